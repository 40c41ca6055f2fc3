"""Multi-query associative recall: key-value pairs, then some of the keys again; the value is to be named after each.

    tokens    k1 v1 k2 v2 · ·  k2 · · ·  k1 ·          keys in [1, V/2), values in [V/2, V), · is 0 or a random token
    targets   -  -  -  -  - -  v2 - - -  v1 -          - is -100

The gap between the pairs and a query is drawn with probability proportional to n^(a-1) for the n-th place, without
replacement within a row. ``multiquery_ar`` gives the same arrays from the same seeds as the function of that name in
zoology (github.com/HazyResearch/zoology), the field's reference. Sources: Arora et al., "Zoology: Measuring and
Improving Recall in Efficient Language Models", ICLR 2024; Arora et al., "Simple linear attention language models
balance the recall-throughput tradeoff" (Based), 2024.
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zonal.data import permuted, shuffled_rows
from zonal.errors import ArgumentError
from zonal.names import known_names
from zonal.tasks.task import IGNORED, TEST, TRAIN, VALIDATION, Batch, Guess, HeldOut, check_batch

_NOISE_ROWS = 8192
_MANY_PAIRS = 64
_GUESSED_ROWS = 4096  # sequences on which a guess is found, and as many on which it is measured


@dataclass(frozen=True)
class Examples:
    """Generated sequences, kept small: tokens (n, T) of uint16 or int32; places and values (n, pairs): where values are
    to be named.
    """

    tokens: np.ndarray
    places: np.ndarray
    values: np.ndarray

    def tensors(self, rows: np.ndarray | slice) -> tuple[Tensor, Tensor]:
        """(tokens, targets) of the rows, int64 (len(rows), T)."""
        tokens = self.tokens[rows].astype(np.int64)
        targets = np.full(tokens.shape, IGNORED, dtype=np.int64)
        np.put_along_axis(targets, self.places[rows].astype(np.int64), self.values[rows].astype(np.int64), axis=1)
        return torch.from_numpy(tokens), torch.from_numpy(targets)


def _check(
    call: str,
    vocab_size: int,
    num_examples: int,
    input_seq_len: int,
    power_a: float,
    num_kv_pairs: int,
    num_passes: int,
) -> None:
    def require(holds: bool, required: str, got: str) -> None:
        if not holds:
            raise ArgumentError(f"{call}: {required} required, got {got}.")

    numbers = (num_examples, num_kv_pairs, num_passes, input_seq_len, vocab_size)
    require(all(isinstance(number, Integral) for number in numbers), "whole numbers are", ", ".join(map(repr, numbers)))
    require(num_examples >= 1, "at least 1 example is", f"{num_examples}")
    require(num_kv_pairs >= 1, "at least 1 key-value pair is", f"{num_kv_pairs}")
    require(num_passes >= 1, "at least 1 pass over the pairs is", f"{num_passes}")
    require(input_seq_len % 2 == 0, "an even length is", f"{input_seq_len}")
    require(
        input_seq_len < vocab_size < 2**31,
        "a vocabulary larger than the length (and below 2^31) is",
        f"vocabulary {vocab_size}, length {input_seq_len}",
    )
    room = 2 * num_kv_pairs * (num_passes + 1)
    require(
        room <= input_seq_len,
        f"{num_kv_pairs} pairs in {num_passes} pass(es) and their queries take {room} tokens; "
        f"a length of {room} or more is",
        f"{input_seq_len}",
    )
    require(math.isfinite(power_a) and power_a != 0, "a finite power_a other than 0 is", f"{power_a}")


def _gap_probabilities(places: int, power_a: float, call: str) -> np.ndarray:
    # the order of these operations decides the last bits, and those decide draws
    with np.errstate(over="ignore", invalid="ignore"):
        p = power_a * np.arange(1, places + 1) ** (float(power_a) - 1)
        p = p / p.sum()
    if not np.isfinite(p).all():
        raise ArgumentError(
            f"{call}: power_a={power_a} gives no finite probabilities over {places} places; use a value nearer to 1."
        )
    return p


def _draw_subsets(stream: np.random.RandomState, rows: int, choices: int, size: int, dtype: type) -> np.ndarray:
    """(rows, size): for each row ``size`` different numbers below ``choices``; row-wise ``stream.choice(choices, size,
    replace=False)``.
    """
    drawn = np.empty((rows, size), dtype=dtype)
    for row in drawn:
        row[:] = stream.permutation(choices)[:size]
    return drawn


def _draw_gaps(stream: np.random.RandomState, rows: int, p: np.ndarray, size: int) -> np.ndarray:
    """(rows, size): row-wise ``stream.choice(len(p), size, replace=False, p=p)``, draw for draw.

    That call draws as many uniforms as numbers are missing, inverts the cumulative distribution of what is left, keeps
    first occurrences, and repeats. Most of its time goes into setting up tiny arrays, so for few pairs the first
    inversion of many rows is done at once and the rest on plain lists.
    """
    if np.count_nonzero(p) < size:
        raise ArgumentError(
            f"multiquery_ar: only {np.count_nonzero(p)} gaps have a probability above 0, {size} were required; "
            "use power_a nearer to 1."
        )
    gaps = np.empty((rows, size), dtype=np.int32)
    if size > _MANY_PAIRS:
        for row in gaps:
            row[:] = stream.choice(len(p), size, replace=False, p=p)
        return gaps

    def distribution(without: list[int]) -> np.ndarray:
        left = p.copy()
        left[without] = 0
        cumulative = np.cumsum(left)
        return cumulative / cumulative[-1]

    whole = distribution([])
    uniforms: list[float] = []
    firsts: list[int] = []
    at = 0

    def ensure(count: int) -> None:
        nonlocal at
        if at + count > len(uniforms):
            more = stream.random_sample(max(8192, count))
            uniforms[:] = uniforms[at:] + more.tolist()
            firsts[:] = firsts[at:] + whole.searchsorted(more, side="right").tolist()
            at = 0

    for row in gaps:
        ensure(size)
        found = list(dict.fromkeys(firsts[at : at + size]))
        at += size
        while (missing := size - len(found)) > 0:
            ensure(missing)
            cumulative = distribution(found).tolist()
            found += dict.fromkeys([bisect_right(cumulative, x) for x in uniforms[at : at + missing]])
            at += missing
        row[:] = found
    return gaps


def generate(
    vocab_size: int, num_examples: int, input_seq_len: int, seed: int, power_a: float = 0.01, num_kv_pairs: int = 8,
    num_passes: int = 1, random_non_queries: bool = True, noise_seed: int | None = None,
) -> Examples:  # fmt: skip
    """As ``multiquery_ar``, in the small form. About 13 µs a row at V = 512 and 100 µs at V = 8192 on one core."""
    _check("multiquery_ar", vocab_size, num_examples, input_seq_len, power_a, num_kv_pairs, num_passes)
    for name, value, limit in (("seed", seed, 2**32), ("noise_seed", 0 if noise_seed is None else noise_seed, 2**63)):
        if not 0 <= value < limit:
            raise ArgumentError(f"multiquery_ar: {name} must lie in [0, 2^{limit.bit_length() - 1}), got {value}.")
    dtype = np.uint16 if vocab_size <= 2**16 else np.int32
    first_value = vocab_size // 2
    context = 2 * num_kv_pairs * num_passes
    p = _gap_probabilities((input_seq_len - context) // 2, power_a, "multiquery_ar")

    # one stream: all keys, then all values, then all gaps
    stream = np.random.RandomState(seed)
    keys = _draw_subsets(stream, num_examples, first_value - 1, num_kv_pairs, dtype) + dtype(1)
    values = _draw_subsets(stream, num_examples, vocab_size - first_value, num_kv_pairs, dtype) + dtype(first_value)
    places = context + 2 * _draw_gaps(stream, num_examples, p, num_kv_pairs)

    tokens = np.zeros((num_examples, input_seq_len), dtype=dtype)
    tokens[:, :context] = np.tile(np.stack([keys, values], axis=2).reshape(num_examples, -1), (1, num_passes))
    np.put_along_axis(tokens, places.astype(np.int64), keys, axis=1)
    if random_non_queries:
        generator = torch.Generator().manual_seed(seed if noise_seed is None else noise_seed)
        for begin in range(0, num_examples, _NOISE_ROWS):
            block = tokens[begin : begin + _NOISE_ROWS]
            noise = torch.randint(vocab_size, size=block.shape, generator=generator).numpy()
            np.copyto(block, noise, where=block == 0, casting="unsafe")
    return Examples(tokens, places.astype(np.uint16 if input_seq_len <= 2**16 else np.int32), values)


def multiquery_ar(
    vocab_size: int, num_examples: int, input_seq_len: int, seed: int, power_a: float = 0.01, num_kv_pairs: int = 8,
    num_passes: int = 1, random_non_queries: bool = True, noise_seed: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(inputs, labels), int64 (num_examples, input_seq_len), bit for bit those of zoology's function from the same
    arguments.

    seed: of a legacy NumPy stream (``RandomState``); NumPy's global state is neither read nor changed.
    random_non_queries: put a uniformly drawn token wherever the input would be 0. It may be 0 again or repeat a key, as
    in zoology.
    noise_seed: of the torch generator those come from; None takes ``seed``. Zoology draws them from torch's global
    generator unseeded: equal arrays need ``torch.manual_seed(noise_seed)`` right before its call.
    num_passes: how often the pairs are shown before the queries, in the same order each time. Zoology fails for more
    than 1; here the stream of keys, values and gaps is read as for 1, and the gaps count from the end of the last pass.
    Raises: ArgumentError when the length is odd or too short for the pairs, the vocabulary is not larger than the
    length, or a number is out of range.
    """
    examples = generate(
        vocab_size, num_examples, input_seq_len, seed, power_a, num_kv_pairs, num_passes, random_non_queries, noise_seed
    )
    return examples.tensors(slice(None))


