"""Iterative solvers of one small symmetric system per token, for all tokens at once, and the derivative of a solution.

A system is given as a function ``apply(x) = A x`` of x (..., N). No matrix is formed.
"""

from typing import Any

import torch
from torch import Tensor

from zonal.algebra.solvers import Apply, first_derivative_only

_NO_SECOND = (
    "nn: a layer that solves for its queries (MesaNet, GatedKalmaNet) goes back through the solution and has no second "
    "derivative. Use a layer that solves nothing, such as GatedDeltaNet with ZONAL_KERNELS=off, where you need "
    "create_graph=True."
)


def chebyshev(apply: Apply, q: Tensor, low: Tensor, high: Tensor, steps: int) -> Tensor:
    """x with A x ≈ q, by ``steps`` steps of Chebyshev iteration from 0, for A with eigenvalues in [low, high], low > 0.

    The error shrinks by (√κ − 1) / (√κ + 1) per step, with κ = high / low.
    """
    centre = (low + high) / 2
    ratio = ((high - low) / (high + low)).square() / 4
    before, x = torch.zeros_like(q), q / centre
    weight = torch.full_like(ratio, 2.0)
    for _ in range(steps - 1):
        weight = 1 / (1 - ratio * weight)
        x, before = before + weight * (x - before + (q - apply(x)) / centre), x
    return x


class _Solution(torch.autograd.Function):
    """x, whose derivative by the residual q − A x is A⁻¹."""

    @staticmethod
    def forward(residual: Tensor, x: Tensor, solve: Apply) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Apply], output: Tensor) -> None:
        ctx.solve = inputs[2]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        with torch.no_grad():
            solved = ctx.solve(grad_outputs[0])
        (x,) = ctx.saved_tensors
        return first_derivative_only(solved, x, _NO_SECOND), None, None


def solution(apply: Apply, solve: Apply, q: Tensor) -> Tensor:
    """x = solve(q), differentiable in q and in everything that ``apply`` depends on, by the implicit function theorem.

    The backward pass takes one more solve and the derivative of one product. No iteration is recorded, and the gradient
    is as accurate as the solve.

    Raises: PathError where a second derivative is asked for.
    """
    with torch.no_grad():
        x = solve(q)
    if not torch.is_grad_enabled():
        return x
    return _Solution.apply(q - apply(x), x, solve)


__all__ = ["chebyshev", "solution"]
