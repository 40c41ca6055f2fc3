"""Compile Triton kernels for devices that are not here, and report registers, spills and shared memory of each.

    python -m tools.triton_aot tile --out report.json [--device 90] [--link horner] [--dtype bfloat16] [--dim 128]
        [--mask packed] [--kernel keys] [--jobs 2]

The families are tile, ridge, distance and sums.
"""

import argparse
import contextlib
import itertools
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton

from tools.triton_aot import distance, ridge, sums, tile
from tools.triton_aot.compiler import DEVICES, DTYPES, Compiled, Family, Variant, summary, write

FAMILIES: dict[str, Family] = {
    "tile": tile.FAMILY,
    "ridge": ridge.FAMILY,
    "distance": distance.FAMILY,
    "sums": sums.FAMILY,
}


def parser_of() -> argparse.ArgumentParser:
    """A command for each family."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.triton_aot", description="Compile Triton kernels ahead of time."
    )
    families = parser.add_subparsers(dest="family", required=True)
    for name, family in FAMILIES.items():
        command = families.add_parser(name, help=family.about)
        command.add_argument("--out", type=Path, help="where the report goes (JSON)")
        command.add_argument(
            "--device", type=int, action="append", choices=DEVICES, help="compute capability times 10; may be repeated"
        )
        command.add_argument("--link", choices=family.links, action="append")
        command.add_argument("--mask", choices=family.masks, action="append")
        command.add_argument("--dtype", choices=DTYPES, action="append")
        command.add_argument(
            "--dim",
            type=int,
            action="append",
            choices=family.dims if family.only else None,
            help=f"by default {', '.join(map(str, family.dims))}",
        )
        command.add_argument("--kernel", action="append", help=family.kernels)
        if family.sample is not None:
            command.add_argument("--sample", action="store_true", help="what the committed report holds")
        command.add_argument("--jobs", type=int, default=1, help="processes (default: %(default)s)")
    return parser


def compiled(family: str, variant: Variant, kernels: list[str] | None) -> list[Compiled]:
    """The kernels of a variant, in a process of a pool or in this one."""
    return FAMILIES[family].compiled(variant, kernels)


def main(arguments: list[str]) -> int:
    """Compile, print the table and write the report. Returns 1 if a kernel spills at d <= 128 or exceeds its device."""
    chosen = parser_of().parse_args(arguments)
    family = FAMILIES[chosen.family]
    # the default of fusing a multiplication and an addition differs between versions
    os.environ["TRITON_DEFAULT_FP_FUSION"] = "1"
    if family.sample is not None and chosen.sample:
        wanted = family.sample()
    else:
        wanted = family.cover(chosen.link, chosen.mask, chosen.dtype, chosen.dim, chosen.device)
    with contextlib.ExitStack() as stack:
        spread = (
            map if chosen.jobs == 1 else stack.enter_context(ProcessPoolExecutor(chosen.jobs, get_context("spawn"))).map
        )
        made = spread(compiled, itertools.repeat(chosen.family), wanted, itertools.repeat(chosen.kernel))
        rows = list(itertools.chain.from_iterable(made))
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
