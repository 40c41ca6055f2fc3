"""Layers under torch.compile: one graph a mechanism, the same numbers, and one graph for sequences of several
lengths.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal import nn
from zonal.kernels import native as native_kernels

# the number of a plan's iterations depends on values, so that its iteration stays outside of the graph
PLANS = {"sinkhorn", "hyperbolic_transport"}
SETTINGS: dict[str, dict[str, object]] = {"rewa_operator": {"qk_dim": 9}}
SPECS = [
    *(name for name in m.names() if name not in PLANS),
    "ska(power=1)",
    "ska(fading=True)",
    "rewa_categorical(size=3, transport=True)",
]
LAYERS: dict[str, Callable[[], nn.TokenMixer]] = {
    "mamba2": lambda: nn.Mamba2(24, head_dim=6, state=4), "mamba3": lambda: nn.Mamba3(24, head_dim=6, state=4),
    "mesanet": lambda: nn.MesaNet(24, head_dim=6),
    "gated_kalmanet": lambda: nn.GatedKalmaNet(24, head_dim=6),
    "gated_deltanet": lambda: nn.GatedDeltaNet(24, head_dim=6),
}  # fmt: skip


def made(spec: str) -> nn.TokenMixer:
    torch.manual_seed(0)
    if spec in LAYERS:
        return LAYERS[spec]()
    return nn.Attention(
        24, 4, spec, causal=not m.resolve(spec).anchor.couples, init="default", **SETTINGS.get(spec, {})
    )  # type: ignore[arg-type]


def inputs(tokens: int) -> Tensor:
    return torch.randn(2, tokens, 24, generator=torch.Generator().manual_seed(tokens))


class Graphs:
    """A backend that runs a graph as it is and counts them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated:DeprecationWarning"
)  # torch's own tracer does that to an autograd.Function
@pytest.mark.parametrize("spec", [*SPECS, *LAYERS])
def test_a_layer_is_one_graph(spec: str) -> None:
    layer, graphs, x = made(spec), Graphs(), inputs(20)
    with torch.no_grad():
        y = torch.compile(layer, fullgraph=True, backend=graphs)(x)
        torch.testing.assert_close(y, layer(x), rtol=1e-4, atol=1e-5)
    assert graphs.count == 1
    assert y.abs().max() > 1e-4


def test_a_layer_with_an_action_mask_is_one_graph() -> None:
    layer, graphs, x = made("ska(power=1)"), Graphs(), inputs(20)
    stored = torch.arange(20) % torch.tensor([[3], [2]]) == 0
    with torch.no_grad():
        y = torch.compile(layer, fullgraph=True, backend=graphs)(x, action_mask=stored)
        torch.testing.assert_close(y, layer(x, action_mask=stored), rtol=1e-4, atol=1e-5)
    assert graphs.count == 1


@pytest.mark.parametrize("spec", ["softmax", "sko", "ska(power=1)", "mamba2"])
def test_one_graph_has_gradients_and_serves_several_lengths(spec: str) -> None:
    layer, graphs = made(spec), Graphs()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for tokens in (20, 37, 150):
        x = inputs(tokens)
        torch._dynamo.mark_dynamic(x, 1)
        found, expected = (
            torch.autograd.grad(call(x).square().sum(), layer.parameters(), allow_unused=True)
            for call in (compiled, layer)
        )
        for one, other in zip(found, expected, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * max(1.0, float(other.abs().max())))
    assert graphs.count == 1


@pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")
@pytest.mark.parametrize("spec", ["softmax", "linear", "sko", "retention", "ridge", "ska(power=1)", "rewa", "mamba2"])
def test_inductor_gives_the_same_numbers(spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler that ``torch.compile`` uses by default, which writes C++ for what surrounds the kernels: y and the
    gradients of all parameters.
    """
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    layer, x = made(spec), inputs(20)
    compiled = torch.compile(layer, fullgraph=True, backend="inductor", options={"compile_threads": 1})
    found, expected = [], []
    for call, all_of_it in ((compiled, found), (layer, expected)):
        y = call(x)
        gradients = torch.autograd.grad(y.square().sum(), layer.parameters(), allow_unused=True)
        all_of_it += [y.detach(), *gradients]
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * max(1.0, float(other.abs().max())))
    assert expected[0].abs().max() > 1e-4


def test_values_that_do_not_fit_stop_a_compiled_call() -> None:
    """What eager calls refuse by name is an assertion of the graph."""
    q, k, v = torch.randn(3, 1, 2, 8, 4, generator=torch.Generator().manual_seed(0)).unbind(0)
    operator = m.resolve("retention")

    def call(decay: Tensor) -> Tensor:
        y = zonal.attention(q, k, v, operator, causal=True, log_decay=decay)
        assert isinstance(y, Tensor)
        return y

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(torch.full((1, 2, 8), -0.1)), call(torch.full((1, 2, 8), -0.1)))
    with pytest.raises(RuntimeError, match="log_decay must be <= 0"):
        compiled(torch.full((1, 2, 8), 0.1))
