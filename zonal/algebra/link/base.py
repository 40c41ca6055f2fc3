"""Links: how a score becomes evidence, K = l(S), with derivative, coefficients and tags.

A link is evaluated on tiles: ``value(x, c)`` and ``derivative(x, c)`` are elementwise in x and take the link's
coefficients c, a tensor (n, H, 1, 1) made once per call from what is learned. A link that is a polynomial says so
(``degree``) and gives its monomial coefficients, which is all that feature maps and Horner kernels need to know.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from zonal.algebra.declaration import Declaration, Derived, Move, require, row
from zonal.algebra.horner import horner, horner_derivative, power_sums
from zonal.algebra.score import Params
from zonal.formula import FORMULAS, Formula

NO_COEFFICIENTS = torch.zeros(0, 1, 1, 1, dtype=torch.float64)


class Link(Declaration, abstract=True):
    """From a score to evidence. ``domain``: where it is defined, None = everywhere. ``log_space``: kept as its logarithm."""

    slot = "link"
    domain: ClassVar[tuple[float, float] | None] = None
    log_space: ClassVar[bool] = False
    spreads: ClassVar[bool] = False
    """Whether what it declares a head is spread over any number of heads; else one number has to divide the other."""

    @property
    def positive(self) -> bool:
        """Whether l(x) >= 0 on the whole domain."""
        return False

    @property
    def degree(self) -> int | None:
        """The polynomial degree, or None when the link is no polynomial."""
        return None

    @property
    def operations(self) -> int:
        """Elementwise passes over a tile for one evaluation, for the cost model."""
        return 1

    def sized(self, dim: int) -> "Link":
        """The link for heads of ``dim`` numbers, where it had left their number open."""
        return self

    def spread(self, heads: int) -> "Link":
        """The link with what it declares a head for so many heads, where these are not a multiple of what is declared."""
        return self

    @property
    def formula(self) -> Formula | None:
        """The link as the tile kernels have it, or None: torch's tiles run it then."""
        return None

    def coefficients(self, params: Params) -> Tensor:
        """(n, H, 1, 1) in float64, differentiable in what is learned."""
        return NO_COEFFICIENTS

    def monomials(self, c: Tensor) -> Tensor:
        """Coefficients of x^0, x^1, … as (degree + 1, H, 1, 1), for polynomial links."""
        raise NotImplementedError(f"{type(self).__name__} is not a polynomial")

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__}.value")

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__}.derivative")

    def coefficient_vjp(self, x: Tensor, grad: Tensor, c: Tensor) -> Tensor:
        """Gradient of sum(grad * value(x, c)) with respect to c, in float64."""
        return torch.zeros(0, 1, 1, 1, dtype=torch.float64, device=x.device)

    # The same three for tiles of one shape after another, without a graph. The last argument is a buffer of x's shape that may be used, and
    # returned: a fresh one a tile costs more than the arithmetic. A link that does not care leaves them alone.

    def value_into(self, x: Tensor, c: Tensor, out: Tensor) -> Tensor:
        return self.value(x, c)

    def derivative_into(self, x: Tensor, c: Tensor, out: Tensor) -> Tensor:
        return self.derivative(x, c)

    def coefficient_vjp_into(self, x: Tensor, grad: Tensor, c: Tensor, spare: Tensor) -> Tensor:
        return self.coefficient_vjp(x, grad, c)


@dataclass(frozen=True)
class Exp(Link):
    """l(x) = exp(x): the only positive measurable link with l(a + b) = l(a) l(b). Kept in log space throughout."""

    log_space: ClassVar[bool] = True

    @property
    def positive(self) -> bool:
        return True

    @property
    def operations(self) -> int:
        return 6

    @property
    def formula(self) -> Formula:
        return FORMULAS["exp"]

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return x.exp()

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        return x.exp()

    def moves(self) -> tuple[Move, ...]:
        forced = Derived("exponential link", "hence the link is exp(a x), a absorbed by the scale of the score")
        return (Move("restriction", "link", "Prune W", "evidence multiplies where scores add", (forced,)),)


@dataclass(frozen=True)
class Identity(Link):
    """l(x) = x."""

    @property
    def degree(self) -> int:
        return 1

    @property
    def operations(self) -> int:
        return 0

    @property
    def formula(self) -> Formula:
        return FORMULAS["identity"]

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


@dataclass(frozen=True)
class Yat(Link):
    """l(x) = x^2 / (2 + eps - 2x), 0 <= l <= 1/eps on [-1, 1]. Positive definite for eps > 0. Source: SLAY, eq. 3."""

    domain: ClassVar[tuple[float, float] | None] = (-1.0, 1.0)

    eps: float = 0.01

    def __post_init__(self) -> None:
        require(
            0 < self.eps < math.inf,
            f"Yat: eps must be > 0 (the kernel is unbounded at 0) and finite, received {self.eps}.",
        )

    @property
    def positive(self) -> bool:
        return True

    @property
    def operations(self) -> int:
        return 3

    @property
    def formula(self) -> Formula:
        return replace(FORMULAS["yat"], constants=(self.eps,))

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
        return (
            Move(
                "restriction",
                "link",
                "Yat",
                f"evidence is alignment squared over distance squared (eps = {self.eps:g})",
                (bounded,),
            ),
        )


@dataclass(frozen=True)
class SquaredAffine(Link):
    """l(x) = (x + b)^2: never negative, exact with (d + 1)(d + 2)/2 features. learn_bias: one b a head."""

    bias: float = 0.04
    learn_bias: bool = False

    @property
    def positive(self) -> bool:
        return True

    @property
    def degree(self) -> int:
        return 2

    @property
    def operations(self) -> int:
        return 2

    @property
    def formula(self) -> Formula:
        return FORMULAS["squared_affine"]

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
        return (
            Move(
                "restriction",
                "link",
                "squared affine",
                "evidence is the square of an affine function of the score",
                (features,),
            ),
        )


