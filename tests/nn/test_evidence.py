"""What the heads of a layer make of their inputs: their evidence, and its form."""

import math

import pytest
import torch
from torch import Tensor

from zonal import mechanisms as m
from zonal import nn, prior, probe
from zonal.errors import ArgumentError
from zonal.execution import dense
from zonal.execution.call import prepare
from zonal.nn.evidence import forms, maps


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(operator: str = "softmax", **settings: object) -> nn.Attention:
    torch.manual_seed(1)
    return nn.Attention(12, 2, m.resolve(operator), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "attention",
    [
        lambda: layer(conv=3, rotary=True, kv_heads=1),
        lambda: layer("yat", causal=False, qk_norm=True),
        lambda: nn.Attention(12, 2, m.softmax(prior=(prior.ALiBi(), prior.Window(4)))),
        lambda: layer("linear"),
        lambda: layer("rewa"),
        lambda: nn.Attention(12, 2, m.yat().replace(prior=prior.Decay(rates=(0.9, 0.8), learn=False, gated=True))),
    ],
)
def test_rows_of_the_evidence_are_the_weights(attention: object) -> None:
    """Its row-conditional, applied to the values, is what the layer reads out."""
    made: nn.Attention = attention().double()  # type: ignore[operator]
    x = inputs(2, 9, 12).double()
    weights = probe.Rows().observe(made.evidence(x)).log.exp()
    _, _, v, _, _ = made._projected(x, None, None, None)
    v = v.repeat_interleave(made.heads // made.kv_heads, 1)
    assert torch.allclose(made._read_out(weights @ v), made(x, path="dense"), atol=1e-8)


def test_signed_kernels_have_no_logarithm() -> None:
    with pytest.raises(ArgumentError, match="kernel of operator 'sko' may be negative"):
        layer("sko").evidence(inputs(1, 5, 12))


@pytest.mark.parametrize("causal", [True, False])
def test_forms_of_softmax_heads(causal: bool) -> None:
    """Shares sum to one, a head of 6 numbers is explained by 6 where nothing is forbidden, and the ladder of weights goes down."""
    found = forms(layer(causal=causal), inputs(2, 14, 12, seed=3), (1, 3, 6), refine=8)
    assert len(found) == 2
    for head in found:
        assert math.isclose(head.gauge + head.columns + head.interaction, 1)
        assert min(head.gauge, head.columns, head.interaction) > 0
        assert 0 < head.explained[0] < head.explained[1] < head.explained[2] <= 1 + 1e-9
        assert causal or math.isclose(head.explained[2], 1)
        assert head.uniform > 0
        assert head.by_columns > head.by_rank[1] > head.by_rank[2]
        assert all(better <= nat for better, nat in zip(head.refined, head.by_rank, strict=True))
        assert causal or head.by_rank[2] < 1e-12


def test_a_head_that_is_all_field_has_no_interaction() -> None:
    """Constant queries: every row of scores is the same, and the column field alone gives the weights."""
    attention = layer(bias=True, causal=False)
    with torch.no_grad():
        attention.query.weight.zero_()
        attention.query.bias.copy_(inputs(12, seed=5))
    for head in forms(attention, inputs(1, 8, 12), (1,)):
        assert head.columns > 1 - 1e-9
        assert head.by_columns < 1e-12 < head.uniform
        assert head.refined == ()


def test_an_empty_first_row_counts_for_nothing() -> None:
    attention = nn.Attention(12, 2, m.softmax(prior=prior.Causal(include_self=False)))
    with torch.no_grad():
        q, k, v, _, _ = attention._projected(inputs(1, 7, 12), None, None, None)
        assert not dense.weights(prepare(attention.operator, q, k, v, causal=True))[:, :, 0].any()
    for head in forms(attention, inputs(1, 7, 12), (1, 2), refine=3):
        assert math.isfinite(head.uniform + head.by_columns + sum(head.by_rank) + sum(head.refined))


@pytest.mark.parametrize(("ranks", "words"), [((), "rising ranks"), ((2, 2), "rising ranks"), ((1, 9), "number of tokens, 8"), ((0,), "whole number >= 1")])
def test_ranks_must_rise_and_fit(ranks: tuple[int, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        forms(layer(), inputs(1, 8, 12), ranks)


@pytest.mark.parametrize("causal", [True, False])
def test_maps_add_up_to_the_form(causal: bool) -> None:
    """The first sequence alone; the interaction is the evidence without its fields, its energy has the spectrum, and the product is the nearest of its rank."""
    made, x = layer(causal=causal).double(), inputs(2, 9, 12).double()
    form, *_ = forms(made, x[:1], (2,))
    drawn, *_ = maps(made, x, 2)
    forbidden = drawn.evidence.isneginf()
    assert bool(forbidden.any()) == causal
    assert all(torch.equal(each.isneginf(), forbidden) for each in drawn)
    weights, interaction, product = (each.masked_fill(forbidden, 0) for each in (drawn.weights, drawn.interaction, drawn.product))
    assert torch.allclose(weights.sum(-1), torch.ones(9).double())
    fields = probe.centred(drawn.evidence)
    assert torch.allclose((drawn.evidence - fields.rows[:, None] - fields.columns).masked_fill(forbidden, 0), interaction)
    assert torch.allclose(torch.tensor(form.spectrum).double(), torch.linalg.svdvals(interaction).square() / interaction.square().sum())
    assert math.isclose(form.explained[0], float(1 - (interaction - product).square().sum() / interaction.square().sum()), rel_tol=1e-6)
    assert form.explained[0] >= sum(form.spectrum[:2]) - 1e-9


def test_maps_of_a_rank_that_is_none() -> None:
    with pytest.raises(ArgumentError, match=r"nn.evidence.maps: a rank up to the number of tokens, 5, is required, received 6"):
        maps(layer(), inputs(1, 5, 12), 6)
