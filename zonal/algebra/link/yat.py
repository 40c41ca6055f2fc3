"""The spherical Yat link."""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zonal.algebra.declaration import Derived, Move, require
from zonal.algebra.link.base import Link
from zonal.formula import Formula

_FORMULA = Formula(  # c[0] is eps
    "yat",
    "x * x / (2.f + c[0] - 2.f * x)",
    "2.f * x * (2.f + c[0] - x) / ((2.f + c[0] - 2.f * x) * (2.f + c[0] - 2.f * x))",
    triton="zonal.kernels.triton.links:yat",
    domain=(-1.0, 1.0),
)
_LEAST = 1e-6


@dataclass(frozen=True)
class Yat(Link):
    """l(x) = x^2 / (2 + eps - 2x) for x in [-1, 1], with 0 <= l <= 1/eps. Positive definite for eps > 0.

    In float32, 2 + eps is off by up to 1.2e-7, so that l may exceed 1/eps by about 1.2e-7/eps of it: a tenth at 1e-6.

    Raises: ArgumentError unless eps is positive and finite. Source: SLAY (001), eq. 3.
    """

    domain = (-1.0, 1.0)
    positive = True
    operations = 3

    eps: float = 0.01

    def __post_init__(self) -> None:
        require(
            _LEAST <= self.eps < math.inf,
            f"Yat: eps must be > 0 (the kernel is unbounded at 0), at least {_LEAST:g}, which float32 can add to 2, "
            f"and finite, received {self.eps}.",
        )

    @property
    def formula(self) -> Formula:
        return replace(_FORMULA, constants=(self.eps,))

    def indefinite_reason(self, unit: bool, dim: int | None) -> None:
        return None  # a power series with coefficients >= 0

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return x.square() / (2 + self.eps - 2 * x)

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        gap = 2 + self.eps - 2 * x
        return 2 * x * (2 + self.eps - x) / gap.square()

    def value_into(self, x: Tensor, c: Tensor, out: Tensor) -> Tensor:
        gap = torch.mul(x, -2, out=out).add_(2 + self.eps)
        return torch.div(x, gap, out=gap).mul_(x)

    def derivative_into(self, x: Tensor, c: Tensor, out: Tensor) -> Tensor:
        gap = torch.mul(x, -2, out=out).add_(2 + self.eps)
        part = torch.div(x, gap, out=gap)
        return torch.addcmul(part, part, part, out=part).mul_(2)  # 2 u (1 + u) with u = x / gap

    def moves(self) -> tuple[Move, ...]:
        bounded = Derived("bounded link", f"hence 0 <= K <= {1 / self.eps:g}, the most at equal directions")
        text = f"evidence is alignment squared over distance squared (eps = {self.eps:g})"
        return (self.move("restriction", "Yat", text, bounded),)


__all__ = ["Yat"]
