"""``zonal build``: compile the CPU kernels by hand, ahead of their first use."""

import time
from dataclasses import dataclass

from zonal.algebra.link import LINKS, Link
from zonal.errors import ZonalError
from zonal.execution import native
from zonal.features import feature_map
from zonal.kernels.cpp import build, library

DESCRIPTION = """\
Compile the CPU kernels for every link that has a formula, and check that each loads. Without this, a kernel is compiled
when it is first used, which takes some seconds once. CXX names the compiler; ZONAL_CACHE the folder where libraries are kept.

Examples:
  zonal build
  zonal build --again"""


_NAMES = {"tile": "float32", "tile_bf16": "bfloat16", "sums": "sums over features"}


@dataclass(frozen=True)
class Build:
    """Compile the CPU kernels."""

    again: bool = False
    """Compile what is there already, too."""


def run(options: Build, command: str) -> int:
    """Run the command. Returns 0 when every kernel is built and loads, 1 when one failed."""
    links = [link for kind in LINKS.values() if isinstance(link := kind(), Link)]
    codes = {code: feature_map(link) is not None for link in links if (code := native.code_of(link)) is not None}
    compiler = build.compiler()
    if compiler is None:
        build.target(next(iter(codes)))  # says what to install
    print(f"compiler  {compiler} {' '.join(build.flags())}")
    failed = 0
    for code, summed in codes.items():
        for source in build.SOURCES:
            if source == "sums" and not summed:
                continue
            if source == "tile_bf16" and (library.failure(code) is not None or not library.load(code).zonal_has_bf16()):
                continue
            name, start = f"{code.name} ({_NAMES[source]})", time.perf_counter()
            known = build.built(code, source) and not options.again
            try:
                path = build.build(code, source, again=options.again)
                library.load(code, source)
                print(f"{name:<38} {'was there' if known else f'{time.perf_counter() - start:.1f} s':>9}  {path}")
            except ZonalError as error:
                failed += 1
                print(f"{name:<38} failed: {error}")
    return 1 if failed else 0
