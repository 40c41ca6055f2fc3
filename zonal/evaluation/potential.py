"""Tests whether the efforts of moves come from a potential: the Hodge decomposition of a 1-form on a graph.

A 1-form gives each edge a number w, whose sign changes with the edge's direction. It is exact, that is
w(a→b) = f(b) - f(a) for some potential f of the nodes, if and only if its sum around every cycle is 0. In general
w = grad f + curl* t + h, three orthogonal parts. The potential f solves min |w - grad f|². The curl part, curl* t, is
what triangles of the graph explain of the rest. The harmonic part h is what only longer cycles explain. The curl and
harmonic parts circulate: as much flows into each node as out of it, and no potential explains them.
"""

import itertools
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zonal.errors import ArgumentError
from zonal.evaluation.statistics import Spread, spread

Exactness = Literal["exact", "within the spread", "beyond the spread", "not decidable", "no cycles"]
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Hodge:
    """potential (V, …), of mean 0 on each connected component; gradient, curl and harmonic (E, …) sum to the 1-form."""

    potential: Tensor
    gradient: Tensor
    curl: Tensor
    harmonic: Tensor

    @property
    def circulation(self) -> Tensor:
        """What no potential gives, curl and harmonic."""
        return self.curl + self.harmonic

    @property
    def share(self) -> float:
        """|circulation|² / |w|², of 0 for a form that is 0."""
        whole = (self.gradient + self.circulation).square().sum()
        return float(self.circulation.square().sum() / whole) if whole > 0 else 0.0


@dataclass(frozen=True)
class CycleSum:
    """The sum around one cycle, nodes in order, over seeds; ``length`` is the sum of absolute efforts on the way."""

    nodes: tuple[int, ...]
    total: Spread
    length: float


@dataclass(frozen=True)
class Circulation:
    """What seeds say of a form. ``cycles``: one for each edge beyond a spanning forest, which together decide;
    ``verdict``: "exact" where no sum exceeds rounding, else whether any interval excludes 0 at ``level``, corrected for
    their number (Bonferroni).
    """

    mean: Hodge
    share_by_seed: tuple[float, ...]
    cycles: tuple[CycleSum, ...]
    level: float
    verdict: Exactness


