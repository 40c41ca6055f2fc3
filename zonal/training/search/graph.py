"""The move graph of what was tried: regimes joined by single moves, each with its effort, and whether the efforts come
from a potential.

The effort of an edge is the difference in the measure at the largest number of steps that both ends were trained for:
what the search itself compares. Where all edges have the same number of steps it is the difference of one number a
regime, and exact by construction; where halving ended some regimes early, edges are of unlike numbers of steps, and
learning curves that cross make it circulate.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from zonal.evaluation.potential import Circulation, circulation
from zonal.evaluation.statistics import Spread, spread
from zonal.models import ModelConfig
from zonal.training.search.moves import Move, proposals
from zonal.training.search.regime import Regime

Costs = Mapping[Regime, Mapping[int, Mapping[int, float]]]
"""Regime → steps → seed → cost."""


@dataclass(frozen=True)
class Edge:
    """A move between two tried regimes (places in the list of them), its effort a seed and their spread."""

    tail: int
    head: int
    kind: str
    text: str
    steps: int
    efforts: tuple[float, ...]
    effort: Spread


@dataclass(frozen=True)
class Graph:
    """Regimes in the order they were tried, the moves between them, and what their efforts say; None without a move."""

    regimes: tuple[Regime, ...]
    edges: tuple[Edge, ...]
    found: Circulation | None


def effort(
    costs: Mapping[int, Mapping[int, float]], other: Mapping[int, Mapping[int, float]]
) -> tuple[int, tuple[float, ...]] | None:
    """(steps, other - own by seed) at the largest number of steps that both have costs for; None without one."""
    common = set(costs) & set(other)
    if not common:
        return None
    steps = max(common)
    return steps, tuple(other[steps][seed] - costs[steps][seed] for seed in sorted(costs[steps]))


def move_graph(costs: Costs, model: ModelConfig, kinds: Sequence[str], palette: Sequence[str]) -> Graph:
    """The graph of all regimes with costs; an edge runs from the one that was tried first."""
    regimes = tuple(regime for regime, found in costs.items() if found)
    place = {regime: index for index, regime in enumerate(regimes)}
    edges: dict[frozenset[int], Edge] = {}
    for tail, regime in enumerate(regimes):
        for move in proposals(regime, model, kinds, palette):
            if not isinstance(move, Move) or move.target not in place:
                continue
            head = place[move.target]
            pair = frozenset((tail, head))
            measured = effort(costs[regime], costs[move.target])
            # the way back of an edge that is there says nothing new: a difference changes its sign
            if pair not in edges and measured is not None:
                steps, values = measured
                edges[pair] = Edge(tail, head, move.kind, move.text, steps, values, spread(values))
    found = tuple(edges.values())
    form = torch.tensor([edge.efforts for edge in found], dtype=torch.float64)
    return Graph(
        regimes, found, circulation(len(regimes), [(edge.tail, edge.head) for edge in found], form) if found else None
    )
