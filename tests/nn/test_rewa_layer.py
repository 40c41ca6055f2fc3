"""Layers of REWA: what they share, and what becomes of a layer of softmax attention."""

import copy

import pytest
import torch
from torch import Tensor, nn

import zonal
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.nn import Attention, rewa


def tokens(batch: int = 2, length: int = 19, dim: int = 48) -> Tensor:
    return torch.randn(batch, length, dim, generator=torch.Generator().manual_seed(0))


LAYERS = {
    "plain": {},
    "grouped": {"kv_heads": 2},
    "rotary": {"rotary": True, "qk_norm": True},
    "conv": {"conv": 3, "qk_dim": 20},
    "lifted": {"cg_lift": 9},
}


@pytest.mark.parametrize("name", LAYERS)
def test_from_softmax_changes_nothing(name: str) -> None:
    """To 1e-6 in float32, with closed gates; and the layer that was given is not touched."""
    torch.manual_seed(0)
    layer = Attention(48, 4, m.softmax(prior=zonal.prior.ALiBi()), **LAYERS[name])  # type: ignore[arg-type]
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    x, before = tokens(), copy.deepcopy(layer.state_dict())
    new = rewa.from_softmax(layer)
    expected = layer(x)
    assert isinstance(expected, Tensor)
    for path in ("dense", "tiled"):
        assert (new(x, path=path) - expected).abs().max() <= 1e-6 * expected.abs().max().clamp_min(1)  # type: ignore[operator]
    assert all(torch.equal(value, layer.state_dict()[key]) for key, value in before.items())
    # a decoder goes on from its memory
    first, memory = new(x[:, :11], return_memory=True)
    rest, _ = new(x[:, 11:], memory)
    assert torch.allclose(torch.cat([first, rest], 1), expected, atol=1e-5)
    # open gates are another function, with a gradient from the start
    gate = new.operator.learned_parts["score_gate"]
    assert gate.shape == (4, 3)
    (pull,) = torch.autograd.grad((new(x) * torch.linspace(-1, 1, 48)).sum(), gate)  # type: ignore[operator]
    assert (pull < 0).any()  # to be opened
    with torch.no_grad():
        gate.fill_(1.0)
    assert not torch.allclose(new(x), expected, atol=1e-3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("bias", "causal"), [(True, False), (False, True)])
