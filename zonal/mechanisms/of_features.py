"""Attention by any feature map, y_t = phi_q(q_t) . S_t / (phi_q(q_t) . Z_t), for the mechanisms with features."""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import Identity
from zonal.features import FeatureMap, Features


def of_features(
    features: FeatureMap,
    dim: int | None = None,
    seed: int | None = None,
    allow_signed: bool = False,
    scaled: bool = False,
    name: str = "features",
) -> Operator:
    """Row-normalised attention by any feature map: y_t = phi_q(q_t) . S_t / (phi_q(q_t) . Z_t), with constant memory.

    dim, seed, scaled: as in ``features.Features``. allow_signed: accept a map whose scores may be negative. The sum of
    a row may then be close to zero and its output very large.

    Raises: PathError for a signed map without ``allow_signed``.
    """
    anchor = Row(allow_signed=allow_signed)
    features.check(name, anchor)
    return Operator(Features(features, dim=dim, seed=seed, scaled=scaled), Identity(), anchor, name=name)


__all__ = ["of_features"]
