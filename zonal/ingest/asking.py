"""Questions to an archive: the memory proposes spans, their texts decide."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from zonal.errors import ArgumentError
from zonal.ingest import sums
from zonal.ingest.archive import Archive
from zonal.ingest.text import Read, words
from zonal.memory.sums import FeatureSums

CANDIDATES = 256
LEAST = 0.5
# words that say little of what is asked; those of other languages are weighed down where they are frequent
COMMON = frozenset(
    [
        *("a", "about", "an", "and", "any", "are", "as", "at", "be", "been", "but", "by", "can", "could", "did", "do"),
        *("does", "for", "from", "had", "has", "have", "he", "her", "his", "how", "i", "if", "in", "into", "is", "it"),
        *("its", "many", "me", "much", "my", "no", "not", "of", "on", "or", "our", "she", "should", "so", "some"),
        *("that", "the", "their", "them", "then", "there", "these", "they", "this", "those", "to", "was", "we", "were"),
        *("what", "when", "where", "which", "who", "whom", "whose", "why", "will", "with", "would", "you", "your"),
    ]
)


class Answer(NamedTuple):
    """A span that fits a question.

    folder, document: the folder that was read, and the path of the document in it. start, end: its characters. text:
    what they are. fit: the share of the question's words that the span has, each weighed by how few spans have it.
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

    Raises: ArgumentError for a question without words.
    """
    if not 0 < least <= 1 or candidates < 1 or top < 1:
        raise ArgumentError(
            f"ask: least must be above 0 and at most 1, candidates and top at least 1, received {least}, {candidates} "
            f"and {top}."
        )
    asked = list(dict.fromkeys(words(question)))
    if not asked:
        raise ArgumentError(f"ask: the question must have words, received {question!r}.")
    asked = [word for word in asked if word not in COMMON] or asked
    if not archive.memory.count:
        return []
    reads = list(archive.documents().values())
    places, weights = proposed(archive.memory, reads, asked, candidates)
    ends = np.cumsum([len(read.spans) for read in reads])
    found = []
    for place in places:
        document = int(np.searchsorted(ends, place, side="right"))
        read, span = reads[document], place - int(ends[document] - len(reads[document].spans))
        text = read.text(span)
        there = set(words(text))
        fit = sum(weight for word, weight in weights.items() if word in there) / sum(weights.values())
        if fit >= least:
            start, end = (int(x) for x in read.spans[span])
            missing = tuple(word for word in asked if word not in there)
            found.append(Answer(read.root, read.path, start, end, text, fit, missing))
    return sorted(found, key=lambda each: (-each.fit, len(each.text)))[:top]


def proposed(
    memory: FeatureSums, reads: Sequence[Read], asked: list[str], candidates: int
) -> tuple[list[int], dict[str, float]]:
    """The numbers of the spans that the memory takes for the best, and the weights of the words. ``reads``: the
    documents in the memory, at least one span.

    A word weighs log(1 + N / (n + 1/2)), for N spans of which n have its bucket. In the memory its row is divided by n:
    the n values in it are noise to one another, and this weight makes a span with all words stand out the most.
    """
    rows = sums.rows(memory, asked)
    weights = torch.log1p(memory.count / (rows[:, -1] + 0.5))
    value = (rows[:, : sums.CODE] / rows[:, -1:].clamp_min(1)).sum(0)
    estimates = sums.scores(value, sums.identities(reads))
    places = estimates.topk(min(candidates, len(estimates))).indices.tolist()
    return places, dict(zip(asked, weights.tolist(), strict=True))


__all__ = ["CANDIDATES", "COMMON", "LEAST", "Answer", "ask", "proposed"]