def test_from_torch(bias: bool, causal: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(48, 4, bias=bias, batch_first=True)
    with torch.no_grad():
        for weight in layer.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    x = tokens()
    mask = nn.Transformer.generate_square_subsequent_mask(19) if causal else None
    expected = layer(x, x, x, need_weights=False, attn_mask=mask, is_causal=causal)[0]
    assert torch.allclose(rewa.from_softmax(layer, causal=causal)(x), expected, atol=1e-6)  # type: ignore[arg-type]


def test_open_gates_learn() -> None:
    """What softmax cannot do as it stands: a converted layer fits a hyperbolic teacher better than the frozen dot
    product, by its gates alone.
    """
    torch.manual_seed(0)
    layer = Attention(48, 4, "softmax")
    teacher = rewa.from_softmax(layer, weights=(1.0, 1.0, 4.0), gates=(0.0, 0.0, 2.0))
    student = rewa.from_softmax(layer, weights=(1.0, 1.0, 4.0))
    x = 3 * tokens()
    target = teacher(x).detach()  # type: ignore[union-attr]
    optimiser = torch.optim.Adam([student.operator.learned_parts["score_gate"]], lr=0.2)
    losses = []
    for _ in range(25):
        loss = (student(x) - target).square().mean()  # type: ignore[operator]
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.1 * losses[0]
    assert (student.operator.learned_parts["score_gate"][:, 2] > 0.5).all()


def test_shared_witness() -> None:
    """One map: a token is nearest to itself, always; two maps need not have it so."""
    torch.manual_seed(0)
    x = tokens()
    for shared in (True, False):
        layer = Attention(48, 4, m.rewa(shared_witness=shared), qk_norm=True)
        assert (layer.query is layer.key) == shared
        assert (
            sum(p.numel() for p in layer.parameters()) == (3 if shared else 4) * 48 * 48 + (12 if shared else 24) + 12
        )
        q, k = (layer._split(linear(x), 4) for linear in (layer.query, layer.key))
        params = layer.operator.bind(4, 4).score_params
        score = layer.operator.score.pair(layer.operator.score.prepare_query(q, params, None), k)
        assert bool((score.argmax(-1) == torch.arange(19)).all()) == shared
        assert layer(x).shape == x.shape  # type: ignore[union-attr]
    with pytest.raises(ArgumentError, match="needs kv_heads = heads = 4"):
        Attention(48, 4, m.rewa(shared_witness=True), kv_heads=2)


def test_one_map_has_one_name() -> None:
    layer = Attention(48, 4, m.rewa(shared_witness=True), qk_norm=True, bias=True)
    assert not any(name.startswith("key") for name in layer.state_dict())
    layer.query = nn.Identity()  # type: ignore[assignment]
    assert layer.key is layer.query


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rewa.from_softmax(Attention(48, 4, "cosine")), "score Dot of plain queries and keys"),
        (lambda: rewa.from_softmax(Attention(48, 4, "linear")), "score Dot of plain queries and keys"),
        (lambda: rewa.from_softmax(nn.MultiheadAttention(48, 4, dropout=0.1)), "dropout=0"),
        (lambda: rewa.from_softmax(nn.Linear(48, 48)), "received Linear"),  # type: ignore[arg-type]
        (
            lambda: rewa.from_softmax(Attention(48, 4, "softmax"), parts=(4, 4, 3)),
            "sizes \\(4, 4, 3\\) need vectors of 11 numbers, received 12",
        ),
        (lambda: Attention(48, 4, "rewa(parts=(5, 5, 5))", qk_dim=12), "need vectors of 15 numbers, received 12"),
        (lambda: m.rewa(parts=(4, 4)), "rewa: parts must be three numbers"),
        (lambda: m.rewa(parts=(0, 0, 0)), "rewa: a part of at least one number"),
        (lambda: m.rewa(weights=(1.0, 0.0, 1.0)), "To switch a factor off, use a gate of 0"),
        (lambda: m.rewa(temperature=0.0), "temperature must be > 0"),
    ],
)
def test_errors_say_what_would_do(make: object, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make()  # type: ignore[operator]


def test_parts_of_nothing_are_left_out() -> None:
    operator = m.rewa(parts=(0, 8, 4), weights=(1.0, 2.0, 3.0)).for_heads(2, dim=12)
    assert [type(f).__name__ for f in operator.score.metric.factors] == ["Sphere", "Hyperbolic"]  # type: ignore[attr-defined]
    assert operator.learned_parts["score_weight"].shape == (2, 2)
    again = zonal.Operator.from_config(operator.config())
    assert again.score == operator.score


def test_adaptive_weights() -> None:
    """Each query weighs the spaces by a softmax over its first three numbers; those of keys are not read, nor kept by a
    memory.
    """
    torch.manual_seed(0)
    layer = Attention(60, 4, m.rewa(adaptive=True, parts=(4, 4, 4)))
    x = tokens(dim=60)
    whole = layer(x)
    q, k = (layer._split(linear(x), 4) for linear in (layer.query, layer.key))
    operator = layer.operator
    params = operator.bind(4, 4).score_params
    prepared = operator.score.prepare_query(q, params, None)
    assert torch.allclose(prepared[..., :3], 3 * q[..., :3].softmax(-1))
    assert torch.equal(operator.score.prepare_key(k, params), k[..., 3:])
    plain = zonal.Operator(m.rewa(parts=(4, 4, 4)).score, zonal.link.Exp(), zonal.anchor.Row())
    parts = [
        f.pair(a, b) / f.typical(4)
        for f, a, b in zip(plain.score.metric.factors, q[..., 3:].split(4, -1), k[..., 3:].split(4, -1), strict=True)
    ]  # type: ignore[attr-defined]
    expected = -(torch.stack(parts, -1) * prepared[..., None, :3]).sum(-1)
    assert torch.allclose(operator.score.pair(prepared, k[..., 3:]), expected, atol=1e-5)
    first, memory = layer(x[:, :7], return_memory=True)
    rest, _ = layer(x[:, 7:], memory)
    assert torch.allclose(torch.cat([first, rest], 1), whole, atol=1e-5)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="need vectors of 12 numbers after 3 that weigh the factors, received 12"):
        Attention(48, 4, m.rewa(adaptive=True, parts=(4, 4, 4)), qk_dim=12)
