"""The identity link of linear attention and ridge retrieval."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from zonal.algebra.declaration import Derived, Move
from zonal.algebra.link.base import Link
from zonal.formula import Formula

_FORMULA = Formula("identity", "x", "spread(1.f)", triton="zonal.kernels.triton.links:identity")


@dataclass(frozen=True)
class Identity(Link):
    """l(x) = x."""

    linear: ClassVar[bool] = True

    @property
    def degree(self) -> int:
        return 1

    @property
    def operations(self) -> int:
        return 0

    @property
    def lowest_degree(self) -> int:
        return 1

    @property
    def formula(self) -> Formula:
        return _FORMULA

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
        return (
            Move(
                "restriction",
                "link",
                "linear evidence",
                "evidence is the score",
                (Derived("linear link", "hence evidence adds where scores add, and has their sign"),),
            ),
        )


__all__ = ["Identity"]
