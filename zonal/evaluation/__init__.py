"""Metrics of one run, and statistics over several seeds."""

from zonal.evaluation.efficiency import common_target, tokens_to
from zonal.evaluation.examination import Marks, examine
from zonal.evaluation.metrics import Accumulator, Cells, evaluate, evaluate_transfer
from zonal.evaluation.selection import Final, best_learning_rate
from zonal.evaluation.statistics import Difference, Spread, difference_within_spread, spread
from zonal.evaluation.verdicts import auroc, risk_curve
from zonal.execution.paths.coverage import Coverage, coverage

__all__ = [
    "Accumulator",
    "Cells",
    "Coverage",
    "Difference",
    "Final",
    "Marks",
    "Spread",
    "auroc",
    "best_learning_rate",
    "common_target",
    "coverage",
    "difference_within_spread",
    "evaluate",
    "evaluate_transfer",
    "examine",
    "risk_curve",
    "spread",
    "tokens_to",
]
