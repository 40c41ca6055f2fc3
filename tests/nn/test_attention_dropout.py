"""Dropout of attention weights: its definition, its mean, its gradients, and who has no weights."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal import nn
from zonal.errors import ArgumentError, PathError

SPECS = ["softmax", "sko", "retention", "ridge", "ska", "local_global"]


def tokens(batch: int = 2, length: int = 7) -> Tensor:
    return torch.randn(batch, length, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def made(spec: str = "softmax", dropout: float = 0.4) -> nn.Attention:
    """A layer without a norm behind the operator, whose mean would not be that of the weights."""
    torch.manual_seed(0)
    layer = nn.Attention(12, 2, spec, init="default", readout_norm=None, dropout=dropout).double()
    with torch.no_grad():
        for linear in (layer.query, layer.key, layer.value, layer.output):
            linear.weight.normal_(0.0, 0.4)
    return layer


def test_it_drops_weights_of_softmax_as_torch_does() -> None:
    """The same numbers, and the same gradients, as softmax, dropout and a product written out."""
    q, k, v = (z.requires_grad_() for z in torch.randn(3, 2, 3, 5, 4, dtype=torch.float64))

    def by_hand() -> Tensor:
        torch.manual_seed(3)
        return F.dropout((q @ k.mT / 2).softmax(-1), 0.3) @ v

    def found() -> Tensor:
        torch.manual_seed(3)
        return zonal.attention(q, k, v, "softmax", dropout=0.3)

    torch.testing.assert_close(found(), by_hand(), rtol=1e-10, atol=1e-10)
    assert not torch.allclose(found(), zonal.attention(q, k, v, "softmax"), atol=1e-2)
    for one, other in zip(
        torch.autograd.grad(found().square().sum(), (q, k, v)),
        torch.autograd.grad(by_hand().square().sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("spec", SPECS)
def test_its_mean_is_the_layer_without_it(spec: str) -> None:
    layer, x = made(spec), tokens(1)
    drawn = torch.stack([layer(x) for _ in range(400)]).detach()
    wanted = layer.eval()(x).detach()
    error = drawn.std(0) / 400**0.5
    assert ((drawn.mean(0) - wanted).abs() < 5 * error + 1e-9).all()
    assert drawn.std(0)[:, 2:].min() > 1e-3


@pytest.mark.parametrize("spec", SPECS)
def test_evaluation_and_decoding_do_not_drop(spec: str) -> None:
    layer, x = made(spec).eval(), tokens()
    plain = made(spec, dropout=0.0)
    torch.testing.assert_close(layer(x), plain(x), rtol=0, atol=0)
    decoder = layer.empty_memory(2).decoder()
    y, _ = layer(x, decoder)
    torch.testing.assert_close(y, plain(x), rtol=1e-7, atol=1e-7)


def test_a_memory_of_keys_and_a_context_take_part() -> None:
    layer, x = made(dropout=0.999), tokens()
    _, memory = layer.eval()(x, return_memory=True)
    assert layer(x, memory)[0].abs().max() > 0.1
    layer.train()
    assert layer(x[:, :1], memory)[0].count_nonzero() < 24
    assert layer(x[:, :1], context=x).count_nonzero() < 24


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does that
def test_a_compiled_layer_drops_too() -> None:
    torch._dynamo.reset()
    layer, x = made(), tokens()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert not torch.equal(compiled(x), compiled(x))


def test_paths_without_weights_are_refused() -> None:
    layer, x = made("squared_affine"), tokens()
    for path in ("tiled", "chunked", "streaming"):
        with pytest.raises(PathError, match=r"never holds the weights.*nn\.Dropout.*Use path='dense'"):
            layer(x, path=path)
    with pytest.raises(PathError, match=r"needs the keys themselves.*never holds the weights"):
        layer(x, layer.empty_memory(2).advance(filled(layer), None, 3, None))
    with pytest.raises(ArgumentError, match=r"a decoder sets no weights to zero.*eval\(\)"):
        layer(x, layer.empty_memory(2).decoder())
    with pytest.raises(ArgumentError, match=r"memory sets no weights to zero.*eval\(\)"):
        layer(x, context=layer.context_memory(x))
    for wrong in (1.0, -0.1):
        with pytest.raises(ArgumentError, match="at least 0 and below 1"):
            made(dropout=wrong)
        with pytest.raises(ArgumentError, match="at least 0 and below 1"):
            zonal.attention(x[None], x[None], x[None], m.softmax(), dropout=wrong)


def filled(layer: nn.Attention) -> zonal.Memory:
    _, memory = layer.eval()(tokens(length=3), return_memory=True)
    layer.train()
    return memory.memory
