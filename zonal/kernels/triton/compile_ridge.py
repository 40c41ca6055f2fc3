"""Compile the kernels for ridge and Koopman read-outs for devices that are not here, as ``compile`` does with the tile kernels.

    python -m zonal.kernels.triton.compile_ridge --out report.json [--device 90] [--dtype bfloat16] [--dim 64] [--mask packed] [--link ridge-2]

Without choices in bfloat16 powers 0, 1 and 2 of a causal call, and power 2 with packed documents, grouped queries and a memory, in other types power 2 of a
causal call, with keys of every size and values of 64 numbers, for every device.
"""

import argparse
import contextlib
import itertools
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from torch import Tensor

from zonal.kernels.cpp.ridge_library import Before
from zonal.kernels.triton import tiles
from zonal.kernels.triton.compile import DEVICES, DTYPES, Compiled, Variant, compiled, name_of, summary, write
from zonal.kernels.triton.ridge_backward import backward
from zonal.kernels.triton.ridge_forward import forward
from zonal.kernels.triton.sizes import RIDGE_LARGEST

DIMS = (24, 32, 48, 56, 64)
# by what a report calls a link
POWERS = {"ridge-0": 0, "ridge-1": 1, "ridge-2": 2}
MASKS = ("causal", "packed", "gqa", "memory")


def cover(links: Iterable[str], masks: Iterable[str] | None, dtypes: Iterable[str], dims: Iterable[int], devices: Iterable[int]) -> list[Variant]:
    """All combinations of what was chosen; where no mask was, in the first type all powers with the first mask and the last with each, in others the last."""
    chosen, types, sizes = list(links), list(dtypes), list(itertools.product(dims, devices))
    if masks is not None:
        kinds = list(itertools.product(chosen, masks, types))
    else:
        kinds = [(link, MASKS[0], types[0]) for link in chosen[:-1]] + [(chosen[-1], mask, types[0]) for mask in MASKS]
        kinds += [(chosen[-1], MASKS[0], dtype) for dtype in types[1:]]
    return [Variant(*kind, dim, device) for kind in kinds for dim, device in sizes]


def launches(variant: Variant, tokens: int = 16384) -> list[tiles.Launch]:
    """The kernels of a forward and a backward with all gradients."""
    power, dtype, dim = POWERS[variant.link], getattr(torch, variant.dtype), variant.dim
    memory, packed = variant.mask == "memory", variant.mask == "packed"
    batch, heads = 1 if packed else 2, 8
    kv_heads = heads // 4 if variant.mask == "gqa" else heads

    def meta(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(*shape, dtype=kind, device="meta")

    documents = 4
    lo, hi, starts = torch.zeros(tokens, dtype=torch.int64), torch.arange(tokens), None
    if packed:
        lo = starts = hi // (tokens // documents) * (tokens // documents)
    q, k, v = meta(batch, heads, tokens, dim), meta(batch, kv_heads, tokens, dim), meta(batch, kv_heads, tokens, RIDGE_LARGEST)
    scale, rho = meta(heads, kind=torch.float32), meta(kv_heads, kind=torch.float32)
    before = Before()
    if memory:
        square, last = meta(batch, kv_heads, dim, dim, kind=torch.float64), meta(batch, kv_heads, dim, kind=torch.float64)
        before = Before(square, meta(batch, kv_heads, RIDGE_LARGEST, dim, kind=torch.float64), square if power else None, last if power else None)
    seen = None, lo, hi, starts, before, power, 1.0, documents if packed else 1
    with tiles.recorded((variant.device // 10, variant.device % 10)) as found:
        y = forward(q, k, v, scale, rho, *seen)
        backward(y, q, k, v, scale, rho, *seen, memory)
    # forward's kernels run again for backward
    return list({(launch.kernel, launch.constants.get("REVERSE")): launch for launch in found}.values())


def title(launch: tiles.Launch) -> str:
    """The kernel's name, and which way it goes."""
    reverse = launch.constants.get("REVERSE")
    return name_of(launch) if reverse is None else f"{name_of(launch)} {'backwards' if reverse else 'forwards'}"


def compiled_all(variant: Variant, kernels: Iterable[str] | None = None) -> list[Compiled]:
    """Compile a variant's kernels, or those whose titles begin so."""
    return [
        replace(compiled(launch, variant), kernel=title(launch))
        for launch in launches(variant) if kernels is None or any(title(launch).startswith(name) for name in kernels)
    ]  # fmt: skip


def main(arguments: list[str]) -> int:
    """Compile, print the table, write the report, and return 1 when a kernel spills or is too large for its device."""
    parser = argparse.ArgumentParser(prog="python -m zonal.kernels.triton.compile_ridge", description="Compile the kernels for ridge read-outs ahead of time.")
    parser.add_argument("--out", type=Path, help="where the report goes (JSON)")
    parser.add_argument("--device", type=int, action="append", choices=DEVICES, help="compute capability times 10; repeat for several")
    parser.add_argument("--link", choices=list(POWERS), action="append")
    parser.add_argument("--mask", choices=MASKS, action="append")
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--dim", type=int, action="append")
    parser.add_argument("--kernel", action="append", help="sums, carry, inverse, factor, read, rows_back, row_sums, keys_back or steps_back")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    chosen = parser.parse_args(arguments)
    # the default of fusing a multiplication and an addition differs between versions
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    wanted = cover(chosen.link or POWERS, chosen.mask, chosen.dtype or DTYPES, chosen.dim or DIMS, chosen.device or DEVICES)
    with contextlib.ExitStack() as stack:
        spread = map if chosen.jobs == 1 else stack.enter_context(ProcessPoolExecutor(chosen.jobs, get_context("spawn"))).map
        rows = list(itertools.chain.from_iterable(spread(compiled_all, wanted, itertools.repeat(chosen.kernel))))
    sys.stdout.write(summary(rows) + "\n")
    misfits = [row for row in rows if not row.fits]
    for row in misfits:
        sys.stdout.write(f"does not fit: {row}\n")
    sys.stdout.write(f"triton {triton.__version__}: {len(rows)} kernels compiled, {len(misfits)} do not fit\n")
    if chosen.out is not None:
        write(chosen.out, rows)
    return 1 if misfits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
