"""``zonal build``: compile the CPU kernels by hand, ahead of their first use."""

import time
from dataclasses import dataclass

import torch

from zonal.errors import ZonalError
from zonal.execution.routes import ROUTES
from zonal.formula import FORMULAS
from zonal.kernels import build, native

DESCRIPTION = """\
Compile the CPU kernels of every link that has a formula, check that each library loads, and print which routes run it
and where it comes from. Otherwise a kernel is compiled when it is first used, which takes some seconds once. A library
compiled here takes precedence over one that came with the package. CXX names the compiler, ZONAL_CACHE the folder of
libraries. A processor with several instruction sets gets a library for each; the fastest is found
when it is first used.

Examples:
  zonal build
  zonal build --again"""


@dataclass(frozen=True)
class Build:
    """Compile the CPU kernels."""

    again: bool = False
    """Also compile kernels that are already compiled."""


def routes_of(source: str) -> str:
    """The routes that run a C++ source, as ``zonal explain`` names them. Without a route, layers call the kernel."""
    return "; ".join(str(route) for route in ROUTES if source in route.sources) or "layers"


def run(options: Build, command: str) -> int:
    """Run the command. Returns 0 when every kernel is built and loads, 1 when one failed."""
    codes = list(FORMULAS.values())
    compiler = native.compiler()
    if compiler is None and (options.again or native.built(codes[0]) is None):
        native.target(codes[0])  # says what to install
    print(f"compiler  {compiler or 'none'} {' '.join(build.flags(native.candidates(codes[0])[0]))}")
    failed = 0
    for code in codes:
        for source in build.sources(code):
            for isa in native.candidates(code, source, torch.bfloat16):
                name, start = f"{code.name}, {source} for {isa.label} ({routes_of(source)})", time.perf_counter()
                known = None if options.again else native.built(code, source, isa)
                try:
                    path = native.build(code, source, isa, again=options.again)
                    native.load(code, source, isa)
                    how = (
                        f"{time.perf_counter() - start:.1f} s"
                        if known is None
                        else "came with the package"
                        if path.parent == build.SHIPPED
                        else "was there"
                    )
                    print(f"{name:<64} {how:>21}  {path}")
                except ZonalError as error:
                    failed += 1
                    print(f"{name:<64} failed: {error}")
    return 1 if failed else 0
