"""The encoder: it sees both ways and no padding, learns with every anchor that needs that, and refuses layers that read
in one direction.
"""

import pytest
import torch

from zonal.errors import ArgumentError
from zonal.models import ModelConfig, TextEncoder

SPECS = (
    "softmax",
    "sinkhorn",
    "sinkhorn(rho=(1.0, 0.5), learn=True)",
    "sinkhorn(bounds=(0.0, 1.5))",
    "hierarchical(sizes=(4,))",
    "sko",
)
VOCABULARY = 17


def make(spec="sinkhorn", seed=1, **options):
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCABULARY,
        "dim": 16,
        "layers": (spec, spec),
        "heads": 4,
        "kv_heads": 2,
        "rotary": True,
        "init_std": 0.3,
    } | options
    return TextEncoder(ModelConfig(**settings), seed=seed).double()


def text(batch=2, length=11, seed=1):
    return torch.randint(VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
@pytest.mark.parametrize("spec", SPECS)
def test_sees_both_ways_and_no_padding(spec):
    model, tokens = make(spec), text()
    before = model(tokens)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % VOCABULARY
    assert (model(changed)[:, 0] - before[:, 0]).abs().max() > 1e-6
    padded = torch.cat([tokens, text(length=5, seed=9)], 1)
    real = torch.arange(16)[None].expand(2, -1) < 11
    assert torch.allclose(model(padded, key_padding_mask=real)[:, :11], before, atol=2e-4)
    assert torch.allclose(model.pooled(padded, key_padding_mask=real), model.pooled(tokens), atol=2e-4)


@pytest.mark.parametrize("spec", SPECS)
def test_learns_what_was_masked(spec):
    """A few steps on one batch whose masked tokens follow from their neighbours on both sides."""
    model, generator = make(spec, init_std=0.05).float(), torch.Generator().manual_seed(2)
    tokens = (torch.randint(VOCABULARY, (8, 1), generator=generator) + torch.arange(12)) % VOCABULARY
    hidden = torch.rand(8, 12, generator=generator) < 0.25
    given, targets = torch.where(hidden, 0, tokens), torch.where(hidden, tokens, -100)
    optimiser = torch.optim.Adam(model.parameters(), 0.01)
    losses = []
    for _ in range(25):
        total, count = model.loss(given, targets)
        optimiser.zero_grad()
        (total / count).backward()
        optimiser.step()
        losses.append(total.item() / count)
    assert count == int(hidden.sum())
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in model.parameters())


def test_learned_masses_move():
    model = make("sinkhorn(rho=(1.0, 0.5), learn=True)")
    layer = model.blocks[0].attention
    model(text()).square().sum().backward()
    for gate in (layer.query_mass, layer.key_mass):
        assert gate.projection.weight.grad.abs().max() > 1e-6


@torch.no_grad()
def test_tokens_that_are_not_stored_reach_no_other():
    model, tokens = make("ridge"), text()
    stored = torch.arange(11)[None].expand(2, -1) != 4
    changed = torch.where(stored, tokens, (tokens + 1) % VOCABULARY)
    y, other = model(tokens, action_mask=stored), model(changed, action_mask=stored)
    torch.testing.assert_close(y[stored], other[stored], rtol=1e-9, atol=1e-9)
    assert (y[~stored] - other[~stored]).abs().max() > 1e-3
    assert (y - model(tokens))[stored].abs().max() > 1e-3


def test_weights_follow_the_seed():
    one, same, other = (dict(make(seed=seed).named_parameters()) for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["embedding.weight"], other["embedding.weight"])


def test_what_it_reads():
    """Every token sees all; the masses of a coupled anchor too."""
    for spec in ("softmax", "sinkhorn"):
        reads = make(spec).reads(7)
        assert len(reads) == 2
        assert all(bool(each.all()) for each in reads)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"layers": ("softmax", "mamba2(state=8, head_dim=8)")}, r"mamba2.* does not"),
        ({"conv": 3}, "conv=3 does not"),
        ({"layers": ("mixture(parts=('softmax', 'sko'))",)}, "both ways"),
        ({"layers": ("retention",)}, "'retention' fades with time, which has a meaning only for causal=True"),
        ({"layers": ("local_global(window=4)",)}, "has a window that ends with the query's own key"),
    ],
)
def test_layers_that_read_in_one_direction(options, words):
    with pytest.raises(ArgumentError, match=words):
        make(**options)


@pytest.mark.parametrize("tokens", [torch.zeros(3), torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 3)])
def test_what_are_no_tokens(tokens):
    with pytest.raises(ArgumentError, match="tokens must be integers"):
        make()(tokens)
