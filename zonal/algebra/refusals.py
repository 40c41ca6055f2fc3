"""Which scores, links, anchors and priors cannot be combined, and what to take instead."""

import math
from collections.abc import Sequence

from zonal.algebra.anchor import Anchor, Hierarchical, Ridge, Row, TopK
from zonal.algebra.link import Link
from zonal.algebra.prior import ALiBi, Causal, ChunkCausal, Decay, Prior, Window
from zonal.algebra.score import Cosine, NegativeDistance, Score


def leak(anchor: Anchor) -> str:
    """The end of messages on causal masks with an anchor that couples all queries."""
    if isinstance(anchor, Hierarchical):
        why = "the queries of a block share their weights, so that the first of them would depend on the last"
    else:
        why = (
            "what a key may still receive depends on later queries, and so does what earlier queries get (with equal "
            "masses the first query can only fill the first key, the second query the second key, and so on: the plan "
            "is the identity)"
        )
    return f"leaks the future: {why}. Leave it out, or use anchor.Row()"


def outside_domain(score: Score, link: Link) -> str | None:
    """Why a link is not defined on all scores, or None: only what leaves its domain by rounding is clamped to it."""
    if link.domain is None:
        return None
    (low, high), reach = link.domain, math.inf if score.bound is None else score.bound
    if low <= 1e-9 - (0.0 if score.positive else reach) and reach <= high + 1e-9:
        return None
    remedy = "score.Cosine() with temperature >= 1" if low <= -1 and high >= 1 else "a link that is defined everywhere"
    return (
        f"link {type(link).__name__} is defined on [{low:g}, {high:g}] and score {type(score).__name__} can leave it; "
        f"use {remedy}"
    )


def refusal(
    score: Score, link: Link, anchor: Anchor, prior: Sequence[Prior], positive: bool, dim: int | None
) -> str | None:
    """Why these parts cannot be combined for heads of ``dim`` numbers (None: for any size); None if they can."""
    kinds = [type(p) for p in prior]
    twice = next((kind for kind in kinds if kinds.count(kind) > 1), None)
    if twice is not None:
        return f"prior {twice.__name__} is declared twice; declare one of each type"
    outside = outside_domain(score, link)
    if outside is not None:
        return outside
    signed = not positive and not (isinstance(anchor, Row) and anchor.allow_signed)
    if isinstance(anchor, Row | TopK) and signed:
        what = f"{type(score).__name__} scores" if link.linear else f"{type(link).__name__} values"
        return (
            f"anchor {type(anchor).__name__} divides by a sum of {what}, which may be negative and cancel; "
            "use anchor.Count() or anchor.Raw(), a positive link, or Row(allow_signed=True) if you accept rows "
            "that blow up"
        )
    if anchor.couples:
        return _coupled(link, anchor, prior)
    if anchor.window:
        return _with_window(score, link, anchor, prior)
    return _solved(score, link, anchor, prior, dim) if anchor.solves else None


def _with_window(score: Score, link: Link, anchor: Anchor, prior: Sequence[Prior]) -> str | None:
    name = type(anchor).__name__
    if not link.log_space or not score.bilinear:
        return (
            f"anchor {name} has an exponential of a dot product in its window; use score.Dot() or score.Cosine() "
            "with link.Exp()"
        )
    other = next((p for p in prior if not isinstance(p, Causal) or p.include_self is False), None)
    if other is not None:
        return (
            f"anchor {name} has a window that ends with the query's own key, and sums without positions before it; "
            f"drop prior {type(other).__name__}"
        )
    return None


def _coupled(link: Link, anchor: Anchor, prior: Sequence[Prior]) -> str | None:
    name = type(anchor).__name__
    if not link.log_space:
        return f"anchor {name} works on log K, and link {type(link).__name__} is kept as K; use link.Exp()"
    tied = next((p for p in prior if isinstance(p, Causal | ChunkCausal | Decay)), None)
    if isinstance(anchor, Hierarchical) and any(isinstance(p, Window) for p in prior):
        return "anchor Hierarchical has blocks of a tree, all of which see one another; drop the Window prior"
    if tied is not None:
        return (
            f"anchor {name} lets each query's weights depend on all queries, so that prior "
            f"{type(tied).__name__}, which orders them in time, {leak(anchor)}"
        )
    return None


def _solved(score: Score, link: Link, anchor: Anchor, prior: Sequence[Prior], dim: int | None) -> str | None:
    name = type(anchor).__name__
    decays = any(isinstance(p, Decay) for p in prior)
    if any(isinstance(p, ALiBi) for p in prior) or (decays and not isinstance(anchor, Ridge)):
        return (
            f"anchor {name} solves with the kernel among keys, for which a position bias or decay is not defined; "
            "drop the prior"
        )
    indefinite = _indefinite_reason(score, link, dim)
    if indefinite is not None:
        return f"anchor {name} needs a positive definite kernel among keys, and {indefinite}"
    if not isinstance(anchor, Ridge):
        return None
    plain = score.plain and link.linear
    if (anchor.relative or anchor.spectral) and not plain:
        what = "relative > 0" if anchor.relative else "spectral_norm='power'"
        return (
            f"{what} looks at G = sum z z^T, which only the plain product z.z has (score.Dot(scale=1) with "
            "link.Identity()); drop it"
        )
    if not decays:
        return None
    if not plain:
        return (
            f"a decay with anchor {name} fades G = sum z z^T, which only the plain product z.z has "
            "(score.Dot(scale=1) with link.Identity()); drop the prior"
        )
    if anchor.by_query:
        return (
            f"a decay with anchor {name} fades a constant ridge; "
            "use mode='constant', relative=0 and spectral_norm='none', or drop the prior"
        )
    if anchor.compact:
        return f"a decay with anchor {name} fades sums in float64; use compact=False, or drop the prior"
    if any(isinstance(p, ChunkCausal | Window) for p in prior):
        return (
            f"a decay with anchor {name} runs token by token, and neither windows nor whole chunks are defined "
            "with it; drop one of the priors"
        )
    return None


def _indefinite_reason(score: Score, link: Link, dim: int | None) -> str | None:
    """Why the kernel among keys may have negative eigenvalues, or None.

    Without negative eigenvalues, a ridge makes it invertible.
    """
    of_score = score.indefinite_reason()
    if isinstance(score, NegativeDistance):
        return link.indefinite_reason_of_distance() or of_score
    return of_score or link.indefinite_reason(isinstance(score, Cosine), dim)


__all__ = ["leak", "refusal"]
