"""Language modelling of text: predict each token from those before it, on any UTF-8 source.

The token stream is split once: validation is its last part, training all before it, and no token is in both. The split
is set in bytes of text, at the first token that begins after (1 - validation_fraction) of them, so that every tokeniser
is validated on the same text. Training reads windows of ``length`` + 1 tokens (inputs and targets overlap by all but
one), which never reach into the validation part; evaluation reads windows of the validation part without overlap.
"""

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zonal.data import cached_corpus, is_corpus, open_corpus, open_source, permuted, tokenizers
from zonal.data.shards import Corpus
from zonal.data.tokenizers import Tokenizer
from zonal.errors import ArgumentError, FileFormatError
from zonal.names import known_names
from zonal.tasks.task import TEST, Batch, Guess, HeldOut, check_batch, check_content

_BLOCK = 1 << 20
_COUNTED = 1 << 24
# words for the parts of the key that derive a window's phase and an epoch's order
_PHASE, _ORDER = 0, 1


def _spread(count: int, available: int) -> np.ndarray:
    """``count`` of the numbers below ``available``, evenly spaced."""
    return np.arange(count) * available // max(1, count)


def _split(corpus: Corpus, token_bytes: np.ndarray, validation_fraction: float) -> int:
    """The index of the first validation token, read from the end so that a large training part is not touched."""
    left = int(corpus.bytes * validation_fraction)
    stop = corpus.count
    while stop:
        start = max(0, stop - _BLOCK)
        # bytes from each token of the block to the block's end
        tail = np.cumsum(token_bytes[corpus.read(start, stop)][::-1])
        if tail[-1] > left:
            return stop - int(np.searchsorted(tail, left, side="right"))
        left -= int(tail[-1])
        stop = start
    return 0