def segment_seeds(seed: int, train: int, test: int) -> tuple[list[int], list[int]]:
    """The seeds of ``train`` and ``test`` segments that zoology derives from ``seed``: the lower half of 32 bits for
    training, the upper for testing.
    """
    stream = np.random.RandomState(seed)
    lower = stream.randint(0, 2**31, size=train, dtype=np.int64).tolist()
    return lower, stream.randint(2**31, 2**32, size=test, dtype=np.int64).tolist()


@dataclass(frozen=True)
class Segment:
    """Examples of one shape. seed: of its generator, None to derive it from the task's."""

    length: int
    pairs: int
    examples: int
    seed: int | None = None


def _given(segments: Sequence[Segment], derived: Sequence[int]) -> list[int]:
    """The seeds of segments: their own, or those that derive from the task's."""
    return [seed if each.seed is None else each.seed for each, seed in zip(segments, derived, strict=True)]


def _mean(found: Sequence[tuple[float, int]]) -> float:
    """The mean of values with their numbers."""
    return sum(value * count for value, count in found) / sum(count for _, count in found)


@known_names
class MQAR(HeldOut):
    """Recall on fixed sets of training and test sequences, in segments of one length and number of pairs each.

    Either one segment (length, pairs, train_examples, test_examples) or lists of them (train_segments, test_segments).
    A batch never mixes segments. Seeds of segments derive from ``seed`` as in zoology; noise has the segment's own
    seed. A segment is generated when first asked for.
    Order of training: every segment's rows are read in a new pseudo-random order each time around, without a short
    batch at the end of a round; an epoch has ceil(n/B) batches of a segment of n rows, and those of all segments come
    mixed. (Zoology reads its batches in the same order every epoch.) Slices: "pairs" and "length".
    """

    kind, subject, metric = "mqar", "Associative recall", "accuracy"

    def __init__(
        self,
        vocab_size: int = 8192,
        *,
        length: int | None = None,
        pairs: int | None = None,
        train_examples: int | None = None,
        test_examples: int | None = None,
        train_segments: Sequence[Segment] | None = None,
        test_segments: Sequence[Segment] | None = None,
        power_a: float = 0.01,
        passes: int = 1,
        random_non_queries: bool = True,
        seed: int = 123,
        name: str = "mqar",
    ) -> None:
        single = (length, pairs, train_examples, test_examples)
        if train_segments is None and test_segments is None:
            shape = (64 if length is None else length, 4 if pairs is None else pairs)
            train_segments = [Segment(*shape, 100_000 if train_examples is None else train_examples)]
            test_segments = [Segment(*shape, 3_000 if test_examples is None else test_examples)]
        elif any(value is not None for value in single):
            raise ArgumentError(
                "MQAR: give either length, pairs, train_examples and test_examples, or train_segments and "
                "test_segments, not both."
            )
        if not train_segments or not test_segments:
            raise ArgumentError("MQAR: at least one training and one test segment are required.")
        if not 0 <= seed < 2**32:
            raise ArgumentError(f"MQAR: seed must lie in [0, 2^32), got {seed}.")
        for segment in (*train_segments, *test_segments):
            _check("MQAR", vocab_size, segment.examples, segment.length, power_a, segment.pairs, passes)
        self.name, self.vocab_size, self.seed = name, vocab_size, seed
        self.power_a, self.passes, self.random_non_queries = power_a, passes, random_non_queries
        self.train_segments, self.test_segments = tuple(train_segments), tuple(test_segments)
        self.length = max(segment.length for segment in (*self.train_segments, *self.test_segments))
        self.groups = ("filler", "key", "value"), (1, vocab_size // 2)
        tests = len(self.test_segments)
        lower, upper = segment_seeds(seed, len(self.train_segments), 2 * tests)
        self._seeds = {
            TRAIN: _given(self.train_segments, lower),
            TEST: _given(self.test_segments, upper[:tests]),
            VALIDATION: upper[tests:],
        }
        self._generated: dict[tuple[int, int], Examples] = {}

    def examples(self, number: int, use: int) -> Examples:
        """The sequences of a segment for a use, ``TRAIN``, ``TEST`` or ``VALIDATION`` (other sequences of a test
        segment), generated on first use and kept (2 bytes a token up to a vocabulary of 65536).
        """
        if (use, number) not in self._generated:
            segment = (self.train_segments if use == TRAIN else self.test_segments)[number]
            self._generated[use, number] = generate(
                self.vocab_size,
                segment.examples,
                segment.length,
                self._seeds[use][number],
                self.power_a,
                segment.pairs,
                self.passes,
                self.random_non_queries,
            )
        return self._generated[use, number]

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        check_batch("MQAR.train_batch", batch_size, step, seed)
        rounds = [math.ceil(segment.examples / batch_size) for segment in self.train_segments]
        epoch, slot = divmod(step, sum(rounds))
        if len(rounds) > 1:
            slot = int(permuted(np.array([slot]), sum(rounds), (seed, epoch, 0))[0])
        number = 0
        while slot >= rounds[number]:
            slot -= rounds[number]
            number += 1
        segment = self.train_segments[number]
        # the segment's rows as one endless stream, a new order each time around
        stream = (epoch * rounds[number] + slot) * batch_size + np.arange(batch_size)
        rows = shuffled_rows(stream, segment.examples, seed, number + 1)
        return self._batch(segment, *self.examples(number, TRAIN).tensors(rows))

    def tested(self, batch_size: int, use: int) -> Iterator[Batch]:
        for number, segment in enumerate(self.test_segments):
            examples = self.examples(number, use)
            for begin in range(0, segment.examples, batch_size):
                yield self._batch(segment, *examples.tensors(slice(begin, begin + batch_size)))

    def guess(self) -> Guess:
        """At each place the value of the pair that is asked there most often is named, without reading the key, at the
        numbers of pairs that were trained. This is right more often than 1 / pairs: earlier pairs drew their gaps
        first, and so have the shorter ones.
        """
        trained = {segment.pairs for segment in self.train_segments}
        tested = sorted({segment.pairs for segment in self.test_segments})
        both = [pairs for pairs in tested if pairs in trained] or tested
        right = {
            pairs: [(self._by_place(s), s.examples) for s in self.test_segments if s.pairs == pairs] for pairs in both
        }
        if both == tested:
            return Guess(_mean([each for parts in right.values() for each in parts]))
        return Guess(sum(map(_mean, right.values())) / len(both), ("pairs", tuple(map(str, both))))

    def _by_place(self, segment: Segment) -> float:
        """The share that is right where the pair that is asked most often at a place is named there, counted on other
        sequences.
        """
        places = (segment.length - 2 * segment.pairs * self.passes) // 2
        p = _gap_probabilities(places, self.power_a, "MQAR")
        gaps = _draw_gaps(np.random.RandomState(0), 2 * _GUESSED_ROWS, p, segment.pairs)
        pairs = np.arange(segment.pairs)
        asked = np.zeros((places, segment.pairs))
        np.add.at(asked, (gaps[:_GUESSED_ROWS], pairs), 1)
        return float((asked.argmax(1)[gaps[_GUESSED_ROWS:]] == pairs).mean())

    def _batch(self, segment: Segment, tokens: Tensor, targets: Tensor) -> Batch:
        return Batch(
            tokens, targets, {"pairs": [segment.pairs] * len(tokens), "length": [segment.length] * len(tokens)}
        )

    def config(self) -> dict[str, Any]:
        return {
            "task": "mqar", "name": self.name, "vocab_size": self.vocab_size,
            "train_segments": [asdict(segment) for segment in self.train_segments],
            "test_segments": [asdict(segment) for segment in self.test_segments], "power_a": self.power_a,
            "passes": self.passes, "random_non_queries": self.random_non_queries, "seed": self.seed,
        }  # fmt: skip

    def describe(self) -> str:
        shapes = ", ".join(f"{segment.pairs} pairs in {segment.length} tokens" for segment in self.train_segments)
        train, test = (
            sum(segment.examples for segment in segments) for segments in (self.train_segments, self.test_segments)
        )
        fillers = "random fillers" if self.random_non_queries else "blank fillers"
        return (
            f"Multi-query associative recall: {shapes}; vocabulary {self.vocab_size}, {fillers}; "
            f"{train:,} training and {test:,} test sequences."
        )

    def decode(self, tokens: Sequence[int]) -> str:
        """k7 for the key 7, v300 for the value 300, · for 0."""
        words = (
            "·" if token == 0 else f"k{token}" if token < self.vocab_size // 2 else f"v{token}"
            for token in map(int, tokens)
        )
        return " ".join(words)
