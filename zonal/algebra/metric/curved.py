"""Metrics of constant curvature, +1 and -1.

Products of directions are summed in float64, because distances of near points are small differences of them.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.algebra.declaration import require_positive
from zonal.algebra.metric.base import Smooth, unit, unit_vjp
from zonal.errors import ArgumentError
from zonal.formula import Term

# beyond it sinh(a) sinh(b) leaves float32
RADIUS = 40.0
# a direction is smooth at the origin: x / sqrt(|x|^2 + _ORIGIN^2)
_ORIGIN = 1e-6
# squared differences of directions below this are computed from the differences themselves, because a product loses
# too many digits
_NEAR = 1e-6


@dataclass(frozen=True)
class Sphere(Smooth):
    """d(a, b) = 2 atan2(sqrt(|u - v|^2 + eps^2), sqrt(|u + v|^2 + eps^2)) - 2 atan(eps / sqrt(4 + eps^2)).

    u = a/|a| and v = b/|b|. This is the angle between a and b, smoothed by eps: the gradient stays finite where points
    coincide or are opposite. (The gradient of acos is infinite there, and acos is 0 below 1e-4 in float32.) The
    distance of coincident points is zero. A zero vector is at a right angle to every point and gets no gradient.

    Raises: ArgumentError for an eps out of range.
    """

    negative_type = True
    curvature = 1

    @property
    def _least(self) -> float:
        """The angle due to eps, at coincident points."""
        return 2 * math.atan2(self.eps, math.sqrt(4 + self.eps**2))

    def typical(self, dim: int) -> float:
        return math.pi / 2

    def terms(self, dim: int) -> tuple[Term, ...]:
        return (Term("sphere", 0, dim, self.eps),)

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        cosine = unit(q.double())[0] @ unit(k.double())[0].mT
        near, far = ((2 + sign * cosine).clamp_min(0).add(self.eps**2).to(q.dtype).sqrt() for sign in (-2, 2))
        return 2 * torch.atan2(near, far) - self._least

    def pair_vjp(self, q: Tensor, k: Tensor, distance: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        (u, longer), (v, wider) = unit(q.double()), unit(k.double())
        # with x = |u - v|, y = |u + v|, both smoothed: dd/dcos = -2 / (x y), and x y = (2 + eps^2) sin(d + least)
        slope = (grad * (-2 / (2 + self.eps**2)) / (distance + self._least).sin()).double()
        return unit_vjp(u, longer, slope @ v).to(q.dtype), unit_vjp(v, wider, slope.mT @ u).to(k.dtype)


class _Polar(NamedTuple):
    """A point by radius and direction (float64). inside: 1 where the radius is its own, 0 where it was cut."""

    radius: Tensor
    direction: Tensor
    length: Tensor
    inside: Tensor

    def vjp(self, radius: Tensor, direction: Tensor) -> Tensor:
        """The gradient with respect to the point, from those of radius (…, 1) and direction."""
        along = (direction * self.direction).sum(-1, keepdim=True)
        return (direction - along * self.direction) / self.length + radius * self.inside * self.direction


def _polar(x: Tensor) -> _Polar:
    length = (x.square().sum(-1, keepdim=True) + _ORIGIN**2).sqrt()
    return _Polar(length.clamp_max(RADIUS), x / length, length, (length <= RADIUS).to(x.dtype))


def _near(gap: Tensor) -> tuple[Tensor, ...]:
    """Pairs of nearly equal directions. There are few, except for points on a line."""
    return (gap < _NEAR).nonzero(as_tuple=True)


def _gaps(u: Tensor, v: Tensor) -> Tensor:
    """|u_t - v_s|^2 (…, T, S) in float64 for vectors no longer than 1, to a relative 1e-9 where they are near, too."""
    if torch.compiler.is_compiling():  # a traced graph has no places that depend on values
        return torch.cdist(u, v, compute_mode="donot_use_mm_for_euclid_dist").square()
    gap = u.square().sum(-1, keepdim=True) + v.square().sum(-1).unsqueeze(-2) - 2 * (u @ v.mT)
    place = _near(gap)
    if place[0].numel() == 0:
        return gap
    return gap.index_put(place, (u[place[:-1]] - v[(*place[:-2], place[-1])]).square().sum(-1))


def _gaps_vjp(u: Tensor, v: Tensor, gap: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of sum(grad * _gaps(u, v)). Near vectors use their difference, because grad may be huge there."""
    place = _near(gap)
    near = 2 * grad[place]
    grad = grad.index_put(place, torch.zeros_like(near))
    du = 2 * (grad.sum(-1, keepdim=True) * u - grad @ v)
    dv = 2 * (grad.sum(-2).unsqueeze(-1) * v - grad.mT @ u)
    if near.numel():
        queries, keys = place[:-1], (*place[:-2], place[-1])
        pull = near[:, None] * (u[queries] - v[keys])
        du, dv = du.index_put(queries, pull, accumulate=True), dv.index_put(keys, -pull, accumulate=True)
    return du, dv


