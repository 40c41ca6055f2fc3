"""Run the Triton kernels for ridge read-outs and compare: `python ridge_interpreted.py [--own] NAME…`, as ``called``
says.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from kernels import ridge_calls as calls
from kernels.called import OnCuda, replaced, run
from triton.runtime import interpreter

from zonal.execution.paths import ridge as ridge_path
from zonal.kernels.ridge import ridge
from zonal.kernels.triton import ridge_state, sizes

KERNEL = OnCuda(ridge)
RIGHT = ridge_state.carry


def round_products() -> None:
    """A product of float32 as matrix units make it of three products in tf32: each side is rounded to 11 bits, and what
    is left again.
    """
    patched = interpreter.InterpreterBuilder.create_dot

    def cut(x: np.ndarray) -> np.ndarray:
        return ((np.ascontiguousarray(x).view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)

    def dot(self: Any, a: Any, b: Any, c: Any, *rest: Any) -> Any:
        if a.data.dtype == np.float64:
            return patched(self, a, b, c, *rest)
        left, right = cut(a.data), cut(b.data)
        small, low = cut(a.data - left), cut(b.data - right)
        whole = patched(self, a, b, c, *rest)
        return interpreter.TensorHandle(c.data + (small @ right + left @ low + left @ right), whole.dtype)

    interpreter.InterpreterBuilder.create_dot = dot


@contextmanager
def interpreted(own: bool) -> Iterator[None]:
    """Inside, calls go to the Triton kernels, in blocks far smaller than the inputs unless they are to be their own."""
    with replaced(KERNEL, ridge_path, "cuda") as stack:
        if not own:
            stack.enter_context(patch.object(sizes, "RIDGE_BLOCK", 16))
        yield


def spoil(broken: bool) -> None:
    """What blocks bring stays with them."""
    ridge_state.carry = (lambda *call: None) if broken else RIGHT


if __name__ == "__main__":
    repeats = {("gqa", "ska-1"), ("long-24", "ska-1")}
    run(
        sys.argv[1:],
        calls,
        calls.CASES | calls.NAN_KEYS | calls.LONG,
        "chunked",
        KERNEL,
        interpreted,
        spoil,
        lambda case: (case.shape, case.operator) in repeats,
        round_products,
    )
