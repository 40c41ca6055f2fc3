"""Mamba-2 and Mamba-3: the recurrence token by token, every path, gradients, memory, packing, padding, and
transformers' own weights.
"""

import copy
import functools
import importlib.util
import math

import pytest
import torch
import torch.nn.functional as F
from nn import layers
from nn.layers import TOLERANCE, tokens

from zonal.errors import ArgumentError, FileFormatError, PathError
from zonal.nn import GatedNorm, Mamba2, Mamba3

KINDS = ("mamba2", "mamba3", "mamba3-conv")


def make(kind="mamba2", *, dim=12, seed=0, **options):
    """A float64 layer whose parameters are all far from their start, so that no fault hides behind a zero or a one."""
    torch.manual_seed(seed)
    sizes = {"state": 6, "head_dim": 4, "groups": 2} | options
    if kind == "mamba2":
        layer = Mamba2(dim, **{"bias": True} | sizes)
    else:
        layer = Mamba3(dim, turned=0.7, conv=3 if kind.endswith("conv") else 0, **sizes)
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if name.endswith(("skip", "bias", "norm.weight", "log_rate")):
                parameter.uniform_(0.3, 1.5)
            else:
                parameter.normal_(0.0, 0.4)
    return layer.double()


def test_an_adapter_on_the_input_is_heard():
    class Adapted(torch.nn.Linear):
        def forward(self, x):
            return super().forward(2 * x)

    layer = make("mamba2", bias=False)
    adapted = Adapted(12, layer.input.out_features, bias=False)
    adapted.weight = layer.input.weight
    y, layer.input = layer(2 * tokens()), adapted
    torch.testing.assert_close(layer(tokens()), y, **TOLERANCE)


# --- definition -----------------------------------------------------------------------------------------------------


def taps(x, convolution):
    y = torch.zeros_like(x)
    for i in range(convolution.width):
        y[:, i:] += convolution.weight[:, i] * x[:, : x.shape[1] - i]
    return F.silu(y if convolution.bias is None else y + convolution.bias)


