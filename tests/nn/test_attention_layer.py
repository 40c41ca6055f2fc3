"""The attention layer for every mechanism: definition, memory, masks, causality, declared read-outs and starts."""

import pytest
import torch
import torch.nn.functional as F
from matrix import CAUSAL_NAMES
from nn import layers
from nn.layers import TOLERANCE, tokens
from nn.neighbourhoods import deaths_by_hand

import zonal
from zonal import mechanisms, prior
from zonal.errors import ArgumentError
from zonal.nn import Attention, Block, Draws, Rotary, SwiGLU

SPECS = (*CAUSAL_NAMES, "ska(power=1)", "ska(power=2)", "sko(readout='concat')", "ska(power=1, fading=True)")


def size_of(spec):
    """Of a head: operators of 4 x 4 numbers, 6 for the rest."""
    return 16 if spec == "rewa_operator" else 6


def make(spec="softmax", *, dim=12, heads=4, seed=0, **options):
    """A float64 layer with nothing left at zero: a zero output projection would hide every fault before it."""
    torch.manual_seed(seed)
    settings = {
        "kv_heads": 4 if spec.startswith("rewa_categorical") else 2,
        "head_dim": size_of(spec),
        "rotary": True,
        "qk_norm": True,
        "conv": 3,
        "bias": True,
    } | options
    layer = Attention(dim, heads, spec, **settings).double()
    with torch.no_grad():
        for parameter in (
            *layer.output.parameters(),
            *layer.query.parameters(),
            *layer.key.parameters(),
            *layer.value.parameters(),
        ):
            parameter.normal_(0.0, 0.4)
        for norm in (layer.query_norm, layer.key_norm, layer.readout):
            if norm is not None:
                norm.weight.uniform_(0.5, 1.5)
    return layer


# --- definition -----------------------------------------------------------------------------------------------------


def by_hand(layer, x):
    """The layer written out from its equation with plain tensor operations around the dense definition."""
    batch, length, _ = x.shape
    size = layer.value.out_features // layer.kv_heads
    half = size // 2
    c = torch.zeros_like(x)
    for i in range(layer.convolution.width):
        c[:, i:] += layer.convolution.weight[:, i] * x[:, : length - i]

    def heads(linear, count):
        return torch.stack((c @ linear.weight.T + linear.bias).split(size, dim=-1), dim=1).reshape(
            batch, count, length, size
        )

    q, k, v = heads(layer.query, 4), heads(layer.key, layer.kv_heads), heads(layer.value, layer.kv_heads)
    q, k = (
        z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt() * n.weight
        for z, n in ((q, layer.query_norm), (k, layer.key_norm))
    )
    angle = torch.arange(length, dtype=torch.float64)[:, None] * 10000.0 ** (
        -torch.arange(half, dtype=torch.float64) / half
    )
    unit = torch.polar(torch.ones_like(angle), angle)

    def turn(z):
        z = torch.complex(z[..., :half], z[..., half:]) * unit
        return torch.cat((z.real, z.imag), dim=-1)

    decay = None
    if layer.decay_gate is not None:  # the fastest past of six directions is e^-4 in six tokens
        gate = layer.decay_gate.projection
        decay = -4 / 6 / (1 + (-(c @ gate.weight.T + gate.bias)).exp()).transpose(1, 2)
    q, k = turn(q), turn(k)
    if layer.neighbours:
        q, k = (torch.cat((z, deaths_by_hand(z, k, layer.neighbours)), dim=-1) for z in (q, k))
    y = zonal.attention(q, k, v, layer.operator, causal=True, path="dense", log_decay=decay)
    if layer.readout_norm == "head":
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.readout.weight
    y = torch.cat(y.unbind(1), dim=-1)
    if layer.readout_norm == "concat":
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.readout.weight
    return y @ layer.output.weight.T + layer.output.bias


@pytest.mark.parametrize("spec", SPECS)
def test_layer_is_its_equation(spec):
    layer, x = make(spec), tokens()
    torch.testing.assert_close(layer(x, path="dense"), by_hand(layer, x), **TOLERANCE)


def test_plain_softmax_layer_is_torch_sdpa():
    layer, x = make(kv_heads=None, rotary=False, qk_norm=False, conv=0, bias=False), tokens()
    q, k, v = (
        F.linear(x, p.weight).unflatten(2, (4, 6)).transpose(1, 2) for p in (layer.query, layer.key, layer.value)
    )
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x), F.linear(y, layer.output.weight), **TOLERANCE)


def test_not_causal_sees_the_future():
    x = tokens()
    changed = x.clone()
    changed[:, -1] += 1
    for causal in (True, False):
        layer = make(conv=0, causal=causal)
        difference = (layer(changed) - layer(x))[:, :-1].abs().max()
        assert bool(difference < 1e-12) is causal


