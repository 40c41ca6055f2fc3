"""What a model is worth by other means than its next token: what a task finds when it examines a finished model, in
means by cell.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from zonal.errors import ArgumentError
from zonal.evaluation.metrics import Predictor, evaluating


class ExaminedBatch(Protocol):
    """values: numbers of each row by name. slices: properties of each row by name, equal in all rows."""

    @property
    def values(self) -> Mapping[str, Sequence[float]]: ...
    @property
    def slices(self) -> Mapping[str, Sequence[int | str]]: ...


class ExaminingTask(Protocol):
    """What is needed of a task here."""

    def examine(self, model: Any, batch_size: int) -> Iterator[Any]: ...


class Marks:
    """Adds up what was found; ``result`` gives means by cell."""

    def __init__(self):
        self._sums: dict[tuple[tuple[str, int | str], ...], dict[str, list[float]]] = {}

    def add(self, found: ExaminedBatch) -> None:
        """Add one batch. Raises: ArgumentError when its rows differ in a slice, or a number is missing for a row."""
        rows = {len(values) for values in (*found.values.values(), *found.slices.values())}
        mixed = [name for name, values in found.slices.items() if len(set(values)) != 1]
        if len(rows) != 1 or mixed:
            raise ArgumentError(
                "examine: one number per row and equal slices in all rows of a batch are required, "
                f"got lists of lengths {sorted(rows)}, mixed: {mixed}."
            )
        sums = self._sums.setdefault(
            tuple((name, values[0]) for name, values in found.slices.items()), defaultdict(lambda: [0.0, 0.0])
        )
        for name, values in found.values.items():
            sums[name][0] += sum(values)
            sums[name][1] += len(values)

    def result(self) -> list[dict[str, Any]]:
        """One object a cell, in the order of first appearance: ``slices``, the means ``values``, and ``examples``."""
        return [
            {
                "slices": dict(key),
                "values": {name: total / count for name, (total, count) in sums.items()},
                "examples": int(next(iter(sums.values()))[1]),
            }
            for key, sums in self._sums.items()
        ]


def examine(model: Predictor, task: ExaminingTask, *, batch_size: int) -> list[dict[str, Any]]:
    """What ``task`` finds of ``model``, one object a cell, see ``Marks.result``; empty for tasks that examine nothing.

    The model runs in evaluation mode on the device of its parameters and is put back into the mode it was in.
    """
    marks = Marks()
    with evaluating(model):
        for found in task.examine(model, batch_size):
            marks.add(found)
    return marks.result()
