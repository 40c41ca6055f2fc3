"""Training on some kinds of retrieval, and measuring on others and at other lengths: mixtures, their curriculum, and
grids.

A mixture is a list of shapes; a curriculum is a list of stages, each a mixture from one step on. All rows of a batch
have one length, since a model reads them together; within it each row draws its shape. Every sequence is a function of
(seed, its number), so any batch is found from its number alone, whatever came before.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from zonal.errors import ArgumentError, unknown_name
from zonal.names import known_names
from zonal.tasks.retrieval import KINDS, Words, check, example
from zonal.tasks.task import Batch, Drawn, Guess, check_batch, stream

# words for the streams that derive from a task's seed, beside those of training and testing
_TRANSFER, _LENGTHS = 2, 3
_TOKENS_AT_ONCE = 16_384
"""Most tokens of a batch of sequences that are longer than those of training."""


@dataclass(frozen=True)
class Shape:
    """Sequences of one kind, with so many pairs and tokens."""

    kind: str
    pairs: int
    length: int


@dataclass(frozen=True)
class Stage:
    """What is trained on from step ``start`` on: each of ``shapes`` equally often."""

    start: int
    shapes: tuple[Shape, ...]


def grid(kinds: Iterable[str], pairs: Iterable[int], lengths: Iterable[int]) -> tuple[Shape, ...]:
    """Every combination whose facts and questions fit into its length."""
    pairs, lengths = tuple(pairs), tuple(lengths)
    return tuple(
        Shape(kind, count, length)
        for kind in kinds
        for count in pairs
        for length in lengths
        if KINDS[kind].size(count) <= length
    )


@known_names
@dataclass(eq=False)
class Retrieval(Drawn[Shape]):
    """Retrieval of facts from noise, of one kind or of several (``zonal.tasks.retrieval``).

    stages: the curriculum, from step 0 on. test_shapes: what is evaluated while training, ``test_examples`` sequences
    of each; None takes the shapes of the last stage. transfer_shapes: what a finished run is also measured on, other
    kinds or other lengths, ``transfer_examples`` of each. seed: of everything here; test and transfer sequences are the
    same for every run. Slices: "task", "pairs" and "length".
    Metric: the share of right answers of a sequence, averaged over sequences; all shapes weigh the same.

    Raises: ArgumentError when a kind is unknown, a shape cannot be made, the stages are not in order, or no
    shape is tested.
    """

    stages: Sequence[Stage]
    _: KW_ONLY
    test_shapes: Sequence[Shape] | None = None
    transfer_shapes: Sequence[Shape] = ()
    vocab_size: int = 128
    test_examples: int = 200
    transfer_examples: int = 50
    seed: int = 0
    name: str = "retrieval"

    kind, subject, metric = "retrieval", "Retrieval", "accuracy"

    def __post_init__(self) -> None:
        self.stages = tuple(self.stages)
        starts = [stage.start for stage in self.stages]
        if starts[:1] != [0] or sorted(set(starts)) != starts or not all(stage.shapes for stage in self.stages):
            raise ArgumentError(
                "Retrieval: stages with shapes are required, the first from step 0 and each later than the one "
                f"before, got starts {starts}."
            )
        if min(self.test_examples, self.transfer_examples) < 1 or self.seed < 0:
            raise ArgumentError(
                "Retrieval: at least 1 example of a shape and a seed of at least 0 are required, got "
                f"test_examples={self.test_examples}, transfer_examples={self.transfer_examples}, seed={self.seed}."
            )
        self.test_shapes = self.stages[-1].shapes if self.test_shapes is None else tuple(self.test_shapes)
        if not self.test_shapes:
            raise ArgumentError(
                "Retrieval: at least one test shape is required, got none. Leave test_shapes out for those of the last "
                "stage."
            )
        self.transfer_shapes = tuple(self.transfer_shapes)
        self.words = words = Words(self.vocab_size)
        self.groups = ("marker", "noise", "key", "value"), (words.noise.start, words.keys.start, words.values.start)
        used = [*(shape for stage in self.stages for shape in stage.shapes), *self.test_shapes]
        for shape in dict.fromkeys((*used, *self.transfer_shapes)):
            if shape.kind not in KINDS:
                raise unknown_name("Retrieval", "kind", shape.kind, KINDS)
            check(shape.kind, shape.pairs, shape.length, words)
        self.length = max(shape.length for shape in used)

    def row(self, cell: Shape, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        return example(cell.kind, cell.pairs, cell.length, self.words, key)

    def slices(self, cell: Shape) -> dict[str, int | str]:
        return {"task": cell.kind, "pairs": cell.pairs, "length": cell.length}

    def training_cells(self, step: int, seed: int, numbers: range) -> list[Shape]:
        shapes = next(stage.shapes for stage in reversed(self.stages) if stage.start <= step)
        # a length is drawn as often as it stands among the shapes
        length = shapes[stream(self.seed, seed, step, _LENGTHS).integers(len(shapes))].length
        fitting = [shape for shape in shapes if shape.length == length]
        return [fitting[stream(self.seed, seed, number, _LENGTHS, 0).integers(len(fitting))] for number in numbers]

    def tested(self, batch_size: int, use: int) -> Iterator[Batch]:
        yield from self._of(self.test_shapes or (), self.test_examples, batch_size, use)

    def transfer_batches(self, batch_size: int) -> Iterator[Batch]:
        check_batch("Retrieval.transfer_batches", batch_size)
        yield from self._of(self.transfer_shapes, self.transfer_examples, batch_size, _TRANSFER)

    def _of(self, shapes: Sequence[Shape], examples: int, batch_size: int, use: int) -> Iterator[Batch]:
        for shape in dict.fromkeys(shapes):
            long = shape.length > self.length
            rows = max(1, min(batch_size, _TOKENS_AT_ONCE // shape.length)) if long else batch_size
            code = zlib.crc32(f"{shape.kind} {shape.pairs} {shape.length}".encode())
            yield from self.fixed([(shape, code)], examples, rows, use)

    def guess(self) -> Guess:
        """The mean guess of the test shapes (see ``Kind``)."""
        shapes = dict.fromkeys(self.test_shapes or ())
        return Guess(sum(KINDS[shape.kind].guess(shape.pairs, self.words) for shape in shapes) / len(shapes))

    def describe(self) -> str:
        last = self.stages[-1].shapes
        steps = f", in {len(self.stages)} stages" if len(self.stages) > 1 else ""
        transfer = f"; then measured on {_named(self.transfer_shapes)}" if self.transfer_shapes else ""
        return (
            f"Retrieval: {_named(last)}{steps}; vocabulary {self.vocab_size}; a guess among the "
            f"answers of a context is right in {self.guess().value:.0%}{transfer}."
        )

    def word(self, token: int) -> str:
        """k3 for the key and v3 for the value with that number, · for noise, markers as they are."""
        return self.words.name(token)


def _named(shapes: Sequence[Shape]) -> str:
    """The kinds, and from which to which number of pairs and tokens."""

    def span(values: list[int], unit: str) -> str:
        low, high = min(values), max(values)
        return f"{low} {unit}" if low == high else f"{low} to {high} {unit}"

    kinds = ", ".join(dict.fromkeys(shape.kind for shape in shapes))
    return (
        f"{kinds} ({span([shape.pairs for shape in shapes], 'pairs')}, "
        f"{span([shape.length for shape in shapes], 'tokens')})"
    )
