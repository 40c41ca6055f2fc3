"""Scores: one number S_ts per query and key."""

from zonal.algebra.score.base import (
    Clipped,
    Cosine,
    Dot,
    Fused,
    NegativeDistance,
    Params,
    Score,
    unit,
)
from zonal.algebra.score.feature_layer import FeatureLayer
from zonal.algebra.score.operators import Categorical, OperatorPath

__all__ = [
    "Categorical", "Clipped", "Cosine", "Dot", "FeatureLayer", "Fused", "NegativeDistance", "OperatorPath", "Params",
    "Score", "unit",
]  # fmt: skip
