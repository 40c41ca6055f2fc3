"""``zonal build``: compile the CPU kernels by hand, ahead of their first use."""

import time
from dataclasses import dataclass

from zonal.errors import ZonalError
from zonal.formula import FORMULAS
from zonal.kernels import build, native

DESCRIPTION = """\
Compile the CPU kernels of every link that has a formula, check that each library loads, and print where each one comes
from. Otherwise a kernel is compiled when it is first used, which takes some seconds once. A library compiled here takes
precedence over one that came with the package. CXX names the compiler, ZONAL_CACHE the folder of libraries.

Examples:
  zonal build
  zonal build --again"""


_NAMES = {
    "tile": "float32", "tile_bf16": "bfloat16", "sums": "sums over features", "decode": "steps of a decoder",
    "ridge": "ridge read-outs", "ridge_decode": "ridge steps", "mixer": "around a recurrence",
    "distance": "distances", "distance_wide": "distances, AVX-512", "sparse": "the largest of some candidates",
}  # fmt: skip


@dataclass(frozen=True)
class Build:
    """Compile the CPU kernels."""

    again: bool = False
    """Compile what is there already, too."""


def run(options: Build, command: str) -> int:
    """Run the command. Returns 0 when every kernel is built and loads, 1 when one failed."""
    codes = list(FORMULAS.values())
    compiler = native.compiler()
    if compiler is None and (options.again or native.built(codes[0]) is None):
        native.target(codes[0])  # says what to install
    print(f"compiler  {compiler or 'none'} {' '.join(native.flags())}")
    failed = 0
    for code in codes:
        for source in build.sources(code):
            if source == "tile_bf16" and (native.failure(code) is not None or not native.load(code).zonal_has_bf16()):
                continue
            name, start = f"{code.name} ({_NAMES[source]})", time.perf_counter()
            known = None if options.again else native.built(code, source)
            try:
                path = native.build(code, source, again=options.again)
                native.load(code, source)
                how = (
                    f"{time.perf_counter() - start:.1f} s"
                    if known is None
                    else "came with the package"
                    if path.parent == build.SHIPPED
                    else "was there"
                )
                print(f"{name:<38} {how:>21}  {path}")
            except ZonalError as error:
                failed += 1
                print(f"{name:<38} failed: {error}")
    return 1 if failed else 0
