"""The sparse path: each query keeps its largest entries among candidates from hash tables, and compares no other key.

It approximates the anchor TopK, for operators that declare a search. Forward keeps y, the candidates and two numbers a
row: the least entry kept and the log of the row's sum. Backward computes the scores of candidates again. With W =
exp(S - whole) on the kept entries and D_t = dy_t . y_t: dV = W^T dY, dS = W (dY V^T - D).
"""

from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal import torch_func
from zonal.algebra.anchor import TopK
from zonal.algebra.hashing import LSH
from zonal.algebra.metric import Euclidean, HilbertSchmidt, Hyperbolic, Metric, Product, Sphere, SquaredEuclidean
from zonal.algebra.metric.base import unit
from zonal.algebra.score import NegativeDistance, Score
from zonal.algebra.score.base import paired_scores
from zonal.execution.call import Call
from zonal.execution.paths import tile
from zonal.execution.paths.candidates import candidates, keys_of, search_of
from zonal.features import hashing
from zonal.kernels.native import Reason
from zonal.kernels.op import no_second_derivative
from zonal.kernels.sparse import FAMILY, Candidates, Factors, SparseInputs, SparseSpec
from zonal.kernels.sparse import sparse as kernel
from zonal.tracing import in_dispatch_mode

_KINDS: dict[type[Metric], str] = {
    Euclidean: "euclidean", HilbertSchmidt: "euclidean", SquaredEuclidean: "squared", Sphere: "sphere",
    Hyperbolic: "hyperbolic",
}  # fmt: skip

# numbers of keys and values that torch gathers at once
_GATHERED = 1 << 23


def refusal(call: Call) -> str | None:
    """Why this call cannot run sparse, or None when it can."""
    if not call.tags.top:
        return (
            f"anchor {type(call.bound.anchor).__name__} weighs every key; "
            "anchor.TopK(k, search=hashing.LSH()) keeps the largest of those that a search finds"
        )
    if not isinstance(cast(TopK, call.bound.anchor).search, LSH):
        return (
            "anchor TopK declares no search, and nothing else may leave out keys; "
            "declare one, anchor.TopK(k, search=hashing.LSH())"
        )
    if not call.tags.log_space:
        return (
            f"link {type(call.bound.link).__name__} may be large at far keys, which no search for near ones finds; "
            "use link.Exp()"
        )
    if call.biased:
        return "log priors (decay, ALiBi, key biases) make far keys large, and the search does not know them"
    return hashing.hashing_refusal(call.bound.score)


def kernel_refusal(call: Call) -> Reason:
    """Why torch runs in the kernel's place, or None."""
    return FAMILY.refusal(
        call.device.type,
        call.coefficients.dtype,
        lambda: _factors_refusal(call.bound.score) or tile.empty_rows(call) or torch_func.refusal() or _traced_reason(),
    )


def _traced_reason() -> Reason:
    return "hash codes of a call that torch traces need operations of torch" if in_dispatch_mode() else None


def _factors_refusal(score: Score) -> Reason:
    if score.bilinear:
        return None
    if not isinstance(score, NegativeDistance) or score.dot is not None:
        return f"score {type(score).__name__} with a dot product beside distances is not in it"
    metrics = score.metric.factors if isinstance(score.metric, Product) else (score.metric,)
    return next(
        (f"metric {type(metric).__name__} is not in it" for metric in metrics if type(metric) not in _KINDS), None
    )


def points(score: Score, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Factors]:
    """Prepared queries and keys as the kernel takes them; differentiable."""
    if score.bilinear:
        return q, k, Factors()
    assert isinstance(score, NegativeDistance)
    metric = score.metric
    weights, parts = metric.cut(q, k) if isinstance(metric, Product) else (q.new_ones(1), [(metric, q, k)])
    asked, met = [_point(factor, a) for factor, a, _ in parts], [_point(factor, b) for factor, _, b in parts]
    weights = (weights / score.temperature).expand(*q.shape[:3], len(parts))
    numbers, *radii = (torch.cat(each, -1) for each in zip(*asked, strict=True))
    rows = [torch.cat(each, -1) for each in zip(*met, strict=True)]
    factors = Factors(
        tuple(_KINDS[type(factor)] for factor, _, _ in parts),
        tuple(point[0].shape[-1] for point in asked),
        tuple(float(getattr(factor, "eps", 0.0)) for factor, _, _ in parts),
    )
    # keys are fetched from anywhere: a row begins where a line of the cache does
    width = sum(x.shape[-1] for x in rows)
    held = torch.cat([*rows, k.new_zeros(*k.shape[:3], -width % 16)], -1)[..., :width]
    return torch.cat([numbers, weights, *radii], -1), held, factors


