"""A decoding step as a function of tensors: exported and compiled, it is what a decoder computes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal import nn
from zonal.errors import ArgumentError

DIM = 24
LAYERS: dict[str, Callable[[], nn.TokenMixer]] = {
    "softmax": lambda: nn.Attention(DIM, 4, "softmax", rotary=True, conv=3),
    "window": lambda: nn.Attention(DIM, 4, m.softmax(prior=zonal.prior.Window(6)), rotary=True),
    "squared_affine": lambda: nn.Attention(DIM, 4, "squared_affine", kv_heads=2),
    "local_global": lambda: nn.Attention(DIM, 4, m.local_global(3, first=2), kv_heads=2, rotary=True),
    "sko": lambda: nn.Attention(DIM, 4, "sko"),
    "retention": lambda: nn.Attention(DIM, 4, "retention"),
    "ska": lambda: nn.Attention(DIM, 4, "ska", rotary=True, init="default"),
    "ska(fading=True)": lambda: nn.Attention(DIM, 4, "ska(fading=True)", init="default"),
    "mamba2": lambda: nn.Mamba2(DIM, head_dim=6, state=4),
    "mamba3": lambda: nn.Mamba3(DIM, head_dim=6, state=4),
    "gated_deltanet": lambda: nn.GatedDeltaNet(DIM, head_dim=6),
    "rewa_categorical": lambda: nn.Attention(DIM, 4, "rewa_categorical", init="default"),
    "mixture": lambda: nn.Mixture([nn.Attention(DIM, 4, "softmax"), nn.Attention(DIM, 4, "linear")]),
}


def made(name: str) -> nn.TokenMixer:
    torch.manual_seed(0)
    layer = LAYERS[name]()
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim == 2:
                parameter *= 8  # outputs of size one
    return layer


def tokens(batch: int, count: int) -> Tensor:
    return torch.randn(batch, count, DIM, generator=torch.Generator().manual_seed(count))


def started(name: str, batch: int = 2, read: int = 4) -> tuple[nn.TokenMixer, nn.LayerMemory, nn.DecodeStep]:
    layer = made(name)
    memory = layer.empty_memory(batch)
    if read:
        memory = layer(tokens(batch, read), memory)[1]
    assert isinstance(memory, nn.LayerMemory)
    return layer, memory, nn.DecodeStep(layer, memory)


def exported(step: nn.DecodeStep, x: Tensor, state: dict[str, Tensor]) -> Callable[..., Any]:
    return torch.export.export(step, (x, state), dynamic_shapes=step.dynamic_shapes(state)).module()


def follows(run: Callable[..., Any], layer: nn.TokenMixer, memory: nn.LayerMemory, step: nn.DecodeStep) -> None:
    """``run`` takes five tokens one by one, like a decoder; its state is then the decoder's memory."""
    state, decoder = step.state(memory), memory.decoder()
    for x in tokens(memory.batch, 5).split(1, 1):
        y, state = run(x, state)
        expected, decoder = layer(x, decoder)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    expected, found = decoder.value(), step.memory(state)
    assert type(found.memory) is type(expected.memory)
    torch.testing.assert_close(found.reached(), expected.reached())
    x = tokens(memory.batch, 3)
    torch.testing.assert_close(layer(x, found)[0], layer(x, expected)[0], rtol=1e-5, atol=1e-5)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_an_exported_step_decodes(name: str) -> None:
    layer, memory, step = started(name)
    follows(exported(step, tokens(2, 1), step.state(memory)), layer, memory, step)


@pytest.mark.parametrize("name", ["squared_affine", "ska", "mamba2"])
@torch.no_grad()
def test_sums_may_start_empty(name: str) -> None:
    layer, memory, step = started(name, batch=1, read=0)
    follows(exported(step, tokens(1, 1), step.state(memory)), layer, memory, step)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer does that
@pytest.mark.parametrize("name", ["softmax", "squared_affine", "sko", "retention", "ska", "mamba2", "gated_deltanet"])
@torch.no_grad()
def test_a_compiled_step_is_one_graph(name: str) -> None:
    layer, memory, step = started(name)
    compiled, state = torch.compile(step, fullgraph=True, backend="eager"), step.state(memory)
    for kept in ("memory.k", "memory.v"):
        if kept in state:
            torch._dynamo.mark_dynamic(state[kept], 2)
    decoder = memory.decoder()
    for x in tokens(2, 5).split(1, 1):
        y, state = compiled(x, state)
        expected, decoder = layer(x, decoder)
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_rows_of_unequal_length_share_a_step() -> None:
    layer = made("softmax")
    mask = torch.tensor([[False, False, True, True], [True, True, True, True]])
    _, memory = layer(tokens(2, 4), layer.empty_memory(2), key_padding_mask=mask)
    assert isinstance(memory, nn.LayerMemory)
    step = nn.DecodeStep(layer, memory)
    follows(exported(step, tokens(2, 1), step.state(memory)), layer, memory, step)


@torch.no_grad()
def test_a_window_keeps_its_size() -> None:
    layer, memory, step = started("window", read=0)
    state = step.state(memory)
    follows(exported(step, tokens(2, 1), state), layer, memory, step)
    after = step(tokens(2, 1), state)[1]
    assert {name: x.shape for name, x in after.items()} == {name: x.shape for name, x in state.items()}


def test_what_is_no_step_of_tensors_is_refused() -> None:
    _, memory, step = started("softmax")
    with pytest.raises(ArgumentError, match="memory of the layer"):
        nn.DecodeStep(made("softmax"), memory)
    with pytest.raises(ArgumentError, match=r"named spans.*unnamed"):
        step.state(memory.open("doc"))
    with pytest.raises(ArgumentError, match=r"state must hold memory\.k, memory\.v, position, tail; received"):
        step(tokens(2, 1), {**step.state(memory), "surplus": torch.zeros(2)})
    chunks = nn.Attention(DIM, 4, "ska(chunk=8)")
    with pytest.raises(ArgumentError, match=r"whole chunks.*memory\.decoder"):
        nn.DecodeStep(chunks, chunks.empty_memory(1))
