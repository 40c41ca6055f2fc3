"""S-expressions with a missing subtree, which the rest of the sequence determines: a tree, the same tree read by the
rules of its heads, and a gap.

    ( = L R ) ? S .     L = ( f a ( g b c ) )     R = ( f a ( g c b ) )  with  ( g c b )  put out:  ( f a _ )
                        S = ( g c b )

A node is ( head X Y ) with two arguments, an atom or a node each. Heads are typed, and nothing in the sequence says
how: a head of even number keeps the order of its arguments in R, one of odd number turns it. So R is a function of L
that is learned once and holds at every level; the subtree put out of R is that function of one subtree of L: of the one
at its place, and, as no atom stands twice, of the one whose atoms are missing in R. A model must find it and write it
down by the rule. A model that finds it and has not learned the heads can copy it unchanged, which gets most of the
tokens right: that is the guess.

Depth is that of L: a chain of ``depth`` nodes, each inside the last, on either side; every third node has a small node
beside the next instead of an atom. No atom stands twice in a tree; heads do. The subtree put out is any node of at most
two levels but the root. In training heads and atoms of R are to be told from L, too, not the subtree alone: they follow
by the same rules, and are what a model learns them from (of brackets, which are easy, it learns the brackets first and
nothing else for a long while). Only the subtree is measured. Prompts of one depth are filled from the left to one
length, so that all answers begin at the same place.
"""

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch

from zonal.errors import ArgumentError
from zonal.names import known_names
from zonal.tasks.task import IGNORED, TRAIN, Batch, Drawn, Examined, Examinee, Guess, check_batch, stream

_DEPTHS = 2
SIGNS = "·()=_?."
FILL, OPEN, CLOSE, SAME, GAP, ASK, STOP = range(len(SIGNS))
HEADS, ATOMS = 8, 32
_FIRST_HEAD = len(SIGNS)
_FIRST_ATOM = _FIRST_HEAD + HEADS
_BESIDE = 3
# what is learned on shallow trees holds on deep ones, and is hardly found on those
_FIRST_DEPTHS, _STEPS_A_LEVEL = 3, 50
DEEPEST = 24
"""A tree of this depth has as many atoms as there are."""
LONGEST = 13
"""Tokens kept for the subtree put out. No tree that is drawn puts out more than 9."""

Tree = int | tuple[int, "Tree", "Tree"]
"""An atom, or a head with two arguments."""


def turned(tree: Tree) -> Tree:
    """The tree as its heads say that it is read."""
    if isinstance(tree, int):
        return tree
    head, left, right = tree
    left, right = turned(left), turned(right)
    return (head, right, left) if (head - _FIRST_HEAD) % 2 else (head, left, right)


def written(tree: Tree, gap: tuple[int, ...] | None = None) -> list[int]:
    """The tokens of a tree. gap: the way from the root, 1 or 2 a step, to a subtree that is put out."""
    if gap == ():
        return [GAP]
    if isinstance(tree, int):
        return [tree]
    found = [OPEN, tree[0]]
    for side in (1, 2):
        found += written(tree[side], gap[1:] if gap and gap[0] == side else None)
    return [*found, CLOSE]


def parse(tokens: Sequence[int]) -> Tree | None:
    """The one tree that the tokens write; None when they do not write exactly one."""
    place = 0

    def read() -> Tree | None:
        nonlocal place
        token = tokens[place] if place < len(tokens) else FILL
        place += 1
        if token >= _FIRST_ATOM:
            return token
        head = tokens[place] if place < len(tokens) else FILL
        if token != OPEN or not _FIRST_HEAD <= head < _FIRST_ATOM:
            return None
        place += 1
        left = read()
        right = None if left is None else read()
        if left is None or right is None or place >= len(tokens) or tokens[place] != CLOSE:
            return None
        place += 1
        return (head, left, right)

    found = read()
    return found if place == len(tokens) else None


