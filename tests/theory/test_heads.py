"""What the heads of a layer make of their inputs: their evidence, and its form."""

import math
from collections.abc import Callable

import pytest
import torch
from matrix import DECLARED
from torch import Tensor

from zonal import anchor, nn, prior, probe, score
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.execution.call import prepare
from zonal.execution.paths import dense
from zonal.theory.heads import _probe, forms, maps, refusal


def inputs(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(operator: str = "softmax", **settings: object) -> nn.Attention:
    torch.manual_seed(1)
    return nn.Attention(12, 2, m.resolve(operator), **settings)  # type: ignore[arg-type]


NAMED: dict[str, Callable[[], nn.Attention]] = {
    "softmax": lambda: layer(conv=3, rotary=True, kv_heads=1),
    "yat": lambda: layer("yat", causal=False, qk_norm=True),
    "positions": lambda: nn.Attention(12, 2, m.softmax(prior=(prior.ALiBi(), prior.Window(4)))),
    "linear": lambda: layer("linear"),
    "rewa": lambda: layer("rewa"),
    "decay": lambda: nn.Attention(12, 2, m.yat().replace(prior=prior.Decay(rates=(0.9, 0.8), learn=False, gated=True))),
    "sko": lambda: layer("sko"),
    "Row": lambda: layer(),
    "TopK": lambda: nn.Attention(12, 2, m.softmax().replace(anchor=anchor.TopK(k=3))),
    "Count": lambda: nn.Attention(12, 2, m.softmax().replace(anchor=anchor.Count())),
    "Raw": lambda: nn.Attention(12, 2, m.softmax().replace(anchor=anchor.Raw())),
    "Ridge": lambda: layer("ridge(fading=True)"),
    "Koopman": lambda: layer("ska(power=1)", key_gate=True, kv_heads=1),
    "kernel_ridge": lambda: nn.Attention(12, 2, m.softmax().replace(score=score.Dot(scale=1), anchor=anchor.Ridge())),
    "LocalGlobal": lambda: layer("local_global(window=3, first=1, far='hedgehog(size=8)')", kv_heads=1),
    "Plan": lambda: layer("sinkhorn", causal=False),
    "UnbalancedPlan": lambda: nn.Attention(
        12, 2, m.sinkhorn().replace(anchor=anchor.UnbalancedPlan(rho=(0.5, 2.0), learn=True)), causal=False
    ),
    "BoundedPlan": lambda: nn.Attention(
        12, 2, m.sinkhorn().replace(anchor=anchor.BoundedPlan(high=1.2)), causal=False, kv_heads=1
    ),
    "Hierarchical": lambda: layer("hierarchical(sizes=(2, 2))", causal=False),
}


def named(name: str) -> tuple[nn.Attention, Tensor]:
    """A layer in float64, its gates and masses away from their start, and inputs."""
    torch.manual_seed(1)
    made = NAMED[name]().double()
    for gate in (made.query_mass, made.key_mass, made.key_gate, made.decay_gate):
        if gate is not None:
            torch.nn.init.normal_(gate.projection.weight, std=0.3)
    if made.init != "default":
        torch.nn.init.normal_(made.output.weight, std=0.3)
    return made, inputs(2, 9, 12).double()


def read_out(made: nn.Attention, x: Tensor, weights: Tensor) -> Tensor:
    _, _, v, _, _ = made._projected(x)
    return made._read_out(weights @ v.repeat_interleave(made.heads // made.kv_heads, 1))


def test_every_anchor_is_among_the_layers() -> None:
    assert {type(made().operator.anchor).__name__ for made in NAMED.values()} == {
        name for name, kind in DECLARED.items() if kind.slot == "anchor"
    }


@torch.no_grad()
@pytest.mark.parametrize("name", NAMED)
def test_weights_times_values_are_the_read_out(name: str) -> None:
    made, x = named(name)
    wanted = made(x, path="dense")
    assert wanted.abs().max() > 1e-3
    assert torch.allclose(read_out(made, x, made.weights(x)), wanted, rtol=1e-9, atol=1e-12)
    if refusal(made.operator) is None:
        drawn = torch.stack([each.weights for each in maps(made, x[:1], 2)])[None]
        assert torch.allclose(
            read_out(made, x[:1], drawn.masked_fill(drawn.isneginf(), 0)),
            made(x[:1], path="dense"),
            rtol=1e-9,
            atol=1e-12,
        )


@pytest.mark.parametrize("name", [name for name in NAMED if refusal(NAMED[name]().operator) is None])
def test_the_gauge_is_what_weights_do_not_see(name: str) -> None:
    """A factor a row, or a column, of K leaves what the probe sees as it was where the probe says so, and nowhere
    else.
    """
    made, x = named(name)
    call = made.called(x)
    for head, kernel in enumerate(made.evidence_of(call).unbind(1)):
        seen = _probe(call, head)
        weights = made.weights(x)[:, head]
        assert torch.allclose(seen.observe(kernel).log.exp(), weights, rtol=1e-6, atol=1e-9)
        for field, hidden in ((inputs(9, 1, seed=2).double(), seen.left), (inputs(1, 9, seed=3).double(), seen.right)):
            assert torch.allclose(seen.observe(kernel + field).log.exp(), weights, rtol=1e-5, atol=1e-8) == hidden
    form = forms(made, x, (1, 3), refine=4)[1]
    assert form.gauge == (form.rows if seen.left else 0) + (form.columns if seen.right else 0)
    assert form.uniform > form.by_rank[1]
    assert len(form.refined) == (0 if "Plan" in name else 2)
    assert all(better <= nat for better, nat in zip(form.refined, form.by_rank, strict=False))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("kernel_ridge", "solve with the kernel among keys"),
        ("Hierarchical", "anchor of hierarchical.*, Hierarchical, has weights that no probe"),
        ("sko", "the kernel of sko may be negative"),
    ],
)
def test_anchors_without_a_probe_are_refused(name: str, words: str) -> None:
    made, x = named(name)
    for call in (lambda: forms(made, x), lambda: maps(made, x, 1)):
        with pytest.raises(ArgumentError, match=words):
            call()


@pytest.mark.parametrize("shape", [(5, 12), (0, 5, 12), (1, 0, 12)])
def test_inputs_without_tokens_are_refused(shape: tuple[int, ...]) -> None:
    for call in (forms, maps):
        with pytest.raises(ArgumentError, match=r"x \(batch, tokens, dim\) with at least one token is required"):
            call(layer(), torch.zeros(shape), 1)  # type: ignore[operator]


def test_signed_kernels_have_no_logarithm() -> None:
    with pytest.raises(ArgumentError, match="kernel of operator 'sko' may be negative"):
        layer("sko").evidence(inputs(1, 5, 12))


@pytest.mark.parametrize("causal", [True, False])
def test_forms_of_softmax_heads(causal: bool) -> None:
    """Shares sum to one, a head of 6 numbers is explained by 6 where nothing is forbidden, and the ladder of weights
    goes down.
    """
    found = forms(layer(causal=causal), inputs(2, 14, 12, seed=3), (1, 3, 6), refine=8)
    assert len(found) == 2
    for head in found:
        assert math.isclose(head.rows + head.columns + head.interaction, 1)
        assert min(head.rows, head.columns, head.interaction) > 0
        assert head.gauge == head.rows
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_tokens_have_no_energy(dtype: torch.dtype, causal: bool) -> None:
    """What rounding leaves of a constant log K is divided into no shares."""
    attention = layer(causal=causal).to(dtype)
    for head in forms(attention, inputs(12).to(dtype).expand(1, 6, 12), (1,)):
        assert (head.rows, head.columns, head.interaction, head.gauge) == (0, 0, 0, 0)


def test_an_empty_first_row_counts_for_nothing() -> None:
    attention = nn.Attention(12, 2, m.softmax(prior=prior.Causal(include_self=False)))
    with torch.no_grad():
        q, k, v, _, _ = attention._projected(inputs(1, 7, 12))
        assert not dense.weights(prepare(attention.operator, q, k, v, causal=True))[:, :, 0].any()
    for head in forms(attention, inputs(1, 7, 12), (1, 2), refine=3):
        assert math.isfinite(head.uniform + head.by_columns + sum(head.by_rank) + sum(head.refined))


def test_heads_that_see_no_key_at_all() -> None:
    """The whole sequence lies in the first chunk, and a chunk sees earlier ones only: nothing diverges."""
    attention = nn.Attention(12, 2, m.softmax(prior=prior.ChunkCausal(16)))
    for head in forms(attention, inputs(1, 7, 12), (1, 2), refine=2):
        assert (head.uniform, head.by_columns, head.by_rank, head.refined) == (0, 0, (0, 0), (0, 0))


@pytest.mark.parametrize(
    ("ranks", "words"),
    [((), "rising ranks"), ((2, 2), "rising ranks"), ((1, 9), "number of tokens, 8"), ((0,), "whole number >= 1")],
)
def test_ranks_must_rise_and_fit(ranks: tuple[int, ...], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        forms(layer(), inputs(1, 8, 12), ranks)


@pytest.mark.parametrize("causal", [True, False])
def test_maps_add_up_to_the_form(causal: bool) -> None:
    """The first sequence alone; the interaction is the evidence without its fields, its energy has the spectrum, and
    the product is the nearest of its rank.
    """
    made, x = layer(causal=causal).double(), inputs(2, 9, 12).double()
    form, *_ = forms(made, x[:1], (2,))
    drawn, *_ = maps(made, x, 2)
    forbidden = drawn.evidence.isneginf()
    assert bool(forbidden.any()) == causal
    assert all(torch.equal(each.isneginf(), forbidden) for each in drawn)
    weights, interaction, product = (
        each.masked_fill(forbidden, 0) for each in (drawn.weights, drawn.interaction, drawn.product)
    )
    assert torch.allclose(weights.sum(-1), torch.ones(9).double())
    fields = probe.centred(drawn.evidence)
    assert torch.allclose(
        (drawn.evidence - fields.rows[:, None] - fields.columns).masked_fill(forbidden, 0), interaction
    )
    assert torch.allclose(
        torch.tensor(form.spectrum).double(), torch.linalg.svdvals(interaction).square() / interaction.square().sum()
    )
    assert math.isclose(
        form.explained[0], float(1 - (interaction - product).square().sum() / interaction.square().sum()), rel_tol=1e-6
    )
    assert form.explained[0] >= sum(form.spectrum[:2]) - 1e-9


def test_maps_of_a_rank_that_is_none() -> None:
    with pytest.raises(
        ArgumentError, match=r"theory.heads.maps: a rank up to the number of tokens, 5, is required, received 6"
    ):
        maps(layer(), inputs(1, 5, 12), 6)
