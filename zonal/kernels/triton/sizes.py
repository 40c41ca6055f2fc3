"""Sizes that kernels and the planner's cost model share. No triton in here: a machine without it plans, too."""


def padded(width: int) -> int:
    """The width of a tile that holds ``width`` columns: a power of two that the matrix units take."""
    return max(16, power_of_two(width))


def power_of_two(number: int) -> int:
    """The smallest power of two that is no less."""
    return 1 << max(number - 1, 0).bit_length()


def ceil_div(count: int, size: int) -> int:
    """How many blocks of ``size`` hold ``count``."""
    return -(-count // size)


# ---- sums over features (see sums_layout) ----

# queries whose first one says which sum all of them read: no tile of queries is larger
SHARED = 128
# keys from one known sum to the next: few where the sums of features are small beside the tokens
_CHUNKS = (128, 8192)


def block_of(dim: int) -> int:
    """Coordinates of a block."""
    return 8 if dim <= 8 else 16


def pairs_of(dim: int, block: int) -> list[tuple[int, int]]:
    """The pairs (a, b) of blocks of coordinates, a <= b, whose products are features."""
    blocks = ceil_div(dim, block)
    return [(a, b) for a in range(blocks) for b in range(a, blocks)]


def rows_of(degree: int, dim: int, block: int) -> int:
    """Rows of a head's sums: products of pairs of blocks where the degree is two, the padded vector, and 1."""
    return (len(pairs_of(dim, block)) * block**2 if degree == 2 else 0) + padded(dim) + 1


def chunk_of(rows: int, key_dim: int, value_dim: int, itemsize: int) -> int:
    """Keys from one known sum to the next: about so many that the sums take no more room than q, k, v and y."""
    state, token = 4 * rows * (value_dim + 1), 2 * itemsize * (key_dim + value_dim)
    return min(max(power_of_two(ceil_div(state, token)), _CHUNKS[0]), _CHUNKS[1])


# ---- ridge read-outs (see ridge_state) ----

# the widest keys and values of which all tiles stay in registers
RIDGE_LARGEST = 64
# Keys per block: about as many as a key has numbers, so that the block's matrices are as large as its state's. Not 64
# where keys are wider: Triton 3.6 then multiplies by warp groups (wgmma), and on an H200 the numbers were wrong.
RIDGE_BLOCK = 32


__all__ = [
    "RIDGE_BLOCK",
    "RIDGE_LARGEST",
    "SHARED",
    "block_of",
    "ceil_div",
    "chunk_of",
    "padded",
    "pairs_of",
    "power_of_two",
    "rows_of",
]
