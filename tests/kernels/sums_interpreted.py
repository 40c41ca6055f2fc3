"""Run the Triton kernels for sums over features and compare: `python sums_interpreted.py [--own] NAME…` prints one line of JSON a case.

As ``interpreted``: with TRITON_INTERPRET=1 on tensors of the CPU, else on CUDA. Calls come from ``zonal.attention``; on the CPU the kernels
stand in for the C++ one. --own: in the tile sizes that the kernels choose, and not in small ones.
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
from kernels.interpreted import mend, poisoned
from kernels.sums_calls import CASES, DTYPES, LONG, REST, attended, failure, inputs
from torch import Tensor
from triton._C.libtriton import ir
from triton.runtime import interpreter

from zonal.execution import native, native_sums
from zonal.kernels import sums_ops
from zonal.kernels.triton import sums_layout, sums_state, tiles

BROKEN = "broken"


def to_tf32(x: interpreter.TensorHandle) -> interpreter.TensorHandle:
    """Rounded to the digits that products of tf32 read."""
    if x.dtype != tl.float32:
        return x
    bits = (x.data.astype(np.float32).view(np.uint32).astype(np.uint64) + 0x1000) & 0xFFFFE000
    return interpreter.TensorHandle(bits.astype(np.uint32).view(np.float32), tl.float32)


def round_products() -> None:
    """The interpreter multiplies all digits where a device multiplies tf32."""
    dot = interpreter.InterpreterBuilder.create_dot

    def rounded(*call: Any) -> Any:
        builder, a, b, total, precision, most = call
        sides = (to_tf32(a), to_tf32(b)) if precision == ir.INPUT_PRECISION.TF32 else (a, b)
        return dot(builder, *sides, total, precision, most)

    interpreter.InterpreterBuilder.create_dot = rounded


class OnCuda(torch.autograd.Function):
    """``zonal::feature_sums`` as it is registered for CUDA, with the gradients it has."""

    started = 0

    @staticmethod
    def forward(*given: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        OnCuda.started += 1
        with patch.object(torch, "empty", poisoned):
            return sums_ops.on_cuda(*given)

    setup_context = staticmethod(sums_ops._setup)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:  # type: ignore[override]
        with patch.object(torch, "empty", poisoned):
            return sums_ops._backward(ctx, *gradients)


@contextmanager
def interpreted(own: bool) -> Iterator[None]:
    """Inside, calls on the CPU go to the Triton kernels, in blocks far smaller than the inputs unless they are to be their own."""
    with ExitStack() as stack:
        if isinstance(tiles.row_products_kernel, interpreter.InterpretedFunction):
            stack.enter_context(patch.object(native_sums, "refusal", lambda call, kind=None: native_sums.cuda_refusal(call)))
            stack.enter_context(patch.object(native, "plain", lambda *tensors: False))
            stack.enter_context(patch.object(sums_ops, "feature_sums", OnCuda.apply))
            stack.enter_context(patch.object(sums_ops, "feature_sums_backward", sums_ops.backward_on_cuda))
        if not own:
            stack.enter_context(patch.object(sums_layout, "SHARED", 16))
            stack.enter_context(patch.object(sums_layout, "block_of", lambda dim: 4))
            stack.enter_context(patch.object(sums_state, "chunk_of", lambda *call: 16))
            stack.enter_context(patch.object(sums_state, "choose", lambda *call: sums_state.Strips(16, 4, 16, 4, 1)))
        yield


def broken(*call: Any) -> sums_layout.Layout:
    """A layout in which the last pair of blocks is another."""
    form = sums_layout._layout(*call[:3], sums_layout.block_of(call[2]), call[3])
    return form._replace(right=torch.cat([form.right[:-1], form.right[-1:] * 0]))


def main(arguments: list[str]) -> None:
    """Run the named cases."""
    names = [name for name in arguments if name != "--own"]
    device = "cpu" if isinstance(tiles.row_products_kernel, interpreter.InterpretedFunction) else "cuda"
    if device == "cpu":
        mend()
        round_products()
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    right = sums_layout.layout
    for name in names:
        case = (CASES | REST | LONG)[name.removesuffix(f"/{BROKEN}")]
        data = inputs(case)
        sums_layout.layout = broken if name.endswith(BROKEN) else right
        with interpreted("--own" in arguments):
            there = data.to(DTYPES[case.dtype], device)
            got = attended(case, there, "chunked")
            again = attended(case, there, "chunked") if case.shape in ("gqa", "long-32") else got
        wrong = failure(case, data, got)
        if wrong is None and not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
            wrong = f"{name}: another run gave other bits"
        if device == "cpu" and not OnCuda.started:
            wrong = f"{name}: the kernels did not run"
        OnCuda.started = 0
        sys.stdout.write(json.dumps({"name": name, "device": device, "wrong": wrong}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
