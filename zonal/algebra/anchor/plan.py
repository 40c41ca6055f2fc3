"""Transport plans: weights under constraints on the mass that keys receive, by entropic optimal transport.

With masses mu of queries and nu of keys, each summing to one, a plan is

    P_ts = K_ts a_t b_s,   a_t = mu_t e^(f_t),  b_s = nu_s e^(g_s),   W = diag(mu)^-1 P.

It is closest to K = e^L in relative entropy, subject to conditions on the marginals m = P 1 and n = P^T 1. Each side
has a rule that computes its potential from l_t = log sum_s K_ts b_s (or l_s = log sum_t K_ts a_t):

    constraint   f = -l                                      the marginal equals the mass
    penalty      f = -rho / (1 + rho) l                      weight rho KL(m | mu), P close to mu nu^T K
                 f = -rho / (1 + rho) l - log(mu) / (1 + rho)     the same, P close to K
    range        f = clamp(0, log low - l, log high - l)     the marginal stays in a range

Alternating the two rules is Sinkhorn's iteration. Only a_t and b_s are kept, and the gradient uses the fixed point:
with lambda = -df/dl per side, r_t = sum_s P_ts dW_ts / mu_t and c_s likewise, (alpha, beta) solves

    [ m / lambda_1    P         ] [alpha]   [r]
    [ P^T             n / lambda_2 ] [beta ] = [c],          dL_ts = P_ts (dW_ts / mu_t - alpha_t - beta_s).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from zonal.algebra.anchor.base import ROW_GAUGE, Anchor, Blocks, Marginals, Potentials
from zonal.algebra.declaration import Derived, Move, require, require_one_of, require_positive, require_whole
from zonal.algebra.solvers import first_derivative_only
from zonal.errors import ConvergenceError, NonFiniteError
from zonal.tracing import untraced

ABSENT = -1e30
"""The log mass of an excluded query or key. Its exponential is zero, and its sums with scores stay finite."""
# how many steps back are mixed, by how much an error may rise before they are forgotten, and what keeps their weights
# small, in roundings
_PAST, _RISE, _REGULAR = 10, 2.0, 10.0
# the longest way of a mixed step, in those before it, and the coarsest rounding with which an error means something:
# where no plan exists, potentials grow without bound until a step is less than their rounding
_FAR, _COARSE = 1e4, 1e-2
_NO_SECOND = (
    "attention: gradient='implicit' goes back through the fixed point of a plan and has no second derivative. "
    "Use path='dense' with gradient='unrolled' where you need create_graph=True."
)


# log masses from (log a, log b)
Sums = Callable[[Tensor, Tensor], Tensor]


class Step(NamedTuple):
    """The result of a rule: the potential, and -d potential / dl."""

    potential: Tensor
    slope: Tensor


def present(log_mass: Tensor) -> Tensor:
    """Which tokens are included, bool."""
    return log_mass > ABSENT / 2


def weighted(log_mass: Tensor, potential: Tensor) -> Tensor:
    """log a or log b, ABSENT where there is no mass."""
    return torch.where(present(log_mass), log_mass + potential, ABSENT)


def slack(mass: Tensor, change: Tensor) -> Tensor:
    """The part of a head's mass that a change of potentials moves, (B, H), with very large changes kept finite."""
    return (mass * torch.expm1(change.detach().clamp_max(60)).abs()).sum(-1)


