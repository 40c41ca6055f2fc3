"""Questions to an archive: the memory proposes spans, their texts decide."""

import math
import re
from collections.abc import Sequence
from numbers import Integral, Real
from typing import NamedTuple

import numpy as np

from zonal.errors import ArgumentError
from zonal.ingest import sums
from zonal.ingest.archive import Archive
from zonal.ingest.text import Read, bucket, words
from zonal.memory.sums import FeatureSums

CANDIDATES = 256
LEAST = 0.6
READ = 256
"""Spans that are read, at most, to tell in how many a word is."""
# words that say little of what is asked; those of other languages are weighed down where they are frequent
COMMON = frozenset(
    [
        *("a", "about", "an", "and", "any", "are", "as", "at", "be", "been", "but", "by", "can", "could", "did", "do"),
        *("does", "for", "from", "had", "has", "have", "he", "her", "his", "how", "i", "if", "in", "into", "is", "it"),
        *("its", "many", "me", "much", "my", "no", "not", "of", "on", "or", "our", "she", "should", "so", "some"),
        *("that", "the", "their", "them", "then", "there", "these", "they", "this", "those", "to", "was", "we", "were"),
        *("what", "when", "where", "which", "who", "whom", "whose", "why", "will", "with", "would", "you", "your"),
        *("ca", "wo"),  # what is left of "can't" and "won't"
    ]
)
_ENDING = re.compile(r"(?<=\w)(?:n['’]t|['’](?:d|ll|m|re|s|ve))\b", re.IGNORECASE)
"""What English writes with an apostrophe, as in "wasn't" and "who's"."""


class Answer(NamedTuple):
    """A span that fits a question.

    folder, document: the folder that was read, and the path of the document in it. start, end: its characters. text:
    what they are. fit: the share of the question's words that the span has, each weighed by how few spans have it
    (``weighed``).
    missing: the words that it has not.
    """

    folder: str
    document: str
    start: int
    end: int
    text: str
    fit: float
    missing: tuple[str, ...]


def ask(
    archive: Archive, question: str, *, least: float = LEAST, candidates: int = CANDIDATES, top: int = 1
) -> list[Answer]:
    """The spans that fit a question best, the best first; none where no span fits well enough: it is not in memory.

    The memory proposes ``candidates`` spans; they are read from the index, and the words that they share with the
    question decide.

    Args:
        least: the smallest ``Answer.fit`` of an answer. top: so many answers at most.

    Raises: ArgumentError for what is no archive, and for a question without words.
    """
    if not isinstance(archive, Archive):
        raise ArgumentError(
            f"ask: an Archive is required, received {type(archive).__name__}. Read one with Archive.open(folder)."
        )
    numbers = isinstance(least, Real) and isinstance(candidates, Integral) and isinstance(top, Integral)
    if not numbers or not 0 < least <= 1 or candidates < 1 or top < 1:
        raise ArgumentError(
            f"ask: least must be above 0 and at most 1, candidates and top whole numbers of at least 1, received "
            f"{least!r}, {candidates!r} and {top!r}."
        )
    asked = list(dict.fromkeys(words(_ENDING.sub("", question))))
    if not asked:
        raise ArgumentError(f"ask: the question must have words, received {question!r}.")
    asked = [word for word in asked if word not in COMMON] or asked
    if not archive.memory.count:
        return []
    spans = Spans(list(archive.documents().values()))
    weights = weighed(spans, archive.heads * sums.KEY_DIM, asked)
    found = []
    for place in proposed(archive.memory, spans.reads, asked, candidates):
        text = spans.text(place)
        there = set(words(text))
        fit = sum(weight for word, weight in weights.items() if word in there) / sum(weights.values())
        if fit >= least - 1e-9:  # a sum of shares may end below the share that it is
            document, span = spans.place(place)
            read = spans.reads[document]
            start, end = (int(x) for x in read.spans[span])
            missing = tuple(word for word in asked if word not in there)
            found.append(Answer(read.root, read.path, start, end, text, fit, missing))
    return sorted(found, key=lambda each: (-each.fit, len(each.text)))[:top]


class Spans:
    """The spans of documents (at least one), numbered through all of them."""

    def __init__(self, reads: Sequence[Read]) -> None:
        self.reads = reads
        self._ends = np.cumsum([len(read.spans) for read in reads])
        self._decoded: dict[int, str] = {}

    def __len__(self) -> int:
        return int(self._ends[-1])

    def place(self, number: int) -> tuple[int, int]:
        """The number of its document, and its own in there."""
        document = int(np.searchsorted(self._ends, number, side="right"))
        return document, number - int(self._ends[document]) + len(self.reads[document].spans)

    def text(self, number: int) -> str:
        """The text of a span. Each document is decoded once."""
        document, span = self.place(number)
        read = self.reads[document]
        if document not in self._decoded:
            self._decoded[document] = read.data.decode()
        start, end = read.spans[span]
        return self._decoded[document][start:end]


def weighed(spans: Spans, buckets: int, asked: Sequence[str]) -> dict[str, float]:
    """The weight of each word: log(1 + N / (n + 1/2)), for N spans of which n have it. A word that none has weighs as
    if one had it.

    The spans with its bucket are read to tell n, since words that no span has share buckets with others. Of more than
    ``READ`` spans so many are read, at even distances.
    """
    keys = np.concatenate([read.keys for read in spans.reads])
    sizes = np.concatenate([read.sizes for read in spans.reads])
    of = np.repeat(np.arange(len(spans)), sizes)
    weights = {}
    for word in asked:
        places = of[keys == bucket(word, buckets)]
        some = places[np.linspace(0, len(places) - 1, READ).astype(int)] if len(places) > READ else places
        having = sum(word in words(spans.text(int(place))) for place in some) / max(len(some), 1) * len(places)
        weights[word] = math.log1p(len(spans) / (max(having, 1) + 0.5))
    return weights


def proposed(memory: FeatureSums, reads: Sequence[Read], asked: Sequence[str], candidates: int) -> list[int]:
    """The numbers of the spans that the memory takes for the best. ``reads``: the documents in the memory, at least one
    span.

    The row of a word is divided by the number n of spans with its bucket: the n values in it are noise to one another,
    and this weight makes a span with all words stand out the most.
    """
    rows = sums.rows(memory, asked)
    value = (rows[:, : sums.CODE] / rows[:, -1:].clamp_min(1)).sum(0)
    estimates = sums.scores(value, sums.identities(reads))
    return estimates.topk(min(candidates, len(estimates))).indices.tolist()


__all__ = ["CANDIDATES", "COMMON", "LEAST", "Answer", "Spans", "ask", "proposed", "weighed"]
