"""Models and layers that decode: the same logits as from memories, in place, for every kind of layer."""

import pytest
import torch
from torch import Tensor

from zonal import nn
from zonal.models import ModelConfig, build

LAYERS = {
    "softmax": lambda: nn.Attention(16, 2, "softmax", rotary=True, conv=3),
    "ska": lambda: nn.Attention(16, 2, "ska(power=1)", key_gate=True),
    "sko": lambda: nn.Attention(16, 4, "sko(degrees=(2.0,))", kv_heads=2),
    "retention": lambda: nn.Attention(16, 2, "retention"),
    "mamba2": lambda: nn.Mamba2(16, state=4, head_dim=4),
    "mamba3": lambda: nn.Mamba3(16, state=4, head_dim=4),
    "gated_deltanet": lambda: nn.GatedDeltaNet(16, head_dim=8),
    "mixture": lambda: nn.Mixture([nn.Attention(16, 2, "softmax"), nn.Attention(16, 2, "squared_affine")]),
}


def model_of(*operators: str):
    return build(ModelConfig(40, 16, operators, 2, conv=3, rotary=True), seed=0)


def text(length: int, batch: int = 2) -> Tensor:
    return torch.randint(0, 40, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_layers(name: str) -> None:
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(2, 14, 16)
    whole = layer(x)
    y, memory = layer(x[:, :6], return_memory=True)
    decoder, rows, mask = memory.decoder(), [y], torch.tensor([[True], [False]])
    for t in range(6, 14):
        y, decoder = layer(x[:, t : t + 1], decoder)
        rows.append(y)
    torch.testing.assert_close(torch.cat(rows, 1), whole, rtol=1e-4, atol=1e-5)
    left, after = layer(x[:, :1], decoder.value(), key_padding_mask=mask)
    right, decoder = layer(x[:, :1], decoder, key_padding_mask=mask)
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)
    left, right = layer(x[:, 1:2], after)[0], layer(x[:, 1:2], decoder)[0]
    torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_models() -> None:
    model, tokens = model_of("softmax", "squared_affine", "ska(power=1)", "retention"), text(12)
    _, memory = model.prefill(tokens[:, :5])
    decoder = model.decoder(memory)
    for t in range(5, 12):
        if t == 8:
            middle = decoder.memory()
        expected, memory = model.step(tokens[:, t : t + 1], memory)
        torch.testing.assert_close(decoder.step(tokens[:, t : t + 1]), expected, rtol=1e-4, atol=1e-5)
    assert decoder.memory().count == memory.count == 12
    other = model.decoder(middle)
    again = torch.cat([other.step(tokens[:, t : t + 1]) for t in range(8, 12)], 1)
    torch.testing.assert_close(again, model.step(tokens[:, 8:], middle)[0], rtol=1e-4, atol=1e-5)


def test_rows_and_forks_of_a_model() -> None:
    model, tokens = model_of("squared_affine", "softmax"), text(8)
    decoder = model.decoder(model.prefill(tokens)[1])
    more = text(3)
    fork, swapped = decoder.fork(), decoder.gather([1, 0])
    got = decoder.step(more)
    torch.testing.assert_close(fork.step(more), got)
    torch.testing.assert_close(swapped.step(more[[1, 0]]), got[[1, 0]])
    assert decoder.memory().count == 11


def test_a_refused_token_changes_nothing() -> None:
    model, tokens = model_of("squared_affine", "softmax"), text(8)
    decoder = model.decoder(model.prefill(tokens)[1])
    with pytest.raises(ValueError, match="tokens must lie"):
        decoder.step(torch.tensor([[41], [0]]))
    assert decoder.memory().count == 8
