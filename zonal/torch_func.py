"""Whether the transforms of torch.func (vmap, grad, jvp, …) are at work, under which numbers cannot be asked for, and
whether tangents are carried forward.
"""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def active() -> bool:
    """Whether a transform of torch.func is at work."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def forward() -> bool:
    """Whether tensors may carry tangents: inside a level of torch.autograd.forward_ad, as torch.func.jvp opens one."""
    return not torch.compiler.is_compiling() and forward_ad._current_level >= 0


def mapped(x: Tensor | None) -> bool:
    """Whether vmap runs over a tensor, so that its numbers cannot be asked for."""
    return x is not None and active() and torch._C._functorch.is_batchedtensor(x)  # type: ignore[attr-defined]


def refusal() -> str | None:
    """Why a kernel without rules for these transforms does not run, or None."""
    return "a call that is transformed needs operations of torch" if active() or forward() else None


__all__ = ["active", "forward", "mapped", "refusal"]
