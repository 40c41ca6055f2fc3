"""The square of an affine function."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.algebra.declaration import Derived, Move, require, row
from zonal.algebra.horner import power_sums
from zonal.algebra.link.base import Link
from zonal.algebra.score import Params
from zonal.formula import Formula

_MOST = 1e9


@dataclass(frozen=True)
class SquaredAffine(Link):
    """l(x) = (x + b)^2: nonnegative, with (d + 1)(d + 2)/2 exact features for vectors of size d.

    bias: b. learn_bias: learn one b per head.
    """

    positive = True
    degree = 2
    operations = 2
    formula = Formula(
        "squared_affine",
        "(x + c[0]) * (x + c[0])",
        "2.f * (x + c[0])",
        "2.f * (x + c[0])",
        "zonal.kernels.triton.links:squared_affine",
    )

    bias: float = 0.04
    learn_bias: bool = False

    def __post_init__(self) -> None:
        require(
            abs(self.bias) <= _MOST,
            f"SquaredAffine: bias must lie in [-{_MOST:g}, {_MOST:g}], so that sums of its square are numbers in "
            f"float32, received {self.bias!r}.",
        )

    def indefinite_reason(self, unit: bool, dim: int | None) -> str | None:
        if self.learn_bias:
            return (
                "link SquaredAffine(learn_bias=True) may learn b < 0, and (x + b)^2 then has the part 2 b x; "
                "fix b >= 0, or learn link.Gegenbauer(degrees=(2.0,), nonnegative=True)"
            )
        if self.bias < 0:
            return f"link SquaredAffine(bias={self.bias:g}) has the part 2 b x with b < 0; use bias >= 0"
        return None

    def initial(self) -> dict[str, Tensor]:
        return {"bias": row(self.bias)} if self.learn_bias else {}

    def coefficients(self, params: Params) -> Tensor:
        bias = params["bias"].double() if self.learn_bias else torch.tensor([self.bias], dtype=torch.float64)
        return bias.view(1, -1, 1, 1)

    def monomials(self, c: Tensor) -> Tensor:
        return torch.cat([c.square(), 2 * c, torch.ones_like(c)])

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return (x + c[0]).square()

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        return 2 * (x + c[0])

    def coefficient_vjp(self, x: Tensor, grad: Tensor, c: Tensor) -> Tensor:
        return power_sums(x, 2 * grad * (x + c[0]), 1)

    def value_into(self, x: Tensor, c: Tensor, out: Tensor) -> Tensor:
        return torch.add(x, c[0], out=out).square_()

    def derivative_into(self, x: Tensor, c: Tensor, out: Tensor) -> Tensor:
        return torch.add(x, c[0], out=out).mul_(2)

    def coefficient_vjp_into(self, x: Tensor, grad: Tensor, c: Tensor, spare: Tensor) -> Tensor:
        return power_sums(x, torch.add(x, c[0], out=spare).mul_(2).mul_(grad), 1)

    def moves(self) -> tuple[Move, ...]:
        features = Derived("square features", "hence nonnegative, and exact with (d + 1)(d + 2)/2 features")
        text = "evidence is the square of an affine function of the score"
        return (self.move("restriction", "squared affine", text, features),)


__all__ = ["SquaredAffine"]