@dataclass(frozen=True)
class PlanAnchor(Anchor, abstract=True):
    """Base of all plans.

    tolerance: the iteration stops when the next step would move at most this part of a head's mass. For a balanced plan
    with exact rows, this is sum_s |n_s - nu_s|. In float32 it is at least what rounding allows. limit: of iterations.
    on_limit: ``error``, or ``keep`` the current plan: its rows are exact and its columns are not.
    gradient: ``implicit`` (through the fixed point), or ``unrolled`` (through all steps; for checks, on the dense
    path). learn: a layer computes the masses of queries and keys from its input.
    """

    family = "plan"
    couples = True

    tolerance: float = 1e-5
    limit: int = 1000
    on_limit: Literal["error", "keep"] = "error"
    gradient: Literal["implicit", "unrolled"] = "implicit"
    learn: bool = False

    def __post_init__(self) -> None:
        name = type(self).__name__
        require_positive(f"{name}: tolerance (a part of the mass)", self.tolerance)
        require_whole(f"{name}: limit (of iterations)", self.limit)
        require_one_of(f"{name}: on_limit", self.on_limit, ("error", "keep"))
        require_one_of(f"{name}: gradient", self.gradient, ("implicit", "unrolled"))
        self.check_rules()

    def check_rules(self) -> None:
        """Raise ArgumentError for invalid numbers of the two rules."""

    @property
    def by_kernel(self) -> bool:
        """Whether the plan is close to K and not to mu nu^T K. Potentials then depend on the masses, too."""
        return False

    def query_step(self, met: Tensor, mass: Tensor) -> Step:
        """f and its slope -df/dl from l_t and log mu_t (B, H, T). By default the rule of an exact constraint."""
        return Step(-met, torch.ones_like(met))

    def key_step(self, met: Tensor, mass: Tensor) -> Step:
        """g and its slope -dg/dl from l_s and log nu_s (B, H, S). By default the rule of an exact constraint."""
        return Step(-met, torch.ones_like(met))

    def centred(self, marginals: Marginals, f: Tensor, g: Tensor) -> Tensor:
        """g minus a constant that moves from g to f; alternating rules shift it slowly when penalties are large."""
        return g

    def weights(self, blocks: Blocks) -> Tensor:
        assert blocks.marginals is not None
        marginals = blocks.marginals
        log_kernel = torch.where(blocks.qk == float("-inf"), ABSENT, blocks.qk)
        rows, columns = sums_of(log_kernel)
        if self.gradient == "unrolled":
            at = self.potentials(marginals, rows, columns)
            f, g = self.query_stepped(marginals, rows, at.query, at.key).potential, at.key
        else:
            with torch.no_grad():
                at = self.potentials(marginals, rows, columns)
            f, g = self._implicit(log_kernel, marginals, at, rows, columns)
        give = torch.where(present(marginals.query), f, ABSENT)
        weights = (log_kernel + give[..., None] + weighted(marginals.key, g)[..., None, :]).exp()
        self.require_finite(weights.detach().sum(-1))
        return weights

    def require_finite(self, masses: Tensor) -> None:
        """Raise NonFiniteError unless the row masses of the plan are finite.

        A plan without mass constraints may overflow.
        """
        if not bool(masses.isfinite().all()):
            raise NonFiniteError(
                f"{type(self).__name__}: the plan holds infinity: its masses are no limit to exp(scores). "
                "Make scores smaller, or rho larger."
            )

    def query_stepped(self, marginals: Marginals, rows: Sums, f: Tensor, g: Tensor) -> Step:
        """The update of the potential of queries, from both potentials."""
        a, b = weighted(marginals.query, f), weighted(marginals.key, g)
        return stepped(self.query_step, rows(a, b) - a, marginals.query)

    def key_stepped(self, marginals: Marginals, columns: Sums, f: Tensor, g: Tensor) -> Step:
        """The update of the potential of keys, from both potentials."""
        a, b = weighted(marginals.query, f), weighted(marginals.key, g)
        return stepped(self.key_step, columns(a, b) - b, marginals.key)

    @untraced  # how often it goes round depends on numbers, which a tracer does not have
    def potentials(self, marginals: Marginals, rows: Sums, columns: Sums) -> Potentials:
        """Alternate both rules until the potentials converge.

        Args:
            rows: (log a, log b) -> log m (B, H, T). columns: the same -> log n (B, H, S).

        Raises: ConvergenceError at the limit of iterations, unless on_limit is "keep"; NonFiniteError for scores that
        are not finite.
        """
        start = marginals.start
        f = torch.zeros_like(marginals.query) if start is None else start.query.to(marginals.query)
        g = torch.zeros_like(marginals.key) if start is None else start.key.to(marginals.key)
        if not f.numel() or not g.numel():
            return Potentials(f, g, 0, 0.0)
        nu = marginals.key.detach().exp()
        mixing, worst = _Mixing(nu), math.inf
        for iteration in range(1, self.limit + 1):
            f = self.query_stepped(marginals, rows, f, g).potential
            new = self.key_stepped(marginals, columns, f, g).potential
            new = torch.where(present(marginals.key), self.centred(marginals, f, new), 0)
            error = slack(nu, g - new)
            worst = float(error.max())
            largest = float(torch.maximum(f.detach().abs().amax(), g.detach().abs().amax()))
            reach = torch.finfo(f.dtype).eps * (1 + largest)
            if math.isnan(worst) or math.isnan(reach):
                raise NonFiniteError(
                    f"{type(self).__name__}: scores hold NaN or infinity, and a plan couples all queries and keys. "
                    "Look for them in q, k and key_bias."
                )
            if reach <= _COARSE and worst <= max(self.tolerance, reach):
                return Potentials(f, new, iteration, worst)
            g = new if torch.is_grad_enabled() else mixing.next(g, new, error)
        if self.on_limit == "keep":
            return Potentials(f, g, self.limit, worst)
        raise ConvergenceError(
            f"{type(self).__name__}: no plan within limit={self.limit} iterations; the last one still moved "
            f"{worst:.3g} of the mass, tolerance={self.tolerance:g} was asked for. Where the mask lets keys receive "
            "their masses at all: raise limit or tolerance, or make scores smaller (a smaller scale, a larger "
            "temperature). Where it does not: give other masses (query_mass, key_mass) or use anchor.UnbalancedPlan. "
            "on_limit='keep' takes the current plan."
        )

    def _implicit(
        self, log_kernel: Tensor, marginals: Marginals, at: Potentials, rows: Sums, columns: Sums
    ) -> tuple[Tensor, Tensor]:
        """The potentials with the derivative of the fixed point, by one Newton step with a constant matrix."""
        first = self.query_stepped(marginals, rows, at.query, at.key)
        if not first.potential.requires_grad:
            return first.potential, at.key
        second = self.key_stepped(marginals, columns, at.query, at.key)
        with torch.no_grad():
            give, take = weighted(marginals.query, at.query), weighted(marginals.key, at.key)
            plan = (log_kernel + give[..., None] + take[..., None, :]).double().exp()
            left, right = (
                torch.where(total > 0, (step.slope / total).sqrt(), 0)
                for step, total in ((first, plan.sum(-1)), (second, plan.sum(-2)))
            )
            half = left[..., None] * plan * right[..., None, :]
            if not bool(half.isfinite().all()):
                raise NonFiniteError(
                    f"{type(self).__name__}: the plan holds infinity, so that it has no gradient: "
                    "its masses are no limit to exp(scores). Make scores smaller, or rho larger."
                )
            system = torch.eye(half.shape[-1], dtype=half.dtype, device=half.device) - half.mT @ half
            # a constant that one side gives and the other takes changes no plan: such directions are left out.
            # Eigenvalues lie in [0, 1], and those of a sharp plan may all be rounding: none says how small zero is
            inverse = torch.linalg.pinv(system, atol=1e3 * torch.finfo(half.dtype).eps, hermitian=True)
            solve = right[..., None] * inverse * torch.where(right > 0, 1 / right, 0)[..., None, :]
        df, dg = ((step.potential - old).double() for step, old in ((first, at.query), (second, at.key)))
        g = _times(solve, dg - right.square() * _times(plan.mT, df))
        f = df - left.square() * _times(plan, g)
        if not torch.compiler.is_compiling():  # the matrix is constant, so that a second derivative would be wrong
            for moved in (f, g):
                moved.register_hook(lambda gradient: first_derivative_only(gradient, first.potential, _NO_SECOND))
        return at.query + f.to(at.query), at.key + g.to(at.key)


