"""Text to token numbers and back: bytes, or GPT-2's byte-level byte-pair encoding.

Every tokeniser states how many bytes of UTF-8 each of its tokens stands for, so that losses per token can be compared
across tokenisers as bits per byte. ``separator`` is the token put between two documents; it counts as one byte.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cache, cached_property
from importlib import resources

import numpy as np
import tokenizers as tokenizers_library

from zonal.errors import ArgumentError, FileFormatError, unknown_name

_GPT2_SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


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


class GPT2Tokenizer(Tokenizer):
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

    @cached_property
    def token_bytes(self) -> np.ndarray:
        # the vocabulary is written with one printable character a byte
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        for token, number in self._encoder.get_vocab().items():
            lengths[number] = len(token)
        lengths[self.separator] = 1
        return lengths

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._encoder.encode(text).ids, dtype=np.int64)

    def decode(self, tokens: Sequence[int]) -> str:
        return self._encoder.decode(self._checked(tokens), skip_special_tokens=False)


_TOKENIZERS: dict[str, type[Tokenizer]] = {"byte": ByteTokenizer, "gpt2": GPT2Tokenizer}


def names() -> tuple[str, ...]:
    """The names ``resolve`` knows."""
    return tuple(_TOKENIZERS)


@cache
def resolve(name: str) -> Tokenizer:
    """The tokeniser called ``name``: "byte" or "gpt2". It is a constant, read from its files once.

    Raises: ArgumentError that lists the names and the nearest one.
    """
    if name not in _TOKENIZERS:
        raise unknown_name("tokenizers.resolve", "tokenizer", name, _TOKENIZERS)
    return _TOKENIZERS[name]()
