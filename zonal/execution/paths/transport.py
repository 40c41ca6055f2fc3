"""Transport plans by tiles. Potentials are found from row and column sums of scores; no plan is ever held in memory.

A pass gives, for values x of keys, sum_s P_ts x_s / m_t and log m_t (rows), or the same for values of queries and sums
n_s (columns): row attention with log b, or log a, added to the scores. An iteration has one pass of each kind; the
output takes one more. Backward solves

    (I - Q^T Q) x = s (c - P^T (lambda_1 r / m)),   Q = sqrt(lambda_1 / m) P s,   s = sqrt(lambda_2 / n),
    beta = s x,   alpha = lambda_1 (r - P beta) / m

by conjugate gradients, two passes per iteration, with r_t = dy_t . y_t and c_s = v_s . dv_s. The remaining gradient,

    dL_ts = P_ts (dy_t . v_s / mu_t - alpha_t - beta_s)
          = A_ts ([m_t / mu_t dy_t, -m_t] . [v_s, beta_s] - m_t alpha_t),   A = diag(m)^-1 P,

is the backward pass of row attention with one more number per value. No array has both T and S, forward or backward.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.anchor import Marginals, PlanAnchor, Potentials, Row
from zonal.algebra.anchor.plan import ABSENT, present, stepped, weighted
from zonal.algebra.named import operator_of
from zonal.algebra.prior import Bias, Intervals, Visibility
from zonal.algebra.score import Score
from zonal.algebra.solvers import conjugate_gradients
from zonal.errors import ArgumentError, ConvergenceError, NonFiniteError, PathError
from zonal.execution.call import Call, prepare
from zonal.execution.mask import Masses
from zonal.execution.paths import tile, tiled
from zonal.formula import Formula
from zonal.kernels.build import BuildError
from zonal.kernels.native import LARGEST
from zonal.kernels.tile import FAMILY, TileInputs, TileSpec, backward, forward
from zonal.names import known_names
from zonal.tracing import untraced

# The largest relative error of the gradient's linear system. Rounding and the tolerance leave less; more would spoil
# training.
_UNSOLVED = 0.01


def refusal(call: Call) -> str | None:
    """Why the compiled kernel of tiles does not make the passes, or None."""
    if call.device.type not in ("cpu", "meta"):
        return f"passes over rows and columns have no kernel for device {call.device.type!r}"
    if not call.bound.score.bilinear:
        return f"score {type(call.bound.score).__name__} is no dot product of prepared vectors"
    if call.shape.value_dim + 1 > LARGEST:  # beta is one more number of each value
        return f"value dimensions must be at most {LARGEST - 1}, this call has {call.shape.value_dim}"
    return tile.refusal(_as_rows(call))


def _as_rows(call: Call) -> Call:
    """Row attention with the call's scores, as the kernel makes the passes."""
    bound, tags = replace(call.bound, anchor=Row()), call.tags._replace(reduction="row")
    return replace(call, bound=bound, tags=tags, key_bias=None)


# how often an iteration goes round depends on numbers, which a tracer does not have
@untraced
def compiled(call: Call) -> Tensor:
    """y (B, H, T, P) of a call whose anchor is a plan. Raises: BuildError when the kernel does not compile."""
    return _by_passes(call, _Compiled)


@untraced
def by_torch(call: Call) -> Tensor:
    """y (B, H, T, P) of a call whose anchor is a plan, by torch's tiles."""
    return _by_passes(call, _Torch)


def _by_passes(call: Call, passes: "type[_Passes]") -> Tensor:
    marginals = call.marginals
    assert marginals is not None
    q, k, v = _present(call)
    return call.scaled(_Transport.apply(q, k, v, _column(call), marginals.query, marginals.key, call, passes))


def _code(call: Call) -> Formula:
    code = tile.code_of(call.bound.link)
    assert code is not None
    return code


