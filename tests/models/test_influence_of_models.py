"""What layers say that they read, against the derivatives of models and against the perturbation of their inputs."""

import pytest
import torch

from zonal import influence
from zonal import mechanisms as m
from zonal.models import ModelConfig, build
from zonal.nn import Attention

TOKENS = 12

EXACT = [
    pytest.param(("softmax",), {}, id="causal"),
    pytest.param(("regime(prior=('window(left=2)',))",) * 2, {}, id="window"),
    pytest.param(
        ("regime(prior=('window(left=1)',))", "regime(prior=('window(left=4)',))"),
        {"conv": (3, 0)},
        id="window behind a convolution",
    ),
    pytest.param(("ridge",), {}, id="earlier keys only"),
    pytest.param(("regime(prior=('chunk_causal(size=4)',))",) * 2, {}, id="chunks"),
    pytest.param(("mamba2(state=4, head_dim=4, conv=2)",), {}, id="recurrence"),
    pytest.param(("mixture(parts=('softmax', 'regime(prior=(\"window(left=1)\",))'))",), {}, id="mixture"),
    pytest.param(("rewa_topological(neighbours=2)",), {"qk_dim": 4}, id="neighbourhoods"),
    pytest.param(
        ("regime(link='identity', anchor='raw', prior=('decay(learn=False, gated=True)',))",),
        {},
        id="a gate of the decay",
    ),
]
"""Layers of which, at random weights, everything that is read matters, too."""


def blocks(model):
    def function(x):
        for block in model.blocks:
            x = block(x)
        return x

    return function


def made(layers, options):
    torch.manual_seed(0)
    model = build(ModelConfig(7, 16, layers, heads=2, init_std=0.3, **options), seed=0).double()
    with torch.no_grad():  # also what starts at zero takes part
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    return model


@pytest.mark.parametrize(("layers", "options"), EXACT)
def test_derivatives_of_a_model_fill_what_its_layers_read(layers, options):
    model = made(layers, options)
    x = torch.randn(2, TOKENS, 16, dtype=torch.float64)
    bound = influence.reach(model.reads(TOKENS))
    found = influence.support(blocks(model), x)
    assert not bool((found & ~bound).any())
    assert torch.equal(found.any(0), bound)


@pytest.mark.parametrize(("layers", "options"), EXACT)
def test_a_large_change_outside_changes_nothing(layers, options):
    model = made(layers, options)
    x = torch.randn(1, TOKENS, 16, dtype=torch.float64)
    bound = influence.reach(model.reads(TOKENS))
    before = blocks(model)(x)
    for source in range(TOKENS):
        changed = x.clone()
        changed[:, source] = 1e3 * torch.randn(16, dtype=torch.float64)
        torch.testing.assert_close(
            blocks(model)(changed)[0, ~bound[:, source]], before[0, ~bound[:, source]], rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("operator", ["sinkhorn", "hierarchical(sizes=(2,))", "softmax"])
def test_layers_that_see_both_ways(operator):
    layer = Attention(16, 2, m.resolve(operator), causal=False).double()
    x = torch.randn(1, 8, 16, dtype=torch.float64)
    assert bool(influence.reach([layer.reads(8)]).all())
    assert bool(influence.support(layer, x).all())


def test_a_gate_of_the_decay_is_read_between_chunks():
    """A decay of whole chunks of the past passes by the tokens of the open chunk, whose gates it takes in."""
    torch.manual_seed(0)
    layer = Attention(
        16,
        2,
        m.resolve(
            "regime(link='identity', anchor='raw', prior=('chunk_causal(size=4)', 'decay(learn=False, gated=True)'))"
        ),
    ).double()
    found = influence.support(layer, torch.randn(1, TOKENS, 16, dtype=torch.float64))[0]
    bound = influence.reach([layer.reads(TOKENS)])
    assert not bool((found & ~bound).any())
    assert bool(found[6, 5])
    assert not bool(influence.visible(layer.operator.prior, TOKENS, causal=True)[6, 5])


def test_depth_of_a_model():
    """Three windows of 2 behind a convolution of 3: the first layer reaches 4 back, both together 8, all three 12."""
    model = made(("regime(prior=('window(left=2)',))",) * 3, {"conv": 3})
    depths = influence.depth(model.reads(16))
    assert depths[15].tolist() == [-1] * 3 + [3] * 4 + [2] * 4 + [1] * 4 + [0]
