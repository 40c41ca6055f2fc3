"""The square of a polynomial, plus a floor."""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from zonal.algebra.declaration import Derived, Move, require
from zonal.algebra.horner import horner, horner_derivative, power_sums
from zonal.algebra.link.base import Link
from zonal.algebra.score import Params
from zonal.formula import Formula

_FORMULA = Formula(  # the floor is the last number of c
    "polynomial_square",
    "horner(x, c, n - 1) * horner(x, c, n - 1) + c[n - 1]",
    "2.f * horner(x, c, n - 1) * horner_derivative(x, c, n - 1)",
    "2.f * horner(x, c, n - 1)",
    "zonal.kernels.triton.links:polynomial_square",
)

_MOST = 1e9


@dataclass(frozen=True)
class PolynomialSquare(Link):
    """l(x) = p(x)^2 + floor with p(x) = sum_k polynomial[k] x^k: nonnegative, of degree 2 deg p.

    learn: train the coefficients of p, one set per head.

    Raises: ArgumentError unless there are 2 to 9 coefficients of at most 1e9 in magnitude, and 0 <= floor <= 1e18.
    """

    positive = True

    polynomial: tuple[float, ...] = (0.04, 1.0)
    floor: float = 0.0
    learn: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "polynomial", tuple(float(v) for v in self.polynomial))
        require(
            2 <= len(self.polynomial) <= 9,
            f"PolynomialSquare: 2 to 9 coefficients (degree 1 to 8) are required, received {len(self.polynomial)}.",
        )
        require(
            not any(abs(v) > _MOST for v in self.polynomial),
            f"PolynomialSquare: coefficients must lie in [-{_MOST:g}, {_MOST:g}], so that sums of the square are "
            f"numbers in float32, received {self.polynomial}.",
        )
        require(
            0 <= self.floor <= _MOST**2,
            f"PolynomialSquare: floor must be >= 0 (the kernel must not be negative) and at most {_MOST**2:g}, "
            f"received {self.floor}.",
        )

    @property
    def degree(self) -> int:
        return 2 * (len(self.polynomial) - 1)

    @property
    def operations(self) -> int:
        return len(self.polynomial) + 1

    @property
    def formula(self) -> Formula:
        return replace(_FORMULA, constants=(self.floor,))

    def indefinite_reason(self, unit: bool, dim: int | None) -> str | None:
        if self.learn:
            return (
                "link PolynomialSquare(learn=True) may learn coefficients of any sign; use learn=False, "
                "or learn link.Gegenbauer(nonnegative=True)"
            )
        # in Python: models are also built on the device meta, whose tensors hold no numbers
        found = [0.0] * (self.degree + 1)
        for (i, first), (j, second) in itertools.product(enumerate(self.polynomial), repeat=2):
            found[i + j] += first * second
        found[0] += self.floor
        bad = next((k for k, c in enumerate(found) if c < 0), None)
        if bad is None:
            return None
        return (
            f"link PolynomialSquare{self.polynomial} has the part {found[bad]:g} x^{bad}, a negative power; "
            "use coefficients whose square has none"
        )

    def initial(self) -> dict[str, Tensor]:
        return {"coefficient": torch.tensor([self.polynomial], dtype=torch.float32)} if self.learn else {}

    def coefficients(self, params: Params) -> Tensor:
        values = params["coefficient"].double() if self.learn else torch.tensor([self.polynomial], dtype=torch.float64)
        return values.T[:, :, None, None]

    def monomials(self, c: Tensor) -> Tensor:
        terms = [torch.zeros_like(c[0]) for _ in range(2 * len(c) - 1)]
        for i, first in enumerate(c):
            for j, second in enumerate(c):
                terms[i + j] = terms[i + j] + first * second
        return torch.stack([terms[0] + self.floor, *terms[1:]])

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return horner(x, c).square() + self.floor

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        return 2 * horner(x, c) * horner_derivative(x, c)

    def coefficient_vjp(self, x: Tensor, grad: Tensor, c: Tensor) -> Tensor:
        return power_sums(x, 2 * grad * horner(x, c), c.shape[0])

    def value_into(self, x: Tensor, c: Tensor, out: Tensor) -> Tensor:
        return horner(x, c, out).square_().add_(self.floor)

    def derivative_into(self, x: Tensor, c: Tensor, out: Tensor) -> Tensor:
        return horner(x, c, out).mul_(2).mul_(horner_derivative(x, c))

    def moves(self) -> tuple[Move, ...]:
        bounded = Derived("bounded link", f"hence K >= {self.floor:g}, whatever is learned")
        text = f"evidence is p(x)^2 + {self.floor:g} with p of degree {len(self.polynomial) - 1}"
        return (self.move("restriction", "squared polynomial", text, bounded),)


__all__ = ["PolynomialSquare"]
