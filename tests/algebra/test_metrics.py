"""Metrics: distances by their definition, gradients where points coincide, and the dot product that kernels take them from."""

import pytest
import torch
from torch import Tensor

from zonal.algebra.metric import METRICS, Euclidean, Metric, SquaredEuclidean
from zonal.algebra.score import NegativeDistance
from zonal.errors import ArgumentError

KINDS: list[Metric] = [Euclidean(), Euclidean(eps=0.3), SquaredEuclidean()]


def points(queries: int = 7, keys: int = 9, heads: int = 4, kv_heads: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, heads, queries, 5, generator=generator, dtype=torch.float64)
    k = torch.randn(2, kv_heads, keys, 5, generator=generator, dtype=torch.float64)
    return q.requires_grad_(), k.requires_grad_()


def plain(metric: Metric, q: Tensor, k: Tensor) -> Tensor:
    """The distance as its docstring has it."""
    square = (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)
    return square if isinstance(metric, SquaredEuclidean) else (square + metric.eps**2).sqrt() - metric.eps  # type: ignore[attr-defined]


def test_every_metric_is_tested() -> None:
    assert {type(metric) for metric in KINDS} == set(METRICS.values())


@pytest.mark.parametrize("metric", KINDS, ids=str)
def test_distances_and_gradients(metric: Metric) -> None:
    """By autograd and by the hand-written derivative."""
    q, k = points(kv_heads=4)
    with torch.no_grad():
        q[:, :, 0] = k[:, :, 0]  # coincident
    weight = torch.randn(2, 4, 7, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    distance = metric.pair(q, k)
    assert torch.allclose(distance, plain(metric, q, k), atol=1e-9)
    expected = torch.autograd.grad((plain(metric, q, k) * weight).sum(), (q, k))
    by_autograd = torch.autograd.grad((distance * weight).sum(), (q, k))
    by_hand = metric.pair_vjp(q.detach(), k.detach(), distance.detach(), weight)
    for a, b, c in zip(expected, by_autograd, by_hand, strict=True):
        assert torch.allclose(a, b, atol=1e-8)
        assert torch.allclose(a, c, atol=1e-8)


@pytest.mark.parametrize("temperature", [0.5, 3.0])
@pytest.mark.parametrize("metric", KINDS, ids=str)
def test_lift_is_the_score(metric: Metric, temperature: float) -> None:
    """h(scale a(q) . b(k)) = -d / temperature, with key heads that serve two query heads each; h is the C++ text, read as Python."""
    q, k = points()
    lift, (a, b) = metric.lift(temperature), metric.lifted(q, k)
    assert lift is not None
    assert a.shape[-1] == b.shape[-1] == q.shape[-1] + lift.extra
    x = lift.scale * (a @ b.repeat_interleave(2, 1).mT)
    if lift.formula.cpp_value:
        words = {"x": x, "c": lift.formula.constants, "root": torch.sqrt, "most": torch.maximum, "zero": torch.zeros_like(x)}
        x = eval(lift.formula.cpp_value.replace("V{}", "zero"), words)
    expected = NegativeDistance(metric, temperature).pair(q, k.repeat_interleave(2, 1))
    assert torch.allclose(x, expected, atol=1e-9)
    weight = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    for got, want in zip(torch.autograd.grad((x * weight).sum(), (q, k)), torch.autograd.grad((expected * weight).sum(), (q, k)), strict=True):
        assert torch.allclose(got, want, atol=1e-8)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("metric", KINDS, ids=str)
def test_a_poisoned_key_poisons_itself_alone(metric: Metric, bad: float) -> None:
    q, k = (x.detach() for x in points(kv_heads=4))
    clean = metric.pair(q, k)
    k[0, 1, 3, 2] = bad
    found = metric.pair(q, k)
    assert not torch.isfinite(found[0, 1, :, 3]).any()
    found[0, 1, :, 3] = clean[0, 1, :, 3]
    assert torch.allclose(found, clean, atol=1e-9)


@pytest.mark.parametrize("metric", KINDS, ids=str)
def test_no_keys(metric: Metric) -> None:
    q, k = (x.detach() for x in points(kv_heads=4))
    assert metric.pair(q, k[:, :, :0]).shape == (2, 4, 7, 0)
    assert metric.lifted(q, k[:, :, :0])[0].isfinite().all()


def test_a_metric_without_a_dot_product() -> None:
    assert Metric().lift(1.0) is None
    with pytest.raises(ArgumentError, match="eps must be > 0"):
        Euclidean(eps=0.0)
