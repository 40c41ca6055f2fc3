"""Metrics of distributions and of states: Fisher-Rao and Le Cam on softmax(x), fidelity on density matrices."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.algebra.declaration import require, require_whole
from zonal.algebra.metric.base import Metric, Smooth, require_eps, unit
from zonal.algebra.metric.curved import Sphere


@dataclass(frozen=True)
class FisherRao(Smooth):
    """d(a, b) = 2 angle(sqrt(p), sqrt(r)) = 4 asin(|sqrt(p) - sqrt(r)| / 2), p = softmax(a), r = softmax(b).

    It is smooth as ``Sphere`` and at most pi.

    Raises: ArgumentError for an eps out of range.
    """

    negative_type = True

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        return 2 * Sphere(self.eps).pair(_root(q), _root(k)).to(q.dtype)

    def pair_vjp(self, q: Tensor, k: Tensor, distance: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        u, v = _root(q), _root(k)
        du, dv = Sphere(self.eps).pair_vjp(u, v, distance.double() / 2, 2 * grad.double())
        return _root_vjp(u, du).to(q.dtype), _root_vjp(v, dv).to(k.dtype)


def _root(x: Tensor) -> Tensor:
    """sqrt(softmax(x)), of length 1, in float64."""
    return (x.double().log_softmax(-1) / 2).exp()


def _root_vjp(root: Tensor, grad: Tensor) -> Tensor:
    pull = grad * root
    return (pull - root.square() * pull.sum(-1, keepdim=True)) / 2


@dataclass(frozen=True)
class LeCam(Smooth):
    """d(a, b) = sqrt(sum_i (p_i - r_i)^2 / (p_i + r_i) + eps^2) - eps, p = softmax(a), r = softmax(b); at most sqrt(2).

    Paper 004 calls it Fisher's information distance, but that one (``FisherRao``) is up to 2.2 times as long. Cost:
    five operations per pair and number, since it is not a dot product.

    Raises: ArgumentError for an eps out of range.
    """

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        p, r = q.softmax(-1), k.softmax(-1)
        total = q.new_zeros(*q.shape[:-1], k.shape[-2])
        for i in range(q.shape[-1]):
            gap, share = _apart(p, r, i)
            total = total + gap * share
        return (total + self.eps**2).sqrt() - self.eps

    def pair_vjp(self, q: Tensor, k: Tensor, distance: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        p, r = q.softmax(-1), k.softmax(-1)
        slope = grad / (2 * (distance + self.eps))
        dp, dr = torch.empty_like(p), torch.empty_like(r)
        for i in range(q.shape[-1]):
            share = _apart(p, r, i)[1]
            dp[..., i], dr[..., i] = (slope * share * (2 - share)).sum(-1), -(slope * share * (2 + share)).sum(-2)
        return _softmax_vjp(p, dp), _softmax_vjp(r, dr)


def _apart(p: Tensor, r: Tensor, i: int) -> tuple[Tensor, Tensor]:
    """p_i - r_i for all pairs, and it over p_i + r_i (0 where both are 0)."""
    one, other = p[..., i, None], r[..., None, :, i]
    gap = one - other
    return gap, gap / (one + other).clamp_min(torch.finfo(p.dtype).tiny)


def _softmax_vjp(p: Tensor, grad: Tensor) -> Tensor:
    pull = grad * p
    return pull - p * pull.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Fidelity(Metric):
    """d(a, b) = -log((F + eps) / (1 + eps)) with F = (tr sqrt(sqrt(rho) sigma sqrt(rho)))^2, the fidelity.

    rho = A A^T / tr and sigma = B B^T / tr are density matrices; points hold A (m x rank) row by row, D = m rank. F is
    the squared sum of singular values of A^T B, over both traces. Each singular value is computed as sqrt(lambda +
    eps^2) - eps of an eigenvalue of A^T B B^T A. The triangle inequality does not hold. With eps = 0, exp(-d) is F. A
    zero vector has F = 0 with every point. Each pair needs the eigenvalues of a matrix of size ``rank`` in torch, which
    is slow: use short sequences.

    Raises: ArgumentError for points that are not such matrices, and an eps out of range.
    """

    rank: int = 1
    eps: float = 1e-4

    def __post_init__(self) -> None:
        require_whole("Fidelity: rank", self.rank)
        require_eps("Fidelity: eps", self.eps, "it keeps the gradient finite at orthogonal states")

    def check(self, dim: int) -> None:
        require(
            dim >= 1 and dim % self.rank == 0,
            f"metric.Fidelity: points of m x {self.rank} numbers are required, received {dim}.",
        )

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        self.check(k.shape[-1])
        a, b = (unit(x.double())[0].unflatten(-1, (-1, self.rank)) for x in (q, k))
        between = torch.einsum("...tmi,...smj->...tsij", a, b)
        value = torch.linalg.eigvalsh(between @ between.mT)
        total = ((value.clamp_min(0) + self.eps**2).sqrt() - self.eps).sum(-1)
        return -((total.square() + self.eps) / (1 + self.eps)).log().to(q.dtype)


__all__ = ["Fidelity", "FisherRao", "LeCam"]
