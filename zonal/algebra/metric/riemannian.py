"""A metric with a learned tensor: a small network gives a positive definite matrix g(x) at every point."""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.declaration import require, require_whole
from zonal.algebra.metric.base import Metric, require_eps
from zonal.algebra.metric.euclidean import squares, squares_vjp

# slopes nearer than this use the corrected trapezium rule, whose error is their fourth power; a difference quotient
# has fewer digits there
_NEAR = 1e-2


@dataclass(frozen=True)
class Riemannian(Metric):
    """d(a, b) = sqrt(E(a, b) + eps^2) - eps, E the energy of the straight line from a to b under a metric tensor g.

    g = L L^T + floor I with L(x) = [u_1 sqrt(sigma(z_1(x))) … u_n sqrt(sigma(z_n(x)))] and z_j(x) = w_j . x + c_j:

    E = int_0^1 D^T g(a + s D) D ds,   D = b - a,
      = floor |D|^2 + sum_j (u_j . D)^2 (softplus(z_j(b)) - softplus(z_j(a))) / (z_j(b) - z_j(a))

    The units w_j, c_j, u_j are learned per key head. The integral is exact. Where w = 0, d is Mahalanobis' distance for
    the constant g; sqrt(floor) |D| <= d everywhere, up to eps. The energy of the straight line is an upper bound of the
    squared geodesic distance. d is symmetric, and 0 only at coincident points; the triangle inequality may fail.

    units: n. floor: > 0, keeps g positive definite. eps: keeps the gradient finite and zero at coincident points. size:
    D, filled in by a layer together with ``heads``; without it, units keep the values that ``seed`` draws. seed: of the
    units; None = each layer draws its own, and without a layer it is 0. Cost: a dozen float64 operations per pair and
    unit, so use short sequences.

    ``pair`` takes points as ``query`` and ``key`` prepare them, (x, z(x), u . x).

    Raises: ArgumentError for numbers out of range, or points of another size. Source: REWA (004).
    """

    kv_rows: ClassVar[tuple[str, ...]] = ("unit", "direction")

    units: int = 8
    floor: float = 0.1
    eps: float = 1e-4
    size: int | None = None
    heads: int = 1
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("units", self.units), ("heads", self.heads), ("size", self.size)):
            if value is not None:
                require_whole(f"Riemannian: {name}", value)
        require(
            0 < self.floor < 1,
            f"Riemannian: floor must lie between 0 and 1 (g is floor I and what is learned), received {self.floor}.",
        )
        require_eps("Riemannian: eps", self.eps, "it keeps the gradient finite at coincident points")

    def sized(self, dim: int, heads: int) -> "Riemannian":
        self.check(dim)
        return self if self.size is not None else Riemannian(self.units, self.floor, self.eps, dim, heads, self.seed)

    def check(self, dim: int) -> None:
        require(
            self.size in (None, dim) and dim > 0,
            f"metric.Riemannian: points of {self.size or 'one or more'} numbers are required, received {dim}.",
        )

    def typical(self, dim: int) -> float:
        return (2 * dim) ** 0.5

    def passes(self, dim: int) -> int:
        return 5 + 9 * self.units  # measured, in float64

    def initial(self) -> dict[str, Tensor]:
        return {} if self.size is None else self._start(self.size, self.seed)

    def started(self, seed: int) -> dict[str, Tensor]:
        return {} if self.size is None or self.seed is not None else self._start(self.size, seed)

    def _start(self, dim: int, seed: int | None) -> dict[str, Tensor]:
        """Initial units w and c (heads, n, dim + 1), and directions u (heads, n, dim).

        For points of N(0, 1), z has unit variance and the mean of g is I.
        """
        generator = torch.Generator().manual_seed(seed or 0)
        unit, direction = torch.randn(2, self.heads, self.units, dim, generator=generator, dtype=torch.float32).unbind(
            0
        )
        length = (2 * (1 - self.floor) * dim / self.units) ** 0.5
        return {"unit": F.pad(unit / dim**0.5, (0, 1)), "direction": length * F.normalize(direction, dim=-1)}

    def _maps(self, dim: int, params: dict[str, Tensor], heads: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Units and directions for so many heads, in the type of ``like``."""
        self.check(dim)
        found = params if self.size is not None else self._start(dim, self.seed)
        unit, direction = (found[name].to(like) for name in ("unit", "direction"))
        return unit.repeat_interleave(heads // unit.shape[0], 0), direction.repeat_interleave(heads // unit.shape[0], 0)

    def query(self, q: Tensor, params: dict[str, Tensor]) -> Tensor:
        unit, direction = self._maps(q.shape[-1], params, q.shape[1], q)
        return torch.cat([q, q @ unit[..., :-1].mT + unit[:, None, :, -1], q @ direction.mT], -1)

    def key(self, k: Tensor, params: dict[str, Tensor]) -> Tensor:
        return self.query(k, params)

    def as_query(self, k: Tensor, params: dict[str, Tensor]) -> Tensor:
        return k

    @property
    def keeps_keys(self) -> bool:
        return False

    def width(self, dim: int) -> int:
        return dim + 2 * self.units

    def tensor(self, x: Tensor, params: dict[str, Tensor]) -> Tensor:
        """g(x) for points (B, H, T, D) as they come -> (B, H, T, D, D)."""
        unit, direction = self._maps(x.shape[-1], params, x.shape[1], x)
        level = (x @ unit[..., :-1].mT + unit[:, None, :, -1]).sigmoid()
        learned = torch.einsum("bhtn,hni,hnj->bhtij", level, direction, direction)
        return learned + self.floor * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)

    def _parted(self, x: Tensor) -> "_Points":
        points, slope, along = x.double().split([x.shape[-1] - 2 * self.units, self.units, self.units], -1)
        return _Points(points, slope, along, F.softplus(slope), slope.sigmoid())

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        a, b = self._parted(q), self._parted(k)
        energy = self.floor * squares(a.points, b.points).clamp_min(0)
        for j in range(self.units):
            energy = energy + (b.along[..., None, :, j] - a.along[..., j, None]).square() * _mean(
                a, b, j, _way(a, b, j)
            )
        return (energy + self.eps**2).sqrt().to(q.dtype) - self.eps

    def pair_vjp(self, q: Tensor, k: Tensor, distance: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self._parted(q), self._parted(k)
        pull = (grad / (distance + self.eps)).double() / 2  # by the energy
        found = [torch.empty_like(x, dtype=torch.float64) for x in (q, k)]
        for whole, part in zip(found, squares_vjp(a.points, b.points, 2 * self.floor * pull), strict=True):
            whole[..., : part.shape[-1]] = part
        first = found[0].shape[-1] - 2 * self.units
        for j in range(self.units):
            way = _way(a, b, j)
            mean = _mean(a, b, j, way)
            from_a, from_b = _mean_slopes(mean, way)
            along = b.along[..., None, :, j] - a.along[..., j, None]
            square, slope = pull * along.square(), 2 * pull * along * mean
            found[0][..., first + j], found[1][..., first + j] = (square * from_a).sum(-1), (square * from_b).sum(-2)
            found[0][..., first + self.units + j], found[1][..., first + self.units + j] = -slope.sum(-1), slope.sum(-2)
        return found[0].to(q.dtype), found[1].to(k.dtype)


class _Points(NamedTuple):
    """Prepared points in float64: x, z(x), u . x, softplus(z), sigmoid(z)."""

    points: Tensor
    slope: Tensor
    along: Tensor
    area: Tensor
    level: Tensor


class _Way(NamedTuple):
    """One unit on the lines from all a to all b: the change of z, with and without zeros; sigmoid and its slope at both
    ends; and where z hardly changes.
    """

    gap: Tensor
    one: Tensor
    other: Tensor
    bend: Tensor
    turn: Tensor
    near: Tensor
    far: Tensor


def _way(a: _Points, b: _Points, j: int) -> _Way:
    gap = b.slope[..., None, :, j] - a.slope[..., j, None]
    one, other = a.level[..., j, None], b.level[..., None, :, j]
    near = gap.abs() < _NEAR
    return _Way(gap, one, other, one * (1 - one), other * (1 - other), near, torch.where(near, 1, gap))


def _mean(a: _Points, b: _Points, j: int, way: _Way) -> Tensor:
    """The mean of sigmoid between z_j(a) and z_j(b)."""
    quotient = (b.area[..., None, :, j] - a.area[..., j, None]) / way.far
    return torch.where(way.near, (way.one + way.other - way.gap * (way.turn - way.bend) / 6) / 2, quotient)


def _mean_slopes(mean: Tensor, way: _Way) -> tuple[Tensor, Tensor]:
    """The derivatives of ``_mean`` by either end."""
    gap, one, other, bend, turn, near, far = way
    from_a = torch.where(near, bend / 2 + (turn - bend + gap * bend * (1 - 2 * one)) / 12, (mean - one) / far)
    from_b = torch.where(near, turn / 2 - (turn - bend + gap * turn * (1 - 2 * other)) / 12, (other - mean) / far)
    return from_a, from_b


__all__ = ["Riemannian"]
