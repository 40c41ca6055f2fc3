"""Scores: one number S_ts per query and key."""

from zonal.algebra.score.base import Clipped, Fused, Params, Score, unit
from zonal.algebra.score.distance import NegativeDistance
from zonal.algebra.score.feature_layer import FeatureLayer
from zonal.algebra.score.operators import Categorical, OperatorPath
from zonal.algebra.score.products import Cosine, Dot

__all__ = [
    "Categorical", "Clipped", "Cosine", "Dot", "FeatureLayer", "Fused", "NegativeDistance", "OperatorPath", "Params",
    "Score", "unit",
]  # fmt: skip
