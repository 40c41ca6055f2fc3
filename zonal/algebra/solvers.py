"""Conjugate gradients for many symmetric systems at once, each given as a matrix-vector product, and what gradients
through solutions share.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zonal.errors import PathError

Apply = Callable[[Tensor], Tensor]


def conjugate_gradients(apply: Apply, q: Tensor, diagonal: Tensor, steps: int, tolerance: float = 0.0) -> Tensor:
    """x with A x ≈ q, by ``steps`` steps of conjugate gradients from q / diagonal, the diagonal of A.

    A token stops when its residual is at most ``tolerance`` ‖q‖ or at rounding, and when A sends its direction to
    almost zero relative to the diagonal, which happens for singular A. With a tolerance, the iteration ends when all
    tokens have stopped. In exact arithmetic, N steps solve a system of size N.
    """
    # gradients come in any size, and their squares would underflow
    scale = q.abs().amax(-1, keepdim=True)
    q = q / scale.clamp_min(torch.finfo(q.dtype).tiny)
    x = q / diagonal
    r = q - apply(x)
    p, square = r, r.square().sum(-1, keepdim=True)
    least = max(tolerance, torch.finfo(q.dtype).eps) ** 2 * q.square().sum(-1, keepdim=True)
    rounding, stuck = torch.finfo(q.dtype).eps, torch.zeros_like(square, dtype=torch.bool)
    for _ in range(steps):
        going = (square > least) & ~stuck
        if tolerance and not bool(going.any()):
            break
        image = apply(p)
        curved = (p * image).sum(-1, keepdim=True)
        stuck = stuck | (curved <= rounding * (diagonal * p.square()).sum(-1, keepdim=True))
        going = going & ~stuck
        step = torch.where(going, square / curved, 0)
        x, r = torch.addcmul(x, step, p), torch.addcmul(r, step, image, value=-1)
        after = r.square().sum(-1, keepdim=True)
        p = torch.addcmul(r, torch.where(going, after / square, 0), p)
        square = torch.where(going, after, square)
    return x * scale


class _FirstDerivativeOnly(torch.autograd.Function):
    """A gradient that depends on x and refuses to be differentiated again."""

    @staticmethod
    def forward(gradient: Tensor, x: Tensor, message: str) -> Tensor:
        return gradient.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
        ctx.message = inputs[2]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[None, None, None]:
        raise PathError(ctx.message)


def first_derivative_only(gradient: Tensor, x: Tensor, message: str) -> Tensor:
    """The gradient of an implicit function of x, whose own derivative is not known: under ``create_graph`` a second
    derivative raises PathError with ``message``. Autograd's ``once_differentiable`` does not see that it depends on x.
    """
    return _FirstDerivativeOnly.apply(gradient, x, message) if torch.is_grad_enabled() else gradient


__all__ = ["Apply", "conjugate_gradients", "first_derivative_only"]
