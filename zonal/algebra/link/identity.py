"""The identity link of linear attention and ridge retrieval."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.algebra.declaration import Derived, Move
from zonal.algebra.link.base import Link
from zonal.formula import Formula


@dataclass(frozen=True)
class Identity(Link):
    """l(x) = x."""

    linear = True
    degree = 1
    lowest_degree = 1
    operations = 0
    formula = Formula("identity", "x", "spread(1.f)", triton="zonal.kernels.triton.links:identity")

    def indefinite_reason(self, unit: bool, dim: int | None) -> None:
        return None

    def indefinite_reason_of_distance(self) -> str:
        return "a bare distance is none; use link.Exp()"

    def monomials(self, c: Tensor) -> Tensor:
        return torch.tensor([0.0, 1.0], dtype=torch.float64, device=c.device).view(2, 1, 1, 1)

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return x

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        return torch.ones_like(x)

    def moves(self) -> tuple[Move, ...]:
        adds = Derived("linear link", "hence evidence adds where scores add, and has their sign")
        return (self.move("restriction", "linear evidence", "evidence is the score", adds),)


__all__ = ["Identity"]