@torch.no_grad()
@known_names
def potentials(
    q: Tensor,
    k: Tensor,
    operator: Operator | str,
    *,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    key_bias: Tensor | None = None,
    query_mass: Tensor | None = None,
    key_mass: Tensor | None = None,
    start: Potentials | None = None,
) -> Potentials:
    """The potentials f (B, H, T) and g (B, H, S) of an operator's plan, the number of iterations and the last change.

    Memory is O(T + S). The arguments are those of ``zonal.attention``.
    start: potentials of a similar plan, such as that of the previous step.

    Raises: ArgumentError as ``zonal.attention``, and for an operator without a plan; ConvergenceError at the limit of
        iterations.
    """
    operator = operator_of("potentials", operator)
    call = prepare(
        operator, q, k, k, causal=False, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, scale=scale,
        key_bias=key_bias, masses=Masses(query_mass, key_mass, start),
    )  # fmt: skip
    anchor = cast(PlanAnchor, call.bound.anchor)
    if call.tags.family != "plan" or call.marginals is None:
        raise ArgumentError(
            f"potentials: operator {operator.name!r} has anchor {type(anchor).__name__}, which makes no plan. "
            "Use m.sinkhorn(), or operator.replace(anchor=anchor.Plan())."
        )
    q, k, _ = _present(call)
    return _solved(_passes(call)(call, q, k), anchor, call.marginals, _column(call))


