"""The nouns of WordNet: those that are shipped as trees, and the definitions of all, read from its own file.

Shipped are animals, the groups of zoology that they belong to, and artifacts, as three trees. A node is the number of
its line. The lines are in the order of a walk that visits a node before what is below it, so what is below a node are
the nodes that follow it. ``tools.prepare_wordnet`` writes them.
"""

import hashlib
import os
import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path

from zonal.errors import ArgumentError, FileFormatError
from zonal.store import check_file

_SHA256 = "bd26da4db67108ed4ed41ebc9e749555c9b0882e6fdf084752daacc4637cf4a1"
WORDNET = Path("/usr/share/wordnet")
"""Where the Debian package wordnet-base puts the files of WordNet 3.0."""
# bytes of data.noun that are read at most; it has 15 million
_MOST = 2**28
_WORD = re.compile(r"[a-z0-9]+(?:['-][a-z0-9]+)*")


@dataclass(frozen=True)
class Nouns:
    """words: the first of each synset. above: its hypernym, None for a root. ends: where what is below it ends. groups:
    what it is a member of.
    """

    words: tuple[str, ...]
    above: tuple[int | None, ...]
    ends: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    def under(self, word: str) -> range:
        """The first node of that word and all below it. Raises: ArgumentError when there is none."""
        if word not in self.words:
            raise ArgumentError(
                f"wordnet: no synset {word!r} is shipped. Name an animal or an artifact, with _ for spaces, "
                "such as mammal, bird or musical_instrument."
            )
        node = self.words.index(word)
        return range(node, self.ends[node])

    def ancestors(self, node: int) -> tuple[int, ...]:
        """All that is above a node, the nearest first."""
        found, at = [], self.above[node]
        while at is not None:
            found.append(at)
            at = self.above[at]
        return tuple(found)


@cache
def nouns() -> Nouns:
    """WordNet 3.0's animals, their groups, and artifacts: 16,987 synsets, each below its first hypernym.

    Source: Miller, *WordNet: a lexical database for English*, 1995; Princeton University, 2006, whose licence is
    shipped beside the file.
    Raises: FileFormatError when the shipped file is damaged.
    """
    data = (resources.files("zonal.data") / "assets" / "wordnet" / "nouns.txt").read_bytes()
    if hashlib.sha256(data).hexdigest() != _SHA256:
        raise FileFormatError(
            "wordnet: the checksum of the shipped file nouns.txt does not match. Install the package again."
        )
    return read(data.decode())


def read(text: str) -> Nouns:
    """The trees of lines as ``tools.prepare_wordnet`` describes them."""
    words, above, groups, path = [], [], [], []
    ends: list[int] = []
    for node, line in enumerate(text.splitlines()):
        depth, word, *members = line.split()
        for closed in path[int(depth) :]:
            ends[closed] = node
        del path[int(depth) :]
        words.append(word)
        above.append(path[-1] if path else None)
        groups.append(tuple(map(int, members)))
        ends.append(node)
        path.append(node)
    for open_ in path:
        ends[open_] = len(words)
    return Nouns(tuple(words), tuple(above), tuple(ends), tuple(groups))


@dataclass(frozen=True)
class Definition:
    """noun: the first word of the synset, with _ for spaces. words: of its definition, in lower case, without the
    examples of its use.
    """

    noun: str
    words: tuple[str, ...]


def definitions(folder: str | os.PathLike[str] = WORDNET) -> list[Definition]:
    """The definitions of the nouns in the file ``data.noun`` of a folder, in its order; WordNet 3.0 has 82,115.

    Raises: FileFormatError for a file that is not there, cannot be read, or is no such file.
    """
    path = Path(folder) / "data.noun"
    check_file("wordnet", path)
    try:
        with path.open("rb") as file:
            text = file.read(_MOST + 1)
        lines = text.decode().splitlines() if len(text) <= _MOST else [f"more than {_MOST:,} bytes"]
    except FileNotFoundError as error:
        raise FileFormatError(
            f"wordnet: {path} does not exist. It comes with the Debian package wordnet-base: `apt-get install "
            "wordnet-base`, or, without root rights, `apt-get download wordnet-base && dpkg -x wordnet-base_*.deb .` "
            "and the folder usr/share/wordnet."
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"wordnet: {path} cannot be read ({error}). Get it again.") from error
    found = []
    for number, line in enumerate(lines, 1):
        if line.startswith("  "):  # the licence
            continue
        synset, bar, gloss = line.partition(" | ")
        fields = synset.split()
        if not bar or len(fields) < 6 or fields[2] != "n":
            raise FileFormatError(
                f"wordnet: line {number} of {path} must be a noun as in WordNet's data.noun, with its definition "
                f"behind ' | ', received {line[:60]!r}. Get the file again."
            )
        found.append(Definition(fields[4], tuple(_WORD.findall(gloss.split('; "')[0].lower()))))
    return found
