"""P = A^-1 of symmetric positive definite matrices, with the short gradient dA = -P dP P."""

from typing import Any

import torch
from torch import Tensor

from zonal.algebra.primal import factorised


class _Inverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, matrix: Tensor, who: str) -> Tensor:  # type: ignore[override]
        # float64 inside: after many tokens the matrix spans as many powers of ten as float32 has digits
        inverse = torch.cholesky_inverse(factorised(matrix.double(), who)).to(matrix.dtype)
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (inverse,) = ctx.saved_tensors
        return -inverse @ (grad @ inverse), None


def positive_inverse(matrix: Tensor, who: str) -> Tensor:
    """A^-1 of (…, r, r).

    Raises: NonFiniteError, naming ``who``, when a matrix is not positive definite.
    """
    return _Inverse.apply(matrix, who)


def with_ridge(matrix: Tensor, ridge: Tensor) -> Tensor:
    """A + rho I; ridge broadcastable to (…, 1, 1)."""
    return matrix + ridge * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


__all__ = ["positive_inverse", "with_ridge"]
