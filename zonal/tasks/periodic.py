"""The next value of a signal made of K waves whose frequencies have no common period, told from the values so far.

    x_t = K^(-1/2) sum_k cos(2 pi f_k t + p_k),   f_k and p_k drawn anew for each sequence,   token_t = floor(V (1 + x_t
    / reach) / 2)

with x clipped at its reach, 1 for one wave and 3 standard deviations (2.1) for more. The frequencies are drawn from a
continuous range, so that no two have a common period but by chance of measure zero: the signal never repeats, and what
has been seen must be matched nearly, not exactly.

The answer is in the context: 2 K past values determine the next one (a sum of K cosines obeys a linear recurrence of
order 2 K), up to the rounding of values to tokens. So only places after more than ``warm_up`` values are asked. A
model that finds the past window most like the present one and names what came after it is kernel regression, with the
kernel of its attention; the windows lie on a torus of K dimensions, of which K grows thin fast.
"""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from zonal.errors import ArgumentError
from zonal.names import known_names
from zonal.tasks.task import IGNORED, Batch, Drawn, Examined, Examinee, Guess, check_batch, stream

_COUNTS = 2
SLOWEST, FASTEST = 0.02, 0.25
"""Frequencies, in waves a token: periods from 4 to 50 tokens."""


@known_names
@dataclass(eq=False)
class Periodic(Drawn[int]):
    """Signals of each number of ``frequencies``, in ``vocab_size`` levels and ``length`` tokens, of which the first
    half is not asked.

    test_examples: sequences of each number of frequencies. Slices: "frequencies". ``examine`` measures ``within one
    level``, the share of predictions that are at most one level off. Raises: ArgumentError when a number is out of
    range.
    """

    frequencies: Sequence[int] = (1, 2, 4, 8)
    _: KW_ONLY
    vocab_size: int = 32
    length: int = 128
    test_examples: int = 64
    seed: int = 0
    name: str = "periodic"

    kind, subject, metric = "periodic", "Signals", "accuracy"

    def __post_init__(self) -> None:
        self.frequencies = tuple(self.frequencies)
        least = {"vocab_size": 2, "length": 2, "test_examples": 1, "seed": 0}
        low = any(getattr(self, name) < limit for name, limit in least.items())
        if low or not self.frequencies or min(self.frequencies) < 1:
            raise ArgumentError(
                "Periodic: numbers of frequencies of at least 1, at least 2 levels, 2 tokens and 1 test example, "
                f"and a seed of at least 0 are required, got {self}."
            )
        self.warm_up = self.length // 2
        if self.warm_up + 1 < 2 * max(self.frequencies):
            raise ArgumentError(
                f"Periodic: {max(self.frequencies)} frequencies are determined by {2 * max(self.frequencies)} values, "
                f"but the first question of {self.length} tokens comes after {self.warm_up + 1}. Give a length of at "
                f"least {4 * max(self.frequencies) - 2}, or fewer frequencies."
            )

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

    def row(self, cell: int, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        signal = self.levels(*self.waves(cell, key))
        targets = signal[1:].copy()
        targets[: self.warm_up] = IGNORED
        return signal[:-1], targets

    def slices(self, cell: int) -> dict[str, int]:
        return {"frequencies": cell}

    def training_cells(self, step: int, seed: int, numbers: range) -> list[int]:
        chosen = [stream(self.seed, seed, number, _COUNTS).integers(len(self.frequencies)) for number in numbers]
        return [self.frequencies[int(place)] for place in chosen]

    def tested(self, batch_size: int, use: int) -> Iterator[Batch]:
        cells = [(count, count) for count in dict.fromkeys(self.frequencies)]
        return self.fixed(cells, self.test_examples, batch_size, use)

    def examine(self, model: Examinee, batch_size: int) -> Iterator[Examined]:
        check_batch("Periodic.examine", batch_size)
        device = next(model.parameters()).device
        for batch in self.evaluation_batches(batch_size):
            said = model(batch.tokens.to(device))[:, self.warm_up :].argmax(-1).cpu()
            near = ((said - batch.targets[:, self.warm_up :]).abs() <= 1).double().mean(-1)
            yield Examined({"within one level": near.tolist()}, batch.slices)

    def guess(self) -> Guess:
        """The better of naming one level everywhere, the one that is right most often, and naming the last again."""
        batches = list(self.evaluation_batches(self.test_examples))
        asked = torch.cat([batch.targets[:, self.warm_up :].flatten() for batch in batches])
        last = torch.cat([batch.tokens[:, self.warm_up :].flatten() for batch in batches])
        right = torch.stack([asked.bincount().max(), (asked == last).sum()])
        return Guess(float(right.max() / len(asked)))

    def describe(self) -> str:
        counts = ", ".join(map(str, self.frequencies))
        return (
            f"Periodic signals: the next of {self.vocab_size} levels of a sum of {counts} waves without a common "
            f"period, after {self.warm_up + 1} to {self.length} values."
        )

    def word(self, token: int) -> str:
        """The number of the level."""
        return str(token)
