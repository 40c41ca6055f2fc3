"""Training on some kinds of retrieval, and measuring on others and at other lengths: mixtures, their curriculum, and
grids.

A mixture is a list of shapes; a curriculum is a list of stages, each a mixture from one step on. All rows of a batch
have one length, since a model reads them together; within it each row draws its shape. Every sequence is a function of
(seed, its number), so any batch is found from its number alone, whatever came before.
"""

import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from zonal.errors import ArgumentError, unknown_name
from zonal.tasks.retrieval import KINDS, Words, check, example
from zonal.tasks.task import Batch, Guess, Task, check_batch, stream

# words for the streams that derive from a task's seed
_TRAIN, _TEST, _TRANSFER, _LENGTHS = range(4)
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


class Retrieval(Task):
    """Retrieval of facts from noise, of one kind or of several (``zonal.tasks.retrieval``).

    stages: the curriculum, from step 0 on. test_shapes: what is evaluated while training, ``test_examples`` sequences
    of each; None takes the shapes of the last stage. transfer_shapes: what a finished run is also measured on, other
    kinds or other lengths, ``transfer_examples`` of each. seed: of everything here; test and transfer sequences are the
    same for every run. Slices: "task", "pairs" and "length".
    Metric: the share of right answers of a sequence, averaged over sequences; all shapes weigh the same.

    Raises: ArgumentError when a kind is unknown, a shape cannot be made, or the stages are not in order.
    """

    metric = "accuracy"

    def __init__(
        self,
        stages: Sequence[Stage],
        *,
        test_shapes: Sequence[Shape] | None = None,
        transfer_shapes: Sequence[Shape] = (),
        vocab_size: int = 128,
        test_examples: int = 200,
        transfer_examples: int = 50,
        seed: int = 0,
        name: str = "retrieval",
    ) -> None:
        self.stages = tuple(stages)
        starts = [stage.start for stage in self.stages]
        if (
            not starts
            or starts[0] != 0
            or sorted(set(starts)) != starts
            or not all(stage.shapes for stage in self.stages)
        ):
            raise ArgumentError(
                "Retrieval: stages with shapes are required, the first from step 0 and each later than the one "
                f"before, got starts {starts}."
            )
        if min(test_examples, transfer_examples) < 1 or seed < 0:
            raise ArgumentError(
                "Retrieval: at least 1 example of a shape and a seed of at least 0 are required, "
                f"got test_examples={test_examples}, "
                f"transfer_examples={transfer_examples}, seed={seed}."
            )
        self.name, self.vocab_size, self.seed = name, vocab_size, seed
        self.test_examples, self.transfer_examples = test_examples, transfer_examples
        self.test_shapes = self.stages[-1].shapes if test_shapes is None else tuple(test_shapes)
        self.transfer_shapes = tuple(transfer_shapes)
        self.words = Words(vocab_size)
        trained = [shape for stage in self.stages for shape in stage.shapes]
        for shape in dict.fromkeys((*trained, *self.test_shapes, *self.transfer_shapes)):
            if shape.kind not in KINDS:
                raise unknown_name("Retrieval", "kind", shape.kind, KINDS)
            check(shape.kind, shape.pairs, shape.length, self.words)
        self.length = max(shape.length for shape in (*trained, *self.test_shapes))

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        check_batch("Retrieval.train_batch", batch_size, step, seed)
        shapes = next(stage.shapes for stage in reversed(self.stages) if stage.start <= step)
        # a length is drawn as often as it stands among the shapes
        length = shapes[stream(self.seed, seed, step, _LENGTHS).integers(len(shapes))].length
        fitting = [shape for shape in shapes if shape.length == length]
        numbers = range(step * batch_size, (step + 1) * batch_size)
        chosen = [fitting[stream(self.seed, seed, number, _LENGTHS, 0).integers(len(fitting))] for number in numbers]
        return self._batch(chosen, [(self.seed, seed, number, _TRAIN) for number in numbers])

    def evaluation_batches(self, batch_size: int) -> Iterator[Batch]:
        check_batch("Retrieval.evaluation_batches", batch_size)
        yield from self._fixed(self.test_shapes, self.test_examples, batch_size, _TEST)

    def transfer_batches(self, batch_size: int) -> Iterator[Batch]:
        check_batch("Retrieval.transfer_batches", batch_size)
        yield from self._fixed(self.transfer_shapes, self.transfer_examples, batch_size, _TRANSFER)

    def _fixed(self, shapes: Sequence[Shape], examples: int, batch_size: int, use: int) -> Iterator[Batch]:
        for shape in shapes:
            rows = (
                batch_size if shape.length <= self.length else max(1, min(batch_size, _TOKENS_AT_ONCE // shape.length))
            )
            name = zlib.crc32(f"{shape.kind} {shape.pairs} {shape.length}".encode())
            for begin in range(0, examples, rows):
                numbers = range(begin, min(begin + rows, examples))
                yield self._batch([shape] * len(numbers), [(self.seed, name, number, use) for number in numbers])

    def _batch(self, shapes: Sequence[Shape], keys: Sequence[tuple[int, ...]]) -> Batch:
        drawn = [
            example(shape.kind, shape.pairs, shape.length, self.words, key)
            for shape, key in zip(shapes, keys, strict=True)
        ]
        tokens, targets = (torch.from_numpy(np.stack(arrays)) for arrays in zip(*drawn, strict=True))
        slices = {
            "task": [shape.kind for shape in shapes],
            "pairs": [shape.pairs for shape in shapes],
            "length": [shape.length for shape in shapes],
        }
        return Batch(tokens, targets, slices)

    def config(self) -> dict[str, Any]:
        return {
            "task": "retrieval", "name": self.name, "vocab_size": self.vocab_size,
            "stages": [asdict(stage) for stage in self.stages],
            "test_shapes": [asdict(shape) for shape in self.test_shapes],
            "transfer_shapes": [asdict(shape) for shape in self.transfer_shapes], "test_examples": self.test_examples,
            "transfer_examples": self.transfer_examples, "seed": self.seed,
        }  # fmt: skip

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Self:
        """Raises: KeyError or TypeError when ``config`` is not one of ``config()``; ``tasks.from_config`` says so in
        words.
        """

        def shapes(values: list[dict[str, Any]]) -> tuple[Shape, ...]:
            return tuple(Shape(**value) for value in values)

        return cls(
            [Stage(stage["start"], shapes(stage["shapes"])) for stage in config["stages"]],
            test_shapes=shapes(config["test_shapes"]),
            transfer_shapes=shapes(config["transfer_shapes"]),
            vocab_size=config["vocab_size"],
            test_examples=config["test_examples"],
            transfer_examples=config["transfer_examples"],
            seed=config["seed"],
            name=config["name"],
        )

    def guess(self) -> Guess:
        """Any of the answers that a context offers is named, on the test shapes."""
        return Guess(sum(KINDS[shape.kind].guess(shape.pairs) for shape in self.test_shapes) / len(self.test_shapes))

    def describe(self) -> str:
        last = self.stages[-1].shapes
        steps = f", in {len(self.stages)} stages" if len(self.stages) > 1 else ""
        transfer = f"; then measured on {_named(self.transfer_shapes)}" if self.transfer_shapes else ""
        return (
            f"Retrieval: {_named(last)}{steps}; vocabulary {self.vocab_size}; a guess among the answers in the context "
            f"is right in {self.guess().value:.0%}{transfer}."
        )

    def token_groups(self, tokens: Tensor) -> tuple[tuple[str, ...], Tensor]:
        starts = torch.tensor(
            [self.words.noise.start, self.words.keys.start, self.words.values.start],
            device=tokens.device,
            dtype=torch.int64,
        )
        return ("marker", "noise", "key", "value"), torch.bucketize(tokens, starts, right=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """k3 for the key and v3 for the value with that number, · for noise, markers as they are."""
        return " ".join(self.words.name(token) for token in map(int, tokens))


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