# --- memory ---------------------------------------------------------------------------------------------------------

SPLITS = ([13], [1] * 13, [7, 1, 1, 1, 1, 1, 1], [4, 9], [1, 5, 2, 5], [12, 1])


@pytest.mark.parametrize("split", SPLITS, ids=lambda s: "+".join(map(str, s)))
@pytest.mark.parametrize("spec", SPECS)
def test_pieces_with_memory_equal_one_pass(spec, split):
    layer, x = make(spec), tokens()
    memory, parts = layer.empty_memory(2), []
    for piece in x.split(split, dim=1):
        y, memory = layer(piece, memory=memory)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, dim=1), layer(x, path="dense"), **TOLERANCE)
    assert memory.length == 13


@pytest.mark.parametrize("spec", SPECS)
def test_memory_is_a_value(spec):
    """Reading on twice from one memory, or from its fork, gives the same; the memory itself stays as it was."""
    layer, x = make(spec), tokens()
    _, memory = layer(x[:, :6], return_memory=True)
    first, _ = layer(x[:, 6:], memory=memory)
    fork = memory.fork()
    again, _ = layer(x[:, 6:], memory=memory)
    forked, _ = layer(x[:, 6:], memory=fork)
    torch.testing.assert_close(again, first, rtol=0, atol=0)
    torch.testing.assert_close(forked, first, rtol=0, atol=0)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("conv", [0, 4])
def test_memory_bytes_is_what_absorbing_takes(spec, conv):
    layer = make(spec, conv=conv)
    for length in (0, 1, 2, 5, 13):
        memory = layer.empty_memory(3)
        if length:
            _, memory = layer(tokens(3, length), memory=memory)
        tensors = memory.memory.tensors()
        # a read of ridge statistics leaves the inverse of G there; it is counted from the start
        held = sum(value.nbytes for value in tensors.values()) + (
            tensors["gram"].nbytes if memory.memory.kind == "ridge" else 0
        )
        held += 0 if memory.tail is None else memory.tail.nbytes
        assert layer.memory_bytes(length) * 3 == memory.nbytes == held, length


@pytest.mark.parametrize("spec", SPECS)
def test_saved_memory_goes_on_where_it_stood(spec, tmp_path):
    layer, x = make(spec), tokens()
    _, memory = layer(x[:, :6], return_memory=True)
    memory.save(tmp_path / "memory.safetensors")
    loaded = layer.load_memory(tmp_path / "memory.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == ["memory.safetensors"]
    for expected, got in zip(layer(x[:, 6:], memory=memory)[0], layer(x[:, 6:], memory=loaded)[0], strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert (loaded.length, loaded.nbytes) == (memory.length, memory.nbytes)


# --- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("spec", SPECS)
def test_padding_changes_nothing(spec, side):
    layer = make(spec)
    layers.check_padding(layer, side, layer)


@pytest.mark.parametrize("spec", SPECS)
def test_padded_prefill_then_decode_equals_each_row_alone(spec):
    layer = make(spec)
    layers.check_rows(layer, layer, tokens(3, 9, seed=7))


@pytest.mark.parametrize("spec", SPECS)
def test_packed_documents_equal_separate_ones(spec):
    layer = make(spec)
    layers.check_documents(layer, 7, layer)


@pytest.mark.parametrize("spec", SPECS)
def test_no_output_depends_on_a_later_token(spec):
    layers.check_causal(make(spec))


# --- what the operator declares -------------------------------------------------------------------------------------


def test_readout_norm_follows_the_operator_unless_told():
    assert make("sko").readout.weight.shape == (6,)
    assert make("sko(readout='concat')").readout.weight.shape == (24,)
    assert make("softmax").readout is None
    assert make("softmax", readout_norm="head").readout.weight.shape == (6,)
    assert make("sko", readout_norm=None).readout is None


@pytest.mark.parametrize(("init", "orthogonal"), [("auto", 3), ("orthogonal", 3), ("zero_output", 2), ("default", 0)])
def test_how_projections_start(init, orthogonal):
    """q, k and v from orthogonal projections of their own, keys of a width r of their own, and an output that is
    zero.
    """
    torch.manual_seed(0)
    layer = Attention(32, 4, "ska(rank=6)", head_dim=8, kv_heads=2, init=init)
    assert (layer.output.weight.abs().max() == 0) == (orthogonal > 0)
    found = 0
    for linear, heads, size in ((layer.query, 4, 6), (layer.key, 2, 6), (layer.value, 2, 8)):
        found += all(
            torch.allclose(head @ head.T, torch.eye(size), atol=1e-5) for head in linear.weight.detach().chunk(heads)
        )
    assert found == orthogonal
    assert (layer(tokens(dim=32).float()).abs().max() == 0) == (orthogonal > 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"operator": "ska(rank=40)"}, "at most dim=32 numbers, received qk_dim=40"),
        ({"operator": "ska", "head_dim": 40}, "head_dim=40"),
        ({"operator": "ska", "init": "orthogonl"}, "Did you mean 'orthogonal'"),
        ({"operator": "softmax", "key_gate": True}, "key_gate is for ridge and Koopman"),
    ],
)
def test_what_does_not_fit_is_refused(options, words):
    with pytest.raises(ArgumentError, match=words):
        Attention(32, 4, **options)
    Attention(32, 4, "ska(rank=40)", init="default")