def sums_of(log_kernel: Tensor) -> tuple[Sums, Sums]:
    """The sums of rows and of columns of whole plans, (B, H, T) and (B, H, S), for log K (B, H, T, S)."""
    return (
        lambda a, b: (log_kernel + a[..., None] + b[..., None, :]).logsumexp(-1),
        lambda a, b: (log_kernel + a[..., None] + b[..., None, :]).logsumexp(-2),
    )


def stepped(rule: Callable[[Tensor, Tensor], Step], met: Tensor, mass: Tensor) -> Step:
    """What a rule gives for tokens of log masses ``mass``; 0 for those that are absent."""
    here = present(mass)
    step = rule(torch.where(here, met, 0), torch.where(here, mass, 0))
    return Step(torch.where(here, step.potential, 0), torch.where(here, step.slope, 0))


def _times(matrix: Tensor, x: Tensor) -> Tensor:
    return (matrix @ x[..., None]).squeeze(-1)


class _Mixing:
    """Anderson acceleration of the fixed point of g: the next potential of keys from the last few, per head.

    With r = T(g) - g at each stored g, the next g is the weighted mean of T(g) (weights sum to one) with the smallest
    mean r. When the error rises, the history is dropped and a plain step follows, which converges by itself.
    """

    def __init__(self, mass: Tensor) -> None:
        self._mass, self._history = mass, []
        self._before: tuple[Tensor, Tensor, Tensor] | None = None

    def next(self, at: Tensor, new: Tensor, error: Tensor) -> Tensor:
        """From T(at) = new, both (B, H, S), and the error (B, H) of ``at``."""
        residual = new - at
        if self._before is not None:
            before, left, least = self._before
            keep = (error <= _RISE * least)[..., None]
            recent = [*self._history, (at - before, residual - left)][-_PAST:]
            self._history = [(moved * keep, changed * keep) for moved, changed in recent]
        self._before = at, residual, error
        if not self._history:
            return new
        moved, changed = (torch.stack(side, -1) for side in zip(*self._history, strict=True))  # (B, H, S, past)
        weighed = (changed * self._mass[..., None]).mT.double()
        gram, wanted = weighed @ changed.double(), weighed @ residual[..., None].double()
        size = gram.diagonal(dim1=-2, dim2=-1).amax(-1)[..., None, None]
        least = _REGULAR * torch.finfo(at.dtype).eps * size + torch.finfo(at.dtype).tiny
        regular = gram + least * torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        mix = torch.linalg.solve(regular, wanted).to(at)
        mix = torch.where(mix.abs().sum(-2, keepdim=True) <= _FAR, mix, 0)
        return new - ((moved + changed) @ mix).squeeze(-1)