def _present(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v with a key head for each query head; what takes no part is zero, so that nothing in it can spread."""
    assert call.marginals is not None
    q = torch.where(present(call.marginals.query)[..., None], call.q, 0)
    there = present(call.marginals.key)[..., None]
    return q, torch.where(there, call.expand(call.k), 0), torch.where(there, call.expand(call.v), 0)


def _column(call: Call) -> Tensor:
    """The key bias (B, H, S) in the computing type, zero without one."""
    assert call.marginals is not None
    key, col = call.marginals.key, call.bias.col
    return torch.zeros_like(key) if col is None else col.to(key).expand_as(key).clamp_min(ABSENT)


class _Compiled:
    """Passes by the tile kernel, with log b (or log a) as biases of keys."""

    def __init__(self, call: Call, q: Tensor, k: Tensor) -> None:
        self._q, self._k, self._slope = q, k, call.bound.slopes
        self._scale, self._none, self._empty = q.new_ones(q.shape[1]), q.new_zeros(q.shape[1], 0), q.new_empty(0)
        seen, code, window = call.visibility, _code(call), call.window
        self._borders = seen.borders
        left = right = None
        if window is not None:
            left, right = window.left, q.shape[2] + seen.keys if window.right is None else window.right
        self._across = TileSpec(code, "row", causal=False, left=left, right=right, inference=True)
        self._along = replace(self._across, left=right, right=left)

    def _inputs(self, q: Tensor, k: Tensor, values: Tensor, col: Tensor) -> TileInputs:
        return TileInputs(q, k, values, self._scale, self._none, None, self._borders, None, col, self._slope)

    def rows(self, a: Tensor, b: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        y, total, _ = forward(self._inputs(self._q, self._k, values, b), self._across)
        return y, a + _log(total)

    def columns(self, a: Tensor, b: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        y, total, _ = forward(self._inputs(self._k, self._q, values, a), self._along)
        return y, b + _log(total)

    def backward(self, b: Tensor, v: Tensor, y: Tensor, total: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        results = y, total, self._empty
        asked = frozenset(("q", "k", "v", "col"))
        dq, dk, *_, dcol = backward((dy,), self._inputs(self._q, self._k, v, b), results, self._across, asked)
        assert dq is not None
        assert dk is not None
        assert dcol is not None
        return dq, dk, dcol.to(dk)


@dataclass(frozen=True)
class _Turned(Score):
    """A score with queries and keys in each other's place."""

    inner: Score

    @property
    def bound(self) -> float | None:
        return self.inner.bound

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        return self.inner.pair(k, q).mT


class _Torch:
    """Passes by torch's tiles, for every score."""

    def __init__(self, call: Call, q: Tensor, k: Tensor) -> None:
        # tiles cannot tell a row of NaN from one that sees no key
        if not bool(q.isfinite().all() and k.isfinite().all()):
            raise NonFiniteError(
                f"{type(call.bound.anchor).__name__}: scores hold NaN or infinity, and a plan joins all queries and "
                "keys. Look for them in q and k."
            )
        score, seen = call.bound.score, replace(call.visibility, key_mask=None)
        self._q, self._k, self._c, self._slope = q, k, call.coefficients, call.bound.slopes
        self._across = tiled.Parts(score, call.bound.link, Row(), None, True, seen, self._slope, 1)
        self._along = self._across._replace(score=score if score.bilinear else _Turned(score), visibility=turned(seen))

    def rows(self, a: Tensor, b: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        y, total, _ = tiled.run_forward(self._across, Bias(col=b, slope=self._slope), self._q, self._k, values, self._c)
        return y, a + _log(total.squeeze(-1))

    def columns(self, a: Tensor, b: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        y, total, _ = tiled.run_forward(self._along, Bias(col=a, slope=self._slope), self._k, self._q, values, self._c)
        return y, b + _log(total.squeeze(-1))

    def backward(self, b: Tensor, v: Tensor, y: Tensor, total: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        passed = tiled.Passed(self._q, self._k, v, self._c, y, total[..., None], y.new_empty(*y.shape[:2], 0, 1))
        found = tiled.run_backward(self._across, Bias(col=b, slope=self._slope), passed, dy, col=True)
        assert found.col is not None
        return found.q, found.k, found.col


_Passes = _Compiled | _Torch
"""Row attention in both directions, for a = log a (B, H, T) and b = log b (B, H, S), key biases included.

``rows`` gives the means of values (B, H, S, n) under each query's part of the plan, and log m (B, H, T); ``columns``
the same for keys; ``backward`` the gradients of q, k and b of the rows that gave y, whose log sums are ``total``.
"""


def _passes(call: Call) -> type[_Passes]:
    """What makes the passes of ``potentials``, which has no planner."""
    if refusal(call) is None:
        try:
            FAMILY.load(_code(call))
            return _Compiled
        except BuildError as error:  # once: from now on it is refused
            warnings.warn(
                f"zonal: torch's tiles run in place of the compiled kernel, several times slower. {error}", stacklevel=4
            )
    return _Torch


def _log(total: Tensor) -> Tensor:
    """The log sums of rows that tiles give as +inf where nothing is seen."""
    return torch.where(torch.isinf(total), ABSENT, total)


def turned(seen: Visibility) -> Visibility:
    """Which queries each key is seen by, for rules whose intervals only ever move forward: all but causal ones."""
    now = seen.intervals
    keys = torch.arange(seen.keys)
    lo, hi = torch.searchsorted(now.hi, keys, right=True), torch.searchsorted(now.lo, keys, right=True)
    offset = int(now.position[0]) if now.position.numel() else 0
    return Visibility(Intervals(lo, hi, torch.zeros_like(keys), keys - offset), now.lo.shape[0], None, seen.edges)


def _solved(passes: _Passes, anchor: PlanAnchor, marginals: Marginals, col: Tensor) -> Potentials:
    per_key, per_query = (
        torch.ones_like(x[:1, :1, :1, None]).expand(*x.shape, 1) if x.numel() else x[..., None]
        for x in (marginals.key, marginals.query)
    )
    return anchor.potentials(
        marginals,
        lambda a, b: passes.rows(a, b + col, per_key)[1],
        lambda a, b: passes.columns(a, b + col, per_query)[1],
    )


class _Transport(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, col: Tensor, log_mu: Tensor, log_nu: Tensor, call: Call,
        made: type[_Passes],
    ) -> Tensor:  # fmt: skip
        anchor = cast(PlanAnchor, call.bound.anchor)
        assert call.marginals is not None
        passes = made(call, q, k)
        at = _solved(passes, anchor, call.marginals._replace(query=log_mu, key=log_nu), col)
        a, b = weighted(log_mu, at.query), weighted(log_nu, at.key)
        y, log_m = passes.rows(a, b + col, v)
        there = present(log_mu)
        f = stepped(anchor.query_step, log_m - a, log_mu).potential  # once more: rows are exact
        log_m = torch.where(there, log_m - at.query + f, ABSENT)
        weights = torch.where(there, (log_m - log_mu).exp(), 0)
        anchor.require_finite(weights)
        y.mul_(weights[..., None])
        ctx.call, ctx.made = call, made
        ctx.save_for_backward(q, k, v, col, log_mu, log_nu, y, f, at.key, log_m)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise PathError(
                "attention: path 'tiled' goes back through the fixed point of a plan and has no second derivative. "
                "Use path='dense' with gradient='unrolled' where you need create_graph=True."
            )
        q, k, v, col, log_mu, log_nu, y, f, g, log_m = ctx.saved_tensors
        if not log_mu.numel() or not log_nu.numel():
            return *(torch.zeros_like(x) for x in (q, k, v, col, log_mu, log_nu)), None, None
        anchor: PlanAnchor = ctx.call.bound.anchor
        passes = ctx.made(ctx.call, q, k)
        there, a, b = present(log_mu), weighted(log_mu, f), weighted(log_nu, g)
        m, inverse = log_m.exp(), torch.where(there, (-log_m).exp(), 0)
        over_mu = torch.where(there, (-log_mu).exp(), 0)
        mean, log_n = passes.columns(a, b + col, dy * over_mu[..., None])
        n = torch.where(present(log_nu), log_n.exp(), 0)
        dv = n[..., None] * mean
        r, c = (dy * y).sum(-1), (dv * v).sum(-1)
        slope_m = stepped(anchor.query_step, log_m - a, log_mu).slope
        slope_n = stepped(anchor.key_step, log_n - b, log_nu).slope

        def across(x: Tensor) -> Tensor:
            return torch.where(there, passes.rows(a, b + col, x[..., None])[0].squeeze(-1), 0)

        def along(x: Tensor) -> Tensor:
            return n * passes.columns(a, b + col, x[..., None])[0].squeeze(-1)

        scale = torch.where(n > 0, (slope_n / n).sqrt(), 0)
        wanted = scale * (c - along(slope_m * r * inverse))
        tolerance = max(min(anchor.tolerance, 1e-5), 4 * torch.finfo(y.dtype).eps)
        beta = scale * conjugate_gradients(
            lambda x: x - scale * along(slope_m * across(scale * x)),
            wanted,
            torch.ones_like(wanted),
            anchor.limit,
            tolerance,
        )
        met = across(beta)
        alpha = slope_m * (r * inverse - met)
        # dy . y of the widened values must be m alpha. A balanced plan has this already, with P beta / m as y's last
        # number.
        wide = torch.cat(
            [y * torch.where(there, (log_mu - log_m).exp(), 0)[..., None], (r * inverse - alpha)[..., None]], -1
        )
        tall = torch.cat([dy * (m * over_mu)[..., None], -m[..., None]], -1)
        total = torch.where(present(log_m), log_m - a, float("inf"))
        dq, dk, dcol = passes.backward(b + col, torch.cat([v, beta[..., None]], -1), wide, total, tall)
        if anchor.on_limit == "error":
            _check_solved(anchor, torch.where(slope_n > 0, dcol - n * beta * (1 / slope_n - 1), 0), c)
        dmu, dnu = -m * met, dcol + n * beta
        # K is mu nu^T K / (mu nu^T), whose scores fall with the masses: by the row and column sums of dL
        if anchor.by_kernel:
            dmu, dnu = dmu - (1 - slope_m) * (r - m * met), n * beta
        return dq, dk, dv, dcol, dmu, dnu, None, None


def _check_solved(anchor: PlanAnchor, left: Tensor, c: Tensor) -> None:
    """Raise ConvergenceError where the columns of dL differ from what the gradient's linear system requires."""
    worst = (
        float((left.abs().sum(-1) / c.abs().sum(-1).clamp_min(torch.finfo(c.dtype).tiny)).amax()) if c.numel() else 0.0
    )
    if worst > _UNSOLVED:
        raise ConvergenceError(
            f"{type(anchor).__name__}: the linear system of the gradient is solved to {worst:.2g} only, "
            f"within limit={anchor.limit} iterations. Raise limit, make "
            "scores smaller (a smaller scale, a larger temperature), or take what there is with on_limit='keep'."
        )


__all__ = ["by_torch", "compiled", "potentials", "refusal", "turned"]
