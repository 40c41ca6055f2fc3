"""Probes: what can be observed of a kernel, which scalings no observation sees, and what remains of a score without
them.

A kernel is given by its logarithm, log K (..., T, S), with -inf for forbidden pairs. exp(-800) is 0 in float64, so
gauges are exact in log space only. With the exponential link, log K is the score plus the log prior, and a scaling a_t
K_ts b_s adds fields to it: S_ts + log a_t + log b_s.

Everything here is dense and in float64, for the analysis of heads with some hundred tokens. It may therefore analyse
causal heads, whose columns are sums over later queries. An anchor may not: under a causal mask, earlier rows of a
balanced plan would depend on later ones.

Source: Geometric Attention, §2.4-2.7, §4.3-4.4.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from zonal.algebra.declaration import require, require_one_of, require_positive, require_whole
from zonal.errors import ArgumentError

By = Literal["row", "column", "both"]


class Observed(NamedTuple):
    """What a probe sees of K: log P_ts = left_t + log K_ts + right_s (..., T, S); left (..., T), right (..., S)."""

    log: Tensor
    left: Tensor
    right: Tensor


class Probe:
    """An observable of a kernel. ``left``, ``right``: whether it is blind to positive factors per row, per column."""

    left: ClassVar[bool] = False
    right: ClassVar[bool] = False

    def observe(self, log_kernel: Tensor) -> Observed:
        """log K (..., T, S) -> what is seen, in float64."""
        raise NotImplementedError(f"{type(self).__name__}.observe")


@dataclass(frozen=True)
class Rows(Probe):
    """The row-conditional K_ts / sum_u K_tu. A row without a key is empty, with the factor 1."""

    left = True

    def observe(self, log_kernel: Tensor) -> Observed:
        log_kernel = _checked("probe.Rows", log_kernel)
        mass = log_kernel.logsumexp(-1)
        left = torch.where(mass.isinf(), 0, -mass)
        return Observed(log_kernel + left[..., None], left, log_kernel.new_zeros(log_kernel.mT.shape[:-1]))


@dataclass(frozen=True, eq=False)
class Kernel(Probe):
    """K itself, times a constant factor per row, so that no scaling is hidden.

    log_factor (T,): its logarithm, None = 0. ``observe`` raises ArgumentError for one that is not T finite numbers.
    """

    log_factor: Tensor | None = None

    def observe(self, log_kernel: Tensor) -> Observed:
        log_kernel = _checked("probe.Kernel", log_kernel)
        left = torch.zeros_like(log_kernel[..., 0])
        if self.log_factor is not None:
            shape = tuple(self.log_factor.shape)
            require(
                shape in ((), (1,), left.shape[-1:]) and bool(self.log_factor.isfinite().all()),
                f"probe.Kernel: log_factor must be {left.shape[-1]} finite numbers, one per row, received shape "
                f"{shape}{' with NaN or infinity' if shape == left.shape[-1:] else ''}.",
            )
            left = left + self.log_factor.to(log_kernel)
        return Observed(log_kernel + left[..., None], left, log_kernel.new_zeros(log_kernel.mT.shape[:-1]))


@dataclass(frozen=True, eq=False)
class EntropicPlan(Probe):
    """The entropic plan P = argmin KL(P | R) + rho_1 KL(P 1 | mu) + rho_2 KL(P^T 1 | nu) of a kernel K.

    KL(a | b) = sum a log(a / b) - a + b. It is the plan of ``anchor.UnbalancedPlan``.

    rho: (rho_1, rho_2) >= 0; None = an exact constraint. The default, two constraints, gives the balanced plan.
    reference: R, "masses" for mu nu^T K or "kernel" for K. rows (T,), columns (S,): the positive marginals mu and nu;
    None = uniform with sum 1. The probe does not see the scaling of a constrained side. It sees the scaling of a
    penalised side.
    tolerance: the iteration ends when no log factor changes by more, relative to the largest. iterations: the limit.

    Raises: ArgumentError for marginals that do not fit, rows or columns without an allowed pair, and no convergence.
    """

    rows: Tensor | None = None
    columns: Tensor | None = None
    rho: tuple[float | None, float | None] = (None, None)
    reference: Literal["masses", "kernel"] = "masses"
    tolerance: float = 1e-13
    iterations: int = 10_000

    def __post_init__(self) -> None:
        good = isinstance(self.rho, tuple) and len(self.rho) == 2
        good = good and all(r is None or 0 <= r < math.inf for r in self.rho)
        require(
            good,
            "probe.EntropicPlan: rho must be two finite numbers >= 0, or None for an exact constraint, received "
            f"{self.rho!r}.",
        )
        require_one_of("probe.EntropicPlan: reference", self.reference, ("masses", "kernel"))
        require_positive("probe.EntropicPlan: tolerance", self.tolerance)
        require_whole("probe.EntropicPlan: iterations", self.iterations)

    @property
    def left(self) -> bool:
        return self.rho[0] is None

    @property
    def right(self) -> bool:
        return self.rho[1] is None

    def observe(self, log_kernel: Tensor) -> Observed:
        log_kernel = _checked("probe.EntropicPlan", log_kernel)
        for side, axis in (("row", -1), ("column", -2)):
            empty = log_kernel.isneginf().all(axis).nonzero()
            require(
                not len(empty),
                f"probe.EntropicPlan: every row and column needs an allowed pair, but {side} "
                f"{empty[0, -1] if len(empty) else 0} has none. Leave it out.",
            )
        mu = self._marginal("rows", self.rows, log_kernel.shape[-2])
        nu = self._marginal("columns", self.columns, log_kernel.shape[-1])
        masses = float(mu.sum()), float(nu.sum())
        fits = not (self.left and self.right) or math.isclose(*masses, rel_tol=1e-9)
        require(
            fits,
            f"probe.EntropicPlan: rows and columns must have one sum for a balanced plan, received {masses[0]:g} and "
            f"{masses[1]:g}. Scale one of them, or give a rho.",
        )
        log_mu, log_nu = mu.log().to(log_kernel.device), nu.log().to(log_kernel.device)
        give, take = (1.0 if rho is None else rho / (1 + rho) for rho in self.rho)
        # log a = log mu - give l with the masses in the reference, give (log mu - l) without
        own, other = (log_mu, log_nu) if self.reference == "masses" else (give * log_mu, take * log_nu)
        left, right, change = torch.zeros_like(log_kernel[..., 0]), torch.zeros_like(log_kernel[..., 0, :]), math.inf
        for _ in range(self.iterations):
            earlier = left, right
            left = own - give * (log_kernel + right[..., None, :]).logsumexp(-1)
            right = other - take * (log_kernel + left[..., None]).logsumexp(-2)
            change = max(float((now - before).abs().max()) for now, before in zip((left, right), earlier, strict=True))
            # relative to the factors, because only their last digits remain where K underflows; NaN ends the loop
            # and is reported
            if change <= self.tolerance * (1 + max(float(left.abs().max()), float(right.abs().max()))):
                return Observed(log_kernel + left[..., None] + right[..., None, :], left, right)
        given = (log_kernel + left[..., None] + right[..., None, :]).logsumexp(-1).exp()
        off = float((given - mu.to(log_kernel.device)).abs().sum())
        raise ArgumentError(
            f"probe.EntropicPlan: after {self.iterations} scalings a log factor still changes by {change:.2g}, and "
            f"rows miss their marginals by {off:.2g} in all. The mask leaves no plan with these marginals, or one that "
            "only a limit reaches (under a causal mask with uniform marginals, the diagonal). Allow more pairs, soften "
            "a side with rho, or raise iterations."
        )

    @staticmethod
    def _marginal(name: str, given: Tensor | None, size: int) -> Tensor:
        if given is None:
            return torch.full((size,), 1 / size, dtype=torch.float64)
        good = given.shape == (size,) and bool((given > 0).all()) and bool(given.isfinite().all())
        require(
            good,
            f"probe.EntropicPlan: {name} must be {size} finite numbers > 0, received shape {tuple(given.shape)}. "
            "Leave out tokens without mass.",
        )
        return given.double()


class Equivalence(NamedTuple):
    """Whether a probe tells two kernels apart. error: the largest share of a row's observed mass that differs.

    left (..., T), right (..., S): where it does not, K2 = e^left_t K1 e^right_s, the scaling that is not seen.
    """

    holds: bool
    error: float
    left: Tensor
    right: Tensor


def equivalent(log_first: Tensor, log_second: Tensor, probe: Probe, *, tolerance: float = 1e-9) -> Equivalence:
    """Whether ``probe`` sees the same in log K1 and log K2 (..., T, S), and the unseen scaling between them.

    Raises: ArgumentError for kernels of different shapes, for what is no probe, and as ``probe.observe`` does.
    """
    require(
        isinstance(probe, Probe),
        f"probe.equivalent: a probe such as probe.Rows() is required, received {probe!r}.",
    )
    _same_shape("probe.equivalent", log_first, log_second)
    first, second = probe.observe(log_first), probe.observe(log_second)
    # shares of a row stay as they are when both logs are moved, and exp neither overflows nor vanishes
    top = torch.maximum(first.log.logsumexp(-1), second.log.logsumexp(-1))
    top = torch.where(top.isneginf(), 0, top)[..., None]
    seen, other = (first.log - top).exp(), (second.log - top).exp()
    apart, mass = (seen - other).abs().sum(-1), torch.maximum(seen.sum(-1), other.sum(-1))
    error = float(torch.where(mass > 0, apart / torch.where(mass > 0, mass, 1), 0).max()) if apart.numel() else 0.0
    return Equivalence(error <= tolerance, error, first.left - second.left, first.right - second.right)


class Fields(NamedTuple):
    """S_ts = rows_t + columns_s + interaction_ts on allowed pairs; the interaction is -inf elsewhere."""

    interaction: Tensor
    rows: Tensor
    columns: Tensor


def centred(scores: Tensor, by: By = "both", weight: Tensor | None = None) -> Fields:
    """Scores I (..., T, S) with row fields, column fields or both (``by``) removed: their weighted sums vanish.

    For ``both``, sum_s w_ts I_ts = 0 and sum_t w_ts I_ts = 0 hold at once. Under a mask there is no closed form, so the
    two sets of equations are solved. (Subtracting row means and then column means leaves a result that depends on the
    removed fields.) The constant belongs to the rows: columns have a weighted mean of zero in each connected part of
    the allowed pairs.

    weight: w (..., T, S) > 0 on allowed pairs, None = 1.

    Raises: ArgumentError for scores that are not finite or -inf, or weights that do not fit.
    """
    require_one_of("probe.centred: by", by, get_args(By))
    scores = _checked("probe.centred", scores)
    weight = _weights("probe.centred", scores, weight)
    filled, zeros_r, zeros_c = _filled(scores), torch.zeros_like(scores[..., 0]), torch.zeros_like(scores[..., 0, :])
    if by == "row":
        rows, columns = _mean(filled, weight, -1), zeros_c
    elif by == "column":
        rows, columns = zeros_r, _mean(filled, weight, -2)
    else:
        columns = _columns(filled, weight)
        rows = _mean(filled - columns[..., None, :], weight, -1)
    return Fields(scores - rows[..., None] - columns[..., None, :], rows, columns)


def _columns(scores: Tensor, weight: Tensor) -> Tensor:
    """The column field c of the normal equations, with the rows eliminated.

    (D_c - W^T D_r^-1 W) c = (W * S summed over rows) - W^T (row means of S).
    """
    by_row, by_column = weight.sum(-1), weight.sum(-2)
    share = weight / torch.where(by_row > 0, by_row, 1)[..., None]
    # divided by the root of the columns' weights on both sides, so that the minimum-norm solution has a weighted mean
    # of zero in every connected part
    root = torch.where(by_column > 0, by_column, 1).sqrt()
    system = torch.diag_embed(by_column) - weight.mT @ share
    right = (weight * (scores - _mean(scores, weight, -1)[..., None])).sum(-2)
    # its eigenvalues lie in [0, 1]: what rounding of numbers up to 1 leaves of those that are 0 must not be inverted
    least = 10 * system.shape[-1] * torch.finfo(system.dtype).eps
    inverse = torch.linalg.pinv(system / root[..., None] / root[..., None, :], atol=least, hermitian=True)
    return (inverse @ (right / root)[..., None])[..., 0] / root


class Energies(NamedTuple):
    """Weighted squares of scores about their mean, (...): removed by the row field, then by columns, and the rest."""

    gauge: Tensor
    columns: Tensor
    interaction: Tensor

    @property
    def total(self) -> Tensor:
        return self.gauge + self.columns + self.interaction


def energies(scores: Tensor, weight: Tensor | None = None) -> Energies:
    """The energies of the row field (invisible to a row probe), the column field and the interaction of scores (..., T,
    S).
    """
    scores = _checked("probe.energies", scores)
    weight = _weights("probe.energies", scores, weight)
    filled = _filled(scores)
    mean = (weight * filled).sum((-1, -2), keepdim=True) / weight.sum((-1, -2), keepdim=True).clamp_min(1e-300)
    total = _square(scores - mean, weight)
    by_row, rest = (_square(centred(scores, by, weight).interaction, weight) for by in ("row", "both"))
    return Energies(total - by_row, by_row - rest, rest)


@dataclass(frozen=True)
class NormalForm:
    """S_ts ~ rows_t + columns_s + queries_t . keys_s with queries (..., T, r) and keys (..., S, r).

    explained (...): the share of the interaction's energy in the dot product. best: whether no form of this rank has a
    larger share.
    """

    rows: Tensor
    columns: Tensor
    queries: Tensor
    keys: Tensor
    explained: Tensor
    best: bool

    @property
    def rank(self) -> int:
        return self.queries.shape[-1]

    @property
    def scores(self) -> Tensor:
        """The scores of this form, (..., T, S), without a mask."""
        return self.rows[..., None] + self.columns[..., None, :] + self.queries @ self.keys.mT


def normal_form(scores: Tensor, rank: int, weight: Tensor | None = None, *, sweeps: int = 100) -> NormalForm:
    """Row field, column field, and a dot product of rank ``rank`` for the interaction of scores (..., T, S).

    Without mask or weight, the singular value decomposition gives the best form (Eckart and Young). With either,
    queries and keys are fitted in turn by least squares on the allowed pairs. The fit starts from the decomposition
    with zeros on forbidden pairs, never gets worse, and ends in a local optimum (``best`` is False). sweeps: the limit
    of turns.

    Raises: ArgumentError for a rank below 1 or above min(T, S), and as ``centred`` does.
    """
    require_whole("probe.normal_form: rank", rank)
    require(
        scores.ndim >= 2 and rank <= min(scores.shape[-2:]),
        f"probe.normal_form: rank must be at most min(T, S), received {rank} for scores {tuple(scores.shape)}.",
    )
    fields = centred(scores, "both", weight)
    weight_, target = _weights("probe.normal_form", fields.interaction, weight), _filled(fields.interaction)
    u, s, vh = torch.linalg.svd(target, full_matrices=False)
    root = s[..., :rank].sqrt()
    queries, keys = u[..., :rank] * root[..., None, :], vh[..., :rank, :].mT * root[..., None, :]
    best = weight is None and not bool(fields.interaction.isneginf().any())
    if not best:
        queries, keys = _alternate(target, weight_, queries, keys, sweeps)
    explained = _explained(target, queries @ keys.mT, weight_, scores)
    return NormalForm(fields.rows, fields.columns, queries, keys, explained, best)


def _alternate(target: Tensor, weight: Tensor, queries: Tensor, keys: Tensor, sweeps: int) -> tuple[Tensor, Tensor]:
    """Least squares for queries and keys in turn, until a sweep reduces the error by less than one ten-thousandth."""
    missed = _square(target - queries @ keys.mT, weight)
    for _ in range(sweeps):
        queries = _regress(target, weight, keys)
        keys = _regress(target.mT, weight.mT, queries)
        now = _square(target - queries @ keys.mT, weight)
        if bool((missed - now <= 1e-4 * missed).all()):
            break
        missed = now
    return queries, keys


def _regress(target: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """The best coefficients of ``keys`` for the targets of each row, by least squares.

    A row that sees fewer keys than the rank has several solutions, and gets nearly the shortest.
    """
    gram = torch.einsum("...ts,...sa,...sb->...tab", weight, keys, keys)
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    least = (1e-11 * trace + 1e-30)[..., None].expand(*trace.shape, gram.shape[-1])
    lower, _ = torch.linalg.cholesky_ex(gram + torch.diag_embed(least))
    return torch.cholesky_solve(((weight * target) @ keys)[..., None], lower)[..., 0]


def divergence(log_kernel: Tensor, other: Tensor, probe: Probe = Rows()) -> Tensor:
    """KL divergence per row, (..., T), between what ``probe`` sees of two kernels, log K and other (..., T, S).

    KL(p | m) = sum p log(p/m) - p + m, the usual one for rows of sum 1. Empty and equal rows give 0. Rows with a pair
    that only ``other`` forbids give infinity.

    Raises: ArgumentError for kernels of different shapes, for a divergence that is too large for float64, and as
        ``probe.observe`` does.
    """
    _same_shape("probe.divergence", log_kernel, other)
    apart, barred = _divergence(log_kernel, other, probe)
    require(
        bool((apart.isfinite() | barred).all()),
        "probe.divergence: kernels that fit into float64 are required (log K up to about 700), received larger ones. "
        "Subtract a constant from both, or use probe.Rows().",
    )
    return apart


def _divergence(log_kernel: Tensor, other: Tensor, probe: Probe) -> tuple[Tensor, Tensor]:
    """The divergence, infinity or NaN where it overflows, and which rows have a pair that only ``other`` forbids."""
    seen = probe.observe(log_kernel).log
    model = probe.observe(other.masked_fill(log_kernel.isneginf(), float("-inf"))).log
    barred = (model.isneginf() & ~seen.isneginf()).any(-1)
    same = (seen == model).all(-1) & seen.exp().sum(-1).isinf()  # 0, also where K overflows
    seen, model = (x.masked_fill(same[..., None], 0) for x in (seen, model))
    apart = (seen.exp() * torch.where(seen.isneginf(), 0, seen - model)).sum(-1)
    apart = apart if isinstance(probe, Rows) else apart - seen.exp().sum(-1) + model.exp().sum(-1)
    return torch.where(barred, float("inf"), apart), barred


@torch.inference_mode(False)
def refined(form: NormalForm, scores: Tensor, *, steps: int = 100, probe: Probe = Rows()) -> NormalForm:
    """A form of the same rank with a smaller mean ``divergence`` from what ``probe`` sees of scores (..., T, S).

    The form with the smallest squared error of scores is not the best for weights, because an error on a pair without
    weight does no harm. L-BFGS improves columns, queries and keys of ``form``, and also its rows if the probe sees
    them. The result is never worse than ``form``, and its ``explained`` is that of the new dot product.

    probe: ``Rows`` or ``Kernel``; a plan has no gradient here. steps: of the optimiser. The result has no graph.

    Raises: ArgumentError for a form of other scores, and for a probe without a gradient.
    """
    require_whole("probe.refined: steps", steps)
    require(
        isinstance(probe, Rows | Kernel),
        f"probe.refined: probe must be probe.Rows() or a probe.Kernel, received {type(probe).__name__}, which has no "
        "gradient.",
    )
    scores = _checked("probe.refined", scores).detach().clone()  # autograd saves nothing that inference mode has made
    _same_shape("probe.refined", scores, form.scores)
    given = (form.columns, form.queries, form.keys, *(() if probe.left else (form.rows,)))
    start = [x.detach().double() for x in given]
    parts = [x.clone(memory_format=torch.contiguous_format).requires_grad_() for x in start]
    optimiser = torch.optim.LBFGS(
        parts, max_iter=steps, line_search_fn="strong_wolfe", tolerance_grad=1e-10, tolerance_change=1e-12
    )

    def distance(columns: Tensor, queries: Tensor, keys: Tensor, rows: Tensor | None = None) -> Tensor:
        model = columns[..., None, :] + queries @ keys.mT
        # the search may try what overflows
        return _divergence(scores, model if rows is None else model + rows[..., None], probe)[0].mean(-1)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = distance(*parts).sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(closure)  # type: ignore[arg-type]
    with torch.no_grad():
        better = distance(*parts) < distance(*start)
        columns, queries, keys, *rows = (
            torch.where(better.view(*better.shape, *[1] * (x.ndim - better.ndim)), x, old)
            for x, old in zip(parts, start, strict=True)
        )
        weight, target = _weights("probe.refined", scores, None), _filled(centred(scores).interaction)
        model = (columns[..., None, :] + queries @ keys.mT).masked_fill(scores.isneginf(), float("-inf"))
        explained = _explained(target, _filled(centred(model).interaction), weight, scores)
    return NormalForm(rows[0] if rows else form.rows.detach(), columns, queries, keys, explained, False)


def _checked(call: str, log_kernel: Tensor) -> Tensor:
    good = log_kernel.ndim >= 2 and log_kernel.is_floating_point()
    require(
        good and bool((log_kernel < float("inf")).all()),
        f"{call}: scores or log kernels (..., T, S) are required, finite or -inf, received "
        f"{log_kernel.dtype} of shape {tuple(log_kernel.shape)}{' with NaN or infinity' if good else ''}.",
    )
    return log_kernel.double()


def _same_shape(call: str, first: Tensor, second: Tensor) -> None:
    require(
        first.shape == second.shape,
        f"{call}: kernels of one shape are required, received {tuple(first.shape)} and {tuple(second.shape)}.",
    )


def _weights(call: str, scores: Tensor, weight: Tensor | None) -> Tensor:
    """The weights in float64, zero on forbidden pairs."""
    require(
        0 not in scores.shape[-2:],
        f"{call}: scores of at least one row and one column are required, received {tuple(scores.shape)}.",
    )
    allowed = ~scores.isneginf()
    if weight is None:
        return allowed.double()
    sizes = zip(reversed(weight.shape), reversed(scores.shape), strict=False)
    require(
        weight.ndim <= scores.ndim and all(mine in (1, size) for mine, size in sizes),
        f"{call}: weights must have the shape of the scores, {tuple(scores.shape)}, or broadcast to it, received "
        f"{tuple(weight.shape)}.",
    )
    weight = torch.broadcast_to(weight, scores.shape).double()
    good = bool(((weight > 0) & weight.isfinite() | ~allowed).all())
    require(
        good,
        f"{call}: weights must be finite and > 0 on every allowed pair; forbid a pair (score -inf) to leave it out.",
    )
    return torch.where(allowed, weight, 0)


def _filled(scores: Tensor) -> Tensor:
    return scores.masked_fill(scores.isneginf(), 0)


def _explained(target: Tensor, made: Tensor, weight: Tensor, scores: Tensor) -> Tensor:
    """The share of the energy of ``target`` in ``made``; 1 where the interaction is only rounding of the fields."""
    whole = _square(target, weight)
    some = whole > 1e-24 * _square(scores.double(), weight)
    return torch.where(some, 1 - _square(target - made, weight) / torch.where(some, whole, 1), 1)


def _mean(scores: Tensor, weight: Tensor, axis: int) -> Tensor:
    mass = weight.sum(axis)
    return torch.where(mass > 0, (weight * scores).sum(axis) / torch.where(mass > 0, mass, 1), 0)


def _square(scores: Tensor, weight: Tensor) -> Tensor:
    return (weight * _filled(scores).square()).sum((-1, -2))


__all__ = [
    "Energies",
    "EntropicPlan",
    "Equivalence",
    "Fields",
    "Kernel",
    "NormalForm",
    "Observed",
    "Probe",
    "Rows",
    "centred",
    "divergence",
    "energies",
    "equivalent",
    "normal_form",
    "refined",
]
