"""The exponential link of softmax attention."""

from dataclasses import dataclass

from torch import Tensor

from zonal.algebra.declaration import Derived, Move
from zonal.algebra.link.base import Link
from zonal.formula import Formula


@dataclass(frozen=True)
class Exp(Link):
    """l(x) = exp(x), kept in log space. Up to scale, the only positive measurable link with l(a + b) = l(a) l(b)."""

    log_space = True
    positive = True
    operations = 6
    formula = Formula("exp", log=True)

    def indefinite_reason(self, unit: bool, dim: int | None) -> None:
        return None  # a power series with coefficients >= 0

    def indefinite_reason_of_distance(self) -> None:
        return None

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return x.exp()

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        return x.exp()

    def moves(self) -> tuple[Move, ...]:
        forced = Derived("exponential link", "hence the link is exp(a x), a absorbed by the scale of the score")
        return (self.move("restriction", "Prune W", "evidence multiplies where scores add", forced),)


__all__ = ["Exp"]
