"""How large the tiles of the tile kernels are, by head size, type, device and what the inner loop has to do."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tiling:
    """One choice of tile sizes: rows of queries, rows of keys, warps, and stages of loads in flight.

    registers: the most a thread may take. By default the assembler may spill some to fit one more block.
    """

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int | None = None


# By (kernel, bytes per element, padded width). A small table replaces a search at run time, and nothing depends on the
# length. The tiles are the largest that stay in registers, as `python -m tools.triton_aot tile` counts them. On Hopper
# eight warps share 128 rows: with 64 they would repeat work.
_TILINGS: dict[tuple[str, int, int], Tiling] = {
    ("forward", 2, 64): Tiling(128, 64, 4, 3),
    ("forward", 2, 128): Tiling(128, 64, 8, 3),
    ("forward", 2, 256): Tiling(64, 32, 8, 2),
    ("forward", 4, 64): Tiling(32, 32, 8, 2, 255),
    ("forward", 4, 128): Tiling(32, 16, 8, 1, 128),
    ("forward", 4, 256): Tiling(16, 32, 8, 1),
    ("decode", 2, 64): Tiling(64, 32, 4, 4, 255),
    ("decode", 2, 128): Tiling(32, 32, 4, 3, 255),
    ("decode", 2, 256): Tiling(16, 32, 4, 2),
    ("decode", 4, 64): Tiling(16, 32, 4, 1, 255),
    ("decode", 4, 128): Tiling(16, 32, 8, 1, 128),
    ("decode", 4, 256): Tiling(16, 32, 4, 1),
    ("keys", 2, 64): Tiling(32, 128, 8, 2),
    ("keys", 2, 128): Tiling(32, 128, 8, 2),
    ("keys", 2, 256): Tiling(32, 32, 8, 1),
    ("keys", 4, 64): Tiling(32, 32, 8, 1, 255),
    ("keys", 4, 128): Tiling(16, 32, 8, 1, 128),
    ("keys", 4, 256): Tiling(16, 16, 8, 1),
    ("queries", 2, 64): Tiling(128, 64, 8, 2),
    ("queries", 2, 128): Tiling(128, 64, 8, 2),
    ("queries", 2, 256): Tiling(32, 32, 8, 1),
    ("queries", 4, 64): Tiling(32, 32, 8, 1, 255),
    ("queries", 4, 128): Tiling(32, 16, 8, 1, 255),
    ("queries", 4, 256): Tiling(16, 16, 8, 1),
}
# before Hopper the matrix units take one side from registers
_BEFORE_HOPPER: dict[tuple[str, int, int], Tiling] = {
    ("forward", 2, 64): Tiling(128, 64, 8, 3),
    ("keys", 2, 128): Tiling(32, 64, 8, 2),
    ("queries", 2, 128): Tiling(128, 32, 8, 2),
}
# loads that stop short of the padded width take registers of their own
_NARROWER: dict[tuple[str, int, int], Tiling] = {("keys", 2, 128): Tiling(32, 128, 8, 1)}
# so do a key mask, a first key that moves, and weights that stay float32
_CROWDED: dict[tuple[str, int, int], Tiling] = {
    ("forward", 2, 64): Tiling(128, 64, 8, 3),
    ("forward", 2, 128): Tiling(128, 32, 8, 3),
    ("keys", 2, 128): Tiling(16, 128, 8, 2),
    ("queries", 2, 64): Tiling(128, 32, 8, 2),
    ("queries", 2, 128): Tiling(128, 32, 8, 2),
}
_CROWDED_BEFORE_HOPPER: dict[tuple[str, int, int], Tiling] = {("keys", 2, 128): Tiling(16, 64, 8, 2)}
# float16 whose weights stay float32, for triton 3.6
_WIDE: dict[tuple[str, int, int], Tiling] = {("queries", 2, 128): Tiling(64, 32, 8, 2)}
_WIDE_BEFORE_HOPPER: dict[tuple[str, int, int], Tiling] = {("queries", 2, 128): Tiling(32, 32, 8, 2)}
# shared memory of a block on other devices is too small for several stages of loads
_ROOMY = ((8, 0), (9, 0), (10, 0))


def tiling_of(
    kernel: str, itemsize: int, width: int, capability: tuple[int, int], *, narrow: bool, crowded: bool, wide: bool
) -> Tiling:
    """Tile sizes of a kernel ("forward", "decode", "keys", "queries").

    itemsize: bytes of an entry of q. width: the padded width of the heads. narrow: a head is narrower than that.
    crowded: besides scores and weights the loop holds a key mask, a first key that moves, or weights that stay float32.
    wide: the last of these.
    """
    key, old = (kernel, itemsize, width), capability < (9, 0)
    tables = [_TILINGS]
    if narrow:
        tables.append(_NARROWER)
    if old:
        tables.append(_BEFORE_HOPPER)
    if crowded:
        tables += [_CROWDED, _CROWDED_BEFORE_HOPPER] if old else [_CROWDED]
    if wide:
        tables.append(_WIDE_BEFORE_HOPPER if old else _WIDE)
    tiling = next(table[key] for table in reversed(tables) if key in table)
    return tiling if capability in _ROOMY else replace(tiling, stages=1)


__all__ = ["Tiling", "tiling_of"]
