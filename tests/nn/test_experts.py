"""Mixtures of experts: the conditional that they are, how tokens choose, and models made of them."""

import pytest
import torch

from zonal.errors import ArgumentError
from zonal.models import CausalLM, ModelConfig, build
from zonal.nn import Attention, Mixture, MixtureOfExperts
from zonal.theory import update


def made(experts=5, top=2, seed=0):
    torch.manual_seed(seed)
    layer = MixtureOfExperts(6, 8, experts, top).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, dtype=torch.float64))
    return layer


@pytest.mark.parametrize(("experts", "top"), [(2, 2), (5, 2), (5, 3), (4, 4)])
def test_it_is_its_definition_with_all_gradients(experts, top):
    layer = made(experts, top)
    x = torch.randn(3, 7, 6, dtype=torch.float64, requires_grad=True)
    logits = x @ layer.router.weight.T
    least = logits.sort(-1, descending=True).values[..., top - 1, None]
    shares = logits.masked_fill(logits < least, float("-inf")).softmax(-1)
    expert = torch.einsum(
        "edh,...eh->...ed",
        layer.down,
        torch.nn.functional.silu(torch.einsum("ehd,...d->...eh", layer.gate, x))
        * torch.einsum("ehd,...d->...eh", layer.up, x),
    )
    expected = (shares[..., None] * expert).sum(-2)
    torch.testing.assert_close(layer.shares(x), shares, rtol=1e-12, atol=1e-12)
    leaves = [x, *layer.parameters()]
    wanted = torch.autograd.grad(expected.sin().sum(), leaves)
    for y in (layer(x), layer.dense(x)):
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
        for one, other in zip(torch.autograd.grad(y.sin().sum(), leaves), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert wanted[1].abs().max() > 0  # the router learns


def test_it_is_a_conditional_on_experts():
    """Corollary 5.3: shares are a distribution, of which no more than ``top`` are not 0; the values depend on the
    row.
    """
    layer, x = made(), torch.randn(4, 6, dtype=torch.float64)
    found = update.Conditional(layer.shares(x))
    assert ((found.weights > 0).sum(-1) == 2).all()
    values = torch.stack([layer._expert(x, each) for each in range(5)], -2)
    torch.testing.assert_close(found(values), layer(x), rtol=1e-12, atol=1e-12)


def test_load_counts_what_tokens_take():
    layer, x = made(), torch.randn(2, 50, 6, dtype=torch.float64)
    load = layer.load(x)
    torch.testing.assert_close(load, (layer.shares(x) > 0).double().mean((0, 1)).to(load) / 2)
    assert abs(float(load.sum()) - 1) < 1e-6
    with torch.no_grad():  # one direction of x decides for expert 3, first of all
        layer.router.weight.zero_()[3, 0] = 1
    assert float(layer.load(x.abs())[3]) == 0.5


def test_a_token_by_itself_is_as_among_others():
    layer, x = made(), torch.randn(1, 9, 6, dtype=torch.float64)
    torch.testing.assert_close(torch.cat([layer(one) for one in x.split(1, 1)], 1), layer(x), rtol=1e-12, atol=1e-12)
    assert layer(x[:, :0]).shape == (1, 0, 6)
    assert layer(x[0, 0]).shape == (6,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    layer = made()
    x = torch.randn(2, 5, 6)
    exact = made().to(dtype).double().dense(x.to(dtype).double())
    y = layer.to(dtype)(x.to(dtype))
    assert y.dtype == dtype
    torch.testing.assert_close(
        y.double(), exact, rtol=0, atol=float(exact.detach().abs().max()) * (2e-6 if dtype == torch.float32 else 3e-2)
    )


def test_models_are_made_of_them(tmp_path):
    config = ModelConfig(13, 16, ("softmax", "ska(power=1)"), heads=2, mlp="experts", experts=4, experts_per_token=2)
    model = build(config, 0).double()
    assert [type(block.mlp) for block in model.blocks] == [MixtureOfExperts] * 2
    tokens = torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(0))
    memory, parts = model.empty_memory(2), []
    for piece in tokens.split(1, 1):
        logits, memory = model.step(piece, memory)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), model(tokens), rtol=1e-9, atol=1e-9)
    model.save(tmp_path / "model.safetensors")
    again = CausalLM.load(tmp_path / "model.safetensors")
    assert again.config == config
    # the last bit of a product may follow where in memory its weights lie
    torch.testing.assert_close(again(tokens), model(tokens), rtol=1e-13, atol=1e-15)
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        total, count = model.loss(tokens[:, :-1], tokens[:, 1:].contiguous())
        optimiser.zero_grad()
        total.backward()
        optimiser.step()
        losses.append(float(total.detach()) / count)
    assert losses[-1] < 0.3 * losses[0]


def test_a_mixture_of_attentions_is_a_conditional_on_its_parts_keys():
    """``nn.Mixture``: heads of its parts side by side are conditionals on the disjoint union of their keys, gated by
    its shares.
    """
    torch.manual_seed(0)
    parts = [Attention(8, 2, spec) for spec in ("softmax", "yat", "rewa(parts=(2,2,0))")]
    layer = Mixture(parts, hidden=4).double()
    with torch.no_grad():
        layer.gate_out.weight.normal_()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    gate = layer.shares(x)[:, None].expand(-1, 2, -1, -1)
    rows = [update.Conditional(part.evidence(x).softmax(-1)) for part in parts]
    found = update.mixed(gate, rows)
    assert isinstance(found, update.Conditional)
    values = []
    for part in parts:
        v = part.value(x).unflatten(2, (2, 4)).transpose(1, 2)
        values.append(torch.einsum("bhtp,dhp->bhtd", v, part.output.weight.unflatten(1, (2, 4))))
    torch.testing.assert_close(found(torch.cat(values, 2)).sum(1), layer(x), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: MixtureOfExperts(8, 8, 4, 5), "2 <= top <= experts, received dim=8, hidden=8, experts=4, top=5"),
        (lambda: MixtureOfExperts(8, 8, 4, 1), "2 <= top"),
        (lambda: MixtureOfExperts(8, 0), "hidden=0"),
        (
            lambda: ModelConfig(5, 8, ("softmax",), heads=2, mlp="experts", experts=1),
            "experts must be at least 2, received 1",
        ),
        (
            lambda: ModelConfig(5, 8, ("softmax",), heads=2, experts=0),
            "experts must be a whole number >= 1, received 0",
        ),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
