"""Feature maps as operators: every path, memories, layers and models, and what is drawn is kept."""

import pytest
import torch
from torch import Tensor

import zonal
from zonal import Operator, features, link
from zonal import mechanisms as m
from zonal.algebra.anchor import Count, Row
from zonal.errors import ArgumentError, PathError
from zonal.features import Features
from zonal.features.quadrature import _laguerre
from zonal.features.score import _drawn
from zonal.memory import Memory
from zonal.models import CausalLM, ModelConfig
from zonal.nn import Attention

SPECS = ["slay", "slay(scale='small', polynomial='exact')", "performer(draws=24)", "hedgehog(size=12)"]


def tokens(heads: int = 4, kv_heads: int = 2, length: int = 21, dim: int = 8, value_dim: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    return [torch.randn(2, h, length, d, generator=generator, dtype=torch.float64).requires_grad_() for h, d in shapes]


def own_rows(spec: str, heads: int = 4, kv_heads: int = 2) -> Operator:
    """In float64, with numbers of its own for each key head."""
    return m.resolve(spec).for_heads(heads, kv_heads, dim=8).double()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("spec", SPECS)
def test_every_path_computes_the_features_sums(spec: str, causal: bool) -> None:
    """Against sums written out, with gradients of tokens and of what is learned; heads that share keys share their
    features.
    """
    operator = own_rows(spec)
    score = operator.score
    assert isinstance(score, Features)
    q, k, v = tokens()
    params = operator.bind(4, 2).score_params
    phi_q, phi_k = score.prepare_query(q, params, None), score.prepare_key(k, params).repeat_interleave(2, 1)
    kernel = phi_q @ phi_k.mT
    kernel = kernel.tril() if causal else kernel
    wanted = kernel @ v.repeat_interleave(2, 1) / kernel.sum(-1, keepdim=True)
    leaves = [q, k, v, *operator.parameters()]
    expected = torch.autograd.grad(wanted.square().sum(), leaves)
    for path in ("dense", "tiled", "chunked", *(["streaming"] if causal else [])):
        got = zonal.attention(q, k, v, operator, causal=causal, path=path)
        assert (got - wanted).abs().max() < 1e-9
        for a, b in zip(torch.autograd.grad(got.square().sum(), leaves), expected, strict=True):
            assert (a - b).abs().max() < 1e-8 * (1 + b.abs().max())


@pytest.mark.parametrize("spec", SPECS)
def test_memories_have_the_size_of_the_features(spec: str, tmp_path) -> None:
    operator = own_rows(spec)
    q, k, v = (x.detach() for x in tokens())
    whole = zonal.attention(q, k, v, operator, causal=True, path="dense")
    first, memory = zonal.attention(q[:, :, :13], k[:, :, :13], v[:, :, :13], operator, causal=True, return_memory=True)
    assert memory.kind == "features"
    assert memory.state.shape[2] == operator.score.width(8)
    memory.save(tmp_path / "memory.safetensors")
    memory = Memory.load(tmp_path / "memory.safetensors", operator)
    rest, _ = zonal.attention(q[:, :, 13:], k[:, :, 13:], v[:, :, 13:], operator, causal=True, memory=memory)
    assert (torch.cat([first, rest], 2) - whole).abs().max() < 1e-9
    # and a memory of keys keeps their features
    kept = Memory.empty(operator, 2, 2, 8, 5, torch.float64, kind="keys")
    _, kept = zonal.attention(q[:, :, :13], k[:, :, :13], v[:, :, :13], operator, causal=True, memory=kept)
    rest, _ = zonal.attention(q[:, :, 13:], k[:, :, 13:], v[:, :, 13:], operator, causal=True, memory=kept)
    assert (rest - whole[:, :, 13:]).abs().max() < 1e-9


def test_what_is_drawn_is_saved_and_never_drawn_again() -> None:
    layer, other = (Attention(32, 4, f"slay(seed={seed})", kv_heads=2) for seed in (0, 1))
    names = [name for name in layer.state_dict() if "fixed_parts" in name]
    assert names
    assert all(layer.state_dict()[name].shape[0] == 2 for name in names)  # each key head its own
    assert not torch.equal(layer.state_dict()[names[0]][0], layer.state_dict()[names[0]][1])
    x = torch.randn(1, 10, 32)
    assert not torch.allclose(layer(x), other(x), atol=1e-4)
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), other(x))
    again = Operator.from_config(layer.operator.config())
    assert again.score == layer.operator.score
    assert all(torch.equal(a, b) for a, b in zip(again.buffers(), layer.operator.buffers(), strict=True))
    # swapping another part keeps them, too
    counted = other.operator.replace(anchor=Count())
    assert all(torch.equal(a, b) for a, b in zip(counted.buffers(), layer.operator.buffers(), strict=True))


