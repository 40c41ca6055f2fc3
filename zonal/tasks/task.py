"""What a task is to training and reports: batches as a pure function of their number, a fixed evaluation, one headline
metric.
"""

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, Self, TypeVar, get_type_hints

import numpy as np
import torch
from torch import Tensor, nn

from zonal.errors import ArgumentError, FileFormatError
from zonal.typed import made

IGNORED = -100
# the last numbers of the keys of sequences that are trained on, that are tested, and by which rates are chosen; tasks
# have 2 and 3 for streams of their own
TRAIN, TEST, VALIDATION = 0, 1, 4
C = TypeVar("C")


def check_batch(call: str, batch_size: int, step: int = 0, seed: int = 0) -> None:
    """Raises: ArgumentError when batch_size < 1 or step or seed is negative."""
    if batch_size < 1:
        raise ArgumentError(f"{call}: batch_size must be at least 1, got {batch_size}.")
    if step < 0 or seed < 0:
        raise ArgumentError(f"{call}: step and seed must not be negative, got step={step}, seed={seed}.")


def check_content(call: str, what: str, found: str, wanted: str | None) -> None:
    """Raises: FileFormatError when the SHA-256 of what a run reads is not the one wanted, if there is one."""
    if wanted not in (None, found):
        raise FileFormatError(
            f"{call}: {what} changed since the run was started (the SHA-256 differs). Restore the old state or start a "
            "new run."
        )


def stream(*key: int) -> np.random.Generator:
    """Random numbers that are a function of ``key`` alone."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))


class Batch(NamedTuple):
    """tokens, targets: (B, T) int64. A target of -100 is not supervised. slices: a label per example by slice name,
    e.g. {"pairs": [4, 4]}.
    """

    tokens: Tensor
    targets: Tensor
    slices: Mapping[str, Sequence[int | str]]


class Examined(NamedTuple):
    """values: what was found of each row, by name, such as {"exact match": [1.0, 0.0]}. slices: as in ``Batch``, equal
    in all rows.
    """

    values: Mapping[str, Sequence[float]]
    slices: Mapping[str, Sequence[int | str]]


class Guess(NamedTuple):
    """What a model reaches that has not learned the task: ``value`` of the headline number, at or below which (for a
    loss, above) nothing was learned.

    trained: where an evaluation holds more than was trained, the part of it that was, as (slice, its values); None: all
    of it was.
    """

    value: float
    trained: tuple[str, tuple[str, ...]] | None = None


class Examinee(Protocol):
    """What is needed of a model to examine it: logits (B, T, V) of tokens (B, T), and text that it writes by itself."""

    def __call__(self, tokens: Tensor) -> Tensor: ...
    def parameters(self) -> Iterator[nn.Parameter]: ...
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = ...,
        top_k: int | None = ...,
        top_p: float | None = ...,
        stop: Sequence[int | Sequence[int]] = ...,
    ) -> Iterator[Tensor]: ...


class Task(ABC):
    """Something a language model can be trained for and measured on.

    name: as ``tasks.resolve`` knows it. length: the most tokens a sequence has. metric: the headline number, "accuracy"
    (per example over its supervised positions, then over examples) or "loss" (nats per supervised token).
    bytes_per_token: UTF-8 bytes an evaluated target stands for on average, None where tokens are not text; loss / ln 2
    / bytes_per_token is bits per byte. causal: each token sees those before it; False: every token sees the whole
    sequence, so the model is a ``TextEncoder``.
    """

    name: str
    vocab_size: int
    length: int
    metric: Literal["accuracy", "loss"]
    bytes_per_token: float | None = None
    causal: ClassVar[bool] = True
    subject: ClassVar[str] = ""
    """What it is about, before its name in a heading."""
    groups: tuple[tuple[str, ...], tuple[int, ...]] = (("token",), ())
    """Names of groups of tokens, for pictures, and the first token of each group but the first."""

    @abstractmethod
    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        """Batch number ``step`` (from 0) of the order named by ``seed``: a pure function of its arguments, always
        ``batch_size`` rows.

        Raises: ArgumentError when step or seed is negative or batch_size < 1.
        """

    @abstractmethod
    def evaluation_batches(self, batch_size: int) -> Iterator[Batch]:
        """The whole evaluation set, always the same and in the same order; the last batch may be smaller, and lengths
        may change between batches.

        Raises: ArgumentError when batch_size < 1.
        """

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """What learning rates are chosen by: as the evaluation set, of sequences that are drawn apart from it and from
        those of training. By default nothing, and rates are chosen by the evaluation set.

        Raises: ArgumentError when batch_size < 1.
        """
        return iter(())

    def transfer_batches(self, batch_size: int) -> Iterator[Batch]:
        """What a finished run is measured on once more: other tasks, other lengths. All rows of a batch have equal
        slices; by default nothing.

        Raises: ArgumentError when batch_size < 1.
        """
        return iter(())

    def guess(self) -> Guess | None:
        """What a model reaches that has not learned the task; None where nobody has said, and then no model is said to
        be below it.
        """
        return None

    def token_groups(self, tokens: Tensor) -> tuple[tuple[str, ...], Tensor]:
        """What tokens are, to colour them in a picture: names of groups, and the number of each token's group, shaped
        like tokens. By default as ``groups`` says.
        """
        names, starts = self.groups
        return names, torch.bucketize(tokens, torch.tensor(starts, device=tokens.device, dtype=torch.int64), right=True)

    def examine(self, model: Examinee, batch_size: int) -> Iterator[Examined]:
        """What a finished run is measured on by other means than the next token: what it writes, how it ranks. By
        default nothing.

        The caller has put the model into evaluation mode, without gradients. Raises: ArgumentError when batch_size < 1.
        """
        return iter(())

    def measures_end(self) -> bool:
        """Whether a finished run is measured on anything beside the evaluation set."""
        return type(self).examine is not Task.examine or next(iter(self.transfer_batches(1)), None) is not None

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """JSON values from which ``tasks.from_config`` rebuilds this task."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """The task whose ``config()`` this is: its arguments, beside the key "task".

        Raises: KeyError, TypeError or ArgumentError for anything else; ``tasks.from_config`` says so in words.
        """
        hints = get_type_hints(cls.__init__)
        task = cls(**{name: made(hints[name], value, name) for name, value in config.items() if name != "task"})
        if missing := set(task.config()) - set(config):
            raise KeyError(", ".join(sorted(missing)))
        return task

    def heading(self) -> str:
        """The task as a heading: "Associative recall (mqar-demo)"."""
        return f"{self.subject} ({self.name})" if self.subject else self.name

    @abstractmethod
    def describe(self) -> str:
        """One line for a report."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str | None:
        """Tokens as people read them; None when they mean nothing to people."""


