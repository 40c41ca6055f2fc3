"""Run the Triton kernels for ridge read-outs and compare: `python ridge_interpreted.py [--own] NAME…` prints one line of JSON a case.

With TRITON_INTERPRET=1 in Triton's interpreter on tensors of the CPU, else on CUDA. Calls come from ``zonal.attention``; on the CPU the kernels
stand in for the C++ one. --own: in the blocks that calls have, and not in small ones.
"""

import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from kernels.interpreted import mend, poisoned
from kernels.ridge_calls import CASES, DTYPES, LONG, attended, failure, inputs
from torch import Tensor
from triton.runtime import interpreter

from zonal.execution import native, native_ridge
from zonal.kernels import ridge_ops
from zonal.kernels.triton import ridge_state, sizes, tiles

BROKEN = "broken"


class OnCuda(torch.autograd.Function):
    """``zonal::ridge`` as it is registered for CUDA, with the gradients it has."""

    started = 0

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        OnCuda.started += 1
        with patch.object(torch, "empty", poisoned):
            return ridge_ops.on_cuda(*given)

    setup_context = staticmethod(ridge_ops._setup)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        with patch.object(torch, "empty", poisoned):
            return ridge_ops._backward(ctx, *gradients)


def as_tf32(patched: Any) -> Any:
    """A product of float32 as matrix units make it of three products in tf32: each side is rounded to 11 bits, and what is left again."""

    def cut(x: np.ndarray) -> np.ndarray:
        return ((np.ascontiguousarray(x).view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)

    def dot(self: Any, a: Any, b: Any, c: Any, *rest: Any) -> Any:
        left, right = cut(a.data), cut(b.data)
        small, low = cut(a.data - left), cut(b.data - right)
        whole = patched(self, a, b, c, *rest)
        return interpreter.TensorHandle(c.data + (small @ right + left @ low + left @ right), whole.dtype)

    return dot


@contextmanager
def interpreted(own: bool) -> Iterator[None]:
    """Inside, calls on the CPU go to the Triton kernels, in blocks far smaller than the inputs unless they are to be their own."""
    with ExitStack() as stack:
        if isinstance(tiles.row_products_kernel, interpreter.InterpretedFunction):
            stack.enter_context(patch.object(native_ridge, "refusal", lambda call, remembers=False: native_ridge.cuda_refusal(call)))
            stack.enter_context(patch.object(native, "plain", lambda *tensors: False))
            stack.enter_context(patch.object(ridge_ops, "ridge", OnCuda.apply))
            stack.enter_context(patch.object(ridge_ops, "ridge_backward", ridge_ops.backward_on_cuda))
        if not own:
            stack.enter_context(patch.object(sizes, "ridge_block", lambda dim: 16))
        yield


def main(arguments: list[str]) -> None:
    """Run the named cases."""
    names = [name for name in arguments if name != "--own"]
    device = "cpu" if isinstance(tiles.row_products_kernel, interpreter.InterpretedFunction) else "cuda"
    if device == "cpu":
        mend()
        interpreter.InterpreterBuilder.create_dot = as_tf32(interpreter.InterpreterBuilder.create_dot)
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    right = ridge_state.carry
    for name in names:
        case = (CASES | LONG)[name.removesuffix(f"/{BROKEN}")]
        data = inputs(case)
        # what blocks bring stays with them
        ridge_state.carry = (lambda *call: None) if name.endswith(BROKEN) else right
        with interpreted("--own" in arguments):
            there = data.to(DTYPES[case.dtype], device)
            got = attended(case, there, "chunked")
            again = attended(case, there, "chunked") if case.shape in ("gqa", "long-24") and case.operator == "ska-1" else got
        wrong = failure(case, data, got)
        if wrong is None and not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
            wrong = f"{name}: another run gave other bits"
        if device == "cpu" and not OnCuda.started:
            wrong = f"{name}: the kernels did not run"
        OnCuda.started = 0
        sys.stdout.write(json.dumps({"name": name, "device": device, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
