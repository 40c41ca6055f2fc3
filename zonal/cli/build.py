"""``zonal build``: compile the CPU kernels by hand, ahead of their first use."""

import time
from dataclasses import dataclass

from zonal.algebra.link import LINKS, Link
from zonal.errors import ZonalError
from zonal.execution import native
from zonal.kernels.cpp import build

DESCRIPTION = """\
Compile the CPU tile kernel for every link that has a formula, and check that each loads. Without this, a kernel is compiled
when it is first used, which takes some seconds once. CXX names the compiler; ZONAL_CACHE the folder where libraries are kept.

Examples:
  zonal build
  zonal build --again"""


@dataclass(frozen=True)
class Build:
    """Compile the CPU kernels."""

    again: bool = False
    """Compile what is there already, too."""


def run(options: Build, command: str) -> int:
    """Run the command. Returns 0 when every kernel is built and loads, 1 when one failed."""
    links = [link for kind in LINKS.values() if isinstance(link := kind(), Link)]
    codes = [code for link in links if (code := native.code_of(link)) is not None]
    compiler = build.compiler()
    if compiler is None:
        build.target(codes[0])  # says what to install
    print(f"compiler  {compiler} {' '.join(build.flags())}")
    failed = 0
    for code in codes:
        known, start = build.built(code) and not options.again, time.perf_counter()
        try:
            path = build.build(code, again=options.again)
            native.library.load(code)
            print(f"{code.name:<18} {'was there' if known else f'{time.perf_counter() - start:.1f} s'}  {path}")
        except ZonalError as error:
            failed += 1
            print(f"{code.name:<18} failed: {error}")
    return 1 if failed else 0
