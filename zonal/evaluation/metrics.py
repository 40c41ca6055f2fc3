"""Metrics of a language model on the evaluation batches of a task.

* ``loss``: mean cross-entropy in nats over every supervised position of the whole set (not a mean of batch means).
* ``accuracy``: the mean over supervised positions of each example, then the mean over examples. This is the order of
  zoology's MQAR metric: an example with few queries weighs as much as one with many.
* ``bits_per_byte``: loss / (ln 2 · bytes per position), where the task knows how many bytes a position stands for.
* ``slices``: accuracy of the examples that share a property, such as their number of key-value pairs or their length.

Sums are taken in float64 on the CPU, so the numbers do not depend on how many examples a batch holds beyond the
rounding of the model itself.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.tasks.task import Batch, Task


class Predictor(Protocol):
    """A module with ``predict``: (tokens, targets) → predicted ids (N,), target ids (N,), row of each (N,), and the
    cross-entropy of each in nats (N,), for the N supervised positions. piece: tokens read at a time, each piece from
    the memory of those before; it is only given where sequences are to be read in pieces.
    """

    training: bool

    def predict(
        self, tokens: Tensor, targets: Tensor, *, piece: int | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def train(self, mode: bool = True) -> Any: ...


Predict = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
"""The ``predict`` of a ``Predictor``."""


def cell_of(call: str, slices: Mapping[str, Sequence[int | str]]) -> tuple[tuple[str, int | str], ...]:
    """What the rows of a batch have in common. Raises: ArgumentError when they differ in a slice."""
    mixed = [name for name, values in slices.items() if len(set(values)) != 1]
    if mixed:
        raise ArgumentError(f"{call}: all rows of a batch must have the same {', '.join(mixed)}. Give a batch to each.")
    return tuple((name, values[0]) for name, values in slices.items())


class Accumulator:
    """Adds up batches; ``result`` gives the metrics of everything added so far."""

    def __init__(self, bytes_per_token: float | None = None):
        if bytes_per_token is not None and not bytes_per_token > 0:
            raise ArgumentError(f"Accumulator: bytes_per_token must be positive, got {bytes_per_token}.")
        self.bytes_per_token = bytes_per_token
        self.positions = 0
        self.examples = 0
        self._loss = 0.0
        self._accuracy = 0.0
        # property → value → [sum of example accuracies, examples]
        self._slices: dict[str, dict[int | str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0.0]))

    def add(
        self,
        predicted: Tensor,
        target: Tensor,
        row: Tensor,
        loss: Tensor,
        examples: int,
        slices: Mapping[str, Sequence[int | str]],
    ) -> None:
        """Add one batch of ``examples`` rows; the four tensors (N,) hold one entry for each supervised position.

        Rows without a supervised position do not count as examples.
        """
        rows = row.detach().cpu()
        sizes = [tuple(each.shape) for each in (predicted, target, row, loss)]
        if len(set(sizes)) > 1 or len(sizes[0]) != 1:
            raise ArgumentError(
                "Accumulator.add: predicted, target, row and loss must be (N,), one entry a supervised position, "
                f"received {', '.join(map(str, sizes))}."
            )
        if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < examples:
            raise ArgumentError(
                f"Accumulator.add: rows must lie in 0..{examples - 1}, got {int(rows.min())}..{int(rows.max())}."
            )
        correct = (predicted.detach() == target).double().cpu()
        asked = torch.bincount(rows, minlength=examples)
        right = torch.bincount(rows, weights=correct, minlength=examples)
        for name, values in slices.items():
            if len(values) != examples:
                raise ArgumentError(
                    f"Accumulator.add: slice {name!r} needs one value an example ({examples}), got {len(values)}."
                )
            kinds = {type(value) for value in (*values, *self._slices.get(name, ()))}
            if not (kinds <= {int} or kinds <= {str}):
                raise ArgumentError(
                    f"Accumulator.add: values of slice {name!r} must all be of type int or all of type str, got "
                    f"{', '.join(sorted(kind.__name__ for kind in kinds))}. Convert a tensor with .tolist()."
                )
        present = asked > 0
        accuracy = right / asked.clamp_min(1)
        self.positions += int(asked.sum())
        self.examples += int(present.sum())
        self._loss += float(loss.detach().double().sum())
        self._accuracy += float(accuracy[present].sum())
        for name, values in slices.items():
            for value, kept, score in zip(values, present.tolist(), accuracy.tolist(), strict=True):
                if kept:
                    entry = self._slices[name][value]
                    entry[0] += score
                    entry[1] += 1

    def result(self) -> dict[str, Any]:
        """``loss``, ``accuracy``, ``slices``, ``positions``, ``examples`` and, where bytes are known,
        ``bits_per_byte``.
        """
        if not self.positions:
            raise ArgumentError("evaluate: the evaluation batches hold no supervised position (every target is -100).")
        loss = self._loss / self.positions
        result: dict[str, Any] = {"loss": loss, "accuracy": self._accuracy / self.examples}
        if self.bytes_per_token is not None:
            result["bits_per_byte"] = loss / (math.log(2) * self.bytes_per_token)
        result["slices"] = {
            name: {str(value): total / count for value, (total, count) in sorted(values.items())}
            for name, values in self._slices.items()
        }
        result["positions"] = self.positions
        result["examples"] = self.examples
        return result


class Cells:
    """Adds up batches by what their rows have in common, such as task, pairs and length; ``result`` has one entry for
    each such cell.
    """

    def __init__(self):
        self._found: dict[tuple[tuple[str, int | str], ...], Accumulator] = {}

    def of(self, batch: Batch) -> Accumulator:
        """Where ``batch`` belongs. Raises: ArgumentError when its rows differ in a slice."""
        return self._found.setdefault(cell_of("transfer", batch.slices), Accumulator())

    def result(self) -> list[dict[str, Any]]:
        """One flat object a cell, in the order of first appearance: its slices, ``accuracy``, ``loss`` and
        ``examples``. The loss is None where it is not finite, as on sequences far longer than those of training.
        """
        found = []
        for key, total in self._found.items():
            values = total.result()
            loss = values["loss"] if math.isfinite(values["loss"]) else None
            found.append({**dict(key), "accuracy": values["accuracy"], "loss": loss, "examples": values["examples"]})
        return found


def accumulate(
    predict: Predict, batch: Batch, into: Accumulator, device: torch.device, piece: int | None = None
) -> None:
    """Predict one batch on ``device`` and add it to ``into``. piece: sequences that are longer are read so many tokens
    at a time; None reads them whole.
    """
    tokens, targets = batch.tokens.to(device), batch.targets.to(device)
    found = predict(tokens, targets) if piece is None else predict(tokens, targets, piece=piece)
    into.add(*found, tokens.shape[0], batch.slices)


def evaluate_transfer(
    model: Predictor, task: Task, *, batch_size: int, piece: int | None = None
) -> list[dict[str, Any]]:
    """Accuracy of ``model`` on the transfer batches of ``task``: other tasks, other lengths; one object a cell, see
    ``Cells.result``.

    piece: sequences that are longer are read so many tokens at a time from the model's memory, as a decoder would; None
    reads them whole. The model runs in evaluation mode on the device of its parameters and is put back into the mode it
    was in.
    """
    cells = Cells()
    with evaluating(model) as device:
        for batch in task.transfer_batches(batch_size):
            accumulate(model.predict, batch, cells.of(batch), device, piece)
    return cells.result()


@contextmanager
def evaluating(model: Predictor) -> Iterator[torch.device]:
    """The model in evaluation mode without gradients, and the device it is on; afterwards in the mode it was in."""
    was_training = model.training
    model.train(False)
    try:
        with torch.no_grad():
            yield next(model.parameters()).device
    finally:
        model.train(was_training)


def evaluate(model: Predictor, task: Task, *, batch_size: int) -> dict[str, Any]:
    """Metrics of ``model`` over all evaluation batches of ``task``.

    The model runs in evaluation mode on the device of its parameters and is put back into the mode it was in.

    Returns: see ``Accumulator.result``.
    """
    total = Accumulator(task.bytes_per_token)
    with evaluating(model) as device:
        for batch in task.evaluation_batches(batch_size):
            accumulate(model.predict, batch, total, device)
    return total.result()
