"""What is marked for torch.compile, and tensors that outlive a trace.

The marks are made without importing the compiler: that takes as long as importing torch itself.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from zonal import torch_func

_Function = TypeVar("_Function", bound=Callable)


def constant(function: _Function) -> _Function:
    """``torch.compiler.assume_constant_result``: a traced graph has what the function returned while it was traced."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def constant_kept(most: int) -> Callable[[_Function], _Function]:
    """``constant``, for a function whose last ``most`` results are kept."""

    def decorated(function: _Function) -> _Function:
        keep = functools.lru_cache(maxsize=most)(function)

        @functools.wraps(keep)
        def call(*given: object) -> object:  # the compiler passes over what lru_cache makes, and warns
            return keep(*given)

        return constant(call)  # type: ignore[return-value]

    return decorated


def untraced(function: _Function) -> _Function:
    """``torch.compiler.disable``: a traced graph ends before the function, and another one begins after it."""
    return torch._disable_dynamo(function)  # type: ignore[return-value]


@contextlib.contextmanager
def concrete() -> Iterator[None]:
    """Tensors made here hold numbers, on the CPU where no device is named, and later calls may use them.

    This is so also while torch exports a program (its graph then holds the numbers), in inference mode, and under
    ``torch.device("meta")``.
    """
    with _disable_current_modes(), torch.device("cpu"), torch.inference_mode(False), torch.no_grad():
        yield


def in_dispatch_mode() -> bool:
    """Whether a dispatch mode is at work, such as fake tensors or torch.export's tracer: tensors may lack numbers."""
    return not torch.compiler.is_dynamo_compiling() and torch._C._len_torch_dispatch_stack() > 0


def traced() -> bool:
    """Whether torch traces or transforms: a tensor made now belongs to that trace and must not be kept."""
    return torch.compiler.is_compiling() or in_dispatch_mode() or torch_func.active()


def recorded(tensors: Iterable[Tensor | None]) -> bool:
    """Whether autograd records what is done with these tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def kept(function: _Function) -> _Function:
    """Keeps the last 64 results of a function that makes tensors; ``traced`` calls make their own."""

    @functools.lru_cache(maxsize=64)
    def keep(*given: object) -> object:
        with concrete():
            return function(*given)

    @functools.wraps(function)
    def call(*given: object) -> object:
        if traced():
            return function(*given)
        return keep(*given)

    return call  # type: ignore[return-value]


__all__ = ["concrete", "constant", "constant_kept", "in_dispatch_mode", "kept", "recorded", "traced", "untraced"]
