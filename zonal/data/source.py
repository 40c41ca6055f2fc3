"""What every source of text has in common.

A source gives documents, and each document as pieces of about a megabyte, so that no text need fit in memory. Pieces
are cut only before a space or line end that follows a visible character. GPT-2's tokeniser reads from left to right and
begins a new token there whatever follows. The tokens of the pieces are therefore those of the whole text, as the tests
check.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

_SEARCHED = 1 << 16


class Source(ABC):
    """Documents of text. ``spec`` rebuilds the source by ``open_source``; ``title`` is for people."""

    spec: str
    title: str

    @abstractmethod
    def fingerprint(self) -> str:
        """SHA-256 of the contents: equal fingerprints give equal documents.

        Raises: FileFormatError when a file cannot be read.
        """

    @abstractmethod
    def documents(self) -> Iterator[Iterable[str]]:
        """The documents in order, each as pieces in order.

        Raises: FileFormatError when a file is not UTF-8 text.
        """


def pieces(blocks: Iterable[str]) -> Iterator[str]:
    """Regroup text into pieces that end where a tokeniser cuts anyway; joined they are the text."""
    held = ""
    for block in blocks:
        held += block
        # text without white space (some scripts have none) is held until some comes or it ends
        for cut in range(len(held) - 1, max(0, len(held) - _SEARCHED), -1):
            if held[cut] in " \n" and not held[cut - 1].isspace():
                yield held[:cut]
                held = held[cut:]
                break
    if held:
        yield held
