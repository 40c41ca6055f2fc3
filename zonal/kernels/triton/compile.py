"""Compile the kernels for devices that are not here, and report registers, spills and shared memory of each.

    python -m zonal.kernels.triton.compile --out report.json [--device 90] [--link horner] [--dtype bfloat16]
        [--dim 128] [--mask packed]

The compiled kernels are those that a call would launch: the launches of ``forward`` and ``backward`` on tensors without
data. By default every link is compiled with the masks that need least and most, in every type and head size for every
device, and one link with each mask. That is 1296 kernels, and takes about an hour on one core, less with ``--jobs``.
"""

import argparse
import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zonal.errors import ArgumentError
from zonal.formula import Formula
from zonal.kernels.tile import TileInputs, TileSpec
from zonal.kernels.triton import tiles
from zonal.kernels.triton.backward import backward
from zonal.kernels.triton.forward import DECODE_QUERIES, forward

DEVICES = (80, 90)
# 80 is laid in tiles of 128 columns
DIMS = (64, 80, 128)
DTYPES = ("bfloat16", "float16", "float32")
# bytes of shared memory a block can have
SHARED = {80: 163 * 1024, 90: 227 * 1024}
REGISTERS = 255
# the largest head size at which nothing may spill
UNSPILLED = 128
_LINKS = "zonal.kernels.triton.links:"


class Link(NamedTuple):
    """A link as an operator uses it: its code, how many coefficients are learned, the anchor, and normalisation."""

    code: Formula
    learned: int
    anchor: Literal["row", "count", "raw"]
    normalise: bool


LINKS: dict[str, Link] = {
    "horner": Link(Formula("horner", triton=_LINKS + "horner", domain=(-1.0, 1.0)), 6, "count", True),
    "exp": Link(Formula("exp", log=True), 0, "row", False),
    "yat": Link(Formula("yat", triton=_LINKS + "yat", domain=(-1.0, 1.0), constants=(0.01,)), 0, "row", True),
    "squared_affine": Link(Formula("squared_affine", triton=_LINKS + "squared_affine"), 1, "row", True),
}


class Mask(NamedTuple):
    """Who sees whom. queries: how many the decoding step has."""

    causal: bool = True
    left: int | None = None
    right: int | None = None
    key_mask: bool = False
    packed: bool = False
    groups: int = 1
    queries: int = 1


