"""Tokens as frames: turns that compose, whatever is learned; the score as a dot product; values carried from token to
token.
"""

import pytest
import torch
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal.algebra.score import Categorical
from zonal.errors import ArgumentError
from zonal.nn import Attention


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_turns_compose(dtype: torch.dtype, scale: float) -> None:
    """A_xx = I, A_xy A_yz = A_xz and A_yx = A_xy^-1 for any three tokens; of condition 1, without reflections."""
    score = Categorical(size=5)
    x = draw(7, 10, scale=scale).to(dtype)
    g = score.frames(x)
    assert g.dtype == dtype
    morphism = g.mT[:, None] @ g[None]  # A_xy = g_x^-1 g_y
    digits = 1e-12 if dtype == torch.float64 else 2e-6
    one = torch.eye(5, dtype=dtype)
    assert torch.allclose(g @ g.mT, one.expand(7, 5, 5), atol=digits)
    assert torch.allclose(
        torch.linalg.inv(g.double())[:, None] @ g.double()[None], morphism.double(), atol=100 * digits
    )
    assert torch.allclose(morphism[range(7), range(7)], one.expand(7, 5, 5), atol=digits)
    assert torch.allclose(
        torch.einsum("xyij,yzjk->xyzik", morphism, morphism), morphism[:, None].expand(7, 7, 7, 5, 5), atol=10 * digits
    )
    assert torch.allclose(morphism.transpose(0, 1).mT, morphism, atol=digits)
    assert torch.linalg.det(g.double()).sub(1).abs().max() < 1e-4


@pytest.mark.parametrize("relation", [False, True])
def test_the_score_is_a_trace(relation: bool) -> None:
    """tr(R^T g_t^-1 g_s) / tau for every pair, as a dot product; without a relation m - |A - I|^2 / 2, with a token
    nearest to itself.
    """
    operator = m.rewa_categorical(relation=relation, temperature=0.5).for_heads(4, 2, dim=5).double()
    q, k = draw(2, 4, 6, 5), draw(2, 2, 9, 5, seed=1)
    params, score = operator.bind(4, 2).score_params, operator.score
    assert isinstance(score, Categorical)
    found = score.pair(score.prepare_query(q, params, None), score.prepare_key(k, params).repeat_interleave(2, 1))
    turn = torch.linalg.inv(score.frames(q))[:, :, :, None] @ score.frames(k).repeat_interleave(2, 1)[:, :, None]
    if relation:
        matrix = operator.learned_parts["score_relation"]
        assert matrix.shape == (2, 4, 4)
        assert torch.allclose(matrix @ matrix.mT, torch.eye(4, dtype=torch.float64).expand(2, 4, 4), atol=1e-6)
        expected = torch.einsum("hij,bhtsij->bhts", matrix.repeat_interleave(2, 0), turn) / 0.5
    else:
        expected = (4 - (turn - torch.eye(4)).square().sum((-1, -2)) / 2) / 0.5
        own = score.pair(
            score.prepare_query(k.repeat_interleave(2, 1), params, None),
            score.prepare_key(k, params).repeat_interleave(2, 1),
        )
        assert torch.equal(own.argmax(-1), torch.arange(9).expand(2, 4, 9))
    assert torch.allclose(found, expected, atol=1e-10)
    assert score.width(5) == 16
    assert operator.tags.bilinear


@pytest.mark.parametrize("path", ["dense", "tiled"])
def test_a_change_of_the_common_frame_changes_nothing(path: str) -> None:
    """g_x -> h g_x leaves every turn, hence every output, as it was: values carried and brought back."""
    score = Categorical(size=4, transport=True)
    operator = zonal.Operator(score, zonal.link.Exp(), zonal.anchor.Row())
    x, v = draw(1, 2, 8, 6), draw(1, 2, 8, 12, seed=1)
    y = score.carried(zonal.attention(x, x, score.carried(v, x), operator, causal=True, path=path), x, back=True)
    g = torch.linalg.qr(draw(4, 4, seed=2))[0] @ score.frames(x)
    turn = g.mT[:, :, :, None] @ g[:, :, None]
    logits = (
        turn.diagonal(dim1=-2, dim2=-1).sum(-1).masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), float("-inf"))
    )
    expected = torch.einsum("bhts,bhtsij,bhsnj->bhtni", logits.softmax(-1), turn, v.unflatten(-1, (3, 4))).flatten(-2)
    assert torch.allclose(y, expected, atol=1e-10)


def test_layers_carry_values() -> None:
    """The first token keeps its own; a decoder goes on from carried values; one map for queries and keys."""
    torch.manual_seed(0)
    layer = Attention(
        24, 3, m.rewa_categorical(size=4, relation=True, transport=True), rotary=True, qk_norm=True
    ).double()
    assert layer.query is layer.key
    assert layer.qk_dim == 6
    x = draw(2, 11, 24)
    y = layer(x)
    assert isinstance(y, Tensor)
    assert torch.allclose(y[:, 0], layer.output(layer.value(x[:, 0])), atol=1e-10)
    first, memory = layer(x[:, :6], return_memory=True)
    rest, _ = layer(x[:, 6:], memory)
    assert torch.allclose(torch.cat([first, rest], 1), y, atol=1e-10)
    # another function than that of values which stay as they are
    plain = Attention(24, 3, m.rewa_categorical(size=4, relation=True), rotary=True, qk_norm=True).double()
    plain.load_state_dict(layer.state_dict())
    assert (plain(x) - y).abs().max() > 1e-2  # type: ignore[operator]
    layer(x).square().sum().backward()  # type: ignore[union-attr]
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


def test_poison_and_extremes() -> None:
    """What is not finite spoils its own token; zeros are the unit frame; numbers at the end of float32 turn by half."""
    score = Categorical(size=4)
    x = draw(5, 6)
    clean = score.frames(x)
    for bad in (float("nan"), float("inf")):
        broken = x.clone()
        broken[2, 1] = bad
        found = score.frames(broken)
        assert not found[2].isfinite().all()
        assert torch.equal(found[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])
    ends = torch.tensor([[0.0] * 6, [1e-30] * 6, [1e30, 0, 0, 0, 0, 0]]).requires_grad_()
    frames = score.frames(ends)
    assert torch.allclose(frames[0], torch.eye(4))
    assert torch.allclose(frames @ frames.mT, torch.eye(4).expand(3, 4, 4), atol=1e-5)
    (pull,) = torch.autograd.grad((frames * draw(3, 4, 4, seed=3).float()).sum(), ends)
    assert pull.isfinite().all()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Categorical(size=1), "size must be a whole number >= 2"),
        (lambda: Categorical(temperature=0.0), "temperature must be > 0"),
        (
            lambda: Categorical(size=3).frames(torch.zeros(4)),
            "vectors of 1 to 3 numbers are required with m = 3, received 4",
        ),
        (lambda: Attention(24, 3, m.rewa_categorical(size=5, transport=True)), "multiple of m = 5 numbers, received 8"),
        (lambda: Attention(24, 4, m.rewa_categorical(), kv_heads=2), "needs kv_heads = heads = 4"),
    ],
)
def test_errors_say_what_would_do(make: object, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()  # type: ignore[operator]
