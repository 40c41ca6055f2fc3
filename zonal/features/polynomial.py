"""Polynomial kernels of q . k with exact features: polynomial links, the Taylor polynomial of exp, the square."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from zonal.algebra.declaration import require, require_whole
from zonal.algebra.link import Link
from zonal.features.base import NONE, Buffers, Claim, FeatureMap, Side
from zonal.features.symmetric import SymmetricPowers
from zonal.tracing import kept

_ROUNDING = 1e-12


@dataclass(frozen=True)
class Polynomial(FeatureMap):
    """phi_q . phi_k = sum_k c_k x^k exactly, by symmetric powers, with the coefficients in phi_q.

    Powers with coefficient zero have no features: m = sum of C(d + k - 1, k) over the others. anywhere: promise
    positivity for vectors of any length and not only for unit vectors (the minimum of the polynomial is checked).

    Raises: ArgumentError for degrees other than 1 to 6.
    """

    claim = Claim("exact", "a weighted sum of symmetric powers", 0.0)

    coefficients: tuple[float, ...]
    anywhere: bool = False

    def __post_init__(self) -> None:
        values = tuple(float(c) for c in self.coefficients)
        object.__setattr__(self, "coefficients", values)
        require(
            2 <= len(values) <= 7 and values[-1] != 0,
            "Polynomial: 2 to 7 coefficients (degree 1 to 6), the last of them not 0, are required, received "
            f"{values}.",
        )
        require(all(math.isfinite(c) for c in values), f"Polynomial: coefficients must be finite, received {values}.")

    @staticmethod
    def of(link: Link) -> "Polynomial":
        """The features of a polynomial link with its declared coefficients (learned ones: ``feature_map``).

        Raises: ArgumentError for a link that is no polynomial, or one with a row for each of several heads.
        """
        require(
            link.degree is not None,
            f"Polynomial.of: link {type(link).__name__} is no polynomial. Fit one: zonal.features.fit_square.",
        )
        values = link.monomials(link.coefficients(link.initial()))
        require(
            values.shape[1] == 1, f"Polynomial.of: one row of coefficients is required, received {values.shape[1]}."
        )
        coefficients = values.detach().flatten().tolist()
        while len(coefficients) > 2 and coefficients[-1] == 0:
            coefficients.pop()
        return Polynomial(tuple(coefficients))

    @property
    def degree(self) -> int:
        return len(self.coefficients) - 1

    @property
    def powers(self) -> SymmetricPowers:
        return SymmetricPowers(self.degree, 0 if self.coefficients[0] else 1)

    @property
    def _kept(self) -> tuple[bool, ...]:
        return tuple(c != 0 for c in self.coefficients[self.powers.lowest :])

    @property
    def unit(self) -> bool:
        return not self.anywhere

    @property
    def positive(self) -> bool:
        return _minimum(self.coefficients, self.anywhere) >= -_ROUNDING * max(map(abs, self.coefficients))

    def dimension(self, dim: int) -> int:
        return sum(size for size, kept in zip(self.powers.sizes(dim), self._kept, strict=True) if kept)

    def flops(self, dim: int) -> int:
        # powers of coefficient zero are still made, on the way to the next
        return self.powers.flops(dim) + self.dimension(dim)

    def kernel(self, x: Tensor, dim: int) -> Tensor:
        out = torch.full_like(x, self.coefficients[-1])
        for c in reversed(self.coefficients[:-1]):
            out = out * x + c
        return out

    def _weights(self, x: Tensor) -> Tensor:
        return _spread(self.coefficients, x.shape[-1], x.dtype, x.device)

    def _pick(self, phi: Tensor, dim: int) -> Tensor:
        if all(self._kept):
            return phi
        segments = phi.split(self.powers.sizes(dim), -1)
        picked = [segment for segment, kept in zip(segments, self._kept, strict=True) if kept]
        return picked[0] if len(picked) == 1 else torch.cat(picked, -1)

    def __call__(self, x: Tensor, buffers: Buffers = NONE, side: Side = "key") -> Tensor:
        phi = self._pick(self.powers(x), x.shape[-1])
        return phi * self._weights(x) if side == "query" else phi


def taylor_exp(scale: float = 1.0, order: int = 2) -> Polynomial:
    """sum_{k <= order} (scale x)^k / k!, the Taylor polynomial of exp(scale x); positive for even orders at any length.

    Order 2 with scale = 1/sqrt(d) are the features of Based (Arora et al. 2024).

    Raises: ArgumentError for orders other than 1 to 6, and |scale| outside [1e-6, 1e6].
    """
    require_whole("taylor_exp: order", order, most=6)
    require(
        1e-6 <= abs(scale) <= 1e6,
        f"taylor_exp: scale must lie between 1e-6 and 1e6 in magnitude, so that float32 holds its powers, received "
        f"{scale!r}.",
    )
    return Polynomial(tuple(scale**k / math.factorial(k) for k in range(order + 1)), anywhere=True)


def square(bias: float = 0.0) -> Polynomial:
    """(x + bias)^2: C(d + 2, 2) features, or C(d + 1, 2) for the bare square."""
    return Polynomial((bias * bias, 2 * bias, 1.0), anywhere=True)


def _minimum(coefficients: tuple[float, ...], anywhere: bool) -> float:
    """The least value on [-1, 1], or on the whole line."""
    if anywhere and (len(coefficients) % 2 == 0 or coefficients[-1] < 0):
        return -math.inf
    p = np.polynomial.Polynomial(coefficients)
    turning = [root.real for root in p.deriv().roots() if abs(root.imag) < 1e-6 and (anywhere or abs(root.real) <= 1)]
    return float(min(p(x) for x in [*turning, -1.0, 1.0]))


@kept
def _spread(coefficients: tuple[float, ...], dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Each coefficient repeated over the features of its power."""
    spread = [c for k, c in enumerate(coefficients) if c != 0 for _ in range(math.comb(dim + k - 1, k))]
    return torch.tensor(spread, dtype=torch.float64).to(device, dtype)


__all__ = ["Polynomial", "square", "taylor_exp"]
