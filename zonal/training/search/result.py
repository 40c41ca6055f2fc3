"""What a search found, as values."""

from dataclasses import dataclass
from pathlib import Path

from zonal.evaluation.statistics import Spread
from zonal.training.record import RunResult
from zonal.training.search.moves import Move, Moves
from zonal.training.search.regime import Regime


@dataclass(frozen=True)
class Outcome:
    """One regime on one rung. ``costs``: seed → cost, None when a run of it failed or it could not be run, which
    ``message`` explains. ``reported``: the same on the evaluation set, where costs are of the validation set.
    """

    runs: tuple[RunResult, ...]
    costs: dict[int, float] | None
    message: str | None
    reported: dict[int, float] | None = None

    @property
    def seconds(self) -> float:
        """Training and evaluating, over all seeds."""
        return sum(run.seconds + run.evaluation_seconds for run in self.runs)


@dataclass(frozen=True)
class Round:
    """One proposal: from ``current``, ``drawn`` of the moves that had not been tried, ``rungs`` of (steps, regimes in
    the order of their costs); ``chosen`` is the best of the last, ``effort`` what going there costs over seeds,
    ``probability`` that it was to be accepted with.
    """

    current: Regime
    drawn: tuple[Move, ...]
    rungs: tuple[tuple[int, tuple[Regime, ...]], ...]
    chosen: Regime | None
    effort: Spread | None
    probability: float | None
    accepted: bool


@dataclass(frozen=True)
class SearchResult:
    """The result of a search. ``status``: "done", or "stopped" on request. ``reason``: what ended it. ``winner``: the
    best regime on the last rung.
    """

    directory: Path
    status: str
    reason: str
    rounds: tuple[Round, ...]
    outcomes: dict[Regime, dict[int, Outcome]]
    judged: dict[Regime, Moves]
    winner: Regime | None

    @property
    def costs(self) -> dict[Regime, dict[int, dict[int, float]]]:
        """Regime → steps → seed → cost, in the order they were tried."""
        return {
            regime: {steps: found.costs for steps, found in rungs.items() if found.costs}
            for regime, rungs in self.outcomes.items()
        }
