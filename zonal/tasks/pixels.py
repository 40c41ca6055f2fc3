"""Pictures as sequences of grey levels, row by row, with a question at the end: which class is it?

    g1 g2 g3 … gn ?        the class is to be named at ?

Each level is the mean of a square of pixels, in steps of 256 / levels. Pictures and labels are those of Fashion-MNIST
or of files laid out as its (``zonal.data.images``): 60,000 to train on and 10,000 to test. Reading images as sequences
of grey levels follows the image task of Tay et al., "Long Range Arena", ICLR 2021; that one has other pictures.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.data import shuffled_rows
from zonal.data.images import FASHION_CLASSES, FASHION_MNIST, Images, fashion_mnist
from zonal.errors import ArgumentError, FileFormatError
from zonal.names import known_names
from zonal.tasks.task import IGNORED, TEST, Batch, Guess, HeldOut, check_batch, check_content


@known_names
class Pixels(HeldOut):
    """Which of ten classes a picture belongs to.

    folder: of the files. side: squares a row, a divisor of the height of the pictures; a sequence has side² + 1 tokens.
    levels: grey levels. test_examples: the first so many test pictures. content: SHA-256 that the sequences must have,
    as ``config`` records it. Metric: the share of right classes. Slices: "class".

    Raises: FileFormatError for files that are missing, damaged or have changed; ArgumentError for sizes that do not
    fit.
    """

    kind, subject, metric, causal = "pixels", "Pictures", "accuracy", False

    def __init__(
        self,
        folder: str | os.PathLike[str] = FASHION_MNIST,
        side: int = 14,
        *,
        levels: int = 16,
        test_examples: int = 10_000,
        content: str | None = None,
        name: str = "fashion-pixels",
    ) -> None:
        self.folder, self.side, self.levels, self.name = os.fspath(Path(folder).absolute()), side, levels, name
        learnt, tested = fashion_mnist(folder)
        height, width = learnt.pixels.shape[1:]
        if height != width or side < 1 or height % side or not 2 <= levels <= 256 or test_examples < 1:
            raise ArgumentError(
                f"Pixels: square pictures, a side that divides their height, 2 to 256 levels and at least 1 test "
                f"example are required, got pictures of {height} x {width}, side={side}, levels={levels}, "
                f"test_examples={test_examples}."
            )
        self.length, self.vocab_size = side * side + 1, levels + 1 + len(FASHION_CLASSES)
        self.groups = ("level", "question", "class"), (levels, levels + 1)
        self.test_examples = min(test_examples, len(tested))
        self._train, self._test = self._sequences(learnt), self._sequences(tested)
        found = hashlib.sha256()
        for part in (*self._train, *self._test):
            found.update(part.numpy().tobytes())
        self.content = found.hexdigest()
        check_content("Pixels", f"the pictures in {folder} have", self.content, content)

    def _sequences(self, images: Images) -> tuple[Tensor, Tensor]:
        """(n, side²) uint8 levels, and (n,) classes."""
        if int(images.labels.max()) >= len(FASHION_CLASSES):
            raise FileFormatError(
                f"Pixels: labels must be below {len(FASHION_CLASSES)}, {self.folder} has {int(images.labels.max())}."
            )
        size = images.pixels.shape[-1] // self.side
        # in pieces: float32 of all pictures at once would take four times their bytes
        parts = [
            (F.avg_pool2d(part[:, None].float(), size) * self.levels / 256).to(torch.uint8).flatten(1)
            for part in images.pixels.split(4096)
        ]
        return torch.cat(parts), images.labels

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        check_batch("Pixels.train_batch", batch_size, step, seed)
        rows = shuffled_rows(step * batch_size + np.arange(batch_size), len(self._train[0]), seed)
        return self._batch(self._train, torch.from_numpy(rows))

    def tested(self, batch_size: int, use: int) -> Iterator[Batch]:
        """For validation as many of the other test pictures, or all; none where all are evaluated."""
        first = 0 if use == TEST else self.test_examples
        end = min(first + self.test_examples, len(self._test[0]))
        for begin in range(first, end, batch_size):
            yield self._batch(self._test, torch.arange(begin, min(begin + batch_size, end)))

    def _batch(self, part: tuple[Tensor, Tensor], rows: Tensor) -> Batch:
        tokens = F.pad(part[0][rows].long(), (0, 1), value=self.levels)
        labels = part[1][rows]
        targets = torch.full_like(tokens, IGNORED)
        targets[:, -1] = labels + self.levels + 1
        return Batch(tokens, targets, {"class": [FASHION_CLASSES[label] for label in labels.tolist()]})

    def guess(self) -> Guess:
        """Always the class that is tested most often."""
        counts = self._test[1][: self.test_examples].bincount()
        return Guess(float(counts.max() / counts.sum()))

    def config(self) -> dict[str, Any]:
        return {
            "task": self.kind, "name": self.name, "folder": self.folder, "side": self.side, "levels": self.levels,
            "test_examples": self.test_examples, "content": self.content,
        }  # fmt: skip

    def describe(self) -> str:
        return (
            f"Pictures of {self.side} x {self.side} grey levels ({self.levels} of them), {len(self._train[0]):,} to "
            f"train on, {self.test_examples:,} to test: one of {len(FASHION_CLASSES)} classes."
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """Levels as numbers, ? for the question, classes in words."""
        names = [*map(str, range(self.levels)), "?", *FASHION_CLASSES]
        return " ".join(names[int(token)] for token in tokens)
