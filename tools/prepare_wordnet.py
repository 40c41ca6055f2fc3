"""WordNet's noun file to the small tree that is shipped: animals, what they belong to in zoology, and artifacts.

    python -m tools.prepare_wordnet /usr/share/wordnet/data.noun zonal/data/assets/wordnet/nouns.txt

The noun file is that of WordNet 3.0 (Debian: ``apt-get download wordnet-base``, ``dpkg -x wordnet-base_*.deb .``). One
line a synset, in the order of a walk that visits a synset before what is below it: its depth, its first word, and the
numbers of the lines (from 0) of the groups that it is a member of, in order. A synset with several hypernyms stands
below the first. The format is read by ``zonal.data.wordnet``.
"""

import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from zonal import store
from zonal.errors import FileFormatError

ANIMAL, ARTIFACT, TAXON = "00015388", "00021939", "07992450"
"""Where the three trees begin, as WordNet 3.0 numbers them."""


@dataclass(frozen=True)
class Synset:
    """word: its first. above: hypernyms, instances' among them. groups: member holonyms."""

    word: str
    above: tuple[str, ...]
    groups: tuple[str, ...]


def synsets(path: Path) -> dict[str, Synset]:
    """The synsets of a WordNet data file, by their number. Raises: FileFormatError when it is not one."""
    found = {}
    try:
        for line in path.read_text(encoding="ascii").splitlines():
            if line.startswith(" "):  # the licence at the top
                continue
            fields = line.partition(" | ")[0].split()
            words = int(fields[3], 16)
            place = 4 + 2 * words
            pointers = [
                (fields[at], fields[at + 1])
                for at in range(place + 1, place + 1 + 4 * int(fields[place]), 4)
                if fields[at + 2] == "n"
            ]
            above = tuple(target for sign, target in pointers if sign in ("@", "@i"))
            found[fields[0]] = Synset(fields[4], above, tuple(target for sign, target in pointers if sign == "#m"))
    except (OSError, UnicodeDecodeError, IndexError, ValueError) as error:
        raise FileFormatError(f"prepare_wordnet: {path} is not a data.noun of WordNet 3.0 ({error}).") from error
    return found


def compact(nouns: dict[str, Synset]) -> str:
    """The shipped lines. Raises: FileFormatError when a root is not there."""
    missing = [root for root in (ANIMAL, ARTIFACT, TAXON) if root not in nouns]
    if missing:
        raise FileFormatError(
            f"prepare_wordnet: there is no synset {missing[0]}; the nouns of WordNet 3.0 were required."
        )
    below = defaultdict(list)
    for number, synset in nouns.items():
        if synset.above:
            below[synset.above[0]].append(number)

    def walk(root: str, kept: set[str] | None) -> list[tuple[int, str]]:
        order, waiting = [], [(0, root)]
        while waiting:
            depth, number = waiting.pop()
            order.append((depth, number))
            waiting += [(depth + 1, child) for child in reversed(below[number]) if kept is None or child in kept]
        return order

    animals = walk(ANIMAL, None)
    # the groups of animals, the groups of those groups, and what kinds of group they are
    groups, waiting = set(), [group for _, number in animals for group in nouns[number].groups]
    while waiting:
        group = waiting.pop()
        if group not in groups:
            groups.add(group)
            waiting += [*nouns[group].groups, *nouns[group].above[:1]]
    order = animals + walk(TAXON, groups) + walk(ARTIFACT, None)
    lines = {number: line for line, (_, number) in enumerate(order)}
    return "".join(
        " ".join(
            [str(depth), nouns[number].word, *(str(lines[group]) for group in nouns[number].groups if group in lines)]
        )
        + "\n"
        for depth, number in order
    )


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    store.write_bytes(target, compact(synsets(source)).encode())
