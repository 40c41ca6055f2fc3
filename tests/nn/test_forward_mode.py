"""Forward-mode derivatives of layers and memories: right, or refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import zonal
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.nn import Attention, GatedDeltaNet, Mamba2, ShortConvolution

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Attention(8, 2, "softmax", conv=3),
    "mamba2": lambda: Mamba2(8, state=4, head_dim=4),
    "gated_deltanet": lambda: GatedDeltaNet(8, state=4, head_dim=4),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_with_a_convolution_lose_no_tangent(name: str) -> None:
    torch.manual_seed(0)
    layer = LAYERS[name]().requires_grad_(False)
    x, t = torch.randn(2, 1, 6, 8).unbind(0)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, t))).tangent
    exact = layer.double()
    step = (exact(x.double() + 1e-5 * t.double()) - exact(x.double() - 1e-5 * t.double())) / 2e-5
    torch.testing.assert_close(found.double(), step, atol=1e-3, rtol=1e-3)


def test_a_convolution_has_the_tangents_of_its_taps() -> None:
    torch.manual_seed(0)
    layer, x = ShortConvolution(4, 3).double(), torch.randn(2, 5, 4, dtype=torch.float64)
    values = {name: value.detach() for name, value in layer.named_parameters()}
    along = {name: torch.randn_like(value) for name, value in values.items()}

    def run(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, values, (x,))[0]

    t = torch.randn_like(x)
    _, found = torch.func.jvp(run, (values, x), (along, t))
    ahead, behind = (
        run({name: value + s * along[name] for name, value in values.items()}, x + s * t) for s in (1e-6, -1e-6)
    )
    torch.testing.assert_close(found, (ahead - behind) / 2e-6, atol=1e-8, rtol=1e-6)


def _read(k: Tensor, v: Tensor) -> Tensor:
    memory = zonal.Memory.empty(m.softmax(), 1, 1, 2, 2)
    return memory.absorb(k, v).absorb(k, v).read(k)


def test_keys_and_values_in_memories_keep_their_tangents() -> None:
    k, v, t = torch.ones(1, 1, 1, 2), torch.tensor([[[[1.0, 2.0]]]]), torch.tensor([[[[3.0, 5.0]]]])
    y, tangent = torch.func.jvp(lambda x: _read(k, x), (v,), (t,))
    assert torch.equal(y, v)
    assert torch.equal(tangent, t)
    with forward_ad.dual_level():
        assert torch.equal(forward_ad.unpack_dual(_read(k, forward_ad.make_dual(v, t))).tangent, t)


@pytest.mark.parametrize("operator", ["softmax", "linear", "ska"])
def test_decoders_refuse_tangents(operator: str) -> None:
    k, v = torch.ones(1, 1, 1, 4), torch.ones(1, 1, 1, 4)
    decoder = zonal.Memory.empty(operator, 1, 1, 4, 4).decoder()
    decoder.step(k, k, v)
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match=r"Decoder\.step: .*forward-mode"):
        decoder.step(k, k, forward_ad.make_dual(v, v))