def _edges(call: str, nodes: int, edges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    found = [(int(a), int(b)) for a, b in edges]
    for a, b in found:
        if a == b or not (0 <= a < nodes and 0 <= b < nodes):
            raise ArgumentError(f"{call}: an edge joins two of the nodes 0 to {nodes - 1}, received ({a}, {b}).")
    if len({frozenset(edge) for edge in found}) != len(found):
        raise ArgumentError(
            f"{call}: two nodes may share one edge, in one direction; give the mean of what was measured both ways."
        )
    return found


def _incidence(nodes: int, edges: Sequence[tuple[int, int]]) -> Tensor:
    """(E, V): grad f = B f."""
    incidence = torch.zeros(len(edges), nodes, dtype=torch.float64)
    for row, (tail, head) in enumerate(edges):
        incidence[row, tail], incidence[row, head] = -1, 1
    return incidence


def _around(nodes: Sequence[int], edges: Sequence[tuple[int, int]]) -> Tensor:
    """(E,): +1 for edges that the cycle follows, -1 for those it goes against."""
    place = {edge: index for index, edge in enumerate(edges)}
    row = torch.zeros(len(edges), dtype=torch.float64)
    for tail, head in itertools.pairwise((*nodes, nodes[0])):
        forward = place.get((tail, head))
        row[place[head, tail] if forward is None else forward] = -1 if forward is None else 1
    return row


def triangles(nodes: int, edges: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """All (a, b, c) with a < b < c whose three edges are there."""
    beside: list[set[int]] = [set() for _ in range(nodes)]
    for a, b in edges:
        beside[a].add(b)
        beside[b].add(a)
    return [
        (a, b, c)
        for a in range(nodes)
        for b in sorted(beside[a])
        if b > a
        for c in sorted(beside[a] & beside[b])
        if c > b
    ]


def cycles(nodes: int, edges: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
    """A basis of the cycles: for each edge beyond a spanning forest of shortest paths, that edge and the way back
    through the forest.
    """
    found = _edges("cycles", nodes, edges)
    beside: list[list[int]] = [[] for _ in range(nodes)]
    for a, b in found:
        beside[a].append(b)
        beside[b].append(a)
    above: dict[int, int] = {}
    depth: dict[int, int] = {}
    for root in range(nodes):
        if root in depth:
            continue
        depth[root], waiting = 0, deque([root])
        while waiting:
            node = waiting.popleft()
            for other in beside[node]:
                if other not in depth:
                    above[other], depth[other] = node, depth[node] + 1
                    waiting.append(other)
    basis = []
    for a, b in found:
        if above.get(a) == b or above.get(b) == a:
            continue
        left, right = [a], [b]
        while left[-1] != right[-1]:
            side = left if depth[left[-1]] >= depth[right[-1]] else right
            side.append(above[side[-1]])
        # a → b, up from b to where both ways meet, down to a
        basis.append((a, *right, *reversed(left[1:-1])))
    return basis


def hodge(nodes: int, edges: Sequence[tuple[int, int]], form: Tensor) -> Hodge:
    """The decomposition of ``form`` (E, …) on a graph of ``nodes`` nodes, by least squares of smallest norm, in
    float64.

    Raises: ArgumentError for edges that are none, come twice, or are not as many as the form has rows, and for NaN or
    infinity.
    """
    found = _edges("hodge", nodes, edges)
    if form.shape[:1] != (len(found),) or not bool(form.isfinite().all()):
        raise ArgumentError(
            f"hodge: a finite number for each of {len(found)} edges is required, received shape {tuple(form.shape)}"
            f"{' with NaN or infinity. Leave failed runs out' if form.shape[:1] == (len(found),) else ''}."
        )
    flat = form.double().reshape(len(found), form.shape[1:].numel())
    incidence = _incidence(nodes, found)
    potential = torch.linalg.pinv(incidence) @ flat
    gradient = incidence @ potential
    rest = flat - gradient
    faces = triangles(nodes, found)
    curls = torch.stack([_around(face, found) for face in faces]) if faces else rest.new_zeros(0, len(found))
    curl = torch.linalg.pinv(curls) @ (curls @ rest)
    shape = form.shape
    return Hodge(potential.view(nodes, *shape[1:]), gradient.view(shape), curl.view(shape), (rest - curl).view(shape))


def circulation(nodes: int, edges: Sequence[tuple[int, int]], forms: Tensor, *, level: float = 0.95) -> Circulation:
    """What ``forms`` (E, seeds), one 1-form a seed, say of exactness: the decomposition of their mean, and every basic
    cycle's sum with its interval.

    Raises: ArgumentError as ``hodge``, and without a seed.
    """
    if forms.ndim != 2 or not forms.shape[1]:
        raise ArgumentError(
            "circulation: forms (edges, seeds) with at least one seed are required, "
            f"received shape {tuple(forms.shape)}."
        )
    found = _edges("circulation", nodes, edges)
    forms = forms.double()
    mean = hodge(nodes, found, forms.mean(1))
    around = cycles(nodes, found)
    each = 1 - (1 - level) / max(1, len(around))
    sums = []
    for nodes_of in around:
        row = _around(nodes_of, found)
        sums.append(
            CycleSum(nodes_of, spread((row @ forms).tolist(), level=each), float((row.abs() @ forms.abs()).mean()))
        )
    shares = tuple(hodge(nodes, found, forms[:, seed]).share for seed in range(forms.shape[1]))
    return Circulation(mean, shares, tuple(sums), each, _verdict(sums))


def _verdict(sums: Sequence[CycleSum]) -> Exactness:
    if not sums:
        return "no cycles"
    if all(
        max(abs(found.total.minimum), abs(found.total.maximum)) <= _ROUNDING * max(found.length, 1e-300)
        for found in sums
    ):
        return "exact"
    if sums[0].total.n < 2:
        return "not decidable"
    beyond = any(
        found.total.low is not None and found.total.high is not None and not found.total.low <= 0.0 <= found.total.high
        for found in sums
    )
    return "beyond the spread" if beyond else "within the spread"
