"""Compile the kernels for devices that are not here, and report registers, spills and shared memory of each.

    python -m zonal.kernels.triton.compile --out report.json [--device 90] [--link horner] [--dtype bfloat16] [--dim 128]

What is compiled is what a call would start: the launches of ``forward`` and ``backward`` on tensors without data.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from zonal.errors import ArgumentError
from zonal.formula import Formula
from zonal.kernels.spec import TileSpec
from zonal.kernels.triton import tiles
from zonal.kernels.triton.backward import backward
from zonal.kernels.triton.forward import forward

DEVICES = (80, 90)
DIMS = (64, 128)
DTYPES = ("bfloat16", "float32")
_LINKS = "zonal.kernels.triton.links:"
# the code of a link, its coefficients, and whether they are learned
LINKS: dict[str, tuple[Formula, int]] = {
    "horner": (Formula("horner", triton=_LINKS + "horner", domain=(-1.0, 1.0)), 6),
    "exp": (Formula("exp", log=True), 0),
    "yat": (Formula("yat", triton=_LINKS + "yat", domain=(-1.0, 1.0), constants=(0.01,)), 0),
}
_TYPES = {
    torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32", torch.int64: "*i64", torch.uint8: "*u8",
}  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """What became of one kernel. shared: bytes a block; wgmma: Hopper's matrix instruction is used; the rest as ``Usage`` has it."""

    kernel: str
    link: str
    dtype: str
    dim: int
    device: int
    tiling: tiles.Tiling
    registers: int
    stack: int
    spills: int
    shared: int
    wgmma: bool


def launches(link: str, dtype: torch.dtype, dim: int, device: int, queries: int = 4096) -> list[tiles.Launch]:
    """The kernels of a causal forward, backward and decoding step with all gradients."""
    code, learned = LINKS[link]
    spec = TileSpec(code, "row" if code.log else "count", normalise=not code.log)

    def meta(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    scale, coefficients = meta(8, kind=torch.float32), meta(8, learned + len(code.constants), kind=torch.float32)
    q, k = meta(2, 8, queries, dim), meta(2, 8, queries, dim)
    with tiles.recorded((device // 10, device % 10)) as found:
        y, factor = forward(q, k, k, scale, coefficients, None, None, spec)
        backward(y, q, k, k, y, factor, scale, coefficients, None, None, spec, learned, (True, True, True, True, True))
        forward(meta(2, 8, 1, dim), k, k, scale, coefficients, None, None, spec)
    return list({launch.kernel: launch for launch in found}.values())


def source(launch: tiles.Launch) -> ASTSource:
    """A launch as the compiler takes it, specialised as a start on a device would be: 1 and None known, multiples of 16 noted."""
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
    signature = {name: kind(value, (index,)) for index, (name, value) in enumerate(zip(names, launch.arguments, strict=False))}
    for name, value in launch.constants.items():
        signature[name] = "constexpr"
        constants[names.index(name),] = value
    return ASTSource(launch.kernel, signature, constants, attributes)


class Usage(NamedTuple):
    """What a compiled kernel takes: registers a thread, bytes of stack a thread, and its reads and writes of the stack inside loops."""

    registers: int
    stack: int
    spills: int


def usage(cubin: bytes) -> Usage:
    """Registers and stack of a kernel. A stack that no loop touches costs nothing: it holds what only the end of the kernel needs."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing, code = (
            subprocess.run([str(tool), flag, file.name], check=True, capture_output=True, text=True).stdout for flag in ("-res-usage", "-sass")
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", listing)
    if found is None:
        raise ArgumentError(f"compile: cuobjdump was expected to say REG and STACK, received {listing[:200]!r}.")
    lines = [(int(place, 16), text) for place, text in re.findall(r"/\*([0-9a-f]{4,})\*/\s+([^;]*);", code)]
    jumps = [(place, re.search(r"\bBRA\b.*?(0x[0-9a-f]+)", text)) for place, text in lines]
    # a jump backwards closes a loop; the jump to itself at the end of every kernel is none
    loops = [(int(jump[1], 16), place) for place, jump in jumps if jump is not None and int(jump[1], 16) < place]
    stack = [place for place, text in lines if re.search(r"\b(LDL|STL)\b", text)]
    return Usage(int(found[1]), int(found[2]), sum(any(start <= place <= end for start, end in loops) for place in stack))


def compiled(launch: tiles.Launch, link: str, dtype: str, dim: int, device: int) -> Compiled:
    """Compile one kernel for compute capability ``device`` / 10."""
    options = {"num_warps": launch.tiling.warps, "num_stages": launch.tiling.stages, "enable_fp_fusion": True}
    result = triton.compile(source(launch), target=GPUTarget("cuda", device, 32), options=options)
    used = usage(result.asm["cubin"])
    name = launch.kernel.fn.__name__.removesuffix("_kernel")
    return Compiled(name, link, dtype, dim, device, launch.tiling, *used, result.metadata.shared, "wgmma" in result.asm["ptx"])


def main(arguments: list[str]) -> int:
    """Compile, write the report, and return 1 when a loop of a kernel for 16-bit types spills."""
    parser = argparse.ArgumentParser(prog="python -m zonal.kernels.triton.compile", description="Compile the tile kernels ahead of time.")
    parser.add_argument("--out", type=Path, help="where the report goes (JSON)")
    parser.add_argument("--device", type=int, action="append", help="compute capability times 10; repeat for several")
    parser.add_argument("--link", choices=list(LINKS), action="append")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--dim", type=int, action="append")
    parser.add_argument("--kernel", action="append", help="forward, decode, combine, keys, queries or row_products")
    chosen = parser.parse_args(arguments)
    # the default of fusing a multiplication and an addition differs between versions
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    rows = []
    for dtype in chosen.dtype or DTYPES:
        for dim in chosen.dim or DIMS:
            for link in chosen.link or LINKS:
                for device in chosen.device or DEVICES:
                    for launch in launches(link, getattr(torch, dtype), dim, device):
                        if chosen.kernel and launch.kernel.fn.__name__.removesuffix("_kernel") not in chosen.kernel:
                            continue
                        rows.append(compiled(launch, link, dtype, dim, device))
                        sys.stdout.write(json.dumps(asdict(rows[-1])) + "\n")
    if chosen.out is not None:
        report = {"triton": triton.__version__, "kernels": [asdict(row) for row in rows]}
        chosen.out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    spilled = [row for row in rows if row.spills and row.dtype != "float32"]
    return 1 if spilled else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
