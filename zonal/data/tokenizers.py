"""Text to token numbers and back: bytes, GPT-2's byte-level byte-pair encoding, or one that was trained on a text.

Every tokeniser states how many bytes of UTF-8 each of its tokens stands for, so that losses per token can be compared
across tokenisers as bits per byte. ``separator`` is the token put between two documents; it counts as one byte.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as tokenizers_library

from zonal.errors import ArgumentError, FileFormatError, unknown_name
from zonal.store import read_json, understood, write_bytes
from zonal.typed import made

_GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


SEPARATOR = "<|endoftext|>"
_PARTS = ("model", "pre_tokenizer", "decoder")
# of a model: with any of these, it makes other tokens of the same merges
_CHANGES = ("ignore_merges", "dropout", "continuing_subword_prefix", "end_of_word_suffix")


class Tokenizer(ABC):
    """A lossless map between UTF-8 text and token numbers in [0, vocab_size)."""

    name: str
    vocab_size: int
    separator: int

    @property
    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of what decides the encoding; equal fingerprints give equal tokens."""

    @property
    @abstractmethod
    def token_bytes(self) -> np.ndarray:
        """(vocab_size,) int64: bytes of UTF-8 that each token stands for."""

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """The tokens of ``text``, (n,) int64."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``. Bytes that are not UTF-8, as when a character is cut, become U+FFFD."""

    @property
    def contents(self) -> dict[str, str]:
        """What a run keeps beside the name, to know a file that has changed."""
        return {}

    def check(self, call: str, sha256: str | None) -> None:
        """Raise FileFormatError when a run was begun with another tokeniser, whose ``contents`` had ``sha256``."""
        if sha256 not in (None, self.fingerprint):
            raise FileFormatError(
                f"{call}: the tokenizer {self.name} has changed since the run was begun with it. Put the old file back."
            )

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        ids = [int(token) for token in tokens]
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise ArgumentError(
                    f"{self.name} tokenizer: decode needs tokens in [0, {self.vocab_size}), got {token}."
                )
        return ids


class ByteTokenizer(Tokenizer):
    """One token a byte. The separator is byte 0, which text files may not contain."""

    name = "byte"
    vocab_size = 256
    separator = 0

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"bytes of UTF-8, separator 0").hexdigest()

    @cached_property
    def token_bytes(self) -> np.ndarray:
        return np.ones(self.vocab_size, dtype=np.int64)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(self._checked(tokens)).decode("utf-8", errors="replace")


class _BytePairs(Tokenizer):
    """Byte-level byte pairs by the library of that name; its vocabulary has one printable character a byte."""

    _encoder: Any

    @cached_property
    def token_bytes(self) -> np.ndarray:
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self._encoder.get_vocab().items():
            lengths[number] = len(token)
        lengths[self.separator] = 1
        return lengths

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._encoder.encode(text).ids, dtype=np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoder.decode(self._checked(tokens), skip_special_tokens=False)


class GPT2Tokenizer(_BytePairs):
    """GPT-2's 50257 tokens. OpenAI's files (MIT licence) are shipped with this package. The separator is <|endoftext|>.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019.
    Raises: FileFormatError when the shipped files are damaged.
    """

    name = "gpt2"
    vocab_size = 50257
    separator = 50256

    def __init__(self) -> None:
        folder = resources.files("zonal.data") / "assets" / "gpt2"
        for file, digest in _GPT2_SHA256.items():
            if hashlib.sha256((folder / file).read_bytes()).hexdigest() != digest:
                raise FileFormatError(f"gpt2 tokenizer: the shipped file {file} is damaged. Install the package again.")
        with (
            resources.as_file(folder / "encoder.json") as vocabulary,
            resources.as_file(folder / "vocab.bpe") as merges,
        ):
            self._encoder = tokenizers_library.ByteLevelBPETokenizer(str(vocabulary), str(merges))

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(b"gpt2 " + "".join(_GPT2_SHA256.values()).encode()).hexdigest()


