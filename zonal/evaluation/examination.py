"""What a model is worth by other means than its next token: what a task finds when it examines a finished model, in
means by cell.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, cast

from zonal.errors import ArgumentError
from zonal.evaluation.metrics import Predictor, cell_of, evaluating
from zonal.tasks.task import Examinee, Task


class Marks:
    """Adds up what was found; ``result`` gives means by cell."""

    def __init__(self):
        self._sums: dict[tuple[tuple[str, int | str], ...], dict[str, list[float]]] = {}

    def add(self, found: tuple[Mapping[str, Sequence[float]], Mapping[str, Sequence[int | str]]]) -> None:
        """Add one batch: numbers of each row by name, and properties of each row by name, equal in all rows.

        Raises: ArgumentError when rows differ in a slice, a number is missing for a row or not finite, or there is
        nothing.
        """
        numbers, slices = found
        rows = {len(values) for values in (*numbers.values(), *slices.values())}
        if len(rows) != 1 or 0 in rows or not numbers:
            raise ArgumentError(
                "examine: one number or more per row and equal slices in all rows of a batch are required, "
                f"got the numbers {list(numbers)} and lists of lengths {sorted(rows)}."
            )
        if odd := [name for name, values in numbers.items() if not all(map(math.isfinite, values))]:
            raise ArgumentError(f"examine: finite numbers are required, received others for {', '.join(odd)}.")
        sums = self._sums.setdefault(cell_of("examine", slices), defaultdict(lambda: [0.0, 0.0]))
        for name, values in numbers.items():
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


def examine(model: Predictor, task: Task, *, batch_size: int) -> list[dict[str, Any]]:
    """What ``task`` finds of ``model``, one object a cell, see ``Marks.result``; empty for tasks that examine nothing.

    The model runs in evaluation mode on the device of its parameters and is put back into the mode it was in.
    """
    marks = Marks()
    with evaluating(model):
        for found in task.examine(cast(Examinee, model), batch_size):
            marks.add(found)
    return marks.result()
