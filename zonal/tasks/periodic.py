"""The next value of a signal made of K waves whose frequencies have no common period, told from the values so far.

    x_t = K^(-1/2) sum_k cos(2 pi f_k t + p_k),   f_k and p_k drawn anew for each sequence,   token_t = floor(V (1 + x_t
    / reach) / 2)

with x clipped at its reach, 1 for one wave and 3 standard deviations (2.1) for more. The frequencies are drawn from a
continuous range, so that no two have a common period but by chance of measure zero: the signal never repeats, and what
has been seen must be matched nearly, not exactly.

The answer is in the context: 2 K past values determine the next one (a sum of K cosines obeys a linear recurrence of
order 2 K), up to the rounding of values to tokens. So only places after ``warm_up`` values are asked. A model that
finds the past window most like the present one and names what came after it is kernel regression, with the kernel of
its attention; the windows lie on a torus of K dimensions, of which K grows thin fast.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Self

import numpy as np
import torch

from zonal.errors import ArgumentError
from zonal.tasks.task import IGNORED, Batch, Examined, Examinee, Guess, Task, check_batch, stream

_TRAIN, _TEST, _COUNTS = range(3)
SLOWEST, FASTEST = 0.02, 0.25
"""Frequencies, in waves a token: periods from 4 to 50 tokens."""


class Periodic(Task):
    """Signals of each number of ``frequencies``, in ``vocab_size`` levels and ``length`` tokens, of which the first
    half is not asked.

    test_examples: sequences of each number of frequencies. Slices: "frequencies". ``examine`` measures ``within one
    level``, the share of predictions that are at most one level off. Raises: ArgumentError when a number is out of
    range.
    """

    metric = "accuracy"

    def __init__(
        self,
        frequencies: Sequence[int] = (1, 2, 4, 8),
        *,
        vocab_size: int = 32,
        length: int = 128,
        test_examples: int = 64,
        seed: int = 0,
        name: str = "periodic",
    ) -> None:
        self.frequencies = tuple(frequencies)
        if (
            not self.frequencies
            or min(self.frequencies) < 1
            or vocab_size < 2
            or length < 2
            or test_examples < 1
            or seed < 0
        ):
            raise ArgumentError(
                "Periodic: numbers of frequencies of at least 1, at least 2 levels, 2 tokens and 1 test example, "
                "and a seed of at least 0 are required, got "
                f"frequencies={self.frequencies}, vocab_size={vocab_size}, length={length}, "
                f"test_examples={test_examples}, seed={seed}."
            )
        self.vocab_size, self.length, self.test_examples = vocab_size, length, test_examples
        self.seed, self.name = seed, name
        self.warm_up = length // 2

    def waves(self, count: int, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(frequencies, phases), float64 (count,), of the sequence named by ``key``."""
        chance = stream(*key)
        return chance.uniform(SLOWEST, FASTEST, count), chance.uniform(0, 2 * np.pi, count)

    def levels(self, frequencies: np.ndarray, phases: np.ndarray) -> np.ndarray:
        """(length + 1,) int64: the signal as tokens."""
        count = len(frequencies)
        signal = np.cos(2 * np.pi * np.arange(self.length + 1)[:, None] * frequencies + phases).sum(-1) / np.sqrt(count)
        reach = 1.0 if count == 1 else 3 / np.sqrt(2)
        return np.clip((signal / reach + 1) / 2 * self.vocab_size, 0, self.vocab_size - 1).astype(np.int64)

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        check_batch("Periodic.train_batch", batch_size, step, seed)
        numbers = range(step * batch_size, (step + 1) * batch_size)
        counts = [
            self.frequencies[stream(self.seed, seed, number, _COUNTS).integers(len(self.frequencies))]
            for number in numbers
        ]
        return self._batch(counts, [(self.seed, seed, number, _TRAIN) for number in numbers])

    def evaluation_batches(self, batch_size: int) -> Iterator[Batch]:
        check_batch("Periodic.evaluation_batches", batch_size)
        for count in self.frequencies:
            for begin in range(0, self.test_examples, batch_size):
                numbers = range(begin, min(begin + batch_size, self.test_examples))
                yield self._batch([count] * len(numbers), [(self.seed, count, number, _TEST) for number in numbers])

    def _batch(self, counts: Sequence[int], keys: Sequence[tuple[int, ...]]) -> Batch:
        signals = torch.from_numpy(
            np.stack([self.levels(*self.waves(count, key)) for count, key in zip(counts, keys, strict=True)])
        )
        targets = signals[:, 1:].clone()
        targets[:, : self.warm_up] = IGNORED
        return Batch(signals[:, :-1].contiguous(), targets, {"frequencies": list(counts)})

    def examine(self, model: Examinee, batch_size: int) -> Iterator[Examined]:
        check_batch("Periodic.examine", batch_size)
        device = next(model.parameters()).device
        for batch in self.evaluation_batches(batch_size):
            said = model(batch.tokens.to(device))[:, self.warm_up :].argmax(-1).cpu()
            near = ((said - batch.targets[:, self.warm_up :]).abs() <= 1).double().mean(-1)
            yield Examined({"within one level": near.tolist()}, batch.slices)

    def guess(self) -> Guess:
        """The same level is named everywhere, the one that is right most often."""
        shares = torch.zeros(self.vocab_size, dtype=torch.float64)
        for batch in self.evaluation_batches(self.test_examples):
            shares += torch.bincount(batch.targets[:, self.warm_up :].flatten(), minlength=self.vocab_size)
        return Guess(float(shares.max() / shares.sum()))

    def config(self) -> dict[str, Any]:
        return {
            "task": "periodic", "name": self.name, "frequencies": list(self.frequencies), "vocab_size": self.vocab_size,
            "length": self.length, "test_examples": self.test_examples, "seed": self.seed,
        }  # fmt: skip

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Raises: KeyError or TypeError when ``config`` is not one of ``config()``; ``tasks.from_config`` says so in
        words.
        """
        return cls(
            config["frequencies"], vocab_size=config["vocab_size"], length=config["length"],
            test_examples=config["test_examples"], seed=config["seed"], name=config["name"],
        )  # fmt: skip

    def describe(self) -> str:
        counts = ", ".join(map(str, self.frequencies))
        return (
            f"Periodic signals: the next of {self.vocab_size} levels of a sum of {counts} waves without a common "
            f"period, after {self.warm_up} to {self.length} values."
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """The levels as numbers."""
        return " ".join(map(str, map(int, tokens)))
