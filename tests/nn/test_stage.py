"""Stages: their equation, the ways to compose, and that no evidence changes nothing."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from zonal import mechanisms as m
from zonal.algebra.prior import Causal
from zonal.errors import ArgumentError, FileFormatError
from zonal.models import CausalLM, ModelConfig, TextEncoder, build
from zonal.nn import Attention, Block, DenseSkip, GatedResidual, PostNorm, RMSNorm, Stage, SwiGLU

RESIDUALS = ("pre", "post", "gated", "dense")
by_residual = pytest.mark.parametrize("residual", RESIDUALS)


def drawn(module, seed=0):
    """The module in float64 with all its weights moved from where they start."""
    generator = torch.Generator().manual_seed(seed)
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return module


def gated(gate, m):
    scaled = m / (m.square().mean(-1, keepdim=True) + gate.eps).sqrt()
    return 1 / (1 + (-(scaled @ gate.projection.weight.T + gate.projection.bias)).exp())


@by_residual
@pytest.mark.parametrize("mlp", [True, False])
def test_a_block_is_its_equation(residual, mlp):
    torch.manual_seed(0)
    block = drawn(Block(Attention(8, 2, "softmax"), SwiGLU(8, 16) if mlp else None, residual=residual, records=3))
    records = tuple(
        torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3 if residual == "dense" else 1)
    )
    x = sum(g * r for g, r in zip(block.history.weight, records, strict=True)) if residual == "dense" else records[0]
    for name in ("attention", "mlp"):
        layer, norm, gate = (getattr(block, f"{name}{part}") for part in ("", "_norm", "_gate"))
        if layer is None:
            continue
        if residual == "post":
            x = norm(x + layer(x))
        else:
            x = x + (gated(gate, x) if residual == "gated" else 1) * layer(norm(x))
    y = block(records)
    torch.testing.assert_close(y, x, rtol=1e-12, atol=1e-12)
    leaves = [*records, *block.parameters()]
    for one, other in zip(*(torch.autograd.grad(z.sin().sum(), leaves) for z in (y, x)), strict=True):
        assert one.abs().max() > 0
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_parts_are_combined_freely():
    """A dense skip, a gate and a norm after all of it, around a function that is no layer."""
    skip, gate, norm = drawn(DenseSkip(4, 2)), drawn(GatedResidual(4)), drawn(RMSNorm(4))
    records = tuple(torch.randn(1, 3, 4, dtype=torch.float64) for _ in range(2))
    found = Stage(torch.tanh, skip, norm, lambda m, increment: PostNorm(norm)(m, gate(m, increment) - m))(records)
    read = skip.weight[0] * records[0] + skip.weight[1] * records[1]
    torch.testing.assert_close(found, norm(read + gated(gate, read) * norm(read).tanh()), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(Stage(torch.tanh)(records[0]), records[0] + records[0].tanh())
    assert Stage(lambda h: (h, "beside"))(records[0])[1] == "beside"


# --- no evidence, no change -----------------------------------------------------------------------------------------

OPERATORS = ["softmax", "sko(degrees=(2,3))", "yat", "ridge", "ska(power=1)", "rewa(parts=(2,2,2))", "linear"]


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(OPERATORS), st.sampled_from(RESIDUALS), st.integers(0, 4), st.integers(0, 1000))
def test_rows_that_see_no_key_keep_what_they_had(operator, residual, padding, seed):
    """The first token of a layer of strictly earlier keys, and padding before it: exactly what memory read, and after a
    post-norm its norm.
    """
    torch.manual_seed(seed)
    layer = Attention(12, 2, m.resolve(operator).replace(prior=(Causal(include_self=False),)), head_dim=6)
    block = drawn(Block(layer, residual=residual, records=2), seed)
    records = tuple(
        torch.randn(2, 4 + padding, 12, dtype=torch.float64) for _ in range(2 if residual == "dense" else 1)
    )
    mask = (torch.arange(4 + padding) >= padding).expand(2, -1)
    y = block(records, key_padding_mask=mask)
    read = block.history(records)
    kept = F.rms_norm(read, (12,), block.attention_norm.weight, 1e-6) if residual == "post" else read
    blind = slice(0, padding + 1)
    torch.testing.assert_close(y[:, blind], kept[:, blind], rtol=0, atol=1e-14 if residual == "post" else 0)
    assert (y[:, -1] - kept[:, -1]).abs().amax(-1).min() > 1e-9  # one that sees three does change


def test_a_post_norm_keeps_what_it_has_made():
    """The exception to the source's assumption 5.1: norm(m + 0) is m for m = norm(x), up to ε, as long as the gain is
    1.
    """
    norm = RMSNorm(16).double()
    x = torch.randn(3, 16, dtype=torch.float64)
    made, compose = norm(x), PostNorm(norm)
    torch.testing.assert_close(compose(made, torch.zeros_like(x)), made, rtol=2e-6, atol=0)
    assert (compose(x, torch.zeros_like(x)) - x).abs().max() > 0.01
    with torch.no_grad():
        norm.weight.mul_(1.5)
    made = norm(x)
    assert (
        compose(made, torch.zeros_like(x)) / made - 1
    ).abs().max() < 1e-5  # a gain that is the same for all channels is kept, too
    with torch.no_grad():
        norm.weight[0] = 3
    made = norm(x)
    assert (compose(made, torch.zeros_like(x)) - made).abs().max() > 0.01


# --- models ---------------------------------------------------------------------------------------------------------


def config(residual, layers=("softmax", "ska(power=1)", "mamba2(state=4, head_dim=8)"), conv=(0, 3, 0)):
    return ModelConfig(13, 16, layers, heads=2, conv=conv, rotary=True, residual=residual)


@by_residual
@pytest.mark.parametrize("split", [[1] * 9, [5, 1, 3]], ids=str)
def test_pieces_from_a_memory_equal_one_pass(residual, split):
    model = drawn(build(config(residual), 0))
    tokens = torch.randint(13, (2, 9), generator=torch.Generator().manual_seed(0))
    whole = model(tokens)
    memory, parts = model.empty_memory(2), []
    for piece in tokens.split(split, 1):
        logits, memory = model.step(piece, memory)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-9, atol=1e-9)
    assert next(iter(model.generate(tokens, 3, temperature=0))).tolist() == whole[:, -1].argmax(-1).tolist()


@by_residual
def test_what_looks_into_a_model_sees_its_stages(residual):
    model = drawn(build(config(residual), 0))
    tokens = torch.randint(13, (1, 6), generator=torch.Generator().manual_seed(0))
    seen = []
    hooks = [
        block.attention.register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0]))
        for block in model.blocks
    ]
    model(tokens)
    for hook in hooks:
        hook.remove()
    for (index, mixer, x), entered in zip(model.layer_inputs(tokens), seen, strict=True):
        assert mixer is model.blocks[index].attention
        torch.testing.assert_close(x, entered, rtol=0, atol=0)


@by_residual
def test_saved_and_loaded(residual, tmp_path):
    model = drawn(build(config(residual), 0))
    tokens = torch.randint(13, (1, 6))
    model.save(tmp_path / "model.safetensors")
    again = CausalLM.load(tmp_path / "model.safetensors")
    assert again.config == model.config
    assert again.config.residual == residual
    for (name, x), (other, y) in zip(again.state_dict().items(), model.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(x, y)
    # equal weights at other addresses: torch's products may round their last bit otherwise
    torch.testing.assert_close(again(tokens), model(tokens), rtol=1e-12, atol=1e-12)
    with pytest.raises(ArgumentError, match=r"residual must be 'pre', 'post', 'gated' or 'dense', received 'norm'"):
        config("norm")


def test_weights_of_another_composition_are_refused(tmp_path):
    from zonal.models import files

    path = tmp_path / "model.safetensors"
    files.save(path, "model", build(config("gated"), 0), config("dense").to_dict())
    with pytest.raises(FileFormatError, match=r"history|gate"):
        CausalLM.load(path)


def test_what_was_saved_before_there_was_a_choice_is_pre_norm():
    fields = config("pre").to_dict()
    assert "residual" not in fields
    assert ModelConfig.from_dict(fields) == config("pre")
    assert config("dense").to_dict()["residual"] == "dense"


def test_models_start_from_one_point():
    """Equal weights where names are equal; a dense model is the pre-norm one until its gates have moved."""
    models = {residual: build(config(residual), 4) for residual in RESIDUALS}
    weights = {residual: model.state_dict() for residual, model in models.items()}
    for residual in RESIDUALS[1:]:
        for name, value in weights["pre"].items():
            torch.testing.assert_close(weights[residual][name], value, rtol=0, atol=0)
    tokens = torch.randint(13, (2, 7))
    torch.testing.assert_close(models["dense"](tokens), models["pre"](tokens), rtol=0, atol=0)
    assert models["dense"].num_parameters() - models["pre"].num_parameters() == 16 * (1 + 2 + 3 + 4)
    total, _ = models["dense"].loss(tokens, tokens)
    total.backward()
    assert all(block.history.weight.grad.abs().amax(-1).min() > 0 for block in models["dense"].blocks)
    assert models["dense"].history.weight.grad.abs().amax(-1).min() > 0


@by_residual
def test_an_encoder_of_text_has_the_choice_too(residual):
    model = drawn(TextEncoder(ModelConfig(13, 16, ("softmax", "sinkhorn"), heads=2, residual=residual), 0))
    tokens = torch.randint(13, (2, 7))
    total, _ = model.loss(tokens, tokens)
    total.backward()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: Block(Attention(8, 2, "softmax"), residual="norm"),
            "unknown residual 'norm'.*dense, gated, post, pre",
        ),
        (lambda: DenseSkip(8, 0), "required dim >= 1 and records >= 1, received dim=8, records=0"),
        (lambda: DenseSkip(8, 3)((torch.randn(1, 2, 8),)), "3 records are required, oldest first, received 1"),
        (
            lambda: Block(Attention(8, 2, "softmax"), residual="dense", records=2)(torch.randn(1, 2, 8)),
            "2 records are required",
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