class HeldOut(Task):
    """A task with a validation set, which is made like its evaluation set."""

    @abstractmethod
    def tested(self, batch_size: int, use: int) -> Iterator[Batch]:
        """The evaluation set where ``use`` is ``TEST``; where it is ``VALIDATION``, sequences that are not in it, or
        nothing.
        """

    def evaluation_batches(self, batch_size: int) -> Iterator[Batch]:
        check_batch(f"{type(self).__name__}.evaluation_batches", batch_size)
        return self.tested(batch_size, TEST)

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        check_batch(f"{type(self).__name__}.validation_batches", batch_size)
        return self.tested(batch_size, VALIDATION)


class Drawn(HeldOut, Generic[C]):
    """A task whose sequences are drawn: each is a function of its cell, which says what it is like, and of its key.

    A subclass is a dataclass. Its fields are its settings, in JSON as ``config`` has them, with ``seed`` and ``name``.
    """

    kind: ClassVar[str]
    seed: int

    @abstractmethod
    def row(self, cell: C, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets), int64 (T,), of the sequence of a cell that is named by ``key``."""

    @abstractmethod
    def slices(self, cell: C) -> Mapping[str, int | str]:
        """The labels of the examples of a cell, by slice."""

    @abstractmethod
    def training_cells(self, step: int, seed: int, numbers: range) -> list[C]:
        """The cells of a training batch, whose sequences are those with these numbers. All have one length."""

    @abstractmethod
    def word(self, token: int) -> str:
        """A token as people read it."""

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        check_batch(f"{type(self).__name__}.train_batch", batch_size, step, seed)
        numbers = range(step * batch_size, (step + 1) * batch_size)
        cells = self.training_cells(step, seed, numbers)
        return self._batch(cells, [(self.seed, seed, number, TRAIN) for number in numbers])

    def fixed(self, cells: Sequence[tuple[C, int]], examples: int, batch_size: int, use: int) -> Iterator[Batch]:
        """Batches of ``examples`` sequences of each cell, which are the same for every run. cells: with the numbers
        that stand for them in keys.
        """
        for cell, code in cells:
            for begin in range(0, examples, batch_size):
                numbers = range(begin, min(begin + batch_size, examples))
                yield self._batch([cell] * len(numbers), [(self.seed, code, number, use) for number in numbers])

    def _batch(self, cells: Sequence[C], keys: Sequence[tuple[int, ...]]) -> Batch:
        drawn = [self.row(cell, key) for cell, key in zip(cells, keys, strict=True)]
        tokens, targets = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*drawn, strict=True))
        slices = [self.slices(cell) for cell in cells]
        return Batch(tokens, targets, {name: [each[name] for each in slices] for name in slices[0]})

    def config(self) -> dict[str, Any]:
        names = ["name", *(field.name for field in dataclasses.fields(self) if field.name != "name")]  # type: ignore
        return {"task": self.kind, **{name: _plain(getattr(self, name)) for name in names}}

    def decode(self, tokens: Sequence[int]) -> str:
        return " ".join(self.word(int(token)) for token in tokens)


def _plain(value: Any) -> Any:
    """A setting as JSON."""
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value