class FileTokenizer(_BytePairs):
    """The byte pairs of a tokenizer.json, as ``train`` and the libraries of Hugging Face write them for GPT-2's kind.

    Its name is the file's path. The separator is <|endoftext|>. Tokens are those of other readers of the file, except
    that <|endoftext|> within a text is encoded as text, where others make it the separator.

    Raises: FileFormatError when the file is missing, or its tokeniser is of another kind, may lose text, or changes
    tokens by other means (dropout, a template, truncation, padding).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).expanduser().absolute()
        self.name = self.path.as_posix()
        if not self.path.exists():
            raise FileFormatError(
                f"tokenizer: {self.path} does not exist. Required: {', '.join(_TOKENIZERS)} or a tokenizer.json, as "
                "`zonal tokenizer` makes it."
            )
        stored = read_json(self.path)
        with understood("tokenizer", self.path):
            model, before, after = (made(Mapping[str, Any], stored[part], part) for part in _PARTS)
            vocabulary = made(dict[str, int], model["vocab"], "vocab")
            merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
            others = {token["content"] for token in stored["added_tokens"]} - {SEPARATOR}
            suitable = (
                [part["type"] for part in (model, before, after)] == ["BPE", "ByteLevel", "ByteLevel"]
                and stored["normalizer"] is None
                and not before["add_prefix_space"]
                # otherwise the library of Hugging Face makes other tokens of this file than the encoder below
                and before.get("use_regex", True)
                and not any(model.get(name) for name in _CHANGES)
                and all(stored.get(name) is None for name in ("truncation", "padding"))
                and (stored.get("post_processor") is None or stored["post_processor"]["type"] == "ByteLevel")
                and not others
                and {SEPARATOR, *tokenizers_library.pre_tokenizers.ByteLevel.alphabet()} <= set(vocabulary)
                and sorted(vocabulary.values()) == list(range(len(vocabulary)))
                and all(len(pair) == 2 and {*pair, "".join(pair)} <= set(vocabulary) for pair in merges)
            )
        if not suitable:
            raise FileFormatError(
                f"tokenizer: {self.path} must be byte-level BPE without a normaliser or a space before the text, with "
                "use_regex and without ignore_merges, dropout, prefixes or suffixes of tokens, truncation, padding or "
                f"a post_processor that adds tokens, with all 256 bytes, the token {SEPARATOR} and no other special "
                "tokens, so that no text is lost and its tokens are those of its other readers. "
                "`zonal tokenizer` makes such a file."
            )
        self._encoder = tokenizers_library.ByteLevelBPETokenizer(vocabulary, merges)
        self.separator = vocabulary[SEPARATOR]
        self.vocab_size = len(vocabulary)
        self._digest = hashlib.sha256(json.dumps([vocabulary, merges], sort_keys=True).encode()).hexdigest()

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"byte pairs {self._digest}".encode()).hexdigest()

    @property
    def contents(self) -> dict[str, str]:
        return {"tokenizer_sha256": self.fingerprint}


def train(texts: Iterable[str], size: int, path: str | os.PathLike[str]) -> FileTokenizer:
    """Learn ``size`` tokens of byte-level byte pairs from ``texts``, write them to the new file ``path`` (.json), and
    open it.

    The 256 bytes and <|endoftext|> are among the tokens. A pair that stands in the texts once makes no token, so a
    short text gives fewer.

    Raises: ArgumentError when size < 257, or the file exists or does not end with .json.
    """
    path = Path(path)
    if size <= len(tokenizers_library.pre_tokenizers.ByteLevel.alphabet()):
        raise ArgumentError(f"tokenizers.train: size must be at least 257, the bytes and a separator, got {size}.")
    if path.suffix != ".json" or path.exists():
        raise ArgumentError(f"tokenizers.train: a new file that ends with .json is required, got {path}.")
    encoder = tokenizers_library.ByteLevelBPETokenizer()
    encoder.train_from_iterator(
        texts, vocab_size=size, min_frequency=2, special_tokens=[SEPARATOR], show_progress=False
    )
    write_bytes(path, encoder.to_str().encode("utf-8"))
    return FileTokenizer(path)


_TOKENIZERS: dict[str, type[Tokenizer]] = {"byte": ByteTokenizer, "gpt2": GPT2Tokenizer}


def names() -> tuple[str, ...]:
    """The names ``resolve`` knows."""
    return tuple(_TOKENIZERS)


def resolve(name: str) -> Tokenizer:
    """The tokeniser called ``name``: "byte", "gpt2", or the path of a tokenizer.json.

    Raises: ArgumentError that lists the names and the nearest one; FileFormatError for an unsuitable file.
    """
    if name.endswith(".json"):
        return FileTokenizer(name)
    if name not in _TOKENIZERS and Path(name).exists():
        raise ArgumentError(f"tokenizers.resolve: the file of a tokeniser must end with .json, received {name!r}.")
    if name not in _TOKENIZERS:
        raise unknown_name("tokenizers.resolve", "tokenizer", name, [*_TOKENIZERS, "the path of a tokenizer.json"])
    return _shipped(name)


@cache
def _shipped(name: str) -> Tokenizer:
    """A constant, read from its files once."""
    return _TOKENIZERS[name]()
