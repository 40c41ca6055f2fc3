"""A row of the summary: one operator over its seeds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zonal.evaluation.statistics import Spread, spread
from zonal.report.records import Run


@dataclass(frozen=True)
class Row:
    """One operator at its chosen learning rate. learned: whether the headline number on what was trained is better than
    a guess, None where that is unknown.
    """

    operator: str
    label: str
    learning_rate: float | None
    runs: tuple[Run, ...]
    planned: int
    failed: int
    loss: Spread | None
    accuracy: Spread | None
    bits_per_byte: Spread | None
    seconds: Spread | None
    tokens_per_second: Spread | None
    peak_memory_bytes: Spread | None
    parameters: int | None
    memory_bytes: Mapping[int, int]
    slices: Mapping[str, Mapping[str, Spread]]
    sweep: Mapping[float, Spread]
    best: frozenset[str]
    speed_ratio: float | None
    learned: bool | None

    def value(self, metric: str) -> Spread | None:
        """The column called ``metric``: "loss", "accuracy" or "bits_per_byte"."""
        return {"loss": self.loss, "accuracy": self.accuracy, "bits_per_byte": self.bits_per_byte}[metric]


def spread_if_any(values: Sequence[float]) -> Spread | None:
    """The mean and spread of one number over seeds; None where no seed has it."""
    return spread(values) if values else None
