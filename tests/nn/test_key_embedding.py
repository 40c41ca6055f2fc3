"""Keys of a layer on paper: what the two numbers of a point are in each space, and which keys they are."""

import math

import pytest
import torch

from zonal import mechanisms as m
from zonal.algebra.metric import Euclidean, Hyperbolic, Sphere, to_ball
from zonal.errors import ArgumentError
from zonal.nn import Attention, key_embedding


def test_the_plane_is_seen_along_its_principal_axes():
    x = torch.randn(200, 5, dtype=torch.float64) * torch.tensor([3.0, 0.1, 2.0, 0.1, 0.1]) + 7
    points, share = key_embedding.on_paper(x, Euclidean())
    gaps = torch.cdist(points, points)
    assert torch.allclose(gaps, torch.cdist(x[:, [0, 2]], x[:, [0, 2]]), atol=1.0)
    spread = torch.linalg.eigvalsh(torch.cov(x.T)).flip(0)
    assert share == pytest.approx((spread[:2].sum() / spread.sum()).item())
    assert torch.allclose(points.mean(0), torch.zeros(2, dtype=torch.float64), atol=1e-12)


def test_points_in_two_dimensions_keep_their_distances():
    x = torch.randn(50, 2, dtype=torch.float64)
    points, share = key_embedding.on_paper(x, Euclidean())
    assert share == pytest.approx(1)
    assert torch.allclose(torch.cdist(points, points), torch.cdist(x, x), atol=1e-6)
    points, _ = key_embedding.on_paper(x, Sphere())
    assert torch.allclose(points.norm(dim=-1), torch.ones(50, dtype=torch.float64))
    points, _ = key_embedding.on_paper(x, Hyperbolic())
    ball = to_ball(x)
    assert torch.allclose(torch.cdist(points, points), torch.cdist(ball, ball), atol=1e-6)


@pytest.mark.parametrize("metric", [Sphere(), Hyperbolic(), Hyperbolic(scale=None)])
def test_curved_spaces_lie_in_the_unit_disk(metric):
    points, share = key_embedding.on_paper(torch.randn(300, 6) * torch.logspace(-3, 3, 300)[:, None], metric)
    assert points.norm(dim=-1).max() <= 1 + 1e-12
    assert 0 < share <= 1


def test_a_point_of_hyperbolic_space_keeps_its_distance_from_the_origin():
    x = torch.randn(40, 8, dtype=torch.float64)
    points, _ = key_embedding.on_paper(x, Hyperbolic(scale=0.5))
    assert torch.allclose(2 * points.norm(dim=-1).atanh(), 0.5 * x.norm(dim=-1))


@pytest.mark.parametrize("metric", [Euclidean(), Sphere(), Hyperbolic()])
@pytest.mark.parametrize("x", [torch.zeros(4, 3), torch.ones(1, 1), torch.ones(3, 1)])
def test_few_and_equal_points_are_numbers_too(metric, x):
    points, share = key_embedding.on_paper(x, metric)
    assert points.shape == (x.shape[0], 2)
    assert bool(points.isfinite().all())
    assert math.isfinite(share)


@pytest.mark.parametrize("x", [torch.zeros(0, 3), torch.zeros(3), torch.full((2, 2), math.nan)])
def test_what_is_no_table_of_points_is_refused(x):
    with pytest.raises(ArgumentError, match=r"key_embedding\.on_paper: one finite point or more"):
        key_embedding.on_paper(x, Euclidean())


@pytest.mark.parametrize(
    "operator", ["rewa", "rewa(parts=(2, 4, 2))", "rewa(parts=(0, 4, 3), adaptive=True, gates=(1.0, 0.0, 1.0))"]
)
def test_a_layer_shows_its_own_keys(operator):
    width = 9 if "adaptive" in operator else 8
    layer = Attention(4 * width, heads=4, kv_heads=2, operator=operator)
    x = torch.randn(2, 7, 4 * width)
    heads = key_embedding.of_layer(layer, x)
    metric = key_embedding.metric_of(layer)
    keys = layer.stored_keys(x)
    assert len(heads) == 2
    for head, parts in enumerate(heads):
        assert [part.name for part in parts] == list(metric.names)
        pieces = keys[:, head].flatten(0, 1).split(metric.parts(keys.shape[-1]), -1)
        for part, piece, factor in zip(parts, pieces, metric.factors, strict=True):
            assert torch.equal(part.points, key_embedding.on_paper(piece.detach(), factor)[0])


def test_a_layer_of_one_distance_has_one_space():
    operator = m.rewa().replace(score=m.rewa().score.__class__(Hyperbolic()))
    layer = Attention(16, heads=2, operator=operator)
    assert [[part.name for part in head] for head in key_embedding.of_layer(layer, torch.randn(1, 5, 16))] == [
        ["Hyperbolic"]
    ] * 2


def test_a_layer_without_distances_is_refused():
    with pytest.raises(ArgumentError, match="score NegativeDistance is required"):
        key_embedding.of_layer(Attention(16, heads=2, operator="softmax"), torch.randn(1, 5, 16))


def test_what_heads_make_of_distances_can_be_read():
    layer = Attention(24, heads=2, operator=m.rewa(weights=(0.5, 1.0, 2.0), gates=(1.0, 3.0, 0.0)))
    found = layer.learned()
    assert found["weights"] == {
        "Euclidean": pytest.approx([0.5] * 2),
        "Sphere": pytest.approx([3.0] * 2),
        "Hyperbolic": [0.0] * 2,
    }
    assert found["curvature"] == pytest.approx([3 / 3.5] * 2)
    shut = Attention(24, heads=2, operator=m.rewa(gates=(0.0, 0.0, 0.0)))
    assert shut.learned()["curvature"] == [0.0, 0.0]
    bent = Attention(24, heads=2, operator=m.rewa(parts=(0, 0, 12)))
    assert bent.learned()["curvature"] == pytest.approx([-1.0] * 2)
