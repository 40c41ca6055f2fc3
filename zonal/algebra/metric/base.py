"""Base class of metrics, and sums of distances."""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from zonal.algebra.declaration import Declaration, declared, require, require_positive, vjp
from zonal.formula import Formula, Term

_LEAST, _MOST = 1e-18, 1e9  # of eps; kernels take its fourth power, too


class DotReduction(NamedTuple):
    """A score as a function of a dot product, for the tile kernels with the link exp: log K = h(scale a(q) . b(k)).

    formula: has h, in log space. extra: how many more numbers a and b have than q and k. steep: near points have large
    slopes, and the product, a small difference of large squares in float32, does not tell how near they are; it then
    serves only where operations of torch are needed and float64 is not to be had, under torch.func.
    """

    formula: Formula
    scale: float
    extra: int
    steep: bool = False


class Metric(Declaration, abstract=True):
    """Base of distances d(a, b) >= 0 between points on the last axis.

    A metric that is a sum of distances of the distance kernel gives its ``terms``. A metric that is a function of one
    dot product gives ``dot_reduction`` and ``reduced``, and runs in the tile kernels if the distance kernel does not
    apply. Any other metric runs in torch's tiles.
    """

    slot = "metric"
    curvature: ClassVar[int | None] = None
    """Curvature of a space of constant curvature: 0 flat, 1 a sphere, -1 hyperbolic. None for other spaces."""
    negative_type: ClassVar[bool] = False
    """Whether exp(-t d) is a positive definite kernel for every t > 0."""

    @property
    def title(self) -> str:
        """The usual name of the distance."""
        return type(self).__name__

    def indefinite_reason(self) -> str | None:
        """Why exp(-d) among keys may have negative eigenvalues, for people, or None when it cannot."""
        if self.negative_type:
            return None
        known = ", ".join(kind for kind, each in declared("metric").items() if getattr(each, "negative_type", False))
        return f"exp(-d) is one for distances of negative type ({known}), which {type(self).__name__} need not be"

    def typical(self, dim: int) -> float:
        """About the distance of two points whose ``dim`` numbers are drawn from N(0, 1)."""
        return 1.0

    def sized(self, dim: int, heads: int) -> "Metric":
        """The metric for points of ``dim`` numbers and ``heads`` key heads, with open sizes filled in.

        Raises: as ``check`` does.
        """
        self.check(dim)
        return self

    def started(self, seed: int) -> dict[str, Tensor]:
        """Initial values of a metric sized by a layer, by name, in place of ``initial()``.

        seed: of random values.
        """
        return {}

    def passes(self, dim: int) -> int:
        """How many elementwise passes over all pairs take about as long as ``pair`` without its product (measured)."""
        return 75

    def check(self, dim: int) -> None:
        """Raise ArgumentError when points cannot have ``dim`` numbers."""

    def query(self, q: Tensor, params: dict[str, Tensor]) -> Tensor:
        """Query points (B, H, T, D) as ``pair`` takes them, with what was learned."""
        return q

    def as_query(self, k: Tensor, params: dict[str, Tensor]) -> Tensor:
        """A prepared key in the form of a prepared query."""
        return self.query(k, params)

    def key(self, k: Tensor, params: dict[str, Tensor]) -> Tensor:
        """Key points (B, Hkv, S, D) as ``pair`` takes them, with what was learned."""
        return k

    @property
    def keeps_keys(self) -> bool:
        """Whether a prepared key is made of numbers of the key as it came."""
        return True

    def width(self, dim: int) -> int:
        """How many numbers ``key`` leaves of ``dim``."""
        return dim

    def learned(self, params: dict[str, Tensor]) -> dict[str, Any]:
        """Learned values as plain lists, for people."""
        return {}

    def terms(self, dim: int) -> tuple[Term, ...] | None:
        """The distances whose weighted sum (``weighed``) is this metric, on points of ``dim`` numbers, or None."""
        return None

    def weighed(self, q: Tensor, params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What ``parted`` makes of ``query``, without joining both first.

        An axis along which all weights are equal has length 1.
        """
        return self.parted(self.query(q, params), self.width(q.shape[-1]))

    def parted(self, q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """The weights (B, H, T, terms) of ``terms`` and the points (B, H, T, dim) that ``query`` made one of."""
        return q.new_ones(1, 1, 1, 1), q

    def dot_reduction(self, temperature: float) -> DotReduction | None:
        """How -d / temperature follows from the dot product of ``reduced`` vectors, or None."""
        return None

    def reduced(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """The vectors a(q) and b(k): q (B, H, T, D), k (B, Hkv, S, D) -> (…, D + extra), differentiable."""
        raise NotImplementedError(f"{type(self).__name__}.reduced")

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        """All distances: q (..., T, D), k (..., S, D) -> (..., T, S)."""
        raise NotImplementedError(f"{type(self).__name__}.pair")

    def pair_vjp(self, q: Tensor, k: Tensor, distance: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of sum(grad * pair(q, k)) with respect to q and k; by autograd where a metric writes none."""
        return vjp(self.pair, q, k, grad)


@dataclass(frozen=True)
class Smooth(Metric, abstract=True):
    """Base of metrics that are smooth at coincident points. eps > 0 keeps the gradient finite there.

    Raises: ArgumentError for an eps whose square float32 does not hold, outside [1e-18, 1e9].
    """

    eps: float = 1e-4

    def __post_init__(self) -> None:
        require(
            _LEAST <= self.eps <= _MOST,
            f"{type(self).__name__}: eps must be > 0 (it keeps the gradient finite at coincident points), from "
            f"{_LEAST:g} to {_MOST:g}, so that float32 holds its square, received {self.eps!r}.",
        )


def require_eps(name: str, eps: float, why: str) -> None:
    """Raise ArgumentError unless the eps of a metric that works in float64 is > 0 and at most that of ``Smooth``.

    name: the metric and the argument, "Fidelity: eps". why: what the lower limit is for.
    """
    require_positive(name, eps, why)
    require(eps <= _MOST, f"{name} must be at most {_MOST:g}, received {eps!r}.")


def unit(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x / |x|, 1 / |x|) on the last axis. A vector shorter than 1e-12 has no direction: zeros, and no gradient."""
    square = x.square().sum(-1, keepdim=True)
    long = square > 1e-24
    inverse = torch.where(long, square, 1).rsqrt() * long
    return x * inverse, inverse


def unit_vjp(direction: Tensor, inverse: Tensor, grad: Tensor) -> Tensor:
    """The gradient with respect to x of sum(grad * direction)."""
    return (grad - (grad * direction).sum(-1, keepdim=True) * direction) * inverse


__all__ = ["DotReduction", "Metric", "Smooth", "require_eps", "unit", "unit_vjp"]