def _point(metric: Metric, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Points as the kernel takes them: numbers, with zeros up to its whole vectors; radius (…, 1); its sinh."""
    numbers, radius, sinh = _polar(metric, x)
    return F.pad(numbers, (0, -numbers.shape[-1] % 8)), radius, sinh


def _polar(metric: Metric, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(metric, Hyperbolic):
        radius, direction = metric.polar(x)
        return direction, radius, radius.sinh()
    none = torch.zeros_like(x[..., :1])
    if not isinstance(metric, Sphere):
        return x, none, none
    direction, inverse = unit(x.double())
    return direction.to(x.dtype), (inverse == 0).to(x.dtype), none


def compiled(call: Call) -> Tensor:
    """y (B, H, T, P) by the compiled kernel. Raises: BuildError when it does not compile."""
    found = candidates(call, native=True)
    q, k, factors = points(call.bound.score, call.q, call.k)
    spec = SparseSpec(factors, cast(TopK, call.bound.anchor).k)
    return call.scaled(kernel(SparseInputs(q, k, call.v, *found), spec)[0])


def by_torch(call: Call) -> Tensor:
    """y (B, H, T, P) by torch."""
    search, found = search_of(call), candidates(call, native=False)
    parts = _Parts(call.bound.score, cast(TopK, call.bound.anchor), max(search.reach, search.window))
    return call.scaled(_Sparse.apply(call.q, call.k, call.v, found, parts))


class _Parts(NamedTuple):
    """What a row is made from, apart from tensors. reach: the most candidates of one table."""

    score: Score
    anchor: TopK
    reach: int


class _Met(NamedTuple):
    """Queries (B, H, t, 1, D), with the keys (B, H, t, C, D) and values that they compare.

    Also the places of these keys among all (B, Hkv, S), and log K (B, H, t, 1, C).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    place: Tensor
    score: Tensor
    kernel: Tensor


def _meet(parts: _Parts, q: Tensor, k: Tensor, v: Tensor, found: Candidates, span: slice) -> _Met:
    key, fresh = keys_of(found, span, min(parts.reach, k.shape[2]))
    batch, kv_heads, keys = k.shape[:3]
    head = (
        torch.arange(batch * kv_heads, device=k.device)
        .view(batch, kv_heads, 1, 1)
        .repeat_interleave(q.shape[1] // kv_heads, 1)
    )
    place = head * keys + key
    asked, near = q[:, :, span, None], k.flatten(0, 2)[place]
    score = paired_scores(parts.score, asked, near)
    return _Met(
        asked, near, v.flatten(0, 2)[place], place, score, score.masked_fill(~fresh.unsqueeze(-2), float("-inf"))
    )


def _spans(q: Tensor, k: Tensor, v: Tensor, found: Candidates, reach: int) -> list[slice]:
    numbers = q.shape[0] * q.shape[1] * found.order.shape[2] * min(reach, k.shape[2]) * (k.shape[3] + v.shape[3])
    size = max(1, _GATHERED // max(numbers, 1))
    return [slice(t, t + size) for t in range(0, q.shape[2], size)]


class _Sparse(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, found: Candidates, parts: _Parts
    ) -> Tensor:
        y = q.new_zeros(*q.shape[:3], v.shape[3])
        least, whole = (q.new_empty(*q.shape[:3], 1, 1) for _ in range(2))
        for span in _spans(q, k, v, found, parts.reach) if k.shape[2] else ():
            met = _meet(parts, q, k, v, found, span)
            least[:, :, span] = parts.anchor.least(met.kernel)
            kept = met.kernel.masked_fill(met.kernel < least[:, :, span], float("-inf"))
            total = kept.logsumexp(-1, keepdim=True)
            # a row that meets no key is zero
            whole[:, :, span] = torch.where(total == float("-inf"), float("inf"), total)
            y[:, :, span] = ((kept - whole[:, :, span]).exp() @ met.v).squeeze(-2)
        ctx.found, ctx.parts = found, parts
        ctx.save_for_backward(q, k, v, y, least, whole)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        no_second_derivative("sparse")
        q, k, v, y, least, whole = ctx.saved_tensors
        found, parts = ctx.found, ctx.parts
        dq, dk, dv = torch.zeros_like(q), k.new_zeros(k.shape), v.new_zeros(v.shape)
        shared = (dy * y).sum(-1)[..., None, None]
        for span in _spans(q, k, v, found, parts.reach) if k.shape[2] else ():
            met = _meet(parts, q, k, v, found, span)
            kept = met.kernel.masked_fill(met.kernel < least[:, :, span], float("-inf"))
            weights, slope = (kept - whole[:, :, span]).exp(), dy[:, :, span, None]
            ds = weights * (slope @ met.v.mT - shared[:, :, span])
            own, near = parts.score.pair_vjp(met.q, met.k, met.score, ds)
            dq[:, :, span] = own.squeeze(-2)
            for total, part in ((dk, near), (dv, weights.mT @ slope)):
                total.flatten(0, 2).index_add_(0, met.place.flatten(), part.flatten(0, 3))
        return dq, dk, dv, None, None


__all__ = ["by_torch", "compiled", "kernel_refusal", "points", "refusal"]
