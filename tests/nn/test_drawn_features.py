"""What operators draw at random belongs to a layer: its numbers follow from the model's seed, the layer and the
head.
"""

import itertools

import pytest
import torch

import zonal
from zonal import mechanisms as m
from zonal.models import CausalLM, ModelConfig, build
from zonal.nn import Attention

SPECS = {
    "performer": "performer(draws=8)",
    "slay": "slay(scale='small')",
    "hedgehog": "hedgehog(size=8)",
    "rewa_functional": "rewa_functional(size=8)",
    "rewa_riemannian": "rewa_riemannian(units=2)",
    "rewa_operator": "rewa_operator(relations=1)",
    "rewa_operator of a size": "rewa_operator(relations=1, size=3)",
    "rewa_operator, chosen paths": "rewa_operator(relations=1, choices=2)",
    "rewa_categorical": "rewa_categorical(relation=True)",
}


def parts(operator):
    return {name: value.detach().clone() for name, value in operator.state_dict().items() if ".score_" in name}


def rows(model):
    """What the scores of a model hold, (layer, head, name) -> numbers."""
    return {
        (i, h, name): value[h]
        for i, block in enumerate(model.blocks)
        for name, value in parts(block.attention.operator).items()
        for h in range(value.shape[0])
    }


def model_of(spec, seed, heads=2):
    return build(ModelConfig(20, 32, (spec,) * 2, heads, mlp="none"), seed)


@pytest.mark.parametrize("name", SPECS)
def test_layers_heads_and_seeds_draw_their_own_and_a_rebuild_repeats(name):
    spec = SPECS[name]
    first, again, other = rows(model_of(spec, 0)), rows(model_of(spec, 0)), rows(model_of(spec, 1))
    assert first, "the score of this operator draws something"
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not any(torch.equal(first[key], other[key]) for key in first)
    for (a, x), (b, y) in itertools.combinations(first.items(), 2):
        if a[2] == b[2]:  # of another layer, or of another head
            assert not torch.equal(x, y), (a, b)


@pytest.mark.parametrize("name", SPECS)
def test_a_seed_that_is_given_pins_what_is_drawn(name):
    spec = SPECS[name].replace("(", "(seed=3, ")
    first, other = rows(model_of(spec, 0)), rows(model_of(spec, 1))
    assert all(
        torch.equal(first[0, h, name], value) and torch.equal(other[i, h, name], value)
        for (i, h, name), value in first.items()
    )


@pytest.mark.parametrize("name", SPECS)
def test_what_was_drawn_is_saved_with_the_model(name, tmp_path):
    model = model_of(SPECS[name], 5)
    model.save(tmp_path / "model.safetensors")
    read = CausalLM.load(tmp_path / "model.safetensors")
    tokens = torch.randint(20, (1, 12))
    assert all(torch.equal(value, rows(read)[key]) for key, value in rows(model).items())
    with torch.no_grad():
        assert torch.equal(model(tokens), read(tokens))


def test_a_layer_of_its_own_follows_torch_s_generator():
    def made(seed):
        torch.manual_seed(seed)
        return parts(Attention(16, 2, "performer(draws=4)").operator), parts(
            Attention(16, 2, "performer(draws=4)").operator
        )

    (a, b), (c, _), (d, _) = made(0), made(0), made(1)
    (name,) = a
    assert torch.equal(a[name], c[name])
    assert not torch.equal(a[name], b[name])
    assert not torch.equal(a[name], d[name])


def test_other_weights_do_not_depend_on_what_operators_draw():
    plain, drawn = model_of("softmax", 0).state_dict(), model_of("performer", 0).state_dict()
    assert all(torch.equal(value, drawn[name]) for name, value in plain.items())


def test_numbers_of_the_user_s_own_stay():
    operator = zonal.Operator(m.performer(draws=4, dim=8).score, zonal.link.Identity()).for_heads(2)
    before = parts(operator)
    layer = Attention(16, 2, operator)
    assert all(torch.equal(value, before[name]) for name, value in parts(layer.operator).items())


def test_a_call_without_a_layer_repeats():
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind(0)
    with torch.no_grad():
        first, again, pinned = (
            zonal.attention(q, k, v, make()) for make in (m.performer, m.performer, lambda: m.performer(seed=0))
        )
    assert torch.equal(first, again)
    assert torch.equal(first, pinned)


def test_a_memory_file_carries_what_its_operator_drew(tmp_path):
    torch.manual_seed(0)
    layer = Attention(16, 2, "performer(draws=8)")
    k, v, q = torch.randn(3, 1, 2, 9, 8).unbind(0)
    with torch.no_grad():
        memory = layer.empty_memory(1).memory.absorb(k, v)
        memory.save(tmp_path / "memory.safetensors")
        assert torch.equal(zonal.Memory.load(tmp_path / "memory.safetensors").read(q), memory.read(q))
