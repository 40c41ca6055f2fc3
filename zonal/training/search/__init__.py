"""Search over regimes: training as a walk among operators and parameters, by typed moves, on the machinery of
comparisons.
"""

from zonal.training.search.moves import KINDS, PALETTE, Move, Moves, Skipped, moves
from zonal.training.search.regime import Regime
from zonal.training.search.result import Outcome, Round, SearchResult
from zonal.training.search.run import Search
from zonal.training.search.spec import SearchSpec

__all__ = [
    "KINDS",
    "PALETTE",
    "Move",
    "Moves",
    "Outcome",
    "Regime",
    "Round",
    "Search",
    "SearchResult",
    "SearchSpec",
    "Skipped",
    "moves",
]