@dataclass(frozen=True)
class Plan(PlanAnchor):
    """The balanced plan: min KL(P | K) subject to P 1 = mu and P^T 1 = nu. Queries give mu and keys receive nu exactly.

    With equal masses, rows of W sum to one and columns to T / S. Bidirectional only.

    Raises: ConvergenceError where the mask allows no such plan within the limit. Source: Geometric Attention,
    definition 2.18.
    """

    normalises = True

    def moves(self) -> tuple[Move, ...]:
        column = Derived("column gauge", "hence K and K b are, too: column gauge")
        sums = Derived(
            "plan sums", "hence rows of weights sum to one, and with equal masses their columns to queries over keys"
        )
        seen = "only the plan with given masses of queries and keys is observed"
        balanced = "of all a K b the one in which queries give their masses and keys receive theirs"
        return (
            self.move("quotient", "plan probe", seen, ROW_GAUGE, column),
            self.move("section", "balanced", balanced, sums),
        )


@dataclass(frozen=True)
class UnbalancedPlan(PlanAnchor):
    """The unbalanced plan: min KL(P | R) + rho_1 KL(P 1 | mu) + rho_2 KL(P^T 1 | nu).

    KL(m | mu) = sum m log(m / mu) - m + mu. A query with little evidence gives little mass: rows of W sum to m / mu.

    rho: (rho_1, rho_2) >= 0; None = an exact constraint as in ``Plan``, 0 = no penalty. (None, 0) is softmax attention,
    with log nu added to its scores if R has the masses.
    reference: R. "masses": mu nu^T K, whose plan keeps its mass when all tokens are duplicated. "kernel": K, as in the
    paper, whose mass depends on the number of tokens. Both are the same for a constrained side. ``probe.EntropicPlan``
    has the same two.

    Raises: ArgumentError for rho that are negative. Source: Geometric Attention, definition 2.19.
    """

    rho: tuple[float | None, float | None] = (1.0, 1.0)
    reference: Literal["masses", "kernel"] = "masses"

    @property
    def by_kernel(self) -> bool:
        return self.reference == "kernel"

    def check_rules(self) -> None:
        require_one_of("UnbalancedPlan: reference", self.reference, ("masses", "kernel"))
        require(
            isinstance(self.rho, tuple) and len(self.rho) == 2 and all(r is None or r >= 0 for r in self.rho),
            f"UnbalancedPlan: rho must be two numbers >= 0, or None for an exact mass, received {self.rho!r}.",
        )

    def query_step(self, met: Tensor, mass: Tensor) -> Step:
        return self._pulled(met, mass, self.rho[0])

    def key_step(self, met: Tensor, mass: Tensor) -> Step:
        return self._pulled(met, mass, self.rho[1])

    def _pulled(self, met: Tensor, mass: Tensor, rho: float | None) -> Step:
        slope = 1.0 if rho is None else rho / (1 + rho)
        pull = -slope * met
        return Step(pull - (1 - slope) * mass if self.by_kernel else pull, torch.full_like(met, slope))

    def centred(self, marginals: Marginals, f: Tensor, g: Tensor) -> Tensor:
        if not self.rho[0] or not self.rho[1]:
            return g  # one side is an exact constraint, or has no penalty
        # in float64: large rho magnify what rounding leaves
        sides = ((marginals.query, f, self.rho[0]), (marginals.key, g, self.rho[1]))
        # of the factors that the plan has beside its reference: a and b, or a / mu and b / nu
        factors = [
            potential + torch.where(present(mass), mass, 0) if self.by_kernel else potential
            for mass, potential, _ in sides
        ]
        give, take = (
            (mass.double() - own.double() / rho).logsumexp(-1, keepdim=True)
            for (mass, _, rho), own in zip(sides, factors, strict=True)
        )
        return g - ((give - take) * self.rho[0] * self.rho[1] / (self.rho[0] + self.rho[1])).to(g)

    def moves(self) -> tuple[Move, ...]:
        sides = [
            f"{side} {'exactly' if rho is None else f'with weight {rho:g}'}"
            for side, rho in zip(("queries give their mass", "keys receive theirs"), self.rho, strict=True)
        ]
        seen = "only the plan that is drawn to given masses of queries and keys is observed"
        near = f"{', '.join(sides)}; near {'K' if self.by_kernel else 'K times both masses'}"
        return (
            self.move("quotient", "unbalanced plan probe", seen, *([ROW_GAUGE] if self.rho[0] is None else [])),
            self.move("section", "drawn to masses", near),
        )