@pytest.mark.parametrize("spec", SPECS)
def test_a_model_made_for_its_shapes_leaves_nothing_behind(spec: str) -> None:
    """What is drawn is kept for the next layer that asks, which may be one with weights."""
    for kept in (_drawn.__wrapped__, _laguerre):
        kept.cache_clear()
    with torch.device("meta"):
        Attention(24, 3, spec)
    layer = Attention(24, 3, spec)
    assert layer(torch.randn(1, 5, 24)).isfinite().all()


@pytest.mark.parametrize(
    "spec",
    ["slay(scale='small')", "hedgehog(size=16)", "polynomial_square(degree=2, d_qk=6)", "squared_affine(d_qk=4)"],
)
def test_a_model_trains_and_generates_from_its_memory(spec: str) -> None:
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(30, 32, (spec,), 4, rotary=True))
    ids = torch.randint(0, 30, (2, 17))
    logits = model(ids)
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().max() > 0 for p in model.parameters())
    with torch.no_grad():
        head, memory = model.step(ids[:, :9], model.empty_memory(2))
        tail, memory = model.step(ids[:, 9:], memory)
    assert memory.nbytes == 2 * model.memory_bytes(17)
    assert (torch.cat([head, tail], 1) - logits).abs().max() < 2e-4


def test_small_queries_beside_wide_values() -> None:
    layer = Attention(64, 4, m.polynomial_square(degree=4, d_qk=8), rotary=True)
    assert (layer.query.weight.shape[0], layer.key.weight.shape[0], layer.value.weight.shape[0]) == (32, 32, 64)
    assert Attention(64, 4, "yat", qk_dim=8).query.weight.shape[0] == 32
    y, memory = layer(torch.randn(1, 5, 64), return_memory=True)
    assert y.shape == (1, 5, 64)
    assert memory.memory.state.shape == (1, 4, 495, 17)
    with pytest.raises(ArgumentError, match="qk_dim must be a whole number >= 1"):
        Attention(64, 4, "yat", qk_dim=0)


def test_mistakes_are_said() -> None:
    q, k, v = (x.detach() for x in tokens())
    # left open, it takes the numbers that its seed gives for the size it meets
    left_open = zonal.attention(q, k, v, m.slay(seed=3))
    assert torch.allclose(left_open, zonal.attention(q, k, v, m.slay(seed=3, dim=8)), atol=1e-9)
    assert not torch.allclose(left_open, zonal.attention(q, k, v, m.slay(seed=4)), atol=1e-3)
    with pytest.raises(ArgumentError, match="made for heads of size 16, and meet one of 8"):
        zonal.attention(q, k, v, m.slay(dim=16))
    with pytest.raises(PathError, match="grow without bound"):
        m.slay(polynomial="tensor_sketch")
    assert not Operator(
        Features(features.Slay(polynomial=features.TensorSketch(8), draws=4), dim=8),
        link.Identity(),
        Row(allow_signed=True),
    ).tags.positive
    with pytest.raises(ArgumentError, match="must be a FeatureMap"):
        Features("slay")  # type: ignore[arg-type]
    page = str(zonal.explain(m.slay(dim=8), (1, 4, 64, 8), causal=True))
    assert "Slay features: the kernel is meant, not exact (biased)" in page
