"""Nonnegative polynomials fitted to a zonal kernel: p(x)^2 + c, whose features are exact and whose rows cannot cancel."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.algebra.declaration import require
from zonal.algebra.link import Link, PolynomialSquare
from zonal.features.least_squares import levenberg_marquardt

_ANGLES = 4096
_BINS = 4096


class SquareFit(NamedTuple):
    """A fitted link, and its root mean square error relative to the kernel's root mean square under the weights of the fit."""

    link: PolynomialSquare
    error: float


def uniform_angles(dim: int, points: int = _ANGLES) -> tuple[Tensor, Tensor]:
    """Nodes x and weights of E f(u . v) for u, v independent and uniform on the sphere in R^dim, dim >= 2. Both (points,) float64.

    The density of x = cos(theta) is proportional to sin^(dim - 2)(theta) d theta, smooth enough for equal steps in theta.
    """
    require(dim >= 2, f"uniform_angles: dim must be >= 2, received {dim}.")
    theta = (torch.arange(points, dtype=torch.float64) + 0.5) * (math.pi / points)
    weight = theta.sin() ** (dim - 2)
    return theta.cos(), weight / weight.sum()


def histogram(angles: Tensor, bins: int = _BINS) -> tuple[Tensor, Tensor]:
    """Nodes and weights of a sample of q . k in [-1, 1]: bins of equal width, each at the mean of what fell into it."""
    x = angles.detach().flatten().double().clamp(-1, 1)
    require(x.numel() > 0 and bool(x.isfinite().all()), "fit_square: angles must be finite and at least one, as q @ k.mT of unit vectors gives them.")
    place = ((x + 1) * (bins / 2)).long().clamp_max(bins - 1)
    count = torch.zeros(bins, dtype=torch.float64, device=x.device).index_add_(0, place, torch.ones_like(x))
    total = torch.zeros_like(count).index_add_(0, place, x)
    full = count > 0
    return (total[full] / count[full]).cpu(), (count[full] / x.numel()).cpu()


def fit_square(kernel: Link, degree: int, *, dim: int | None = None, angles: Tensor | None = None) -> SquareFit:
    """p(x)^2 + c nearest to ``kernel`` in weighted least squares, with p of degree ``degree`` / 2 and c >= 0.

    Args:
        kernel: a link without learned parts, such as Yat(eps=1.0).
        degree: of the whole polynomial: 2, 4 or 6.
        dim: weigh x as it falls for independent uniform unit vectors in R^dim.
        angles: weigh x as it falls in this sample of q . k. One of ``dim`` and ``angles`` is required.

    Raises: ArgumentError for other degrees, signed kernels, both or neither of ``dim`` and ``angles``.
    """
    require(degree in (2, 4, 6), f"fit_square: degree must be 2, 4 or 6, received {degree}.")
    require(kernel.positive and not kernel.initial(), f"fit_square: a positive kernel with nothing learned is required, received {kernel}.")
    require((dim is None) != (angles is None), "fit_square: pass dim=... for the angles of random vectors, or angles=... for your own, not both.")
    x, weight = histogram(angles) if angles is not None else uniform_angles(dim or 0)
    wanted = kernel.value(x.view(1, 1, 1, -1), kernel.coefficients({}))[0, 0, 0]
    scale = float((weight * wanted.square()).sum().sqrt())
    require(math.isfinite(scale) and scale > 0, f"fit_square: {kernel} is zero or not finite on these angles.")
    wanted = wanted / scale
    order = degree // 2
    powers = torch.stack([x**j for j in range(order + 1)], -1)
    root = weight.sqrt()

    def residual(at: Tensor) -> tuple[Tensor, Tensor]:
        p = powers @ at[:-1]
        slope = torch.cat([2 * p[:, None] * powers, (2 * at[-1]).expand(len(x), 1)], -1)
        return root * (p.square() + at[-1].square() - wanted), root[:, None] * slope

    best = min((levenberg_marquardt(residual, start) for start in _starts(powers, root, wanted, x)), key=lambda found: found[1])
    at = best[0]
    polynomial = at[:-1] * math.sqrt(scale) * (1 if at[-2] >= 0 else -1)
    floor = float(at[-1].square())
    # the bound c >= 0 is met at c = 0, which a search over the root of c only comes near
    return SquareFit(PolynomialSquare(tuple(polynomial.tolist()), floor=floor * scale if floor > 1e-9 else 0.0), math.sqrt(best[1]))


def _starts(powers: Tensor, root: Tensor, wanted: Tensor, x: Tensor) -> list[Tensor]:
    """p fitted to the square root of the kernel, which may change sign anywhere, with a small and a larger floor."""
    found = []
    for turn in (-1.0, -0.3, 0.0, 0.3):
        signed = wanted.sqrt() * torch.where(x < turn, -1.0, 1.0)
        p = torch.linalg.lstsq(root[:, None] * powers, (root * signed)[:, None], driver="gelsd").solution[:, 0]
        found += [torch.cat([p, p.new_tensor([floor])]) for floor in (1e-3, 0.1)]
    return found


__all__ = ["SquareFit", "fit_square", "histogram", "uniform_angles"]
