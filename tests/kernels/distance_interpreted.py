"""Run the Triton kernels for attention by distance and compare: `python distance_interpreted.py [--own] NAME…` prints one line of JSON a case.

With TRITON_INTERPRET=1 in Triton's interpreter on tensors of the CPU, else on CUDA. Calls come from ``zonal.attention``; on the CPU the kernels
stand in for the C++ one. --own: in the tiles that calls have, and not in small ones.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from kernels.distance_calls import CASES, DTYPES, LONG, attended, failure, inputs
from kernels.interpreted import mend, poisoned
from torch import Tensor
from triton.runtime import interpreter

from zonal.execution import native, native_distance
from zonal.kernels import distance_ops
from zonal.kernels.triton import distance_tiles, forward, tiles

BROKEN = "broken"


class OnCuda(torch.autograd.Function):
    """``zonal::distance`` as it is registered for CUDA, with the gradients it has."""

    started = 0

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        OnCuda.started += 1
        with patch.object(torch, "empty", poisoned):
            return distance_ops.on_cuda(*given)

    setup_context = staticmethod(distance_ops._setup)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        with patch.object(torch, "empty", poisoned):
            return distance_ops._backward(ctx, *gradients)


@contextmanager
def interpreted(own: bool) -> Iterator[None]:
    """Inside, calls on the CPU go to the Triton kernels, in tiles far smaller than the inputs unless they are to be their own."""
    with ExitStack() as stack:
        if isinstance(tiles.row_products_kernel, interpreter.InterpretedFunction):
            stack.enter_context(patch.object(native_distance, "refusal", native_distance.unfit))
            stack.enter_context(patch.object(native, "plain", lambda *tensors: False))
            stack.enter_context(patch.object(distance_ops, "distance", OnCuda.apply))
            stack.enter_context(patch.object(distance_ops, "distance_backward", distance_ops.backward_on_cuda))
        if not own:
            stack.enter_context(patch.object(distance_tiles, "choose", lambda *call: tiles.Tiling(16, 16, 4, 1)))
            stack.enter_context(patch.object(forward, "_SPLIT_KEYS", 20))
        yield


def main(arguments: list[str]) -> None:
    """Run the named cases."""
    names = [name for name in arguments if name != "--own"]
    device = "cpu" if isinstance(tiles.row_products_kernel, interpreter.InterpretedFunction) else "cuda"
    if device == "cpu":
        mend()
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    for name in names:
        case = (CASES | LONG)[name.removesuffix(f"/{BROKEN}")]
        data = inputs(case)
        # no pair counts as close
        distance_tiles.NEAR = tl.constexpr(-1.0 if name.endswith(BROKEN) else 1 / 64)
        with interpreted("--own" in arguments):
            there = data.to(DTYPES[case.dtype], device)
            got = attended(case, there, "tiled")
            again = attended(case, there, "tiled") if case.shape in ("gqa", "long-96") else got
        wrong = failure(case, data, got)
        if wrong is None and not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
            wrong = f"{name}: another run gave other bits"
        if device == "cpu" and not OnCuda.started:
            wrong = f"{name}: the kernels did not run"
        OnCuda.started = 0
        sys.stdout.write(json.dumps({"name": name, "device": device, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
