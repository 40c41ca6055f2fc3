"""The sparse path by a compiled kernel on the CPU: which calls it takes, and how a call becomes one."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.anchor import TopK
from zonal.algebra.metric import Euclidean, HilbertSchmidt, Hyperbolic, Metric, Product, Sphere, SquaredEuclidean
from zonal.algebra.metric.base import unit
from zonal.algebra.score import NegativeDistance, Score
from zonal.execution import native
from zonal.execution.call import Call
from zonal.kernels.native import Reason
from zonal.kernels.sparse import FAMILY, Candidates, Factors, SparseInputs, SparseSpec
from zonal.kernels.sparse import sparse as kernel

_KINDS: dict[type[Metric], str] = {
    Euclidean: "euclidean", HilbertSchmidt: "euclidean", SquaredEuclidean: "squared", Sphere: "sphere",
    Hyperbolic: "hyperbolic",
}  # fmt: skip


def refusal(call: Call) -> Reason:
    """Why torch runs in the kernel's place, or None."""
    return FAMILY.refusal(
        call.device.type,
        call.coefficients.dtype,
        lambda: _factors_refusal(call.bound.score) or native.empty_rows(call) or native.transformed(),
    )


def _factors_refusal(score: Score) -> Reason:
    if score.bilinear:
        return None
    if not isinstance(score, NegativeDistance) or score.dot is not None:
        return f"score {type(score).__name__} with a dot product beside distances is not in it"
    metrics = score.metric.factors if isinstance(score.metric, Product) else (score.metric,)
    return next(
        (f"metric {type(metric).__name__} is not in it" for metric in metrics if type(metric) not in _KINDS), None
    )


class _Points(NamedTuple):
    """A part of queries and keys as the kernel takes it: numbers, radius (…, 1) and its sinh."""

    q: tuple[Tensor, Tensor, Tensor]
    k: tuple[Tensor, Tensor, Tensor]


def points(score: Score, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Factors]:
    """Prepared queries and keys as the kernel takes them; differentiable."""
    if score.bilinear:
        return q, k, Factors()
    assert isinstance(score, NegativeDistance)
    metric = score.metric
    weights, parts = metric.cut(q, k) if isinstance(metric, Product) else (q.new_ones(1), [(metric, q, k)])
    made = [_Points(_padded(_point(factor, a)), _padded(_point(factor, b))) for factor, a, b in parts]
    weights = (weights / score.temperature).expand(*q.shape[:3], len(parts))
    rows = [
        torch.cat([x[i] for x in side], -1) for side in ([p.q for p in made], [p.k for p in made]) for i in range(3)
    ]
    factors = Factors(
        tuple(_KINDS[type(factor)] for factor, _, _ in parts),
        tuple(p.q[0].shape[-1] for p in made),
        tuple(float(getattr(factor, "eps", 0.0)) for factor, _, _ in parts),
    )
    # keys are fetched from anywhere: a row begins where a line of the cache does
    width = sum(x.shape[-1] for x in rows[3:])
    held = torch.cat([*rows[3:], k.new_zeros(*k.shape[:3], -width % 16)], -1)[..., :width]
    return torch.cat([rows[0], weights, *rows[1:3]], -1), held, factors


def _padded(point: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Zeros up to whole vectors of the kernel, which takes what is left over number by number."""
    return F.pad(point[0], (0, -point[0].shape[-1] % 8)), point[1], point[2]


def _point(metric: Metric, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if isinstance(metric, Hyperbolic):
        radius, direction = metric.polar(x)
        return direction, radius, radius.sinh()
    none = torch.zeros_like(x[..., :1])
    if not isinstance(metric, Sphere):
        return x, none, none
    direction, inverse = unit(x.double())
    return direction.to(x.dtype), (inverse == 0).to(x.dtype), none


def sparse(call: Call, found: Candidates) -> Tensor:
    """y (B, H, T, P), before the anchor's factor per head, for a call that is not refused.

    Raises: BuildError when the kernel does not compile.
    """
    anchor = call.bound.anchor
    assert isinstance(anchor, TopK)
    q, k, factors = points(call.bound.score, call.q, call.k)
    return kernel(SparseInputs(q, k, call.v, *found), SparseSpec(factors, anchor.k))[0]


__all__ = ["points", "refusal", "sparse"]
