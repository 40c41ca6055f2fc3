"""Which of many thousand nouns is it, by half of its definition?

    · · striped feline of forests tiger-like … ?        the synset is to be named at ?

Labels are synsets of WordNet (``zonal.data.wordnet.definitions``), each a token of its own. An example shows each word
of a definition with a chance of one half, in order. Training shows other halves each time that it comes back to a
label; evaluation halves that are always the same. A model must so keep tens of thousands of labels apart by a few words
each: extreme classification, as the literature on many labels calls it (Bhatia et al., *The extreme classification
repository*, 2016).
"""

import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zonal.data import permuted, shuffled_rows
from zonal.data.wordnet import WORDNET, definitions
from zonal.errors import ArgumentError
from zonal.names import known_names
from zonal.tasks.task import IGNORED, TEST, TRAIN, Batch, Guess, HeldOut, check_batch, check_content, stream

SHOWN = 0.5
LEAST, MOST = 8, 40
"""Words that the definition of a label has."""
_EMPTY, _UNKNOWN, _QUESTION = range(3)
_SIGNS = ("·", "◌", "?")


@known_names
class Glosses(HeldOut):
    """The noun that is defined, from half of the words of its definition.

    folder: of WordNet's files. length: tokens of a sequence, words that do not fit are left out at the end. labels:
    how many synsets, drawn from those with definitions of 8 to 40 words. test_examples: labels that are tested, one
    example each. content: SHA-256 that labels and definitions must have, as ``config`` records it. Words of a single
    definition are told apart from others, but not from each other. Metric: the share of labels that are named first.

    Raises: FileFormatError for a file that is missing, damaged or has changed; ArgumentError for sizes that do not fit.
    """

    kind, subject, metric, causal = "glosses", "Extreme classification", "accuracy", False

    def __init__(
        self,
        folder: str | os.PathLike[str] = WORDNET,
        length: int = 24,
        *,
        labels: int = 20_480,
        test_examples: int = 5_000,
        content: str | None = None,
        name: str = "glosses",
    ) -> None:
        self.folder, self.length, self.labels, self.name = os.fspath(Path(folder).absolute()), length, labels, name
        able = [each for each in definitions(folder) if LEAST <= len(each.words) <= MOST]
        if length < 2 or not 2 <= labels <= len(able) or not 1 <= test_examples <= labels:
            raise ArgumentError(
                f"Glosses: a length of at least 2, 2 to {len(able):,} labels and 1 to as many test examples are "
                f"required, got length={length}, labels={labels}, test_examples={test_examples}."
            )
        self.test_examples = test_examples
        chosen = [able[row] for row in permuted(np.arange(labels), len(able), (0,)).tolist()]
        told = "\n".join(f"{each.noun} {' '.join(each.words)}" for each in chosen)
        self.content = hashlib.sha256(told.encode()).hexdigest()
        check_content("Glosses", f"the definitions in {folder} have", self.content, content)
        uses = Counter(word for each in chosen for word in set(each.words))
        self._words = (*_SIGNS, *sorted(word for word, count in uses.items() if count > 1))
        self._nouns = tuple(each.noun for each in chosen)
        tokens = {word: token for token, word in enumerate(self._words)}
        self._glosses = [np.array([tokens.get(word, _UNKNOWN) for word in each.words]) for each in chosen]
        self.vocab_size = len(self._words) + labels
        self.groups = ("sign", "word", "noun"), (len(_SIGNS), len(self._words))

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        check_batch("Glosses.train_batch", batch_size, step, seed)
        numbers = np.arange(step * batch_size, (step + 1) * batch_size)
        rows = shuffled_rows(numbers, self.labels, seed)
        return self._batch(rows, [(seed, number, TRAIN) for number in numbers.tolist()])

    def tested(self, batch_size: int, use: int) -> Iterator[Batch]:
        """For validation as many other labels, or all other; other halves of the same definitions where all labels are
        evaluated.
        """
        first = 0 if use == TEST else self.test_examples % self.labels
        end = min(first + self.test_examples, self.labels)
        for begin in range(first, end, batch_size):
            rows = np.arange(begin, min(begin + batch_size, end))
            yield self._batch(rows, [(0, row, use) for row in rows.tolist()])

    def _batch(self, rows: np.ndarray, keys: Sequence[tuple[int, ...]]) -> Batch:
        tokens = np.full((len(rows), self.length), _EMPTY)
        targets = np.full_like(tokens, IGNORED)
        for place, (row, key) in enumerate(zip(rows.tolist(), keys, strict=True)):
            gloss = self._glosses[row]
            shown = gloss[stream(*key).random(len(gloss)) < SHOWN][: self.length - 1]
            tokens[place, self.length - 1 - len(shown) : -1] = shown
        tokens[:, -1], targets[:, -1] = _QUESTION, rows + len(self._words)
        return Batch(torch.from_numpy(tokens), torch.from_numpy(targets), {})

    def guess(self) -> Guess:
        """Any label."""
        return Guess(1 / self.labels)

    def config(self) -> dict[str, Any]:
        return {
            "task": self.kind, "name": self.name, "folder": self.folder, "length": self.length, "labels": self.labels,
            "test_examples": self.test_examples, "content": self.content,
        }  # fmt: skip

    def describe(self) -> str:
        return (
            f"Extreme classification: which of {self.labels:,} nouns of WordNet, by half of the words of its "
            f"definition; {self.test_examples:,} are tested."
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """· for an empty place, ◌ for a word of one definition only, ? for the question, then words and nouns."""
        names = (*self._words, *self._nouns)
        return " ".join(names[int(token)] for token in tokens)
