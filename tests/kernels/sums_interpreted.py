"""Run the Triton kernels for sums over features and compare: `python sums_interpreted.py [--own] NAME…`, as ``called``
says.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton.language as tl
from kernels import sums_calls as calls
from kernels.called import OnCuda, replaced, run
from triton._C.libtriton import ir
from triton.runtime import interpreter

from zonal.execution.paths import sums as sums_path
from zonal.kernels.sums import sums
from zonal.kernels.triton import sums_layout, sums_state

KERNEL = OnCuda(sums)
RIGHT = sums_layout.layout


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


@contextmanager
def interpreted(own: bool) -> Iterator[None]:
    """Inside, calls go to the Triton kernels, in blocks far smaller than the inputs unless they are to be their own."""
    with replaced(KERNEL, sums_path, "cuda") as stack:
        if not own:
            stack.enter_context(patch.object(sums_layout, "SHARED", 16))
            stack.enter_context(patch.object(sums_layout, "block_of", lambda dim: 4))
            stack.enter_context(patch.object(sums_layout, "chunk_of", lambda *call: 16))
            stack.enter_context(patch.object(sums_state, "choose", lambda *call: sums_state.Strips(16, 4, 16, 4, 1)))
        yield


def spoil(broken: bool) -> None:
    """A layout in which the last pair of blocks is another."""

    def other(*call: Any) -> sums_layout.Layout:
        form = RIGHT(*call)
        return form._replace(right=torch.cat([form.right[:-1], form.right[-1:] * 0]))

    sums_layout.layout = other if broken else RIGHT


if __name__ == "__main__":
    cases = calls.CASES | calls.REST | calls.LONG
    run(
        sys.argv[1:],
        calls,
        cases,
        "chunked",
        KERNEL,
        interpreted,
        spoil,
        lambda case: case.shape in ("gqa", "long-32"),
        round_products,
    )
