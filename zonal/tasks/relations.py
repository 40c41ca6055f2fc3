"""Questions about WordNet for ``Lookup``: what is an ancestor of what, and what lies at the end of a path of relations.

Entities are fixed and learned, not given in the context: a relation is then one thing for all of them, and so is a
chain of relations, and a chain that was never trained can be asked. With the edges in the context each sequence would
be its own graph, a chain of hops a search that takes a layer each, and nothing would be composed that was learned.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

import numpy as np

from zonal.data import wordnet
from zonal.errors import ArgumentError
from zonal.tasks.task import stream


@dataclass(frozen=True)
class Cell:
    """Questions of one kind: the group of what is asked, and a size, the distance or the number of hops."""

    group: str
    size: int


@dataclass(frozen=True)
class Question:
    """answers: what may not stand among the candidates but for ``answer``, the entity itself included."""

    entity: int
    relations: tuple[int, ...]
    answers: frozenset[int]
    answer: int


class Source(ABC):
    """Where questions come from. Entities are numbers from 0 on.

    name: as ``source`` rebuilds it. slices: what group and size of a cell are called. training, tests: cells to train
    and to measure on;
    controls: cells that were trained, measured beside.
    """

    name: str
    slices: tuple[str, str]
    entities: int
    relations: tuple[str, ...]
    training: tuple[Cell, ...]
    tests: tuple[Cell, ...]
    controls: tuple[Cell, ...] = ()

    @abstractmethod
    def hops(self, cell: Cell) -> int:
        """How many relations stand in a question."""

    @abstractmethod
    def draw(self, cell: Cell, chance: np.random.Generator) -> Question:
        """A question of a cell."""

    @abstractmethod
    def word(self, entity: int) -> str:
        """An entity as people read it."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """JSON values from which ``source`` rebuilds this."""

    @abstractmethod
    def describe(self) -> str:
        """A phrase for a report."""


_WIDEST = 8
FARTHEST = 6


class Ancestors(Source):
    """Is a candidate above the entity in the tree of hypernyms of ``subset``, a word of WordNet such as "mammal"?

    Pairs (node, ancestor): all at distance 1 are trained, and ``closure`` of those farther apart; the rest is tested.
    Every entity of a tested pair is in trained ones, so that the pair follows from those: an ancestor's ancestor is an
    ancestor. Left out are ancestors of more than an eighth of all nodes, which a model could name without reading the
    question. Distances run to ``FARTHEST``.

    Raises: ArgumentError when the word is unknown or closure is not between 0 and 1.
    """

    name = "ancestors"
    slices = ("pairs", "distance")
    relations = ()

    def __init__(self, subset: str = "mammal", closure: float = 0.5, seed: int = 0) -> None:
        if not 0 <= closure < 1:
            raise ArgumentError(f"Ancestors: closure must be at least 0 and below 1, got {closure}.")
        self.subset, self.closure, self.seed = subset, closure, seed
        self._nouns = wordnet.nouns()
        nodes = self._nouns.under(subset)
        self.entities, self._first = len(nodes), nodes.start
        widest = self.entities // _WIDEST
        self._above = [tuple(a - nodes.start for a in self._nouns.ancestors(node) if a in nodes) for node in nodes]
        self._pairs: dict[Cell, np.ndarray] = {}
        # a word itself comes first: it teaches what a label is for
        self._pairs[Cell("trained", 0)] = np.arange(self.entities)[:, None].repeat(2, 1)
        for distance in range(1, FARTHEST + 1):
            far = [(node, above[distance - 1]) for node, above in enumerate(self._above) if len(above) >= distance]
            pairs = np.array(
                [pair for pair in far if self._nouns.ends[pair[1] + nodes.start] - nodes.start - pair[1] <= widest],
                dtype=np.int64,
            ).reshape(-1, 2)
            held = stream(seed, distance).random(len(pairs)) >= (closure if distance > 1 else 1.0)
            self._pairs[Cell("trained", distance)], self._pairs[Cell("held out", distance)] = pairs[~held], pairs[held]
        filled = [cell for cell, pairs in self._pairs.items() if len(pairs)]
        self.training = self.controls = tuple(cell for cell in filled if cell.group == "trained")
        self.tests = tuple(cell for cell in filled if cell.group == "held out")

    def pairs(self, cell: Cell) -> np.ndarray:
        """(n, 2): node and ancestor of every pair of a cell."""
        return self._pairs[cell]

    def hops(self, cell: Cell) -> int:
        return 0

    def draw(self, cell: Cell, chance: np.random.Generator) -> Question:
        node, ancestor = self._pairs[cell][chance.integers(len(self._pairs[cell]))].tolist()
        return Question(node, (), frozenset((node, *self._above[node])), ancestor)

    def word(self, entity: int) -> str:
        return self._nouns.words[entity + self._first]

    def config(self) -> dict[str, Any]:
        return {"source": self.name, "subset": self.subset, "closure": self.closure, "seed": self.seed}

    def describe(self) -> str:
        held, trained = (
            sum(len(pairs) for cell, pairs in self._pairs.items() if cell.group == group)
            for group in ("held out", "trained")
        )
        return (
            f"which candidate is above a word in WordNet's tree of {self.subset} ({self.entities:,} synsets); "
            f"{trained:,} pairs trained, {held:,} held out"
        )


RELATIONS = ("kind-of", "has-kind", "member-of", "has-member")
_REVERSED = {(1, 0), (3, 2)}
"""Down and up again leads back."""
_SHARE = 8
_LEAST_STARTS = 8


class Paths(Source):
    """What lies at the end of a path of one to ``most`` relations among the animals of ``subset`` and the groups of
    zoology that they belong to?

    Relations: kind of (the hypernym), has kind, member of (a genus, family, order …), has member; a step may lead to
    several entities. A composition is a sequence of relations. A quarter of those of each length from 2 on is never
    trained ("unseen"). The others are ("seen"), but for the entities they could start from that are drawn with a chance
    of one in eight, and are tested there; a composition with few starts may have none. All single relations are trained
    everywhere ("trained").

    Raises: ArgumentError when the word is unknown or most is not from 1 to 4.
    """

    name = "paths"
    slices = ("composition", "hops")
    relations = RELATIONS

    def __init__(self, subset: str = "carnivore", most: int = 4, seed: int = 0) -> None:
        if not 1 <= most <= 4:
            raise ArgumentError(f"Paths: hops must be from 1 to 4, got {most}.")
        self.subset, self.most, self.seed = subset, most, seed
        nouns = wordnet.nouns()
        self._nodes = _with_groups(nouns, nouns.under(subset))
        self.entities = len(self._nodes)
        self._words = tuple(nouns.words[node] for node in self._nodes)
        place = {node: entity for entity, node in enumerate(self._nodes)}
        up = [tuple(place[a] for a in (nouns.above[node],) if a in place) for node in self._nodes]
        member = [tuple(place[group] for group in nouns.groups[node] if group in place) for node in self._nodes]
        self._next = (up, _reversed(up), member, _reversed(member))
        self._ends = functools.lru_cache(maxsize=1 << 16)(self._walk)
        # no relation at all comes first: it teaches what a label is for
        self._starts: dict[Cell, list[tuple[tuple[int, ...], np.ndarray]]] = {
            Cell("trained", 0): [((), np.arange(self.entities))]
        }
        for hops in range(1, most + 1):
            self._divide(hops)
        cells = [cell for cell, found in self._starts.items() if found]
        self.training = tuple(cell for cell in cells if cell.group == "trained")
        self.tests = tuple(cell for cell in cells if cell.group != "trained" or cell.size == 1)

    def _divide(self, hops: int) -> None:
        """Which compositions of so many relations are trained, and from where."""
        found = {
            path: starts
            for path in product(range(len(RELATIONS)), repeat=hops)
            if len(starts := self.starts(path)) >= _LEAST_STARTS
        }
        paths = list(found)
        chance = stream(self.seed, hops)
        unseen = set(chance.permutation(len(paths))[: len(paths) // 4 if hops > 1 else 0].tolist())
        parts: dict[str, list[tuple[tuple[int, ...], np.ndarray]]] = {"trained": [], "seen": [], "unseen": []}
        for index, path in enumerate(paths):
            starts = found[path]
            if index in unseen:
                parts["unseen"].append((path, starts))
                continue
            held = chance.random(len(starts)) < (1 / _SHARE if hops > 1 else 0.0)
            for group, kept in (("trained", starts[~held]), ("seen", starts[held])):
                if len(kept):
                    parts[group].append((path, kept))
        for group, entries in parts.items():
            self._starts[Cell(group, hops)] = entries

    def _walk(self, entity: int, path: tuple[int, ...]) -> frozenset[int]:
        if not path:
            return frozenset((entity,))
        return frozenset(after for before in self._ends(entity, path[:-1]) for after in self._next[path[-1]][before])

    def ends(self, entity: int, path: Sequence[int]) -> frozenset[int]:
        """All entities that a path of relations leads to."""
        return self._ends(entity, tuple(path))

    def starts(self, path: tuple[int, ...]) -> np.ndarray:
        """The entities from which a path leads to another; none for a path that turns back on itself."""
        if any(pair in _REVERSED for pair in pairwise(path)):
            return np.empty(0, dtype=np.int64)
        return np.array(
            [entity for entity in range(self.entities) if self.ends(entity, path) - {entity}], dtype=np.int64
        )

    def compositions(self, cell: Cell) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Each sequence of relations of a cell, with the entities that it is asked of."""
        return iter(self._starts[cell])

    def hops(self, cell: Cell) -> int:
        return cell.size

    def draw(self, cell: Cell, chance: np.random.Generator) -> Question:
        entries = self._starts[cell]
        path, starts = entries[chance.integers(len(entries))]
        entity = int(starts[chance.integers(len(starts))])
        ends = self.ends(entity, path)
        others = sorted(ends - {entity}) if path else [entity]
        return Question(entity, path, ends | {entity}, others[chance.integers(len(others))])

    def word(self, entity: int) -> str:
        return self._words[entity]

    def config(self) -> dict[str, Any]:
        return {"source": self.name, "subset": self.subset, "most": self.most, "seed": self.seed}

    def describe(self) -> str:
        trained, unseen = (
            sum(len(entries) for cell, entries in self._starts.items() if cell.group == group and cell.size)
            for group in ("trained", "unseen")
        )
        return (
            f"which candidate is at the end of 1 to {self.most} relations from a word, among WordNet's {self.subset} "
            f"and their groups ({self.entities:,} synsets); "
            f"{trained} sequences of relations trained, {unseen} never seen"
        )


def _with_groups(nouns: wordnet.Nouns, animals: range) -> tuple[int, ...]:
    """The nodes and all groups that they are members of, directly or not."""
    groups: set[int] = set()
    waiting = [group for node in animals for group in nouns.groups[node]]
    while waiting:
        group = waiting.pop()
        if group not in groups:
            groups.add(group)
            waiting += nouns.groups[group]
    return (*animals, *sorted(groups - set(animals)))


def _reversed(relation: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    found: list[list[int]] = [[] for _ in relation]
    for entity, others in enumerate(relation):
        for other in others:
            found[other].append(entity)
    return [tuple(others) for others in found]


def source(config: dict[str, Any]) -> Source:
    """The source whose ``config()`` this is. Raises: KeyError or TypeError when it is not one."""
    return {"ancestors": Ancestors, "paths": Paths}[config["source"]](
        **{name: value for name, value in config.items() if name != "source"}
    )
