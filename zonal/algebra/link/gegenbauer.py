"""Polynomials of the cosine in the basis of one sphere: the link of the Spherical Kernel Operator."""

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra import gegenbauer
from zonal.algebra.declaration import Derived, Move, expand_rows, require, require_one_of, row, spread_rows
from zonal.algebra.horner import horner, horner_derivative, power_sums
from zonal.algebra.link.base import Link
from zonal.algebra.score import Params
from zonal.errors import ArgumentError
from zonal.formula import Formula

_LARGEST = 64
"""Up to this degree float32 keeps errors below 1e-5 of Phi_n(1)."""
_AMPLIFIED = 1000.0
"""Up to this factor of rounding errors, monomials in float32 are about as exact as the three-term recurrence."""
_FORMULA = Formula(
    "polynomial",
    "horner(x, c, n)",
    "horner_derivative(x, c, n)",
    "1.f",
    "zonal.kernels.triton.links:horner",
    domain=(-1.0, 1.0),
)


@dataclass(frozen=True)
class Gegenbauer(Link):
    """Phi_n(x) = sum_{k=0}^{ceil n} w_k clamp(n - k + 1, 0, 1) R_k(x), R_k = C_k^lam(x) / C_k^lam(1), lam = (q - 1)/2.

    degrees: n of each head; fractional degrees are allowed. They repeat over the heads if their number divides, else
    they are evenly spread with the last one kept (``spread``). manifold_dim: q >= 1 (q = 1 gives Chebyshev
    polynomials); "head" = D - 1, the dimension of the sphere of unit vectors of a head.
    init: ``ones`` (the paper; not localised) has w_k = u_k with u_k = 1 initially. ``reproducing`` (the kernel of the
    theory) has w_k = N_k u_k with u_k = h(k/n), where N_k is the number of harmonics of degree k. u is learned and not
    w, because N_k reaches 1e7 and steps of w would be negligible.
    nonnegative: keeps learned weights positive (softplus; a weight of 0 starts at 1e-4). The kernel is then positive
    definite on S^q, as anchors that solve require. The link is signed in general, so the row anchor rejects it.

    Raises: ArgumentError for degrees and dimensions out of range. Source: SKO, eqs. 3-5.
    """

    domain = (-1.0, 1.0)
    spreads = True

    degrees: tuple[float, ...] = (2.0, 3.0, 4.0, 5.0)
    manifold_dim: int | Literal["head"] = 64
    init: Literal["ones", "reproducing"] = "ones"
    learn_weights: bool = True
    learn_degrees: bool = False
    nonnegative: bool = False

    def __post_init__(self) -> None:
        good = isinstance(self.degrees, tuple | list) and len(self.degrees) > 0
        good = good and all(
            isinstance(n, int | float) and not isinstance(n, bool) and 0 <= n <= _LARGEST for n in self.degrees
        )
        require(
            good,
            f"Gegenbauer: degrees must be a tuple of one or more numbers from 0 to {_LARGEST}, such as (3.0,), "
            f"received {self.degrees!r}.",
        )
        object.__setattr__(self, "degrees", tuple(float(n) for n in self.degrees))
        dim = self.manifold_dim
        require(
            dim == "head" or (isinstance(dim, int) and not isinstance(dim, bool) and dim >= 1),
            f"Gegenbauer: manifold_dim must be 'head' or a whole number >= 1 (1 = Chebyshev), received {dim!r}.",
        )
        require_one_of("Gegenbauer: init", self.init, ("ones", "reproducing"))

    @property
    def _q(self) -> int:
        if self.manifold_dim == "head":
            raise ArgumentError(
                "Gegenbauer: manifold_dim='head' needs the size of a head. "
                "Use operator.for_heads(heads, dim=...), or give a number."
            )
        return self.manifold_dim

    def sized(self, dim: int) -> "Gegenbauer":
        return replace(self, manifold_dim=max(dim - 1, 1)) if self.manifold_dim == "head" else self

    def spread(self, heads: int) -> "Gegenbauer":
        if heads % len(self.degrees) == 0:
            return self
        return replace(self, degrees=tuple(self.degrees[i] for i in spread_rows(len(self.degrees), heads)))

    @property
    def degree(self) -> int:
        # a learned degree may grow by one before its gate would need a polynomial that is not there
        return math.ceil(max(self.degrees)) + (1 if self.learn_degrees else 0)

    @property
    def clenshaw(self) -> bool:
        """Whether monomials lose too many digits in float32. The three-term recurrence is then used instead."""
        return gegenbauer.amplification(self.degree, self._q) > _AMPLIFIED

    @property
    def operations(self) -> int:
        return self.degree * (4 if self.clenshaw else 1)

    @property
    def formula(self) -> Formula | None:
        return None if self.clenshaw or self.degree > 32 else _FORMULA

    @property
    def fixed_degree(self) -> bool:
        return not self.learn_degrees

    def indefinite_reason(self, unit: bool, dim: int | None) -> str | None:
        if not unit:
            return "link Gegenbauer is positive definite on unit vectors; use score.Cosine()"
        if self.learn_weights and not self.nonnegative:
            return (
                "link Gegenbauer may learn weights of any sign, and a negative weight w_k makes its harmonics "
                "negative; use Gegenbauer(nonnegative=True)"
            )
        if dim is not None and self.manifold_dim != "head" and dim > self.manifold_dim + 1:
            return (
                f"link Gegenbauer(manifold_dim={self.manifold_dim}) is positive definite for keys of at most "
                f"manifold_dim + 1 = {self.manifold_dim + 1} numbers, these have {dim}; use manifold_dim >= {dim - 1}"
            )
        return None

    def initial(self) -> dict[str, Tensor]:
        start = self._start().float()
        learned: dict[str, Tensor] = {"degree": row(*self.degrees)} if self.learn_degrees else {}
        if not self.learn_weights:
            return learned
        if not self.nonnegative:
            return {**learned, "weight": start}
        start = start.clamp_min(1e-4)
        return {**learned, "raw_weight": start + (-(-start).expm1()).log()}  # softplus^-1

    def _start(self) -> Tensor:
        """u where it starts, (degrees, degree + 1): 1, or the low-pass h(k / n)."""
        if self.init == "ones":
            return torch.ones(len(self.degrees), self.degree + 1, dtype=torch.float64)
        return torch.tensor([gegenbauer.low_passes(n, self.degree + 1) for n in self.degrees], dtype=torch.float64)

    def _gated(self, params: Params) -> Tensor:
        device = next((p.device for p in params.values()), torch.device("cpu"))
        if "degree" in params:
            gates = gegenbauer.gates(params["degree"].double(), self.degree + 1)
        else:
            gates = gegenbauer.constant_gates(self.degrees, self.degree + 1).to(device)
        if "raw_weight" in params:
            weight = F.softplus(params["raw_weight"].double())
        else:
            weight = params["weight"].double() if "weight" in params else self._start().to(device)
        if self.init == "reproducing":
            counts = [gegenbauer.harmonic_dimension(k, self._q) for k in range(self.degree + 1)]
            weight = weight * torch.tensor(counts, dtype=torch.float64, device=device)
        return weight * expand_rows(gates, weight.shape[0], "Gegenbauer degrees")

    def coefficients(self, params: Params) -> Tensor:
        gated = self._gated(params)
        if not self.clenshaw:
            gated = gated @ gegenbauer.to_monomials(self.degree, self._q).to(gated.device)
        return gated.T[:, :, None, None]

    def monomials(self, c: Tensor) -> Tensor:
        if not self.clenshaw:
            return c
        matrix = gegenbauer.to_monomials(self.degree, self._q).to(c.device)
        return torch.einsum("khij,kn->nhij", c, matrix)

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return gegenbauer.series(x, c, self._q) if self.clenshaw else horner(x, c)

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        return gegenbauer.series_derivative(x, c, self._q) if self.clenshaw else horner_derivative(x, c)

    def coefficient_vjp(self, x: Tensor, grad: Tensor, c: Tensor) -> Tensor:
        if not self.clenshaw:
            return power_sums(x, grad, c.shape[0])
        sums = [(grad * r).sum((-1, -2)).double().sum(0) for r in gegenbauer.basis(x, c.shape[0], self._q)]
        return torch.stack(sums).view(c.shape[0], -1, 1, 1)

    def value_into(self, x: Tensor, c: Tensor, out: Tensor) -> Tensor:
        return self.value(x, c) if self.clenshaw else horner(x, c, out)

    def derivative_into(self, x: Tensor, c: Tensor, out: Tensor) -> Tensor:
        return self.derivative(x, c) if self.clenshaw else horner_derivative(x, c, out)

    def coefficient_vjp_into(self, x: Tensor, grad: Tensor, c: Tensor, spare: Tensor) -> Tensor:
        return self.coefficient_vjp(x, grad, c) if self.clenshaw else power_sums(x, grad, c.shape[0], spare)

    def moves(self) -> tuple[Move, ...]:
        most = "manifold_dim + 1" if self.manifold_dim == "head" else f"{self.manifold_dim + 1}"
        signed = Derived("", "hence weights may be negative, and no theorem about positive kernels applies")
        definite = Derived(
            "definite kernel",
            f"hence K among keys of at most {most} numbers is positive definite, although single entries may be "
            "negative",
        )
        what = "zonal polynomial of weights above zero" if self.nonnegative else "zonal polynomial"
        degrees = ", ".join(f"{n:g}" for n in self.degrees) + (" (by head, in turn)" if len(self.degrees) > 1 else "")
        text = f"evidence is a polynomial in the cosine, of degree {degrees}"
        return (self.move("restriction", what, text, definite if self.nonnegative else signed),)


__all__ = ["Gegenbauer"]
