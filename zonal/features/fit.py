"""Nonnegative polynomials p(x)^2 + c fitted to a zonal kernel. Their features are exact and rows never cancel."""

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
    """A fitted link, and its RMS error relative to the kernel's RMS under the weights of the fit."""

    link: PolynomialSquare
    error: float


def uniform_angles(dim: int) -> tuple[Tensor, Tensor]:
    """Nodes x and weights of E f(u . v) for u, v independent and uniform on the sphere in R^dim, dim >= 2.

    Both are in float64. The density of x = cos(theta) is proportional to sin^(dim - 2)(theta) d theta, which
    is smooth enough for equal steps in theta.
    """
    require(dim >= 2, f"uniform_angles: dim must be >= 2, received {dim}.")
    theta = (torch.arange(_ANGLES, dtype=torch.float64, device="cpu") + 0.5) * (math.pi / _ANGLES)
    weight = theta.sin() ** (dim - 2)
    return theta.cos(), weight / weight.sum()


def histogram(angles: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Nodes and weights of a weighted sample of q . k in [-1, 1].

    Bins have equal width, and each node is the mean of the sample in its bin.
    """
    x = angles.detach().flatten().double().clamp(-1, 1)
    share = torch.ones_like(x) if weights is None else weights.detach().flatten().double()
    require(
        share.shape == x.shape, f"fit_square: weights must be as many as angles, {x.numel()}, received {share.numel()}."
    )
    require(
        x.numel() > 0 and bool(x.isfinite().all()),
        "fit_square: angles must be finite and at least one, as q @ k.mT of unit vectors gives them.",
    )
    require(
        bool((share.isfinite() & (share >= 0)).all()) and float(share.sum()) > 0,
        "fit_square: weights must be finite, >= 0 and not all 0.",
    )
    place = ((x + 1) * (_BINS / 2)).long().clamp_max(_BINS - 1)
    mass = torch.zeros(_BINS, dtype=torch.float64, device=x.device).index_add_(0, place, share)
    total = torch.zeros_like(mass).index_add_(0, place, share * x)
    full = mass > 0
    return (total[full] / mass[full]).cpu(), (mass[full] / mass.sum()).cpu()


def row_weights(kernel: Link, x: Tensor, causal: bool = True) -> Tensor:
    """1 / (sum of the row)^2 for kernel scores x (…, T, S), 0 for hidden keys, as weights for ``fit_square``.

    The fit then minimises the error of normalised rows, where all rows have equal influence. Without these weights, a
    few rows with the largest kernel values dominate.
    """
    value = kernel.at(x)
    visible = torch.ones_like(x).tril() if causal else torch.ones_like(x)
    total = (value * visible).sum(-1, keepdim=True)
    return visible / torch.where(total > 0, total, torch.inf).square()


def fit_square(
    kernel: Link, degree: int, *, dim: int | None = None, angles: Tensor | None = None, weights: Tensor | None = None
) -> SquareFit:
    """p(x)^2 + c nearest to ``kernel`` in weighted least squares, with p of degree ``degree`` / 2 and c >= 0.

    Args:
        kernel: a link without learned parts, such as Yat(eps=1.0).
        degree: of the whole polynomial: 2, 4 or 6.
        dim: weight x by its density for independent uniform unit vectors in R^dim.
        angles: weight x by this sample of q . k. Exactly one of ``dim`` and ``angles`` is required.
        weights: of each of ``angles``. Use ``row_weights`` for attention that divides by the sum of the row. Default:
            equal.

    Raises: ArgumentError for other degrees, signed kernels, both or neither of ``dim`` and ``angles``.
    """
    require(degree in (2, 4, 6), f"fit_square: degree must be 2, 4 or 6, received {degree}.")
    require(
        kernel.positive and not kernel.initial(),
        f"fit_square: a positive kernel with nothing learned is required, received {kernel}.",
    )
    require(
        (dim is None) != (angles is None),
        "fit_square: pass dim=... for the angles of random vectors, or angles=... for your own, not both.",
    )
    require(weights is None or angles is not None, "fit_square: weights are of angles; pass both.")
    x, weight = histogram(angles, weights) if angles is not None else uniform_angles(dim or 0)
    wanted = kernel.at(x)
    scale = float((weight * wanted.square()).sum().sqrt())
    require(math.isfinite(scale) and scale > 0, f"fit_square: {kernel} is zero or not finite on these angles.")
    wanted = wanted / scale
    powers = torch.stack([x**j for j in range(degree // 2 + 1)], -1)
    root = weight.sqrt()
    # the floor enters linearly, so the bound c >= 0 either holds for the best c or gives c = 0
    starts = _starts(powers, root, wanted, x)
    searches = [_search(powers, root, wanted, start, floor) for start in starts for floor in (False, True)]
    at, cost = min((found for found in searches if found[0][-1] >= 0), key=lambda found: found[1])
    polynomial = at[:-1] * math.sqrt(scale) * (1 if at[-2] >= 0 else -1)
    return SquareFit(PolynomialSquare(tuple(polynomial.tolist()), floor=float(at[-1] * scale)), math.sqrt(cost))


def _search(powers: Tensor, root: Tensor, wanted: Tensor, start: Tensor, floor: bool) -> tuple[Tensor, float]:
    """([p, c], squared error) with the least squared error near p = ``start``; c = 0 unless ``floor``."""

    def residual(at: Tensor) -> tuple[Tensor, Tensor]:
        p = powers @ at[: powers.shape[1]]
        value, slope = p.square(), 2 * p[:, None] * powers
        if floor:
            value, slope = value + at[-1], torch.cat([slope, torch.ones_like(p)[:, None]], -1)
        return root * (value - wanted), root[:, None] * slope

    at, cost = levenberg_marquardt(residual, torch.cat([start, start.new_zeros(1)]) if floor else start)
    return (at if floor else torch.cat([at, at.new_zeros(1)])), cost


def _starts(powers: Tensor, root: Tensor, wanted: Tensor, x: Tensor) -> list[Tensor]:
    """p fitted to the square root of the kernel, which may change sign anywhere."""
    signed = [wanted.sqrt() * torch.where(x < turn, -1.0, 1.0) for turn in (-1.0, -0.3, 0.0, 0.3)]
    return [
        torch.linalg.lstsq(root[:, None] * powers, (root * values)[:, None], driver="gelsd").solution[:, 0]
        for values in signed
    ]


__all__ = ["SquareFit", "fit_square", "histogram", "row_weights", "uniform_angles"]
