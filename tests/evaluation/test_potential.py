"""Efforts with a known potential and a known circulation are taken apart into both."""

import math

import pytest
import torch

from zonal.errors import ArgumentError
from zonal.evaluation.potential import circulation, cycles, hodge, triangles

# two triangles that share an edge, a square without a diagonal, a bridge, and two nodes apart
NODES = 9
EDGES = [(0, 1), (1, 2), (0, 2), (3, 1), (2, 3), (3, 4), (4, 5), (6, 5), (6, 3), (7, 8)]


def rotation(edges, cycle):
    """1 along the cycle, 0 elsewhere."""
    form = torch.zeros(len(edges), dtype=torch.float64)
    for a, b in zip(cycle, (*cycle[1:], cycle[0]), strict=True):
        form[edges.index((a, b)) if (a, b) in edges else edges.index((b, a))] = 1 if (a, b) in edges else -1
    return form


def drop(potential):
    return torch.stack([potential[b] - potential[a] for a, b in EDGES])


def test_a_known_potential_comes_back_and_nothing_circulates():
    potential = torch.randn(NODES, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = hodge(NODES, EDGES, drop(potential))
    assert found.circulation.abs().max() < 1e-12
    assert found.share < 1e-24
    for part in ([0, 1, 2, 3, 4, 5, 6], [7, 8]):  # up to a constant on each connected part
        assert torch.allclose(found.potential[part], potential[part] - potential[part].mean(), atol=1e-12)


def test_a_known_circulation_is_found_beside_a_known_potential():
    potential = torch.randn(NODES, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    square = 0.7 * rotation(EDGES, (3, 4, 5, 6))
    found = hodge(NODES, EDGES, drop(potential) + square)
    assert torch.allclose(found.gradient, drop(potential), atol=1e-12)  # a whole turn has no gradient
    assert torch.allclose(found.harmonic, square, atol=1e-12)  # nor is it a sum of triangles
    assert found.curl.abs().max() < 1e-12
    assert found.share == pytest.approx(float(square.square().sum() / (drop(potential) + square).square().sum()))


def test_what_triangles_explain_is_curl():
    form = 0.3 * rotation(EDGES, (0, 1, 2)) - 0.2 * rotation(EDGES, (1, 2, 3))
    found = hodge(NODES, EDGES, form)
    assert torch.allclose(found.curl, form, atol=1e-12)
    assert found.harmonic.abs().max() < 1e-12


def test_the_parts_stand_at_right_angles_and_circulation_has_no_sources():
    form = torch.randn(len(EDGES), 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    found = hodge(NODES, EDGES, form)
    assert torch.allclose(found.gradient + found.curl + found.harmonic, form, atol=1e-12)
    for a, b in ((found.gradient, found.curl), (found.gradient, found.harmonic), (found.curl, found.harmonic)):
        assert (a * b).sum(0).abs().max() < 1e-12
    for node in range(NODES):
        out = [found.circulation[i] * (1 if edge[0] == node else -1) for i, edge in enumerate(EDGES) if node in edge]
        assert torch.stack(out).sum(0).abs().max() < 1e-12


def test_cycles_are_a_basis_that_closes():
    basis = cycles(NODES, EDGES)
    assert len(basis) == len(EDGES) - NODES + 2  # two connected parts
    rows = torch.stack([rotation(EDGES, cycle) for cycle in basis])
    assert torch.linalg.matrix_rank(rows) == len(basis)
    assert (rows @ drop(torch.arange(NODES, dtype=torch.float64) ** 2)).abs().max() == 0
    assert triangles(NODES, EDGES) == [(0, 1, 2), (1, 2, 3)]


def test_seeds_decide_whether_a_sum_is_more_than_noise():
    generator = torch.Generator().manual_seed(3)
    potentials = torch.randn(NODES, 6, generator=generator, dtype=torch.float64)
    exact = torch.stack([potentials[b] - potentials[a] for a, b in EDGES])
    noise = 0.05 * torch.randn(len(EDGES), 6, generator=generator, dtype=torch.float64)
    turning = 0.7 * rotation(EDGES, (3, 4, 5, 6))[:, None]
    assert circulation(NODES, EDGES, exact).verdict == "exact"
    assert circulation(NODES, EDGES, exact + noise).verdict == "within the spread"
    found = circulation(NODES, EDGES, exact + noise + turning)
    assert found.verdict == "beyond the spread"
    square = next(cycle for cycle in found.cycles if set(cycle.nodes) == {3, 4, 5, 6})
    assert abs(square.total.mean) == pytest.approx(2.8, abs=0.2)
    assert square.total.low is not None
    assert square.total.high is not None
    assert square.total.low * square.total.high > 0
    assert len(found.share_by_seed) == 6
    assert circulation(NODES, EDGES, (exact + turning)[:, :1]).verdict == "not decidable"
    assert circulation(3, [(0, 1), (1, 2)], exact[:2]).verdict == "no cycles"
    # a level of 95% over all cycles together
    assert math.isclose(found.level, 1 - 0.05 / len(found.cycles))


def test_a_graph_without_edges_has_no_cycles():
    assert hodge(3, [], torch.zeros(0)).share == 0
    assert circulation(3, [], torch.zeros(0, 2)).verdict == "no cycles"


@pytest.mark.parametrize(
    ("edges", "form", "message"),
    [
        ([(0, 0)], torch.zeros(1), "joins two of the nodes 0 to 2"),
        ([(0, 3)], torch.zeros(1), "joins two of the nodes 0 to 2"),
        ([(0, 1), (1, 0)], torch.zeros(2), "may share one edge"),
        ([(0, 1)], torch.zeros(2), "a finite number for each of 1 edges"),
        ([(0, 1)], torch.tensor([math.nan]), "with NaN or infinity"),
        ([(0, 1)], torch.tensor([[1.0, math.inf]]), "with NaN or infinity"),
    ],
)
def test_graphs_that_are_none(edges, form, message):
    with pytest.raises(ArgumentError, match=message):
        hodge(3, edges, form)