@dataclass(frozen=True)
class PolynomialSquare(Link):
    """l(x) = p(x)^2 + floor with p(x) = sum_k coefficients[k] x^k: nonnegative by construction, degree 2 deg p."""

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
            self.floor >= 0,
            f"PolynomialSquare: floor must be >= 0 (the kernel must not be negative), received {self.floor}.",
        )

    @property
    def positive(self) -> bool:
        return True

    @property
    def degree(self) -> int:
        return 2 * (len(self.polynomial) - 1)

    @property
    def operations(self) -> int:
        return len(self.polynomial) + 1

    @property
    def formula(self) -> Formula:
        return replace(FORMULAS["polynomial_square"], constants=(self.floor,))

    def initial(self) -> dict[str, Tensor]:
        return {"coefficient": torch.tensor([self.polynomial], dtype=torch.float32)} if self.learn else {}

    def coefficients(self, params: Params) -> Tensor:
        values = params["coefficient"].double() if self.learn else torch.tensor([self.polynomial], dtype=torch.float64)
        return values.T[:, :, None, None]

    def monomials(self, c: Tensor) -> Tensor:
        terms = [
            sum(
                (c[i] * c[k - i] for i in range(max(0, k - len(c) + 1), min(k, len(c) - 1) + 1)), torch.zeros_like(c[0])
            )
            for k in range(2 * len(c) - 1)
        ]
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
        return (
            Move(
                "restriction",
                "link",
                "squared polynomial",
                f"evidence is p(x)^2 + {self.floor:g} with p of degree {len(self.polynomial) - 1}",
                (bounded,),
            ),
        )


@dataclass(frozen=True)
class Oscillatory(Link):
    """l(x) = exp(sum_k a_k e^(-b_k d) cos(w_k d)) of a distance d = max(-x, 0), as ``NegativeDistance`` scores have it: evidence that swings and fades.

    amplitudes a of any sign, decays b > 0, frequencies w; learned, one set a head. l lies between e^-A and e^A, A the sum of |a|.
    """

    amplitudes: tuple[float, ...] = (1.0,)
    decays: tuple[float, ...] = (0.5,)
    frequencies: tuple[float, ...] = (3.0,)
    learn: bool = True

    def __post_init__(self) -> None:
        for name in ("amplitudes", "decays", "frequencies"):
            object.__setattr__(self, name, tuple(float(v) for v in getattr(self, name)))
        same = 0 < len(self.amplitudes) == len(self.decays) == len(self.frequencies)
        require(
            same and all(v > 0 for v in self.decays),
            f"Oscillatory: as many amplitudes, decays > 0 and frequencies are required, received {self.amplitudes}, {self.decays}, {self.frequencies}.",
        )

    @property
    def positive(self) -> bool:
        return True

    @property
    def operations(self) -> int:
        return 8 * len(self.amplitudes) + 1

    def initial(self) -> dict[str, Tensor]:
        if not self.learn:
            return {}
        return {
            "amplitude": row(*self.amplitudes)[None],
            "log_decay": row(*self.decays)[None].log(),
            "frequency": row(*self.frequencies)[None],
        }

    def coefficients(self, params: Params) -> Tensor:
        values = (self.amplitudes, self.decays, self.frequencies)
        rows = (
            [params["amplitude"].double(), params["log_decay"].double().exp(), params["frequency"].double()]
            if self.learn
            else [torch.tensor([v], dtype=torch.float64) for v in values]
        )
        return torch.cat(rows, 1).T[:, :, None, None]

    def _waves(self, x: Tensor, c: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]]:
        """d, and for each wave its a, b, w, e^(-b d) cos(w d) and e^(-b d) sin(w d)."""
        distance = (-x).clamp_min(0)
        found = []
        for a, b, w in zip(*c.chunk(3), strict=True):
            fade = (-b * distance).exp()
            found.append((a, b, w, fade * (w * distance).cos(), fade * (w * distance).sin()))
        return distance, found

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return sum((a * even for a, _, _, even, _ in self._waves(x, c)[1]), torch.zeros_like(x)).exp()

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        waves = self._waves(x, c)[1]
        slope = sum((a * (b * even + w * odd) for a, b, w, even, odd in waves), torch.zeros_like(x))
        return slope * sum((a * even for a, _, _, even, _ in waves), torch.zeros_like(x)).exp() * (x <= 0)

    def coefficient_vjp(self, x: Tensor, grad: Tensor, c: Tensor) -> Tensor:
        distance, waves = self._waves(x, c)
        grad = grad * self.value(x, c)
        pulls = (
            [even for *_, even, _ in waves],
            [-a * distance * even for a, _, _, even, _ in waves],
            [-a * distance * odd for a, *_, odd in waves],
        )
        return (
            torch.stack([(grad * pull).sum((-1, -2)) for kind in pulls for pull in kind])
            .double()
            .sum(1)[:, :, None, None]
        )

    def moves(self) -> tuple[Move, ...]:
        bounded = Derived("bounded link", "hence e^-A <= K <= e^A, A the sum of the waves' |amplitudes|")
        return (
            Move(
                "restriction",
                "link",
                "waves",
                f"evidence swings with distance and fades, in {len(self.amplitudes)} waves",
                (bounded,),
            ),
        )


__all__ = [
    "NO_COEFFICIENTS",
    "Exp",
    "Formula",
    "Identity",
    "Link",
    "Oscillatory",
    "PolynomialSquare",
    "SquaredAffine",
    "Yat",
    "horner",
]
