"""Which sums can hold the past of an operator: sums over features, ridge statistics, or none (keys are kept then)."""

from zonal.algebra import Operator
from zonal.algebra.anchor import LocalGlobal, Ridge, TopK
from zonal.algebra.link import Link
from zonal.algebra.operator import Bound
from zonal.algebra.prior import ALiBi, Prior, Window
from zonal.algebra.score import Score
from zonal.features import SymmetricPowers, feature_map
from zonal.memory.whitened import MAX_STATISTICS, harmonics_of, width_of

MAX_FEATURES = 8192
"""With more features per head than this, keys and values are kept instead."""


def features_refusal(parts: Operator | Bound, key_dim: int) -> str | None:
    """Why sums over features do not carry the past of an operator, or None when they do.

    With an anchor that has a window, the past is what lies before it.
    """
    if parts.anchor.solves:
        return f"anchor {type(parts.anchor).__name__} solves with the kernel among keys, which is no sum over keys"
    if isinstance(parts.anchor, TopK):
        return "anchor TopK keeps single keys, which a sum over keys has forgotten"
    if parts.anchor.family == "":
        return f"anchor {type(parts.anchor).__name__} may weigh a row in any way, which sums over keys cannot tell"
    if not parts.score.bilinear:
        return f"score {type(parts.score).__name__} is no dot product of prepared vectors"
    for prior in _priors(parts):
        if isinstance(prior, Window | ALiBi):
            return (
                f"prior {type(prior).__name__} weights each past key by its distance, "
                "and a sum over keys does not keep positions"
            )
    score, link = _summed(parts)
    features = feature_map(link)
    if features is None:
        return f"link {type(link).__name__} has no finite feature map that is exact"
    size = features.dimension(score.width(key_dim))
    if size > MAX_FEATURES:
        return (
            f"link {type(link).__name__} of degree {features.degree} needs {size} features at head dimension "
            f"{key_dim}, more than {MAX_FEATURES}"
        )
    return None


def served_by(operator: Operator, key_dim: int) -> SymmetricPowers | None:
    """The feature map that sums over keys can be kept with, or None."""
    return None if features_refusal(operator, key_dim) else feature_map(_summed(operator)[1])


def _summed(parts: Operator | Bound) -> tuple[Score, Link]:
    """Score and link of the keys that are summed up: of a far kernel where the anchor declares one."""
    if isinstance(parts.anchor, LocalGlobal):
        return parts.anchor.score, parts.anchor.link
    return parts.score, parts.link


def statistics_refusal(parts: Operator | Bound, key_dim: int) -> str | None:
    """Why the ridge statistics G, M, C do not carry the past of a solving operator, or None when they do."""
    score, link, anchor = parts.score, parts.link, parts.anchor
    if not isinstance(anchor, Ridge):
        return f"anchor {type(anchor).__name__} may solve in any way, of which statistics know nothing"
    if not score.plain or not link.linear:
        what = (
            f"kernel {type(score).__name__}-{type(link).__name__} among keys is not the plain product z.z "
            "(Dot(scale=1) or Cosine(temperature=1) with link Identity)"
        )
        if harmonics_of(parts) is None or key_dim < 2:
            return f"{what}, nor a polynomial of cosines with exact features"
        if anchor.moving:
            return f"{what}, and over features of keys no ridge follows them"
    if width_of(parts, key_dim) > max(MAX_STATISTICS, key_dim):
        return (
            f"keys of {width_of(parts, key_dim)} features (head dimension {key_dim}) "
            f"need square matrices of that size, and the largest size kept is {MAX_STATISTICS}"
        )
    if any(isinstance(p, Window) for p in _priors(parts)):
        return "a window drops keys one by one, and the statistics cannot"
    return None


def _priors(parts: Operator | Bound) -> tuple[Prior, ...]:
    return parts.priors if isinstance(parts, Bound) else parts.prior


__all__ = ["MAX_FEATURES", "features_refusal", "served_by", "statistics_refusal"]
