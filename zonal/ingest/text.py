"""Words of a text, the spans that it is cut into, and their keys."""

import functools
import hashlib
import re
import unicodedata
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

# Chinese and Japanese are written without spaces: each of their characters is a word
_ALONE = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
# what may follow a letter within a word and is not in \w: vowel signs, accents and other marks, and the two joiners of
# Indic and Persian words, but not the variation selectors U+FE00 to U+FE0F, which choose between glyphs
_MARKS = "\u200c\u200d" + "".join(
    mark
    for mark in map(chr, range(0x300, 0x20000))
    if unicodedata.category(mark) in ("Mn", "Mc") and not "\ufe00" <= mark <= "\ufe0f"
)
# no mark is below U+0300: looking there first is faster
_WORD = re.compile(rf"[{_ALONE}]|[^\W_{_ALONE}]+(?:(?![\0-\u02ff])[{_MARKS}]+[^\W_{_ALONE}]*)*")
# where a text is cut if it can be, the best first: after a blank line, after a sentence, after a line
_BREAKS = (re.compile(r"\n[^\S\n]*\n"), re.compile(r"[.!?。！？]['\"’”)\]]*(?=\s)|[。！？]"), re.compile(r"\n"))


class Read(NamedTuple):
    """A document that was read.

    root, path: the folder that it is from, and where it is in there. data: the bytes of the file, text in UTF-8.
    digest: their SHA-256. spans (n, 2): the characters from and to which each span goes. keys: the buckets of the words
    of all spans, one span's after another's, ``sizes`` (n,) of each.
    """

    root: str
    path: str
    digest: str
    data: bytes
    spans: np.ndarray
    sizes: np.ndarray
    keys: np.ndarray

    @property
    def name(self) -> tuple[str, str]:
        """What tells documents apart."""
        return self.root, self.path


def words(text: str) -> list[str]:
    """The words of a text in order, in lower case and one form of Unicode."""
    plain = text.casefold()
    if not text.isascii():
        # again after casefold, which takes characters apart; it makes an i with a second dot of the Turkish capital
        plain = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).replace("i\u0307", "i")
    return _WORD.findall(plain)


def spans(text: str, size: int) -> Iterator[tuple[int, int]]:
    """Where a text is cut: stretches of at most ``size`` words that end with a paragraph or sentence where one ends in
    their second half.
    """
    starts = [match.start() for match in _WORD.finditer(text)]
    at, first = 0, 0
    while first < len(starts):
        end = len(text)
        if first + size < len(starts):
            middle, end = starts[first + (size + 1) // 2], starts[first + size]
            for pattern in _BREAKS:
                found = [match.end() for match in pattern.finditer(text, middle, end)]
                if found:
                    end = found[-1]
                    break
        piece = text[at:end]
        yield at + len(piece) - len(piece.lstrip("\ufeff \t\r\n")), at + len(piece.rstrip())
        at = end
        while first < len(starts) and starts[first] < end:
            first += 1


@functools.lru_cache(maxsize=1 << 18)
def bucket(word: str, buckets: int) -> int:
    """The bucket of a word, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little") % buckets


def read(root: str, path: str, data: bytes, size: int, buckets: int) -> Read:
    """A document, cut into spans of at most ``size`` words. Raises: UnicodeDecodeError for what is not UTF-8."""
    text = data.decode()
    places = list(spans(text, size))
    keys = [sorted({bucket(word, buckets) for word in words(text[start:end])}) for start, end in places]
    return Read(
        root,
        path,
        hashlib.sha256(data).hexdigest(),
        data,
        np.array(places, dtype=np.int64).reshape(-1, 2),
        np.array([len(key) for key in keys], dtype=np.int32),
        np.array([each for key in keys for each in key], dtype=np.int32),
    )


__all__ = ["Read", "bucket", "read", "spans", "words"]
