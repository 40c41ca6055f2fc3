"""Shapes of neighbourhoods: deaths by hand, what is a neighbour, gradients, and the layer that compares them."""

import pytest
import torch
from nn.neighbourhoods import deaths_by_hand
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal.algebra.metric import Topological
from zonal.errors import ArgumentError
from zonal.nn import Attention, deaths
from zonal.nn.topology import Earlier


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("neighbours", [1, 3, 6])
def test_deaths_and_their_gradients(neighbours: int) -> None:
    """By Kruskal's algorithm, with two query heads for one of keys."""
    q, k = draw(2, 4, 9, 3).requires_grad_(), draw(2, 2, 9, 3, seed=1).requires_grad_()
    found = deaths(q, k, neighbours)
    wanted = [deaths_by_hand(x, k, neighbours) for x in (q, k)]
    weight = [draw(*x.shape, seed=2) for x in found]
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=1e-12)
        assert (one[:, :, 0] == 0).all()  # the first token has an empty diagram
        assert (one[:, :, 1, 1:] == 0).all()
        assert (one.diff(dim=-1) <= 0).all()
    grads = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(xs, weight, strict=True)), (q, k))
        for xs in (found, wanted)
    ]  # type: ignore[arg-type]
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, atol=1e-10)


def test_a_shape_that_is_known() -> None:
    """Two pairs far apart: one long death, the rest short. One map for queries and keys makes one diagram of both."""
    points = torch.tensor([[0.0, 0.0], [1.0, 0.0], [10.0, 0.0], [10.0, 2.0]], dtype=torch.float64)[None, None]
    of_queries, of_keys = deaths(points, points, 3)
    assert torch.allclose(of_keys[0, 0, 3], torch.tensor([9.0, 2.0, 1.0], dtype=torch.float64), atol=2e-4)
    assert torch.equal(of_queries, of_keys)
    # a loop of as many tokens, one apart: the same number of components, other deaths
    line = torch.arange(4, dtype=torch.float64)[None, None, :, None] * torch.tensor([1.0, 0.0], dtype=torch.float64)
    even = deaths(line, line, 3)[1]
    apart = Topological().pair(of_keys[0, 0, 3:], even[0, 0, 3:]).item()
    # 1 and 1, 2 and 1 are worth matching, 9 and 1 are not
    assert apart == pytest.approx((1 + (81 + 1) / 2) ** 0.5, abs=1e-3)


def test_only_earlier_real_tokens_are_neighbours() -> None:
    q, k = draw(2, 2, 12, 3), draw(2, 2, 12, 3, seed=1)
    whole = deaths(q, k, 3)
    # later tokens, however large, poisoned or near, change nothing earlier
    later = k.clone()
    later[:, :, 7:] = torch.where(
        torch.rand(2, 2, 5, 1, generator=torch.Generator().manual_seed(3)) > 0.5, float("nan"), 1e6
    )
    for one, other in zip(whole, deaths(q, later, 3), strict=True):
        assert torch.equal(one[:, :, :7], other[:, :, :7])
    # a poisoned token is nobody's neighbour
    broken = k.clone()
    broken[:, :, 4] = float("nan")
    assert deaths(q, broken, 3)[0].isfinite().all()
    # padding is none either, nor are other documents
    mask = torch.rand(2, 12, generator=torch.Generator().manual_seed(4)) > 0.4
    padded = deaths(q, k, 3, key_padding_mask=mask)
    for row in range(2):
        alone = deaths(q[row : row + 1, :, mask[row]], k[row : row + 1, :, mask[row]], 3)
        for one, other in zip(padded, alone, strict=True):
            assert torch.allclose(one[row : row + 1, :, mask[row]], other, atol=1e-12)
    packed = deaths(q[:1], k[:1], 3, cu_seqlens=torch.tensor([0, 5, 12]))
    for part in (slice(0, 5), slice(5, 12)):
        for one, other in zip(packed, deaths(q[:1, :, part], k[:1, :, part], 3), strict=True):
            assert torch.allclose(one[:, :, part], other, atol=1e-12)
    # what came before is looked at as if it stood in front
    for one, other in zip(whole, deaths(q[:, :, 5:], k[:, :, 5:], 3, earlier=Earlier(k[:, :, :5], None)), strict=True):
        assert torch.allclose(one[:, :, 5:], other, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_coincident_points_and_short_types(dtype: torch.dtype) -> None:
    """Equal tokens die at once, with a finite gradient; long sequences are looked through in blocks."""
    x = torch.zeros(1, 1, 6, 4, dtype=dtype).requires_grad_()
    found = deaths(x, x, 3)[1]
    assert found.dtype == dtype
    assert found.abs().max() == 0
    (pull,) = torch.autograd.grad(found.float().sum(), x)
    assert pull.eq(0).all()
    long = draw(1, 1, 300, 4)
    exact, rounded = deaths(long, long, 3)[1], deaths(long.to(dtype), long.to(dtype), 3)[1].double()
    near = deaths(long.to(dtype).double(), long.to(dtype).double(), 3)[1]
    assert (rounded - near).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2)
    assert torch.allclose(exact[:, :, :200], deaths(long[:, :, :200], long[:, :, :200], 3)[1], atol=1e-12)


def test_the_layer_compares_shapes_alone() -> None:
    """With the plane's gate closed two tokens of one neighbourhood shape are equal to every query, wherever they
    lie.
    """
    torch.manual_seed(0)
    layer = Attention(24, 2, m.rewa_topological(neighbours=2, gates=(0.0, 1.0)), qk_dim=4).double()
    assert (layer.qk_dim, layer.key_dim) == (4, 6)
    assert layer.query.weight.shape == (8, 24)
    x = draw(1, 9, 24)
    y = layer(x)
    # the same layer with all keys and queries moved: shapes are as they were
    with torch.no_grad():
        moved = Attention(24, 2, m.rewa_topological(neighbours=2, gates=(0.0, 1.0)), qk_dim=4, bias=True).double()
        moved.load_state_dict(layer.state_dict(), strict=False)
        for linear in (moved.value, moved.output):
            linear.bias.zero_()
        shift = draw(8, seed=5)
        moved.query.bias.copy_(shift)
        moved.key.bias.copy_(shift)
    assert torch.allclose(moved(x), y, atol=1e-9)  # type: ignore[arg-type]
    assert not torch.allclose(Attention(24, 2, m.rewa_topological(neighbours=2), qk_dim=4).double()(x), y, atol=1e-3)  # type: ignore[arg-type]
    again = zonal.Operator.from_config(layer.operator.config())
    assert again.score == layer.operator.score


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: m.rewa_topological(neighbours=0), "neighbours must be a whole number >= 1"),
        (lambda: m.rewa_topological(weights=(1.0, 1.0, 1.0)), "weights must be two numbers"),  # type: ignore[arg-type]
        (lambda: zonal.score.NegativeDistance(neighbours=-1), "neighbours must be a whole number >= 0"),
        (
            lambda: Attention(24, 2, m.rewa_topological(prior=zonal.prior.Window(4))),
            "Drop the prior, or the neighbours",
        ),
    ],
)
def test_errors_say_what_would_do(make: object, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()  # type: ignore[operator]
