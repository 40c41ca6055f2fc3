"""Scores: how a query and a key become one number, S_ts."""

from zonal.algebra.declaration import Declaration
from zonal.algebra.score.base import Clipped, Cosine, Dot, Fused, NegativeDistance, Params, Score, unit
from zonal.algebra.score.operators import Categorical, OperatorPath

SCORES: dict[str, type[Declaration]] = {
    kind.__name__: kind for kind in (Dot, Cosine, NegativeDistance, OperatorPath, Categorical)
}

__all__ = [
    "SCORES",
    "Categorical",
    "Clipped",
    "Cosine",
    "Dot",
    "Fused",
    "NegativeDistance",
    "OperatorPath",
    "Params",
    "Score",
    "unit",
]