@dataclass(frozen=True)
class BoundedPlan(PlanAnchor):
    """The plan closest to softmax attention in which each key receives between low nu_s and high nu_s.

    Closest in relative entropy, weighted by mu; given masses of keys add log nu to the scores of that softmax. low <= 1
    <= high. Rows sum to one. low = 0, high = c limits each key to c times its share. Keys inside the range keep the
    ratios of nu_s K_ts.

    Raises: ArgumentError for a range that does not contain 1.
    """

    normalises = True

    low: float = 0.0
    high: float = 2.0

    def check_rules(self) -> None:
        require(
            0 <= self.low <= 1 <= self.high,
            f"BoundedPlan: 0 <= low <= 1 <= high is required (all keys' shares sum to one), received low={self.low}, "
            f"high={self.high}.",
        )

    def key_step(self, met: Tensor, mass: Tensor) -> Step:
        lowest = math.log(self.low) - met if self.low else torch.full_like(met, ABSENT)
        highest = math.log(self.high) - met
        return Step(torch.maximum(lowest, highest.clamp_max(0)), ((lowest > 0) | (highest < 0)).to(met.dtype))

    def moves(self) -> tuple[Move, ...]:
        held = Derived(
            "held sums", "hence rows of weights sum to one, and with equal masses a key's column stays in that range"
        )
        nearest = f"the nearest to it in which keys receive from {self.low:g} to {self.high:g} times their share"
        return (
            self.move("quotient", "row probe", "only the row-conditional of K is observed", ROW_GAUGE),
            self.move("section", "nearest in a range", nearest, held),
        )


__all__ = [
    "ABSENT", "BoundedPlan", "Plan", "PlanAnchor", "Step", "UnbalancedPlan", "present", "stepped", "sums_of",
    "weighted",
]  # fmt: skip