def test_gates_start_where_they_say():
    """The decay at the declared rate, but for rates too fast for the width of keys; keys stored nearly whole."""
    torch.manual_seed(0)
    layer = Attention(32, 4, "ska(fading=True)", key_gate=True)
    x = torch.zeros(1, 3, 32)
    torch.testing.assert_close(layer.decay_gate(x).exp(), torch.full((1, 4, 3), 0.998))
    torch.testing.assert_close(layer.key_gate(x), torch.sigmoid(torch.full((1, 4, 3), 4.0)))
    assert layer.decay_gate(1e4 * tokens(dim=32).float()).min() >= -4 / 8  # however the gate is driven
    fast = mechanisms.ska().replace(prior=prior.Decay(rates=(0.5,), learn=False, gated=True))
    torch.testing.assert_close(Attention(32, 4, fast).decay_gate(x), torch.full((1, 4, 3), -0.9 * 4 / 8))
    free = Attention(32, 4, mechanisms.retention().replace(prior=prior.Decay(learn=False, gated=True)))
    torch.testing.assert_close(free.decay_gate(x)[0, :, 0].exp(), torch.tensor([0.9, 0.97, 0.99, 0.997]))


@pytest.mark.parametrize("spec", ["ska(power=1)", "ska(power=1, fading=True)"])
def test_actions_and_gates_are_weights_of_keys(spec):
    """A token of action 0 reads and is not stored; a gate is what keys are multiplied by; both go on from a memory."""
    layer, x = make(spec, key_gate=True), tokens()
    with torch.no_grad():
        layer.key_gate.projection.weight.normal_(0.0, 0.5)
        layer.key_gate.projection.bias.zero_()
    stored = torch.rand(2, 13, generator=torch.Generator().manual_seed(2)) > 0.4
    y = layer(x, action_mask=stored, path="dense")
    memory, parts = layer.empty_memory(2), []
    for piece, mask in zip(x.split(1, 1), stored.split(1, 1), strict=True):
        part, memory = layer(piece, memory=memory, action_mask=mask)
        parts.append(part)
    torch.testing.assert_close(torch.cat(parts, 1), y, **TOLERANCE)
    torch.testing.assert_close(layer(x, action_mask=stored, path="chunked"), y, **TOLERANCE)
    assert (layer(x) - y).abs().max() > 1e-3
    with torch.no_grad():
        layer.key_gate.projection.bias.fill_(-60.0)
    assert (layer(x) - layer.output.bias).abs().max() < 1e-9


@pytest.mark.parametrize("spec", ["kernel_ridge", "kernel_ridge(power=1)"])
def test_keys_of_another_kernel_are_not_weighed(spec):
    with pytest.raises(ArgumentError, match="key_gate is for ridge and Koopman read-outs of the plain product"):
        Attention(16, 4, spec, key_gate=True)
    layer = Attention(16, 4, spec)
    assert not layer.chooses
    with pytest.raises(ArgumentError, match="without storing it"):
        layer(torch.randn(1, 3, 16), action_mask=torch.ones(1, 3, dtype=torch.bool))


def test_the_layer_keeps_its_own_copy_of_the_operator():
    operator = mechanisms.sko()
    a, b = Attention(16, 4, operator), Attention(16, 4, operator)
    assert a.operator is not b.operator
    assert not set(map(id, a.operator.parameters())) & set(map(id, [*b.operator.parameters(), *operator.parameters()]))


def test_one_rotary_serves_many_layers():
    rotary = Rotary(6)
    assert make(rotary=rotary).rotary is rotary
    torch.testing.assert_close(make(rotary=rotary)(tokens()), make(rotary=True)(tokens()), rtol=0, atol=0)


