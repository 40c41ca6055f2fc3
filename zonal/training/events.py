"""What happens while training, as values: for a progress display, and for the pipe between a run's process and its
parent.

``run`` names the run: its folder relative to the comparison ("runs/sko/seed-0-lr-0.003"), or the folder's name where a
single model is trained.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from zonal.errors import FileFormatError
from zonal.typed import made


@dataclass(frozen=True)
class Measuring:
    """The step time of an operator is being measured; ``index`` of ``total`` operators, from 0."""

    operator: str
    index: int
    total: int


@dataclass(frozen=True)
class Planned:
    """The plan is made: ``runs`` runs of ``steps`` updates each, of which ``remaining`` are not finished. Measured
    seconds of an update and of an evaluation, by operator.
    """

    runs: int
    remaining: int
    steps: int
    step_seconds: dict[str, float]
    evaluation_seconds: dict[str, float]
    estimated_seconds: float


@dataclass(frozen=True)
class RunStarted:
    """A run begins, or goes on at ``step``. ``notes`` says what of the machine changed since its checkpoint."""

    run: str
    operator: str
    label: str
    seed: int
    learning_rate: float
    step: int
    steps: int
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class StepDone:
    """One update; ``seconds`` is the training time of the run so far."""

    run: str
    step: int
    steps: int
    loss: float
    learning_rate: float
    gradient_norm: float
    tokens: int
    seconds: float


@dataclass(frozen=True)
class EvaluationProgress:
    """A batch of the evaluation at ``step`` is done; keeps a display alive during long ones."""

    run: str
    step: int
    batches: int


@dataclass(frozen=True)
class Evaluated:
    """An evaluation; ``metrics`` as ``zonal.evaluation.evaluate`` returns them."""

    run: str
    step: int
    steps: int
    metrics: dict[str, Any]
    seconds: float


@dataclass(frozen=True)
class Checkpointed:
    """A checkpoint is in place."""

    run: str
    step: int
    path: str


@dataclass(frozen=True)
class RunFinished:
    """A run ended: status "done", "failed" or "stopped". ``skipped``: it had ended before and nothing was run now."""

    run: str
    operator: str
    label: str
    seed: int
    learning_rate: float
    status: str
    message: str | None
    steps_done: int
    final: dict[str, Any] | None
    skipped: bool = False


@dataclass(frozen=True)
class RungStarted:
    """A search starts to train ``regimes`` for ``steps`` updates each, in ``round`` (0: the start) of at most
    ``rounds``. ``current``: the accepted regime. ``share``: the share of the largest possible work that is done.
    """

    round: int
    rounds: int
    current: str
    regimes: tuple[str, ...]
    steps: int
    share: float


@dataclass(frozen=True)
class Judged:
    """A round of a search is over. ``accepted``: whether the search moves to ``regime``. ``effort``: its measure minus
    that of the current regime (less is better).
    """

    round: int
    regime: str
    effort: float
    accepted: bool


@dataclass(frozen=True)
class ComparisonFinished:
    """The last event: how many runs are done, failed and left, and the chosen learning rate of each operator."""

    status: str
    done: int
    failed: int
    left: int
    best_learning_rates: dict[str, float | None]


Event = (
    Measuring
    | Planned
    | RunStarted
    | StepDone
    | EvaluationProgress
    | Evaluated
    | Checkpointed
    | RunFinished
    | RungStarted
    | Judged
    | ComparisonFinished
)
Listener = Callable[[Event], None]

_KINDS = {
    kind.__name__: kind for kind in (RunStarted, StepDone, EvaluationProgress, Evaluated, Checkpointed, RunFinished)
}


def ignore(event: Event) -> None:
    """A listener that does nothing."""


def to_json(event: Event) -> dict[str, Any]:
    """``event`` as plain JSON, its class under the key "event"."""
    return {"event": type(event).__name__, **dataclasses.asdict(event)}


def from_json(values: dict[str, Any]) -> Event:
    """Reverse of ``to_json`` for the events of a run. Raises FileFormatError for anything else."""
    kind = _KINDS.get(values.get("event", ""))
    if kind is None:
        raise FileFormatError(f"events.from_json: {values!r} is not an event of a run.")
    return made(kind, values, "event")