@dataclass(frozen=True)
class Hyperbolic(Smooth):
    """The distance of curvature -1 between points in polar form: x lies at radius |scale x| in the direction of x.

    delta = sinh^2((a - b)/2) + sinh(a) sinh(b) |a^ - b^|^2 / 4,   d = 2 asinh(sqrt(delta + eps^2/4)) - 2 asinh(eps/2)

    with radii a, b and directions a^, b^. Every vector in R^p is a valid point; ``from_ball`` converts points of
    Poincaré's ball.
    eps: keeps the gradient finite and zero at coincident points. scale: None = p^-1/2, which puts points of unit
    variance at radius about 1. A radius above 40 counts as 40 and gets no outward gradient, because sinh(a) sinh(b)
    would overflow float32.

    Directions nearer than 1e-3 are compared by their differences, here and in the distance kernel: a float32 product
    has no digits of |a^ - b^|^2 left there, and sinh(a) sinh(b) magnifies the error. torch.func.vmap is not supported.

    Raises: ArgumentError for an eps out of range, or a scale <= 0.
    """

    negative_type = True
    curvature = -1

    scale: float | None = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("Hyperbolic: scale", self.scale, optional=True)

    @property
    def _least(self) -> float:
        return 2 * math.asinh(self.eps / 2)

    def _scale(self, dim: int) -> float:
        return max(dim, 1) ** -0.5 if self.scale is None else self.scale

    def polar(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Radius (…, 1) and direction (…, D) of points, in their type; differentiable."""
        found = _polar(x.double() * self._scale(x.shape[-1]))
        return found.radius.to(x.dtype), found.direction.to(x.dtype)

    def typical(self, dim: int) -> float:
        return 1.5 if self.scale is None else 1.5 * self.scale * max(dim, 1) ** 0.5

    def terms(self, dim: int) -> tuple[Term, ...]:
        return (Term("hyperbolic", 0, dim, self.eps, self._scale(dim)),)

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        a, b = _polar(q.double() * self._scale(q.shape[-1])), _polar(k.double() * self._scale(k.shape[-1]))
        bent = (_gaps(a.direction, b.direction) * (a.radius.sinh() / 4) * b.radius.sinh().mT).to(q.dtype)
        straight = ((a.radius - b.radius.mT) / 2).to(q.dtype).sinh().square()
        square = bent + straight + self.eps**2 / 4
        # 2 asinh of the root, by the logarithm, which torch vectorises
        root = square.sqrt()
        return 2 * torch.log1p(root + square / (1 + (1 + square).sqrt())) - self._least

    def pair_vjp(self, q: Tensor, k: Tensor, distance: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        scale = self._scale(q.shape[-1])
        a, b = _polar(q.double() * scale), _polar(k.double() * scale)
        gap = _gaps(a.direction, b.direction)
        slope = (2 * grad / (distance + self._least).sinh()).double()  # by delta
        apart = slope * ((a.radius - b.radius.mT).to(q.dtype).sinh() / 2)
        weighed = slope * gap / 4
        sinh_a, sinh_b = a.radius.sinh(), b.radius.sinh()
        da = apart.sum(-1, keepdim=True) + a.radius.cosh() * (weighed @ sinh_b)
        db = b.radius.cosh() * (weighed.mT @ sinh_a) - apart.sum(-2).unsqueeze(-1)
        du, dv = _gaps_vjp(a.direction, b.direction, gap, slope * (sinh_a / 4) * sinh_b.mT)
        return (a.vjp(da, du) * scale).to(q.dtype), (b.vjp(db, dv) * scale).to(k.dtype)


def from_ball(x: Tensor) -> Tensor:
    """Points of Poincaré's ball (…, p), |x| < 1, as points of ``Hyperbolic()``: same direction, radius 2 artanh |x|.

    Raises: ArgumentError for a point on or outside the unit sphere, or not finite.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    if not bool((norm < 1).all()):
        raise ArgumentError(
            "metric.from_ball: points inside the unit ball are required, |x| < 1, received |x| up to "
            f"{norm.max().item():g}."
        )
    return unit(x)[0] * (2 * norm.atanh())


def to_ball(x: Tensor) -> Tensor:
    """Points for ``Hyperbolic()`` as points of Poincaré's ball: the same direction, |x| = tanh(radius / 2)."""
    radius = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return unit(x)[0] * (radius / 2).tanh()


__all__ = ["RADIUS", "Hyperbolic", "Sphere", "from_ball", "to_ball"]
