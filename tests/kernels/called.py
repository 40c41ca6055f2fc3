"""Triton kernels in the place of C++ ones, under calls of ``zonal.attention``: what the families' runners
(``*_interpreted.py``) share.

A runner prints one line of JSON a case. With TRITON_INTERPRET=1 its kernels run in Triton's interpreter on tensors of
the CPU, else on CUDA.
"""

import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from kernels.interpreted import mend, poisoned
from torch import Tensor
from triton.runtime import interpreter

from zonal.kernels.op import Body, Op
from zonal.kernels.triton import tiles

BROKEN = "broken"


class OnCuda:
    """A kernel's body for CUDA. It counts its calls; memory that kernels do not write holds NaN."""

    def __init__(self, op: Op) -> None:
        self.op, self.started = op, 0

    def body(self) -> Body:
        """In the place of that for the device the calls are on."""
        there = self.op.bodies["cuda"]

        def forward(*given: Any) -> tuple[Tensor, ...]:
            self.started += 1
            with patch.object(torch, "empty", poisoned):
                return there.forward(*given)

        def backward(*given: Any) -> tuple[Tensor | None, ...]:
            with patch.object(torch, "empty", poisoned):
                return there.backward(*given)

        return Body(forward, backward)


def here() -> bool:
    """Whether kernels are interpreted, on the CPU."""
    return isinstance(tiles.row_products_kernel, interpreter.InterpretedFunction)


def replaced(kernel: OnCuda, execution: ModuleType, asked: str) -> ExitStack:
    """Inside, calls go to the Triton kernels, interpreted or not. asked: what alone ``execution`` may refuse by."""
    stack = ExitStack()
    family = SimpleNamespace(refusal=lambda *given, cuda, code=None: (cuda if asked == "cuda" else given[2])())
    stack.enter_context(patch.object(execution, "FAMILY", family))
    stack.enter_context(patch.dict(kernel.op.bodies, {"cpu" if here() else "cuda": kernel.body()}))
    if hasattr(execution, "plain"):  # kept tables are for the CPU's kernel alone
        stack.enter_context(patch.object(execution, "plain", lambda *tensors: False))
    return stack


def run(
    arguments: list[str], calls: ModuleType, cases: dict[str, Any], path: str, kernel: Any,
    interpreted: Callable[[bool], AbstractContextManager[Any]],
    spoil: Callable[[bool], None], twice: Callable[[Any], bool], prepare: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Run the named cases. --own: in the tiles that calls have, and not in small ones. spoil: breaks the kernels, or
    makes them right; twice: whether a case is to run again for the same bits; prepare: what else the interpreter has to
    be told.
    """
    device = "cpu" if here() else "cuda"
    if device == "cpu":
        mend()
        prepare()
    np.seterr(all="ignore")
    torch.set_num_threads(1)
    for name in arguments:
        if name == "--own":
            continue
        case = cases[name.removesuffix(f"/{BROKEN}")]
        data = calls.inputs(case)
        spoil(name.endswith(BROKEN))
        with interpreted("--own" in arguments):
            there = data.to(calls.DTYPES[case.dtype], device)
            got = calls.attended(case, there, path)
            again = calls.attended(case, there, path) if twice(case) else None
        wrong = calls.failure(case, data, got)
        if wrong is None and again and not all(torch.equal(a, b) for a, b in zip(got, again, strict=True)):
            wrong = f"{name}: another run gave other bits"
        if not kernel.started:
            wrong = f"{name}: the kernels did not run"
        kernel.started = 0
        sys.stdout.write(json.dumps({"name": name, "device": device, "wrong": wrong}) + "\n")