@pytest.mark.parametrize("spec", SPECS)
def test_every_parameter_has_a_finite_nonzero_gradient(spec):
    layer = make(spec)
    # two tokens are too few for the higher Koopman powers to say anything; 13 are not
    layer(tokens()).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        # a key bias moves every softmax score of a query alike, but not once keys are normed or turned
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("spec", SPECS)
def test_autocast_to_bfloat16_stays_near_float32(spec):
    layer = make(spec).float()
    x = tokens().float()
    expected = layer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    error = (y.float() - expected).norm() / expected.norm()
    assert 0 < error < 0.05


# --- block ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mlp", [True, False])
def test_block_is_pre_norm_residual(mlp):
    torch.manual_seed(0)
    block = Block(make(), SwiGLU(12, 16).double() if mlp else None).double()
    x = tokens()
    middle = x + block.attention(block.attention_norm(x))
    expected = middle + block.mlp(block.mlp_norm(middle)) if mlp else middle
    torch.testing.assert_close(block(x), expected, rtol=0, atol=0)
    y, memory = block(x[:, :5], return_memory=True)
    z, _ = block(x[:, 5:], memory)
    torch.testing.assert_close(torch.cat((y, z), dim=1), expected, **TOLERANCE)


def test_draws_are_named_streams():
    one, two = Draws(seed=3).child("a"), Draws(seed=3, prefix="a.")
    x, y, z = torch.empty(3, 4, 5)
    one.normal_(x, "w")
    two.normal_(y, "w")
    two.normal_(z, "v")
    assert torch.equal(x, y)
    assert not torch.equal(x, z)
    Draws(seed=3).child("b").normal_(z, "w")
    assert not torch.equal(x, z)
    Draws(seed=4, prefix="a.").normal_(y, "w")
    assert not torch.equal(x, y)
    wide = torch.empty(300, 300)
    Draws(std=0.02, output_std=0.005, seed=0).normal_(wide, "w", output=True)
    assert abs(wide.std().item() / 0.005 - 1) < 0.02


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Attention(0, 1, "softmax"), "dim must be a whole number >= 1, received 0"),
        (lambda: Attention(12, 4.0, "softmax"), "heads must be a whole number >= 1, received 4.0"),
        (lambda: Attention(12, 4, "softmax", qk_dim=2.0), "qk_dim must be a whole number >= 1, received 2.0"),
        (lambda: Attention(12, 4, zonal.mechanisms.softmax), "an Operator or a spec .* received a function"),
        (lambda: Attention(12, 2, "softmax", rotary=5e5), "Rotary, which has a base.* received 500000.0"),
        (lambda: Attention(12, 4, "softmax", causal="no"), "causal must be True or False, received 'no'"),
        (lambda: make()(tokens(), zonal.Memory.empty("softmax", 2, 2, 6, 6)), "memory must be.*received KeyValues"),
        (lambda: make()(tokens(), make()(tokens(), return_memory=True)), "memory must be.*received tuple"),
        (lambda: make()(tokens(1), cu_seqlens=[0, 13]), "cu_seqlens must be a torch.Tensor, received list"),
        (lambda: Attention(10, 4, "softmax"), "not a multiple of heads=4"),
        (lambda: Attention(12, 4, "softmax", kv_heads=3), "kv_heads must divide heads=4, received kv_heads=3"),
        (lambda: Attention(12, 4, "softmax", head_dim=0), "head_dim"),
        (lambda: Attention(12, 4, "softmax", conv=1), "conv must be 0"),
        (lambda: Attention(12, 4, "softmax", readout_norm="heads"), "'head', 'concat'"),
        (lambda: Attention(12, 4, "sofmax"), "softmax"),
        (lambda: Attention(12, 4, "softmax", rotary=True), "even"),
        (lambda: make()(tokens(dim=11)), r"\(batch, tokens >= 1, 12\), received \(2, 13, 11\)"),
        (lambda: make()(tokens(length=0)), "tokens >= 1"),
        (lambda: make()([[0.0] * 12]), "nn.Attention: x must be a torch.Tensor, received list"),
        (lambda: make()(tokens(), key_padding_mask=torch.ones(2, 12, dtype=torch.bool)), r"\(2, 13\)"),
        (lambda: make()(tokens(), cu_seqlens=torch.tensor([0, 13])), "batch 1"),
        (lambda: make()(tokens(1), make().empty_memory(1), cu_seqlens=torch.tensor([0, 13])), "no memory"),
        (lambda: make()(tokens(), make().empty_memory(3)), "holds 3 sequences, x has batch 2"),
        (lambda: make()(tokens(), make(conv=0).empty_memory(2)), "another convolution"),
        (lambda: make(conv=0)(tokens(), make().empty_memory(2)), "another convolution"),
        (lambda: make(causal=False)(tokens(), make().empty_memory(2)), "causal=False"),
        (lambda: make()(tokens(), path="dens"), "dense"),
    ],
)
def test_bad_input_is_refused_by_name(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
