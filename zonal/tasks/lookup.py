"""Recall by relation: a context names candidates, each with a label; a question names an entity, and asks the label of
the candidate it is related to.

    c1 a c2 b c3 c c4 d ? e1 ? e2 r1 r2 ? e3 …          candidates c1 … c4, labels a b c d, entities e, relations r

This is associative recall whose keys match by what was learned of them instead of being equal: labels are drawn anew
for each sequence, so nothing can be answered but by finding the candidate that the question belongs to, which is what
the score of query and key decides.

Each question has its own candidate, which is the only one related to its entity, and all candidates of a sequence
belong to a question. So the frequency of a candidate carries no information, and a random label of the context is right
once in as many times as there are candidates. Answers are not written down: they would rule out labels for later
questions, and models learn that instead of relations. A label comes after its candidate, like a value of associative
recall: the short convolution or a layer below puts the candidate into the key there, and no question finds itself.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np

from zonal.errors import ArgumentError
from zonal.names import known_names
from zonal.tasks import relations
from zonal.tasks.relations import Cell, Question, Source
from zonal.tasks.task import IGNORED, TEST, Batch, Drawn, Examined, Examinee, Guess, check_batch, stream

_CONTROL, _CELLS = 2, 3
ASK = 0
LABELS = 8
"""Labels to draw from, per label used in a context. A model can first learn which labels the context holds, and then
which label belongs to which candidate, as with the values of associative recall."""
_TRIES = 200


@known_names
@dataclass(eq=False)
class Lookup(Drawn[Cell]):
    """Questions of ``source`` about ``pairs`` candidates a sequence, ``questions`` of them a sequence, each of another
    candidate.

    test_examples: sequences of each cell of the evaluation. seed: of everything but what the source divides. Slices:
    those of the source, such as "pairs" and "distance". Rows of a training batch draw their cells; those with questions
    of other lengths come in batches of their own. ``examine`` measures, at each question of tests and controls, among
    the labels of the context alone, ``accuracy`` and ``average precision``: one over the place of the right label, most
    likely first (one candidate is right, so this is its mean over questions, MAP).

    Raises: ArgumentError when a number is out of range or no context of so many candidates can be drawn.
    """

    source: Source
    _: KW_ONLY
    pairs: int = 8
    questions: int = 8
    test_examples: int = 100
    seed: int = 0
    name: str = "lookup"

    kind, subject, metric = "lookup", "Recall by relation", "accuracy"

    def __post_init__(self) -> None:
        if self.pairs < 2 or not 1 <= self.questions <= self.pairs or self.test_examples < 1 or self.seed < 0:
            raise ArgumentError(
                "Lookup: at least 2 pairs, from 1 to as many questions, at least 1 test example and a seed of at "
                f"least 0 are required, got pairs={self.pairs}, questions={self.questions}, "
                f"test_examples={self.test_examples}, seed={self.seed}."
            )
        source = self.source
        self._labels = ASK + 1
        self._relations = self._labels + LABELS * self.pairs
        self._entities = self._relations + len(source.relations)
        self.vocab_size = self._entities + source.entities
        self.groups = ("sign", "label", "relation", "entity"), (self._labels, self._relations, self._entities)
        self.training, self.tests, self.controls = (
            self._possible(cells) for cells in (source.training, source.tests, source.controls)
        )
        if not self.training or not self.tests:
            raise ArgumentError(
                f"Lookup: {source.describe()}: no context of {self.pairs} candidates can be drawn from what is "
                f"{'tested' if self.training else 'trained'}. Give fewer pairs, a larger subset or, for hypernyms, "
                f"{'less' if self.training else 'more'} closure."
            )
        self.length = max(self._size(cell) for cell in (*self.training, *self.tests))

    def _possible(self, cells: Sequence[Cell]) -> tuple[Cell, ...]:
        """The cells with enough candidates that are not related to each other's questions."""
        return tuple(cell for cell in cells if self._related(cell, stream(self.seed, _CELLS, cell.size)) is not None)

    def _size(self, cell: Cell) -> int:
        return 2 * self.pairs + self.questions * (2 + self.source.hops(cell))

    def _related(self, cell: Cell, chance: np.random.Generator) -> list[Question] | None:
        """A question for each candidate, such that no other candidate answers it; None when that was not found."""
        found: list[Question] = []
        for _ in range(_TRIES * self.pairs):
            new = self.source.draw(cell, chance)
            if all(new.answer not in old.answers and old.answer not in new.answers for old in found):
                found.append(new)
                if len(found) == self.pairs:
                    return found
        return None

    def row(self, cell: Cell, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets), int64, of the sequence of a cell that is named by ``key``."""
        chance = stream(*key)
        while (asked := self._related(cell, chance)) is None:  # the next draws are others
            pass
        labels = (chance.permutation(LABELS * self.pairs)[: self.pairs] + self._labels).tolist()
        words: list[int] = []
        for place in chance.permutation(self.pairs).tolist():
            words += [self._entities + asked[place].answer, labels[place]]
        targets = [IGNORED] * len(words)
        for question, label in zip(asked[: self.questions], labels, strict=False):  # questions were drawn in any order
            words += [ASK, self._entities + question.entity]
            words += [self._relations + relation for relation in question.relations]
            targets += [IGNORED] * (1 + len(question.relations)) + [label]
        return np.array(words, dtype=np.int64), np.array(targets, dtype=np.int64)

    def slices(self, cell: Cell) -> dict[str, int | str]:
        return dict(zip(self.source.slices, (cell.group, cell.size), strict=True))

    def training_cells(self, step: int, seed: int, numbers: range) -> list[Cell]:
        # a length is drawn as often as it stands among the cells
        hops = self.source.hops(self.training[stream(self.seed, seed, step, _CELLS).integers(len(self.training))])
        fitting = [cell for cell in self.training if self.source.hops(cell) == hops]
        return [fitting[stream(self.seed, seed, number, _CELLS, 0).integers(len(fitting))] for number in numbers]

    def tested(self, batch_size: int, use: int) -> Iterator[Batch]:
        return self._of(self.tests, batch_size, use)

    def _of(self, cells: Sequence[Cell], batch_size: int, use: int) -> Iterator[Batch]:
        return self.fixed([(cell, place) for place, cell in enumerate(cells)], self.test_examples, batch_size, use)

    def examine(self, model: Examinee, batch_size: int) -> Iterator[Examined]:
        check_batch("Lookup.examine", batch_size)
        device = next(model.parameters()).device
        for cells, use in ((self.controls, _CONTROL), (self.tests, TEST)):
            for batch in self._of(cells, batch_size, use):
                asked = batch.targets != IGNORED
                logits = model(batch.tokens.to(device)).float().cpu()
                offered = batch.tokens[:, None, 1 : 2 * self.pairs : 2].expand(-1, logits.shape[1], -1)
                right = logits.gather(-1, batch.targets.clamp_min(0)[..., None])
                # a tie counts against the model
                rank = (logits.gather(-1, offered) >= right).sum(-1).double()
                found = {"accuracy": (rank == 1).double(), "average precision": 1 / rank}
                means = {name: value.masked_fill(~asked, 0).sum(-1) / asked.sum(-1) for name, value in found.items()}
                yield Examined({name: value.tolist() for name, value in means.items()}, batch.slices)

    def config(self) -> dict[str, Any]:
        return {**super().config(), "source": self.source.config()}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        return super().from_config({**config, "source": relations.source(config["source"])})

    def guess(self) -> Guess:
        """Names any label of the context, and the right one where the question is the candidate itself (distance 0),
        which is found by equality. On questions that were trained.
        """
        sizes = [cell.size for cell in (*self.controls, *self.tests) if cell.group == "trained"]
        equal = sizes.count(0) / max(1, len(sizes))
        return Guess(equal + (1 - equal) / self.pairs, (self.source.slices[0], ("trained",)))

    def describe(self) -> str:
        size = self.source.slices[1]
        sizes = sorted({cell.size for cell in self.tests})
        return (
            f"Recall by relation: {self.source.describe()}; {self.questions} questions about {self.pairs} labelled "
            f"candidates, tested at {size} {sizes[0]} to {sizes[-1]}, where a guess among the labels in the context is "
            f"right in {100 / self.pairs:.3g}%."
        )

    def word(self, token: int) -> str:
        """?, #3 for the third label, relations and entities by their names."""
        if token == ASK:
            return "?"
        if token < self._relations:
            return f"#{token - self._labels + 1}"
        if token < self._entities:
            return self.source.relations[token - self._relations]
        return self.source.word(token - self._entities)
