"""P = A^-1 of symmetric positive definite matrices, and the inverse that a memory of ridge statistics keeps."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from zonal import torch_func
from zonal.algebra import Operator
from zonal.algebra.primal import factorised

REMAKE = 1024
"""After updates by this many tokens the inverse is recomputed from G, which bounds its drift."""


class _Inverse(torch.autograd.Function):
    """With the short gradient dA = -P dP P."""

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
    """A + rho I for matrices A (…, r, r); ridge broadcastable to (…, 1, 1), or (…, r, 1) with one number per row."""
    return matrix + ridge * torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)


class Inverse(NamedTuple):
    """matrix: P = (G + rho I)^-1. age: by how many tokens P was updated since it was computed from G. version: the
    ``ridge_version`` that it was computed with.
    """

    matrix: Tensor
    age: int
    version: tuple[float, ...] | None


def ridge_version(operator: Operator) -> tuple[float, ...] | None:
    """A value that changes when the learned ridge or the learned weights of features do; None where nothing is learned.

    On the CPU it holds the numbers themselves, because writes through ``.data`` change no version counter. On other
    devices reading numbers would wait for the device, so it holds the address and the version counter.
    """
    values = [
        value
        for name, value in operator.learned_parts.items()
        if name == "anchor_raw_ridge" or name.startswith("link_")
    ]
    if not values:
        return None
    if not torch_func.active() and all(type(value) in (Tensor, Parameter) and value.is_cpu for value in values):
        return tuple(number for value in values for number in value.detach().flatten().tolist())
    return tuple(number for value in values for number in (value.data_ptr(), value._version))


def kept_inverse(given: Sequence[Inverse | None], rows: Callable[[list[Tensor]], Tensor]) -> Inverse | None:
    """The inverses of several memories as rows of one; None when a memory has no inverse or rho differs."""
    found = [inverse for inverse in given if inverse is not None]
    if len(found) < len(given) or any(inverse.version != found[0].version for inverse in found):
        return None
    return Inverse(rows([inverse.matrix for inverse in found]), max(inverse.age for inverse in found), found[0].version)


__all__ = ["REMAKE", "Inverse", "kept_inverse", "positive_inverse", "ridge_version", "with_ridge"]
