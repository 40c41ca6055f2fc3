"""Marks that torch.compile reads, made without importing the compiler: that takes as long as importing torch itself."""

from collections.abc import Callable
from typing import TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable)


def constant(function: _Function) -> _Function:
    """``torch.compiler.assume_constant_result``: a traced graph has what the function returned while it was traced."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def untraced(function: _Function) -> _Function:
    """``torch.compiler.disable``: a traced graph ends before the function, and another one begins after it."""
    return torch._disable_dynamo(function)  # type: ignore[return-value]


__all__ = ["constant", "untraced"]
