"""What a task is to training and reports: batches as a pure function of their number, a fixed evaluation, one headline
metric.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from zonal.errors import ArgumentError

IGNORED = -100


def check_batch(call: str, batch_size: int, step: int = 0, seed: int = 0) -> None:
    """Raises: ArgumentError when batch_size < 1 or step or seed is negative."""
    if batch_size < 1:
        raise ArgumentError(f"{call}: batch_size must be at least 1, got {batch_size}.")
    if step < 0 or seed < 0:
        raise ArgumentError(f"{call}: step and seed must not be negative, got step={step}, seed={seed}.")


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
    """Something a causal language model can be trained for and measured on.

    name: as ``tasks.resolve`` knows it. length: the most tokens a sequence has. metric: the headline number, "accuracy"
    (per example over its supervised positions, then over examples) or "loss" (nats per supervised token).
    bytes_per_token: UTF-8 bytes an evaluated target stands for on average, None where tokens are not text; loss / ln 2
    / bytes_per_token is bits per byte.
    """

    name: str
    vocab_size: int
    length: int
    metric: Literal["accuracy", "loss"]
    bytes_per_token: float | None = None

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
        like tokens. By default one group.
        """
        return ("token",), torch.zeros_like(tokens)

    def examine(self, model: Examinee, batch_size: int) -> Iterator[Examined]:
        """What a finished run is measured on by other means than the next token: what it writes, how it ranks. By
        default nothing.

        The caller has put the model into evaluation mode, without gradients. Raises: ArgumentError when batch_size < 1.
        """
        return iter(())

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """JSON values from which ``tasks.from_config`` rebuilds this task."""

    @abstractmethod
    def describe(self) -> str:
        """One line for a report."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str | None:
        """Tokens as people read them; None when they mean nothing to people."""