MASKS: dict[str, Mask] = {
    "causal": Mask(),
    "window": Mask(causal=False, left=512, right=512),
    "padding": Mask(key_mask=True),
    "packed": Mask(packed=True),
    # as many rows a program as decoding ever has
    "gqa": Mask(groups=4, queries=DECODE_QUERIES),
    "all": Mask(causal=False, left=512, right=512, key_mask=True, packed=True, groups=4, queries=DECODE_QUERIES),
}
# masks that ask for least and for most; the link with most to hold: six coefficients and their gradients
_ENDS, _FULLEST = ("causal", "all"), "horner"
_TYPES = {
    torch.float32: "*fp32", torch.float64: "*fp64", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip


class Variant(NamedTuple):
    """What kernels are compiled for. device: compute capability times 10."""

    link: str
    mask: str
    dtype: str
    dim: int
    device: int


@dataclass(frozen=True)
class Compiled:
    """The outcome for one kernel. shared: bytes per block. wgmma: whether it uses Hopper's matrix instruction."""

    kernel: str
    link: str
    mask: str
    dtype: str
    dim: int
    device: int
    tiling: tiles.Tiling
    registers: int
    stack: int
    spills: int
    shared: int
    wgmma: bool

    @property
    def fits(self) -> bool:
        """Whether a device of its kind runs it, and up to ``UNSPILLED`` all of its numbers stay in registers."""
        held = self.stack == self.spills == 0 or self.dim > UNSPILLED
        return held and self.registers <= REGISTERS and self.shared <= SHARED[self.device]


def variants(
    links: Iterable[str] = LINKS,
    masks: Iterable[str] = MASKS,
    dtypes: Iterable[str] = DTYPES,
    dims: Iterable[int] = DIMS,
    devices: Iterable[int] = DEVICES,
) -> Iterator[Variant]:
    """All combinations."""
    return itertools.starmap(Variant, itertools.product(links, masks, dtypes, dims, devices))


def cover(
    links: Iterable[str],
    masks: Iterable[str] | None,
    dtypes: Iterable[str],
    dims: Iterable[int],
    devices: Iterable[int],
) -> list[Variant]:
    """All combinations of the choices. Without a chosen mask: all links with ``_ENDS``, and every mask with the link
    that needs most."""
    if masks is not None:
        return list(variants(links, masks, dtypes, dims, devices))
    found = (
        variants(links, _ENDS, dtypes, dims, devices),
        variants([link for link in links if link == _FULLEST], MASKS, dtypes, dims, devices),
    )
    return list(dict.fromkeys(itertools.chain(*found)))


def launches(variant: Variant, tokens: int = 4096) -> list[tiles.Launch]:
    """The kernels of a forward, a backward with all gradients and a decoding step."""
    link, mask, dtype = LINKS[variant.link], MASKS[variant.mask], getattr(torch, variant.dtype)
    spec = TileSpec(
        link.code,
        link.anchor,
        link.normalise,
        causal=mask.causal,
        left=mask.left,
        right=mask.right,
        learned=link.learned,
    )
    batch, heads = 1 if mask.packed else 2, 8

    def meta(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    scale, coefficients = (
        meta(heads, kind=torch.float32),
        meta(heads, link.learned + len(link.code.constants), kind=torch.float32),
    )
    q, k = meta(batch, heads, tokens, variant.dim), meta(batch, heads // mask.groups, tokens, variant.dim)
    padding = meta(batch, tokens, kind=torch.bool) if mask.key_mask else None
    edges = meta(9, kind=torch.int32) if mask.packed else None
    with tiles.recorded((variant.device // 10, variant.device % 10)) as found:
        inputs = TileInputs(q, k, k, scale, coefficients, padding, edges)
        results = forward(inputs, spec)
        backward(results[:1], inputs, results, spec, frozenset(("q", "k", "v", "scale", "coefficients")))
        # packed documents have as many queries as keys: they are never decoded
        few = meta(batch, heads, mask.queries, variant.dim)
        forward(inputs._replace(q=few, cu_seqlens=None), spec)
    return list({launch.kernel: launch for launch in found}.values())


def source(launch: tiles.Launch) -> ASTSource:
    """A launch for the compiler, specialised as on a device: 1 and None are known, multiples of 16 are noted."""
    constants: dict[tuple[int, ...], Any] = {}
    attributes: dict[tuple[int, ...], Any] = {}

    def kind(value: Any, path: tuple[int, ...]) -> Any:
        if isinstance(value, tuple):
            parts = [kind(part, (*path, index)) for index, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if value is None or (isinstance(value, int) and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0):
            attributes[path] = [["tt.divisibility", 16]]
        if isinstance(value, Tensor):
            return _TYPES[value.dtype]
        if isinstance(value, float):
            return "fp32"
        return "i32" if -(2**31) <= value < 2**31 else "i64"

    names = launch.kernel.arg_names
    signature = {
        name: kind(value, (index,)) for index, (name, value) in enumerate(zip(names, launch.arguments, strict=False))
    }
    for name, value in launch.constants.items():
        signature[name] = "constexpr"
        constants[names.index(name),] = value
    return ASTSource(launch.kernel, signature, constants, attributes)


class Usage(NamedTuple):
    """Resources of a compiled kernel: registers and bytes of stack per thread, and instructions that use the stack."""

    registers: int
    stack: int
    spills: int


def usage(cubin: bytes) -> Usage:
    """Registers and stack of a kernel. Nothing but numbers that found no register are on the stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()

        def listing(flag: str) -> str:
            return subprocess.run([str(tool), flag, file.name], check=True, capture_output=True, text=True).stdout

        found = re.search(r"REG:(\d+) STACK:(\d+)", listing("-res-usage"))
        if found is None:
            raise ArgumentError(
                f"compile: cuobjdump was expected to say REG and STACK, received {listing('-res-usage')[:200]!r}."
            )
        registers, stack = int(found[1]), int(found[2])
        # taking the code apart is slow, and without a stack there is nothing to find
        spills = len(re.findall(r"\b(?:LDL|STL)\b", listing("-sass"))) if stack else 0
    return Usage(registers, stack, spills)


def compiled(launch: tiles.Launch, variant: Variant) -> Compiled:
    """Compile one kernel."""
    result = triton.compile(
        source(launch), target=GPUTarget("cuda", variant.device, 32), options=tiles.options(launch.tiling)
    )
    used = usage(result.asm["cubin"])
    return Compiled(
        name_of(launch), *variant, launch.tiling, *used, result.metadata.shared, "wgmma" in result.asm["ptx"]
    )


def name_of(launch: tiles.Launch) -> str:
    return launch.kernel.fn.__name__.removesuffix("_kernel")


def compiled_of(
    found: Iterable[tiles.Launch], variant: Variant, title: Callable[[tiles.Launch], str], kernels: Iterable[str] | None
) -> list[Compiled]:
    """Compile a variant's kernels, or those whose titles begin as one that is named."""
    wanted = ("",) if kernels is None else tuple(kernels)
    return [
        replace(compiled(launch, variant), kernel=title(launch)) for launch in found if title(launch).startswith(wanted)
    ]


def compiled_all(variant: Variant, kernels: Iterable[str] | None = None) -> list[Compiled]:
    """Compile a variant's kernels, or those named."""
    return compiled_of(launches(variant), variant, name_of, kernels)


def summary(rows: list[Compiled]) -> str:
    """A table in Markdown: the most that any link and mask takes."""
    groups: dict[tuple[Any, ...], list[Compiled]] = {}
    for row in rows:
        groups.setdefault((row.kernel, row.dtype, row.dim, row.device), []).append(row)
    lines = [
        "| kernel | type | d | sm | tiles (queries x keys) | warps | stages | registers | stack | spills | shared "
        "KB | compiled |",
        "|" + "---|" * 12,
    ]
    for (kernel, dtype, dim, device), found in groups.items():
        tilings = sorted(
            {(f"{row.tiling.queries} x {row.tiling.keys}", row.tiling.warps, row.tiling.stages) for row in found}
        )
        shape, warps, stages = (", ".join(dict.fromkeys(str(tiling[i]) for tiling in tilings)) for i in range(3))
        most = [max(getattr(row, name) for row in found) for name in ("registers", "stack", "spills", "shared")]
        cells = kernel, dtype, dim, device, shape, warps, stages, *most[:3], f"{most[3] / 1024:.0f}", len(found)
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def write(out: Path, rows: list[Compiled]) -> None:
    """The report as JSON, a line a kernel."""
    limits = {"registers": REGISTERS, "shared": SHARED, "no_spills_up_to_dim": UNSPILLED}
    head = json.dumps({"triton": triton.__version__, "limits": limits, "fit": all(row.fits for row in rows)}, indent=1)
    lines = ",\n".join("  " + json.dumps(asdict(row)) for row in rows)
    out.write_text(f'{head[:-2]},\n "kernels": [\n{lines}\n ]\n}}\n', encoding="utf-8")


class Family(NamedTuple):
    """What a command compiles.

    about: its kernels, in words. links, masks, dims: the possible choices (None: any size). kernels: for the help.
    cover: the variants of a choice. compiled: the kernels of a variant, or those named. sample: the variants of
    ``--sample``.
    """

    module: str
    about: str
    links: Collection[str]
    masks: Collection[str]
    dims: Collection[int]
    kernels: str
    cover: Callable[[Iterable[str], Iterable[str] | None, Iterable[str], Iterable[int], Iterable[int]], list[Variant]]
    compiled: Callable[[Variant, Iterable[str] | None], list[Compiled]]
    sample: Callable[[], list[Variant]] | None = None


def command(family: Family, arguments: list[str]) -> int:
    """Compile, print the table and write the report. Returns 1 if a kernel spills at d <= 128 or exceeds its device."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {family.module}", description=f"Compile {family.about} ahead of time."
    )
    parser.add_argument("--out", type=Path, help="where the report goes (JSON)")
    parser.add_argument(
        "--device", type=int, action="append", choices=DEVICES, help="compute capability times 10; repeat for several"
    )
    parser.add_argument("--link", choices=list(family.links), action="append")
    parser.add_argument("--mask", choices=list(family.masks), action="append")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--dim", type=int, action="append", help=f"by default {', '.join(map(str, family.dims))}")
    parser.add_argument("--kernel", action="append", help=family.kernels)
    if family.sample is not None:
        parser.add_argument(
            "--sample", action="store_true", help="the committed report's links, masks, types, head sizes and devices"
        )
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    # the default of fusing a multiplication and an addition differs between versions
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    if family.sample is not None and chosen.sample:
        wanted = family.sample()
    else:
        wanted = family.cover(
            chosen.link or family.links,
            chosen.mask,
            chosen.dtype or DTYPES,
            chosen.dim or family.dims,
            chosen.device or DEVICES,
        )
    with contextlib.ExitStack() as stack:
        spread = (
            map if chosen.jobs == 1 else stack.enter_context(ProcessPoolExecutor(chosen.jobs, get_context("spawn"))).map
        )
        rows = list(itertools.chain.from_iterable(spread(family.compiled, wanted, itertools.repeat(chosen.kernel))))
    sys.stdout.write(summary(rows) + "\n")
    misfits = [row for row in rows if not row.fits]
    for row in misfits:
        sys.stdout.write(f"does not fit: {row}\n")
    sys.stdout.write(f"triton {triton.__version__}: {len(rows)} kernels compiled, {len(misfits)} do not fit\n")
    if chosen.out is not None:
        write(chosen.out, rows)
    return 1 if misfits else 0


def main(arguments: list[str]) -> int:
    """``command`` with the tile kernels."""
    kernels = "forward, decode, combine, keys, queries or row_products"
    return command(
        Family("zonal.kernels.triton.compile", "the tile kernels", LINKS, MASKS, DIMS, kernels, cover, compiled_all),
        arguments,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