@known_names
class Text(HeldOut):
    """Language modelling of ``source``: "novel", a UTF-8 file, a folder, a pattern, a pre-tokenised corpus, or "hub:…"
    (``zonal.data.open_source``).

    tokenizer: "byte", "gpt2" or the path of a tokenizer.json; None takes the corpus's own, or "byte" for text.
    length: tokens of a sequence. validation_fraction: of the bytes, in (0, 1). evaluation_bytes: evaluate on about
    so many bytes of the validation part, in windows that are spread evenly over it (at least one); None takes all
    of it. max_bytes: read only so much of the source. train_fraction: learn from so much of the training part, in
    bytes from its start, in (0, 1]; the validation part stays the same. content: SHA-256 that the prepared tokens
    must have, as ``config`` records it, so that a run is never resumed on a text that has changed;
    tokenizer_sha256: the same of a tokenizer.json.

    Order of training: an epoch cuts the training part into windows that do not overlap, from a phase drawn for the
    epoch, and visits them in a pseudo-random order; both are functions of (seed, epoch), so any batch is found from its
    number.
    Raises: FileFormatError when the source is missing, empty, binary or too short; ArgumentError when a number is out
    of range.
    """

    kind, subject, metric = "text", "Language modelling", "loss"
    marks = 0
    """How many tokens the task has beside those of the text."""

    def __init__(
        self,
        source: str | os.PathLike[str] = "novel",
        tokenizer: str | None = None,
        length: int = 256,
        *,
        validation_fraction: float = 0.1,
        evaluation_bytes: int | None = 65_536,
        max_bytes: int | None = None,
        train_fraction: float = 1.0,
        content: str | None = None,
        tokenizer_sha256: str | None = None,
        name: str = "text",
    ) -> None:
        if length < 1:
            raise ArgumentError(f"Text: length must be at least 1, got {length}.")
        if not 0 < validation_fraction < 1:
            raise ArgumentError(f"Text: validation_fraction must lie between 0 and 1, got {validation_fraction}.")
        if evaluation_bytes is not None and evaluation_bytes < 1:
            raise ArgumentError(f"Text: evaluation_bytes must be at least 1 or None, got {evaluation_bytes}.")
        if not 0 < train_fraction <= 1:
            raise ArgumentError(f"Text: train_fraction must lie above 0 and be at most 1, got {train_fraction}.")
        self.train_fraction = train_fraction
        self.name, self.length, self.validation_fraction = name, length, validation_fraction
        self.evaluation_bytes, self.max_bytes = evaluation_bytes, max_bytes
        self.source, self.title, self.corpus, self.tokenizer = _load(os.fspath(source), tokenizer, max_bytes)
        self.tokenizer.check("Text", tokenizer_sha256)
        self.vocab_size = self.tokenizer.vocab_size + self.marks
        check_content("Text", f"{self.source} has", self.corpus.sha256, content)
        self.split = _split(self.corpus, self.tokenizer.token_bytes, validation_fraction)
        unread = 1 - train_fraction * (1 - validation_fraction)
        self.train_end = self.split if train_fraction == 1 else _split(self.corpus, self.tokenizer.token_bytes, unread)
        self._check_size()
        self._evaluated, self._validated = self._held_out_windows()
        if self.causal:
            self.bytes_per_token = float(self.tokenizer.token_bytes[self._evaluation_targets()].mean())

    def _check_size(self) -> None:
        needed = self.length + 1
        training = self.train_fraction * (1 - self.validation_fraction)
        parts = (
            ("training", self.train_end, training),
            ("validation", self.corpus.count - self.split, self.validation_fraction),
        )
        # for both parts, and by a part's own share of tokens: the split is set in bytes, and tokens differ in length
        enough = max(math.ceil(needed / (count / self.corpus.count or share)) + 1 for _, count, share in parts)
        for part, count, _ in parts:
            if count < needed:
                raise FileFormatError(
                    f"Text: {self.title} is too short: its {part} part has {count} of {self.corpus.count} "
                    f"{self.tokenizer.name} tokens, one sequence of length {self.length} takes {needed}. Give about "
                    f"{enough} tokens of text or more, or a smaller length."
                )

    def _held_out_windows(self) -> tuple[np.ndarray, np.ndarray]:
        """The stream positions at which windows of the validation part begin: those that are evaluated, all that fit
        or as many as hold about ``evaluation_bytes``; and at most as many of the others, by which rates are chosen.
        Both are spread over the part, since the files of a folder differ.
        """
        validation = self.corpus.count - self.split
        windows = available = (validation - 1) // self.length
        if self.evaluation_bytes is not None:
            window_bytes = self.corpus.bytes * self.validation_fraction / validation * self.length
            windows = max(1, min(available, round(self.evaluation_bytes / window_bytes)))
        evaluated = _spread(windows, available)
        others = np.setdiff1d(np.arange(available), evaluated)
        chosen = others[_spread(min(windows, len(others)), len(others))]
        return self.split + self.length * evaluated, self.split + self.length * chosen

    def _evaluation_targets(self) -> np.ndarray:
        return np.concatenate([self.corpus.read(start + 1, start + 1 + self.length) for start in self._evaluated])

    def train_starts(self, step: int, batch_size: int, seed: int) -> np.ndarray:
        """(batch_size,) the stream positions at which the windows of batch ``step`` begin; a window is the ``length`` +
        1 tokens from there.
        """
        check_batch("Text.train_batch", batch_size, step, seed)
        fitting = (self.train_end - 1) // self.length
        # one window less leaves room for every phase
        windows = max(1, fitting - 1)
        room = min(self.length, self.train_end - windows * self.length)
        epochs, places = np.divmod(step * batch_size + np.arange(batch_size), windows)
        starts = np.empty(batch_size, dtype=np.int64)
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            phase = int(np.random.SeedSequence((seed, epoch, _PHASE)).generate_state(1, np.uint64)[0]) % room
            starts[chosen] = phase + self.length * permuted(places[chosen], windows, (seed, epoch, _ORDER))
        return starts

    def train_batch(self, step: int, batch_size: int, seed: int) -> Batch:
        return self._batch(self.train_starts(step, batch_size, seed).tolist())

    def tested(self, batch_size: int, use: int) -> Iterator[Batch]:
        """For validation at most as many windows of the validation part as are evaluated, between these; none where all
        of it is.
        """
        starts = self._evaluated if use == TEST else self._validated
        for begin in range(0, len(starts), batch_size):
            yield self._batch(starts[begin : begin + batch_size].tolist())

    def _batch(self, starts: list[int]) -> Batch:
        windows = torch.from_numpy(np.stack([self.corpus.read(start, start + self.length + 1) for start in starts]))
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), {})

    def guess(self) -> Guess:
        """The loss of the frequencies of tokens alone, counted in the training part (in its first 16 million tokens,
        each token once more than it stands there).
        """
        return Guess(self._loss_of_frequencies(self._evaluation_targets()))

    def _loss_of_frequencies(self, targets: np.ndarray) -> float:
        counts = np.ones(self.vocab_size, dtype=np.int64)
        for begin in range(0, min(self.train_end, _COUNTED), _BLOCK):
            counts += np.bincount(
                self.corpus.read(begin, min(begin + _BLOCK, self.train_end, _COUNTED)), minlength=self.vocab_size
            )
        return float(np.log(counts.sum()) - np.log(counts)[targets].mean())

    def bits_per_byte(self, loss: float) -> float:
        """Bits per byte of UTF-8 from the mean evaluation loss in nats per token; comparable across tokenisers."""
        assert self.bytes_per_token is not None
        return loss / math.log(2) / self.bytes_per_token

    def config(self) -> dict[str, Any]:
        return {
            "task": self.kind, "name": self.name, "source": self.source, "tokenizer": self.tokenizer.name,
            "length": self.length, "validation_fraction": self.validation_fraction,
            "evaluation_bytes": self.evaluation_bytes, "max_bytes": self.max_bytes,
            "train_fraction": self.train_fraction, "content": self.corpus.sha256, **self.tokenizer.contents,
        }  # fmt: skip

    def heading(self) -> str:
        """ "Language modelling of my.txt"."""
        part = "" if self.train_fraction == 1 else f", {self.train_fraction:.0%} of it"
        return f"{self.subject} of {self.title}{part}"

    def describe(self) -> str:
        kind = {"byte": "Byte-level", "gpt2": "GPT-2 token"}.get(self.tokenizer.name, f"{self.vocab_size:,} token")
        evaluated = len(self._evaluated) * self.length
        part = "" if self.train_fraction == 1 else f" ({self.train_fraction:.0%} of {self.split:,})"
        return (
            f"{kind} language modelling of {self.title}: {self.train_end:,} training tokens{part}, "
            f"{self.corpus.count - self.split:,} validation tokens "
            f"({evaluated:,} evaluated), sequences of {self.length}."
        )

    def encode(self, text: str) -> list[int]:
        """The tokens of ``text``, to prompt a model with."""
        return self.tokenizer.encode(text).tolist()

    def token_groups(self, tokens: Tensor) -> tuple[tuple[str, ...], Tensor]:
        """By the first character after spaces."""
        known, places = tokens.unique(return_inverse=True)
        found = torch.tensor(
            [_group(self.decode([token])) for token in known.tolist()], device=tokens.device, dtype=torch.int64
        )
        return _GROUPS, found[places] if tokens.numel() else tokens

    def decode(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(tokens)


_GROUPS = ("space", "small letter", "capital letter", "digit", "sign", "part of a character")


def _group(text: str) -> int:
    """The number in ``_GROUPS`` of a token's text."""
    first = text.strip()[:1]
    if not first:
        return 0
    if first == "\N{REPLACEMENT CHARACTER}":
        return 5
    return 1 if first.islower() else 2 if first.isalpha() else 3 if first.isdigit() else 4


def _load(source: str, tokenizer: str | None, max_bytes: int | None) -> tuple[str, str, Corpus, Tokenizer]:
    """The source's full name, a title, its tokens and its tokeniser."""
    if source and is_corpus(Path(source).expanduser()):
        folder = Path(source).expanduser().absolute()
        if max_bytes is not None:
            raise ArgumentError(
                "Text: max_bytes limits text that is still to be tokenised; leave it out for a pre-tokenised corpus."
            )
        given = None if tokenizer is None else tokenizers.resolve(tokenizer)
        corpus = open_corpus(folder, given)
        return folder.as_posix(), corpus.source, corpus, given or tokenizers.resolve(corpus.tokenizer)
    opened = open_source(source)
    resolved = tokenizers.resolve("byte" if tokenizer is None else tokenizer)
    return opened.spec, opened.title, cached_corpus(opened, resolved, max_bytes=max_bytes), resolved
