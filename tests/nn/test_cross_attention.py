"""Cross-attention of the layer: every operator that can read a context, against the dense definition in float64."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal import nn
from zonal.errors import ArgumentError

DIM, WIDER = 12, 20
ORDERED = {
    "retention": "prior Decay", "local_global": "window ends", "hierarchical": "one sequence of tokens",
    "rewa_topological": "neighbourhoods",
}  # fmt: skip
PLANS = {"sinkhorn", "hyperbolic_transport"}
SPECS = [
    *(name for name in m.names() if name not in ORDERED),
    "ska(power=1)",
    "rewa_categorical(size=3, transport=True)",
    "sko(readout='concat')",
    "sinkhorn(learn=True)",
]


def close(found: object, expected: object, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def same_map(spec: str) -> bool:
    return m.resolve(spec).score.one_map


def made(spec: str, **settings: Any) -> nn.Attention:
    """A float64 layer whose output projection is not zero."""
    torch.manual_seed(0)
    sizes = {
        "kv_heads": 4 if same_map(spec) else 2, "head_dim": 16 if spec == "rewa_operator" else 6,
        "context_dim": DIM if same_map(spec) else WIDER, "init": "default", "bias": True, "qk_norm": True,
    }  # fmt: skip
    layer = nn.Attention(DIM, 4, spec, **(sizes | settings)).double()
    with torch.no_grad():
        for linear in (layer.query, layer.key, layer.value, layer.output):
            for parameter in linear.parameters():
                parameter.normal_(0.0, 0.4)
    return layer


def drawn(layer: nn.Attention, batch: int = 2, queries: int = 5, keys: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, queries, DIM, dtype=torch.float64, generator=generator)
    return x, torch.randn(batch, keys, layer.value.in_features, dtype=torch.float64, generator=generator)


def by_hand(layer: nn.Attention, x: Tensor, c: Tensor) -> Tensor:
    """The equation of the layer, with the weights of the definition."""

    def heads(y: Tensor, linear: torch.nn.Linear, norm: nn.RMSNorm | None) -> Tensor:
        z = F.linear(y, linear.weight, linear.bias).unflatten(2, (-1, linear.out_features // count)).transpose(1, 2)
        return z if norm is None else z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight

    count = layer.heads
    q = heads(x, layer.query, layer.query_norm)
    count = layer.kv_heads
    k, v = heads(c, layer.key, layer.key_norm), heads(c, layer.value, None)
    score = layer.operator.score
    v = score.carried(v, k) if score.transports else v
    y = zonal.attention(q, k, v, layer.operator, path="dense")
    y = score.carried(y, q, back=True) if score.transports else y
    y = y.transpose(1, 2)
    if layer.readout_norm == "concat":
        y = y.flatten(2)
    if layer.readout is not None:
        y = y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * layer.readout.weight
    return F.linear(y if y.ndim == 3 else y.flatten(2), layer.output.weight, layer.output.bias)


@pytest.mark.parametrize("spec", SPECS)
def test_a_context_gives_keys_and_values(spec: str) -> None:
    layer = made(spec)
    x, c = drawn(layer)
    y = layer(x, context=c)
    close(y, by_hand(layer, x, c))
    assert y.abs().max() > 1e-3
    # queries have no order, and keys none but that from one key to the next, which Koopman read-outs fit
    c = c if spec.startswith("ska") else c.flip(1)
    close(layer(x.flip(1), context=c).flip(1), y, 1e-7)


def test_softmax_is_torch_sdpa_and_has_its_gradients() -> None:
    layer = made("softmax", qk_norm=False, kv_heads=4)
    x, c = (z.requires_grad_() for z in drawn(layer))

    def expected() -> Tensor:
        q, k, v = (
            F.linear(z, p.weight, p.bias).unflatten(2, (4, 6)).transpose(1, 2)
            for z, p in ((x, layer.query), (c, layer.key), (c, layer.value))
        )
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.linear(y, layer.output.weight, layer.output.bias)

    learned = (x, c, *layer.parameters())
    found = torch.autograd.grad(layer(x, context=c).square().sum(), learned, allow_unused=True)
    for one, other in zip(
        found, torch.autograd.grad(expected().square().sum(), learned, allow_unused=True), strict=True
    ):
        close(one, other)


@pytest.mark.parametrize("spec", ["softmax", "squared_affine", "ridge", "ska", "sinkhorn", "rewa_categorical"])
def test_padding_of_the_context_and_of_x(spec: str) -> None:
    """Rows with padding are rows without it, whatever the padding holds."""
    layer = made(spec)
    x, c = drawn(layer)
    real_x = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    real_c = torch.tensor([[True] * 4 + [False] * 5, [True] * 9])
    filled = torch.where(real_c[..., None], c, float("nan"))
    y = layer(x, context=filled, context_padding_mask=real_c, key_padding_mask=real_x)
    close(y[0], layer(x[:1], context=c[:1, :4])[0])
    close(y[1, :3], layer(x[1:, :3], context=c[1:])[0])


@pytest.mark.parametrize("spec", [spec for spec in SPECS if spec.partition("(")[0] not in PLANS])
def test_the_memory_of_a_context_is_the_context(spec: str) -> None:
    layer = made(spec)
    x, c = drawn(layer)
    mask = torch.tensor([[True] * 9, [True] * 6 + [False] * 3])
    memory = layer.context_memory(c, key_padding_mask=mask)
    expected = layer(x, context=c, context_padding_mask=mask)
    for piece, wanted in zip(x.split([1, 1, 3], 1), expected.split([1, 1, 3], 1), strict=True):  # step by step
        close(layer(piece, context=memory), wanted, 1e-7)
    assert memory.count == 9


@pytest.mark.parametrize(("spec", "constant"), [("squared_affine", True), ("ridge", True), ("softmax", False)])
def test_some_memories_of_contexts_have_a_constant_size(spec: str, constant: bool) -> None:
    layer = made(spec)
    sizes = [layer.context_memory(drawn(layer, keys=keys)[1]).nbytes for keys in (8, 80)]
    assert (sizes[0] == sizes[1]) is constant


def test_a_gradient_goes_through_the_memory_of_a_context() -> None:
    layer = made("squared_affine")
    x, c = drawn(layer)
    c.requires_grad_()
    found = torch.autograd.grad(layer(x, context=layer.context_memory(c)).square().sum(), c)[0]
    close(found, torch.autograd.grad(layer(x, context=c).square().sum(), c)[0])


@pytest.mark.parametrize("settings", [{"key_gate": True}, {"cg_lift": 8}])
def test_gates_and_lifts_are_of_the_context(settings: dict[str, Any]) -> None:
    layer = made("ska(power=1)", **settings)
    x, c = drawn(layer)
    y = layer(x, context=c)
    close(layer(x, context=layer.context_memory(c)), y, 1e-7)
    if layer.key_gate is not None:
        with torch.no_grad():
            layer.key_gate.projection.weight.normal_()
        changed = layer(x, context=c)
        assert not torch.allclose(changed, y, atol=1e-3)
        close(layer(x, context=layer.context_memory(c)), changed, 1e-7)


def test_a_layer_without_context_dim_reads_both() -> None:
    """A causal layer, too: with a context no token is hidden."""
    layer = made("softmax", context_dim=None)
    x, c = drawn(layer)
    close(layer(x, context=c), by_hand(layer, x, c))
    assert not torch.allclose(layer(x), layer(x, context=x), atol=1e-3)
    close(layer(x)[:, -1], layer(x, context=x)[:, -1])


def test_the_weights_of_a_context() -> None:
    layer = made("softmax")
    x, c = drawn(layer)
    weights = layer.weights(x, c)
    assert weights.shape == (2, 4, 5, 9)
    v = layer.value(c).unflatten(2, (2, 6)).transpose(1, 2).repeat_interleave(2, 1)
    close(layer.output((weights @ v).transpose(1, 2).flatten(2)), layer(x, context=c))
    assert layer.evidence(x, c).shape == weights.shape


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does that
@pytest.mark.parametrize("spec", ["softmax", "squared_affine", "ridge"])
def test_a_compiled_layer_is_one_graph(spec: str) -> None:
    torch._dynamo.reset()
    layer = made(spec).float()
    x, c = (z.float() for z in drawn(layer))
    with torch.no_grad():
        y = torch.compile(layer, fullgraph=True, backend="eager")(x, context=c)
        close(y, layer(x, context=c), 1e-4)


@pytest.mark.parametrize(("spec", "message"), ORDERED.items())
def test_operators_of_one_sequence_are_refused(spec: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=f"cannot read a context.*{message}"):
        nn.Attention(DIM, 4, spec, head_dim=6, context_dim=WIDER, causal=False)
    layer = nn.Attention(DIM, 4, spec, head_dim=6, causal=spec != "hierarchical")
    with pytest.raises(ArgumentError, match=f"cannot read a context.*{message}"):
        layer(torch.randn(1, 3, DIM), context=torch.randn(1, 4, DIM))


def test_what_does_not_fit_is_refused() -> None:
    layer = made("softmax")
    x, c = drawn(layer)
    plain = nn.Attention(DIM, 4, "softmax").double()
    memory = layer.context_memory(c)
    mask = torch.ones(2, 9, dtype=torch.bool)
    for call, message in (
        (lambda: nn.Attention(DIM, 4, "softmax", context_dim=0), "context_dim must be a whole number >= 1"),
        (lambda: nn.Attention(DIM, 2, "softmax", context_dim=8, rotary=True), "rotary=False, and add positions"),
        (lambda: nn.Attention(DIM, 4, "softmax", context_dim=8, conv=3), "Use conv=0"),
        (lambda: nn.Attention(DIM, 4, "rewa_categorical", context_dim=8), "one map makes its queries and keys"),
        (lambda: nn.Attention(DIM, 4, "ridge", context_dim=2, init="orthogonal"), "at most context_dim=2 numbers"),
        (lambda: layer(x), r"made with context_dim=20.*layer\(x, context=c\)"),
        (lambda: layer.empty_memory(2), "made with context_dim=20"),
        (lambda: layer(x, memory), "memory of a context is passed as context"),
        (lambda: layer(x, context=plain.empty_memory(2)), "context.* must be a torch.Tensor, received LayerMemory"),
        (lambda: layer(x, context=x), r"context must be \(2, tokens >= 1, 20\), received \(2, 5, 12\)"),
        (lambda: layer(x, context=c[:1]), r"context must be \(2, tokens >= 1, 20\), received \(1, 9, 20\)"),
        (lambda: plain(x, context=c), "Make the layer with context_dim"),
        (lambda: layer(x, context=c, context_padding_mask=mask[:, :5]), r"context: key_padding_mask.*\(2, 9\)"),
        (lambda: layer(x, context_padding_mask=mask), "context_padding_mask comes with a context"),
        (lambda: plain(x, context=x, return_memory=True), "leave memory, return_memory"),
        (lambda: layer(x[:1], context=memory), "for 1 sequences; received one of 2"),
        (lambda: layer(x, context=plain.empty_memory(2).memory), r"this layer's context_memory\(\)"),
        (lambda: layer(x, context=memory, context_padding_mask=mask), "holds its mask"),
        (lambda: made("sinkhorn").context_memory(c), "reads all queries together"),
        (lambda: nn.Mamba2(DIM, head_dim=6, state=4)(x.float(), context=x.float()), "cross-attention.*nn.Attention"),
    ):
        with pytest.raises(ArgumentError, match=message):
            call()


# --- in a block -----------------------------------------------------------------------------------------------------


def block(residual: Any = "pre", own: str = "softmax", cross: str = "softmax") -> nn.Block:
    """A float64 block with self-attention, cross-attention and an mlp, none of whose weights is zero."""
    torch.manual_seed(0)
    made = nn.Block(
        nn.Attention(DIM, 2, own), nn.SwiGLU(DIM, 16), residual=residual,
        cross=nn.Attention(DIM, 3, cross, context_dim=WIDER),
    ).double()  # fmt: skip
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def both() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, c = (torch.randn(2, n, d, dtype=torch.float64, generator=generator) for n, d in ((7, DIM), (9, WIDER)))
    return x, c


@pytest.mark.parametrize("residual", ["pre", "post", "gated", "dense"])
def test_a_block_reads_a_context_between_attention_and_mlp(residual: str) -> None:
    layers, (x, c) = block(residual), both()
    real = torch.tensor([[True] * 9, [True] * 4 + [False] * 5])
    cross: Any = layers.cross
    expected = x * layers.history.weight[0] if isinstance(layers.history, nn.DenseSkip) else x
    steps: Any = (
        (layers.attention, layers.attention_norm, layers.attention_gate),
        (lambda h: cross(h, context=c, context_padding_mask=real), layers.cross_norm, layers.cross_gate),
        (layers.mlp, layers.mlp_norm, layers.mlp_gate),
    )
    for layer, norm, gate in steps:
        if residual == "post":
            expected = norm(expected + layer(expected))
        else:
            increment = layer(norm(expected))
            expected = gate(expected, increment) if gate is not None else expected + increment
    y = layers(x, context=c, context_padding_mask=real)
    close(y, expected)
    for gradient in torch.autograd.grad(y.sin().sum(), [*layers.parameters()]):
        assert gradient.abs().max() > 0


@pytest.mark.parametrize("cross", ["softmax", "squared_affine", "ridge"])
def test_a_block_decodes_with_the_memories_of_x_and_of_the_context(cross: str) -> None:
    layers, (x, c) = block(cross=cross), both()
    assert layers.cross is not None
    context, memory = layers.cross.context_memory(c), layers.attention.empty_memory(2)
    found = []
    for piece in x.split([3, 1, 1, 2], 1):
        y, memory = layers(piece, memory, context=context)
        found.append(y)
    close(torch.cat(found, 1), layers(x, context=c), 1e-7)


def test_padding_of_x_is_in_no_row_of_a_block_with_a_context() -> None:
    layers, (x, c) = block(), both()
    real = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    y = layers(x, context=c, key_padding_mask=real)
    close(y[1, :4], layers(x[1:, :4], context=c[1:])[0])


def test_without_cross_a_context_goes_to_the_attention_of_a_block() -> None:
    torch.manual_seed(0)
    alone, (x, c) = nn.Block(nn.Attention(DIM, 3, "softmax", context_dim=WIDER)).double(), both()
    close(alone(x, context=c), x + alone.attention(alone.attention_norm(x), context=c))


def test_what_a_block_refuses() -> None:
    layers, (x, c) = block(), both()
    with pytest.raises(
        ArgumentError, match=r"needs a context. Pass context=c, or context=block\.cross\.context_memory"
    ):
        layers(x)
    with pytest.raises(ArgumentError, match=r"context must be \(2, tokens >= 1, 20\)"):
        layers(x, context=x)
    with pytest.raises(ArgumentError, match="width of attention, dim=12, received dim=20"):
        nn.Block(nn.Attention(DIM, 2, "softmax"), cross=nn.Attention(WIDER, 2, "softmax"))
    with pytest.raises(ArgumentError, match=r"cross-attention.*nn\.Attention"):
        nn.Block(nn.Mamba2(DIM, head_dim=6, state=4))(x.float(), context=c.float())