def ways(tree: Tree, before: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """The ways to all nodes."""
    if isinstance(tree, int):
        return []
    return [before, *ways(tree[1], (*before, 1)), *ways(tree[2], (*before, 2))]


def at(tree: Tree, way: Sequence[int]) -> Tree:
    """The subtree at the end of a way."""
    for side in way:
        assert not isinstance(tree, int)
        tree = tree[1] if side == 1 else tree[2]
    return tree


def height(tree: Tree) -> int:
    """Levels of nodes: 0 for an atom."""
    return 0 if isinstance(tree, int) else 1 + max(height(tree[1]), height(tree[2]))


@known_names
@dataclass(eq=False)
class Expressions(Drawn[int]):
    """Completing a subtree of S-expressions, tested at ``depths`` and trained at all from 2 on: up to 3, and one more
    every 50 steps, to the largest of them.

    test_examples: sequences of each depth. Slices: "depth". Metric: the share of right tokens of the subtree (and of
    the stop after it), each given the right ones before. ``examine`` lets the model write, always the most likely
    token, and measures ``exact match`` and ``parse errors``, texts that are no expression: brackets that do not close,
    a head where an argument belongs, no stop in time.

    Raises: ArgumentError when a depth is not from 2 to ``DEEPEST`` or a number is out of range.
    """

    depths: Sequence[int] = (5, 10, 15)
    _: KW_ONLY
    test_examples: int = 100
    seed: int = 0
    name: str = "sexpr"

    kind, subject, metric = "expressions", "Completing expressions", "accuracy"
    vocab_size = _FIRST_ATOM + ATOMS
    groups = ("sign", "head", "atom"), (_FIRST_HEAD, _FIRST_ATOM)

    def __post_init__(self) -> None:
        self.depths = depths = tuple(dict.fromkeys(self.depths))
        if not depths or min(depths) < 2 or max(depths) > DEEPEST or self.test_examples < 1 or self.seed < 0:
            raise ArgumentError(
                f"Expressions: depths from 2 to {DEEPEST}, at least 1 test example and a seed of at least 0 are "
                f"required, got {self}."
            )
        self.length = max(map(prompt_length, depths)) + LONGEST

    def row(self, cell: int, key: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, targets), int64, of the sequence of a depth that is named by ``key``. In training heads and atoms of
        R are targets, too.
        """
        chance = stream(*key)
        tree = self._tree(cell, chance)
        other = turned(tree)
        gaps = [way for way in ways(other) if way and height(at(other, way)) <= 2]
        gap = gaps[chance.integers(len(gaps))]
        asked = written(other, gap)
        prompt = [OPEN, SAME, *written(tree), *asked, CLOSE, ASK]
        answer = [*written(at(other, gap)), STOP]
        start = prompt_length(cell)
        size = start + LONGEST
        tokens, targets = np.full(size, FILL, dtype=np.int64), np.full(size, IGNORED, dtype=np.int64)
        tokens[start - len(prompt) : start] = prompt
        tokens[start : start + len(answer) - 1] = answer[:-1]
        targets[start - 1 : start - 1 + len(answer)] = answer
        if key[-1] == TRAIN:
            read = [token if token >= _FIRST_HEAD else IGNORED for token in asked]
            targets[start - 3 - len(asked) : start - 3] = read
        return tokens, targets

    def _tree(self, depth: int, chance: np.random.Generator) -> Tree:
        def node(left: Tree, right: Tree) -> Tree:
            return (_FIRST_HEAD + int(chance.integers(HEADS)), left, right)

        atoms = iter(chance.permutation(ATOMS).tolist())

        def atom() -> int:
            return _FIRST_ATOM + next(atoms)

        tree = node(atom(), atom())
        for level in range(1, depth):
            beside = node(atom(), atom()) if level % _BESIDE == 0 else atom()
            tree = node(tree, beside) if chance.integers(2) else node(beside, tree)
        return tree

    def slices(self, cell: int) -> dict[str, int]:
        return {"depth": cell}

    def training_cells(self, step: int, seed: int, numbers: range) -> list[int]:
        deepest = min(max(self.depths), _FIRST_DEPTHS + step // _STEPS_A_LEVEL)
        return [int(stream(self.seed, seed, step, _DEPTHS).integers(2, max(2, deepest) + 1))] * len(numbers)

    def tested(self, batch_size: int, use: int) -> Iterator[Batch]:
        return self.fixed([(depth, depth) for depth in self.depths], self.test_examples, batch_size, use)

    def examine(self, model: Examinee, batch_size: int) -> Iterator[Examined]:
        check_batch("Expressions.examine", batch_size)
        device = next(model.parameters()).device
        for batch in self.evaluation_batches(batch_size):
            prompts = batch.tokens[:, : batch.tokens.shape[1] - LONGEST].to(device)
            drawn = torch.stack(list(model.generate(prompts, LONGEST + 1, temperature=0, stop=[STOP])), 1).tolist()
            right = [[token for token in row if token != IGNORED] for row in batch.targets.tolist()]
            texts = [row[: row.index(STOP) + 1] if STOP in row else row for row in drawn]
            exact = [float(text == wanted) for text, wanted in zip(texts, right, strict=True)]
            broken = [float(text[-1] != STOP or parse(text[:-1]) is None) for text in texts]
            yield Examined({"exact match": exact, "parse errors": broken}, batch.slices)

    def guess(self) -> Guess:
        """Copies the subtree of L whose atoms R lacks, unchanged: this needs no knowledge of the heads."""
        scores = []
        for batch in self.evaluation_batches(self.test_examples):
            for tokens, targets in zip(batch.tokens.numpy(), batch.targets.numpy(), strict=True):
                asked = targets[targets != IGNORED]
                prompt = tokens[tokens != FILL]
                level = np.cumsum(prompt == OPEN) - np.cumsum(prompt == CLOSE)
                border = 3 + int(np.argmax(level[2:] == 1))  # L begins after two signs, at level 2
                left = parse(prompt[2:border].tolist())
                assert left is not None
                missing = _atoms(written(left)) - _atoms(prompt[border : np.argmax(prompt == ASK)].tolist())
                copies = (written(at(left, way)) for way in ways(left))
                copy = next(found for found in copies if _atoms(found) == missing)
                scores.append(float((np.array([*copy, STOP]) == asked).mean()))
        return Guess(float(np.mean(scores)))

    def describe(self) -> str:
        depths = ", ".join(map(str, self.depths))
        return (
            f"S-expressions of depth {depths}: write the missing subtree of a tree whose heads say how it is read from "
            f"another; {HEADS} heads, {ATOMS} atoms."
        )

    def word(self, token: int) -> str:
        """Signs as they are, f0 … for heads, a0 … for atoms."""
        if token < _FIRST_HEAD:
            return SIGNS[token]
        return f"f{token - _FIRST_HEAD}" if token < _FIRST_ATOM else f"a{token - _FIRST_ATOM}"


def _atoms(tokens: Sequence[int]) -> set[int]:
    return {token for token in tokens if token >= _FIRST_ATOM}


def prompt_length(depth: int) -> int:
    """Tokens of the longest prompt: two trees, one without its smallest node, and five signs with the gap."""
    tree = 4 * (depth - 1) + 5 + 4 * ((depth - 1) // _BESIDE)
    return 2 * tree - 5 + 5
