"""Run the Triton kernels for attention by distance and compare: `python distance_interpreted.py [--own] NAME…`, as
``called`` says.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import triton.language as tl
from kernels import distance_calls as calls
from kernels.called import OnCuda, replaced, run

from zonal.execution.paths import distance as distance_path
from zonal.kernels.distance import distance
from zonal.kernels.triton import distance_tiles, forward, tiles

KERNEL = OnCuda(distance)


@contextmanager
def interpreted(own: bool) -> Iterator[None]:
    """Inside, calls go to the Triton kernels, in tiles far smaller than the inputs unless they are to be their own."""
    with replaced(KERNEL, distance_path, "unfit") as stack:
        if not own:
            stack.enter_context(patch.object(distance_tiles, "choose", lambda *call: tiles.Tiling(16, 16, 4, 1)))
            stack.enter_context(patch.object(forward, "_SPLIT_KEYS", 20))
        yield


def spoil(broken: bool) -> None:
    """No pair counts as close."""
    distance_tiles.NEAR = tl.constexpr(-1.0 if broken else 1 / 64)


if __name__ == "__main__":
    run(
        sys.argv[1:],
        calls,
        calls.CASES | calls.LONG,
        "tiled",
        KERNEL,
        interpreted,
        spoil,
        lambda case: case.shape in ("gqa", "long-96"),
    )
