"""Euclidean metrics: a distance and its square."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zonal.algebra.declaration import require
from zonal.algebra.metric.base import DotReduction, Metric, Smooth
from zonal.formula import FORMULAS, Formula, Term

_FORMULA = Formula(  # of a squared distance x, after which exp is taken; c[0] is eps
    "euclidean",
    "c[0] - root(most(x, V{}) + c[0] * c[0])",
    "(x > V{} ? -0.5f / root(most(x, V{}) + c[0] * c[0]) : V{})",
    triton="zonal.kernels.triton.links:euclidean",
    log=True,
)


def _centred(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q and k less the mean key of each head: no difference changes, and what cancels in |q|^2 + |k|^2 - 2 q.k shrinks.

    A mean that is not finite (of a poisoned key, which not all queries need see) is no centre.
    """
    centre = k.detach().mean(-2, keepdim=True) if k.shape[-2] else k.new_zeros(())
    centre = torch.where(torch.isfinite(centre), centre, torch.zeros_like(centre))
    k = k - centre
    if centre.ndim > 2 and q.shape[-3] != centre.shape[-3]:  # key heads that serve several query heads
        centre = centre.repeat_interleave(q.shape[-3] // centre.shape[-3], -3)
    return q - centre, k


def squares(q: Tensor, k: Tensor) -> Tensor:
    """|q_t - k_s|^2 (..., T, S) in float64, negative by rounding only.

    In float32, near points would lose all their digits.
    """
    q, k = _centred(q.double(), k.double())
    return q.square().sum(-1, keepdim=True) + k.square().sum(-1).unsqueeze(-2) - 2 * (q @ k.transpose(-1, -2))


def squares_vjp(q: Tensor, k: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of sum(grad * squares(q, k)) / 2 with respect to q and k."""
    dtype, (q, k), grad = q.dtype, _centred(q.double(), k.double()), grad.double()
    dq, dk = grad.sum(-1, keepdim=True) * q - grad @ k, grad.sum(-2).unsqueeze(-1) * k - grad.transpose(-1, -2) @ q
    return dq.to(dtype), dk.to(dtype)


def _squares_lifted(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Vectors (q, |q|^2, 1) and (-2k, 1, |k|^2), whose dot product is |q - k|^2."""
    q, k = _centred(q, k)
    one = torch.ones_like(q[..., :1]), torch.ones_like(k[..., :1])
    return torch.cat([q, q.square().sum(-1, keepdim=True), one[0]], -1), torch.cat(
        [-2 * k, one[1], k.square().sum(-1, keepdim=True)], -1
    )


@dataclass(frozen=True)
class Euclidean(Smooth):
    """d(a, b) = sqrt(max(|a - b|^2, 0) + eps^2) - eps.

    eps keeps the gradient finite and zero at coincident points, where a plain root has NaN. The distance kernels sum |a
    - b|^2 of near points from differences, and torch's tiles use float64. Under torch.func a float32 product is used,
      with rounding errors for distances below 3e-4 of the spread of the points.

    Raises: ArgumentError for an eps out of range.
    """

    negative_type = True
    curvature = 0

    def passes(self, dim: int) -> int:
        return 12

    def typical(self, dim: int) -> float:
        return (2 * dim) ** 0.5

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        self.check(k.shape[-1])
        return (squares(q, k).clamp_min(0) + self.eps**2).to(q.dtype).sqrt() - self.eps

    def pair_vjp(self, q: Tensor, k: Tensor, distance: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return squares_vjp(q, k, grad / (distance + self.eps))

    def terms(self, dim: int) -> tuple[Term, ...]:
        self.check(dim)
        return (Term("euclidean", 0, dim, self.eps),)

    def dot_reduction(self, temperature: float) -> DotReduction:
        # both roots divided by the temperature: it goes into the scale and into eps
        return DotReduction(replace(_FORMULA, constants=(self.eps / temperature,)), temperature**-2, 2, steep=True)

    def reduced(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        self.check(k.shape[-1])
        return _squares_lifted(q, k)


@dataclass(frozen=True)
class SquaredEuclidean(Metric):
    """d(a, b) = |a - b|^2, a Gaussian kernel with the link exp. The triangle inequality does not hold."""

    negative_type = True
    curvature = 0

    def typical(self, dim: int) -> float:
        return 2.0 * dim

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        return squares(q, k).to(q.dtype)

    def pair_vjp(self, q: Tensor, k: Tensor, distance: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        return squares_vjp(q, k, 2 * grad)

    def terms(self, dim: int) -> tuple[Term, ...]:
        return (Term("squared", 0, dim),)

    def dot_reduction(self, temperature: float) -> DotReduction:
        return DotReduction(FORMULAS["exp"], -1 / temperature, 2)

    def reduced(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return _squares_lifted(q, k)


@dataclass(frozen=True)
class HilbertSchmidt(Euclidean):
    """d(A, B) = |A - B|, the Frobenius norm, smooth as ``Euclidean``. Points are m x m matrices row by row, D = m^2.

    ``score.OperatorPath`` uses its square, which is faster.

    Raises: ArgumentError for points that are not square matrices.
    """

    def check(self, dim: int) -> None:
        require(
            math.isqrt(dim) ** 2 == dim and dim > 0,
            f"metric.HilbertSchmidt: points of m^2 numbers are required, received {dim}.",
        )


__all__ = ["Euclidean", "HilbertSchmidt", "SquaredEuclidean", "squares", "squares_vjp"]
