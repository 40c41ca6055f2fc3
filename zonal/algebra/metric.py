"""Metrics: distances between query and key points, smooth where points coincide, with hand-written derivatives for tiles."""

from dataclasses import dataclass

from torch import Tensor

from zonal.algebra.declaration import Declaration, require


class Metric(Declaration):
    """d(a, b) >= 0 on points of the last axis."""

    slot = "metric"

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        """All distances: q (..., T, D), k (..., S, D) -> (..., T, S)."""
        raise NotImplementedError(f"{type(self).__name__}.pair")

    def pair_vjp(self, q: Tensor, k: Tensor, distance: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of sum(grad * pair(q, k)) with respect to q and k."""
        raise NotImplementedError(f"{type(self).__name__}.pair_vjp")


@dataclass(frozen=True)
class Euclidean(Metric):
    """d(a, b) = sqrt(max(|a - b|^2, 0) + eps^2) - eps.

    The eps keeps the gradient finite and zero at coincident points (a plain root has NaN there).
    """

    eps: float = 1e-4

    def __post_init__(self) -> None:
        require(self.eps > 0, f"Euclidean: eps must be > 0 (it keeps the gradient finite at coincident points), received {self.eps}.")

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        # centring on the mean key shrinks the terms that cancel in |q|^2 + |k|^2 - 2 q.k
        centre = k.mean(-2, keepdim=True) if k.shape[-2] else k.new_zeros(())
        q, k = q - centre, k - centre
        square = q.square().sum(-1, keepdim=True) + k.square().sum(-1).unsqueeze(-2) - 2 * (q @ k.transpose(-1, -2))
        return (square.clamp_min(0) + self.eps**2).sqrt() - self.eps

    def pair_vjp(self, q: Tensor, k: Tensor, distance: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        weight = grad / (distance + self.eps)
        dq = weight.sum(-1, keepdim=True) * q - weight @ k
        dk = weight.sum(-2).unsqueeze(-1) * k - weight.transpose(-1, -2) @ q
        return dq, dk


METRICS: dict[str, type[Declaration]] = {"Euclidean": Euclidean}

__all__ = ["METRICS", "Euclidean", "Metric"]