def mamba2_by_hand(layer, u):
    """h_t = exp(-A Δ_t) h_{t-1} + Δ_t x_t B_t^T, y_t = h_t C_t + D x_t, norm of y ⊙ SiLU(z) group by group: one token
    after another.
    """
    s = layer.sizes
    z, mixed, step = torch.split(
        u @ layer.input.weight.T + layer.input.bias, [s.inner, s.inner + 2 * s.shared, s.heads], dim=2
    )
    mixed = taps(mixed, layer.convolution)
    state, rows = torch.zeros(len(u), s.heads, s.head_dim, s.state, dtype=u.dtype), []
    for t in range(u.shape[1]):
        x = mixed[:, t, : s.inner].reshape(len(u), s.heads, s.head_dim)
        b, c = (
            mixed[:, t, s.inner :]
            .reshape(len(u), 2, s.groups, s.state)
            .repeat_interleave(s.heads // s.groups, 2)
            .unbind(1)
        )
        delta = torch.log1p((step[:, t] + layer.step_bias).exp())
        decay = (-layer.log_rate.exp() * delta).exp()
        state = decay[..., None, None] * state + delta[..., None, None] * x[..., :, None] * b[..., None, :]
        y = (state @ c[..., None])[..., 0] + layer.skip[:, None] * x
        gated = (y.flatten(1) * F.silu(z[:, t])).reshape(len(u), s.groups, -1)
        normed = (gated / (gated.square().mean(-1, keepdim=True) + layer.norm.eps).sqrt()).flatten(
            1
        ) * layer.norm.weight
        rows.append(normed @ layer.output.weight.T + layer.output.bias)
    return torch.stack(rows, 1)


def mamba3_by_hand(layer, u):
    """h_t = α h_{t-1} + β U_{t-1} + γ U_t with complex keys and queries that turn by Δ π tanh θ at each token."""
    s, pairs = layer.sizes, layer.pairs
    z, x, b, c, step, rate, share, angle = (u @ layer.input.weight.T).split(layer.parts, dim=2)
    x = x if layer.convolution is None else taps(x, layer.convolution)

    def prepared(raw, norm, bias):
        raw = raw.reshape(*u.shape[:2], s.groups, s.state)
        raw = raw / (raw.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight
        return raw.repeat_interleave(s.heads // s.groups, 2) + bias

    def turned(row, turn):
        as_complex = torch.view_as_complex(row[..., : 2 * pairs].reshape(*row.shape[:-1], pairs, 2).contiguous())
        return torch.cat(
            [
                torch.view_as_real(as_complex * torch.polar(torch.ones_like(turn), turn)).flatten(-2),
                row[..., 2 * pairs :],
            ],
            -1,
        )

    b, c = prepared(b, layer.key_norm, layer.key_bias), prepared(c, layer.query_norm, layer.query_bias)
    state = torch.zeros(len(u), s.heads, s.head_dim, s.state, dtype=u.dtype)
    turn, before, rows = torch.zeros(len(u), s.heads, pairs, dtype=u.dtype), torch.zeros_like(state), []
    for t in range(u.shape[1]):
        delta = torch.log1p((step[:, t] + layer.step_bias).exp())
        a = rate[:, t]
        alpha = torch.exp(-delta * torch.where(a >= 0, 1 + a, 1 / (1 - a.clamp(max=0))).clamp(min=layer.rate_floor))
        lam = 1 / (1 + torch.exp(-share[:, t]))
        turn = turn + delta[..., None] * math.pi * torch.tanh(angle[:, t, None])
        values = x[:, t].reshape(len(u), s.heads, s.head_dim)
        now = values[..., :, None] * turned(b[:, t], turn)[..., None, :]
        state = (
            alpha[..., None, None] * (state + ((1 - lam) * delta)[..., None, None] * before)
            + (lam * delta)[..., None, None] * now
        )
        y = (state @ turned(c[:, t], turn)[..., None])[..., 0] + layer.skip[:, None] * values
        rows.append((y.flatten(1) * F.silu(z[:, t])) @ layer.output.weight.T)
        before = now
    return torch.stack(rows, 1)


def by_hand(layer, u):
    return mamba2_by_hand(layer, u) if isinstance(layer, Mamba2) else mamba3_by_hand(layer, u)


@pytest.mark.parametrize("path", ["dense", "tiled", "chunked", "streaming", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_path_is_the_recurrence_with_all_gradients(kind, path):
    layer = make(kind)
    layers.check_gradients(layer, path, functools.partial(by_hand, layer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 67, 131])
def test_float32_over_borders_of_blocks(kind, length):
    layer, u = make(kind), tokens(1, length)
    expected = by_hand(layer, u)
    y = layer.float()(u.float())
    assert (y.double() - expected).abs().max() < 2e-5 * (1 + expected.abs().max())


def test_one_group_shares_keys_without_a_copy():
    layer = make(groups=1)
    torch.testing.assert_close(layer(tokens()), mamba2_by_hand(layer, tokens()), **TOLERANCE)
    keys = torch.randn(2, 5, 6)
    assert layer.sizes.by_head(keys).untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()


def test_steps_within_their_limits():
    free, held = make(), make(step_limit=(0.2, 0.9))
    u = tokens()
    assert (free(u) - held(u)).abs().max() > 1e-3
    z = held.input(u)[..., -held.sizes.heads :]
    step = F.softplus(z + held.step_bias)
    assert (step < 0.2).any() or (step > 0.9).any()
    with torch.no_grad():  # steps that are all within their limits are as they were
        wide = make(step_limit=(0.0, 1e3))
    torch.testing.assert_close(wide(u), free(u), rtol=0, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_no_output_depends_on_a_later_token(kind):
    layers.check_causal(make(kind))


def test_steps_and_rates_start_where_they_should():
    torch.manual_seed(0)
    layer = Mamba2(2048, head_dim=8, state=4)
    step, rate = F.softplus(layer.step_bias), layer.log_rate.exp()
    assert step.min() >= 1e-3 * 0.999
    assert step.max() <= 0.1 * 1.001
    assert 1 <= rate.min() < 1.5
    assert 14 < rate.max() <= 16
    assert step.log().mean().item() == pytest.approx(math.log(1e-2), abs=0.2)
    assert layer.learned()["rates"] == pytest.approx((-rate * step).exp().tolist(), rel=1e-5)


def test_a_token_of_zeros_gets_the_derivative_of_the_rate():
    layer, x = make("mamba3"), tokens(1, 5)
    x[:, 2] = 0
    assert torch.autograd.gradcheck(layer, (x.requires_grad_(),))


# --- memory ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "split", [[13], [1] * 13, [7, 1, 1, 4], [4, 9], [1, 5, 2, 5]], ids=lambda s: "+".join(map(str, s))
)
@pytest.mark.parametrize("kind", KINDS)
def test_pieces_with_memory_equal_one_pass(kind, split):
    layer = make(kind)
    layers.check_pieces(layer, split, functools.partial(by_hand, layer))


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_in_float32_equals_the_parallel_form(kind):
    layer = make(kind).float()
    u = tokens(1, 90).float()
    memory, parts = layer.empty_memory(1), []
    for piece in u.split(1, dim=1):
        y, memory = layer(piece, memory=memory)
        parts.append(y)
    whole = layer(u, path="chunked")
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-5 * (1 + whole.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_a_value_of_constant_size(kind):
    layer, u = make(kind), tokens()
    _, memory = layer(u[:, :6], return_memory=True)
    first, _ = layer(u[:, 6:], memory=memory)
    fork = memory.fork()
    for past in (memory, fork, copy.deepcopy(memory)):
        again = layer(u[:, 6:], memory=past)[0]
        torch.testing.assert_close(again, first, rtol=0, atol=0)
    storages = {x.untyped_storage().data_ptr() for x in (*memory.carried.values(), memory.tail) if x is not None}
    assert not storages & {x.untyped_storage().data_ptr() for x in (*fork.carried.values(), fork.tail) if x is not None}
    for length in (1, 13):
        _, filled = layer(tokens(3, length), return_memory=True)
        assert filled.nbytes == 3 * layer.memory_bytes(length) == 3 * layer.memory_bytes(10**6)
        for value in filled.carried.values():  # nothing keeps the tokens alive
            assert value.untyped_storage().nbytes() == value.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_saved_memory_goes_on_where_it_stood(kind, tmp_path):
    layer, u = make(kind), tokens()
    _, memory = layer(u[:, :6], return_memory=True)
    memory.save(tmp_path / "memory.safetensors")
    loaded = layer.load_memory(tmp_path / "memory.safetensors")
    torch.testing.assert_close(layer(u[:, 6:], memory=loaded)[0], layer(u[:, 6:], memory=memory)[0], rtol=0, atol=0)
    assert (loaded.length, loaded.nbytes, set(loaded.carried)) == (memory.length, memory.nbytes, set(memory.carried))
    for other in (make(kind, state=8), make(kind, head_dim=6), make("mamba3" if kind == "mamba2" else "mamba2")):
        with pytest.raises(FileFormatError, match="does not fit layer 0"):
            other.load_memory(tmp_path / "memory.safetensors")


def test_a_long_memory_keeps_its_angles():
    """Angles are running sums; after many tokens the state still turns as the differences say."""
    layer = make("mamba3").float()
    exact, u = make("mamba3"), tokens(1, 3000)
    _, memory = layer(u[:, :2990].float(), return_memory=True)
    assert memory.carried["angle"].abs().max() <= 2 * math.pi
    _, before = exact(u[:, :2990], return_memory=True)
    y, expected = layer(u[:, 2990:].float(), memory=memory)[0], exact(u[:, 2990:], memory=before)[0]
    assert (y - expected).abs().max() < 1e-4 * (1 + expected.abs().max())


# --- masks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["dense", "chunked"])
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_separate_ones(kind, path):
    layer = make(kind)
    layers.check_documents(layer, 7, functools.partial(by_hand, layer), path)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_nothing(kind, side):
    layer = make(kind)
    layers.check_padding(layer, side, functools.partial(by_hand, layer))


@pytest.mark.parametrize("kind", KINDS)
def test_padded_prefill_then_decode_equals_each_row_alone(kind):
    layer = make(kind)
    layers.check_rows(layer, functools.partial(by_hand, layer), tokens(3, 9, seed=7))


# --- precisions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_stays_near_float32(kind, autocast):
    layers.check_bfloat16(make(kind), autocast)


def test_gated_norm_is_its_equation():
    norm = GatedNorm(12, groups=3, eps=0.1).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x, z = tokens(seed=2), tokens(seed=3)
    gated = (x * z * torch.sigmoid(z)).reshape(2, 13, 3, 4)
    expected = (gated / (gated.pow(2).mean(-1, keepdim=True) + 0.1).sqrt()).reshape(2, 13, 12) * norm.weight
    torch.testing.assert_close(norm(x, z), expected, **TOLERANCE)


# --- transformers ---------------------------------------------------------------------------------------------------

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


@needs_transformers
@pytest.mark.parametrize("groups", [1, 2])
def test_equals_transformers_mixer_with_its_weights(groups):
    modeling = importlib.import_module("transformers.models.mamba2.modeling_mamba2")
    torch.manual_seed(0)
    config = modeling.Mamba2Config(
        hidden_size=24,
        num_heads=6,
        head_dim=8,
        state_size=16,
        n_groups=groups,
        chunk_size=32,
        num_hidden_layers=1,
        use_bias=True,
    )
    theirs = modeling.Mamba2Mixer(config, 0)
    if groups > 1 and not hasattr(theirs.norm, "group_size"):
        pytest.skip("before 5.23 transformers normalises all groups at once")
    layer = Mamba2(24, state=16, head_dim=8, groups=groups, bias=True)
    layer.load_transformers(theirs.state_dict())
    u = torch.randn(2, 101, 24, requires_grad=True)
    expected, y = theirs(u), layer(u)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    weight = torch.randn(2, 101, 24)
    wanted = torch.autograd.grad((expected * weight).sum(), [u, *theirs.parameters()])
    mapped = Mamba2(24, state=16, head_dim=8, groups=groups, bias=True)
    mapped.load_transformers(
        dict(zip(dict(theirs.named_parameters()), wanted[1:], strict=True))
    )  # gradients by their names, as weights
    got = torch.autograd.grad((y * weight).sum(), [u, *layer.parameters()])
    for (name, other), one in zip([("u", wanted[0]), *mapped.named_parameters()], got, strict=True):
        scale = other.abs().max()
        assert scale > 0, name
        assert (one - other).abs().max() < 1e-4 * scale, name


def named(layer):
    """Weights by transformers' names, as its mixer would hold them."""
    other = {"in_proj": layer.input, "out_proj": layer.output}
    weights = {f"{name}.{part}": value for name, linear in other.items() for part, value in linear.named_parameters()}
    weights |= {
        "conv1d.weight": layer.convolution.weight.flip(1)[:, None],
        "conv1d.bias": layer.convolution.bias,
        "norm.weight": layer.norm.weight,
    }
    return weights | {"dt_bias": layer.step_bias, "A_log": layer.log_rate, "D": layer.skip}


def test_weights_by_other_names_and_what_does_not_fit():
    source, target = make(seed=1), make(seed=2)
    weights = named(source)
    target.load_transformers(weights)
    torch.testing.assert_close(target(tokens()), source(tokens()), rtol=0, atol=0)
    kept = {name: value.clone() for name, value in target.state_dict().items()}
    for change, words in (
        ({"D": None}, "D is missing"),
        ({"x_proj.weight": torch.ones(1)}, "x_proj.weight is unknown"),
        ({"A_log": torch.ones(5)}, r"A_log is \(5,\) and should be \(6,\)"),
        ({"conv1d.weight": torch.ones(5)}, r"conv1d.weight is \(5,\) and should be"),
    ):
        broken = {name: value for name, value in {**named(make(seed=3)), **change}.items() if value is not None}
        with pytest.raises(ArgumentError, match=words):
            target.load_transformers(broken)
        assert all(torch.equal(kept[name], value) for name, value in target.state_dict().items())


# --- bad input ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: Mamba2(0), ArgumentError, "nn.Mamba2: dim must be a whole number >= 1, received 0"),
        (lambda: Mamba2(12, state=2.5), ArgumentError, "state must be a whole number >= 1"),
        (
            lambda: Mamba2(12, head_dim=7),
            ArgumentError,
            r"head_dim must divide expand · dim = 24, received head_dim=7. Give another",
        ),
        (lambda: Mamba2(12, head_dim=4, groups=4), ArgumentError, "groups must divide the 6 heads"),
        (lambda: Mamba2(12, head_dim=4, conv=1), ArgumentError, "width >= 2"),
        (lambda: Mamba2(12, head_dim=4, step_limit=(1.0, 0.5)), ArgumentError, "step_limit must be"),
        (lambda: Mamba3(12, head_dim=4, turned=1.5), ArgumentError, r"turned must lie in \(0, 1\]"),
        (lambda: Mamba3(12, head_dim=4, state=2, turned=0.5), ArgumentError, "leave a pair of the 2 numbers"),
        (lambda: Mamba3(12, head_dim=4, rate_floor=0.0), ArgumentError, "rate_floor must be > 0"),
        (lambda: Mamba3(12, head_dim=4, conv=1), ArgumentError, "conv must be 0"),
        (
            lambda: make()(tokens(dim=11)),
            ArgumentError,
            r"nn.Mamba2: x must be \(batch, tokens >= 1, 12\), received \(2, 13, 11\)",
        ),
        (lambda: make()(tokens(length=0)), ArgumentError, "tokens >= 1"),
        (
            lambda: make("mamba3")(tokens(), key_padding_mask=torch.ones(2, 12, dtype=torch.bool)),
            ArgumentError,
            r"nn.Mamba3: .*\(2, 13\)",
        ),
        (
            lambda: make()(tokens(1), make().empty_memory(1), cu_seqlens=torch.tensor([0, 13])),
            ArgumentError,
            "take no memory",
        ),
        (lambda: make()(tokens(), make().empty_memory(3)), ArgumentError, "holds 3 sequences, x has batch 2"),
        (lambda: make("mamba3")(tokens(), make("mamba3-conv").empty_memory(2)), ArgumentError, "another convolution"),
        (lambda: make("mamba3")(tokens(), make("mamba2").empty_memory(2)), ArgumentError, "another convolution"),
        (lambda: make("mamba3-conv")(tokens(), make("mamba2").empty_memory(2)), ArgumentError, "another kind of layer"),
        (lambda: make()(tokens(), path="recurrent"), ArgumentError, "path"),
        (
            lambda: (lambda layer: layer(tokens(), layer(tokens(), return_memory=True)[1], path="dense"))(make()),
            PathError,
            "dense",
        ),
        (
            lambda: make()(tokens(), make().empty_memory(2)),
            ArgumentError,
            "nn.Mamba2: the memory was made by another layer or model",
        ),
    ],
)
def test_bad_input_is_refused_by_name(call, error, words):
    with pytest.raises(error, match=words):
        call()
