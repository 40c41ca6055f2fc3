"""Programs of torch.export: a prompt of any length and a decoding step, run as the model runs."""

import functools
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zonal
from zonal import mechanisms as m
from zonal import nn
from zonal.errors import ArgumentError
from zonal.kernels import native
from zonal.models import CausalLM, ModelConfig, ModelPrefill, ModelStep, TextEncoder, build, export

DIM = 24
PLAIN = (
    "cosine", "hedgehog", "slay", "yat", "linear", "ridge", "rewa", "retention", "performer", "polynomial_square",
    "regime", "rewa_functional", "rewa_oscillatory", "rewa_riemannian", "squared_affine", "rewa_categorical",
    "kernel_ridge",
)  # fmt: skip
# what can be exported: a layer, and the least tokens of a prompt
EXPORTED: dict[str, tuple[Callable[[], nn.TokenMixer], int]] = {
    "softmax": (lambda: nn.Attention(DIM, 4, "softmax", rotary=True, conv=3), 3),
    "softmax with a `Window`": (lambda: nn.Attention(DIM, 4, m.softmax(prior=zonal.prior.Window(6)), rotary=True), 3),
    "local_global": (lambda: nn.Attention(DIM, 4, m.local_global(4), kv_heads=2), 5),
    "sko": (lambda: nn.Attention(DIM, 4, "sko"), 3),
    "ska": (lambda: nn.Attention(DIM, 4, "ska", init="default"), 3),
    "rewa_operator": (lambda: nn.Attention(DIM, 4, "rewa_operator", qk_dim=9, init="default"), 3),
    "Mamba2": (lambda: nn.Mamba2(DIM, head_dim=6, state=4), 3),
    "Mixture": (lambda: nn.Mixture([nn.Attention(DIM, 4, "softmax"), nn.Attention(DIM, 4, "linear")]), 3),
    **{name: (functools.partial(nn.Attention, DIM, 4, name, init="default"), 3) for name in PLAIN},
}  # fmt: skip
# what cannot, and the words of its error
REFUSED: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "sinkhorn": (lambda: nn.Attention(DIM, 4, "sinkhorn", causal=False), "data-dependent"),
    "hyperbolic_transport": (lambda: nn.Attention(DIM, 4, "hyperbolic_transport", causal=False), "data-dependent"),
    "rewa_topological": (lambda: nn.Prefill(nn.Attention(DIM, 4, "rewa_topological")), "constant"),
    "hierarchical": (lambda: nn.Attention(DIM, 4, "hierarchical", causal=False), "violated"),
    **{
        name: (functools.partial(lambda spec: nn.Prefill(nn.Attention(DIM, 4, spec)), name), "constant")
        for name in (
            "ska(fading=True)", "ska(running_max=True)", "ska(relative=0.05)", "ska(spectral_norm='power')",
        )
    },
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def stored(program: torch.export.ExportedProgram) -> Callable[..., Any]:
    """The program after it was written and read."""
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file).module()


def own_operators(program: torch.export.ExportedProgram) -> set[str]:
    called = (str(node.target) for node in program.graph.nodes if node.op == "call_function")
    return {name for name in called if name.startswith("zonal")}


@pytest.mark.parametrize("name", EXPORTED)
@torch.no_grad()
def test_a_layer_reads_prompts_of_any_length_and_goes_on(name: str) -> None:
    torch.manual_seed(0)
    make, shortest = EXPORTED[name]
    layer, length = make(), torch.export.Dim("tokens", min=shortest, max=512)
    with torch.no_grad():
        for parameter in layer.parameters():
            if parameter.ndim == 2:
                parameter *= 8  # outputs of size one
    x = torch.randn(2, 9, DIM)
    with zonal.portable():
        program = torch.export.export(nn.Prefill(layer), (x,), dynamic_shapes=({1: length},))
    assert not own_operators(program)
    prefill = program.module()
    for tokens in (shortest, 37):
        x = torch.randn(2, tokens + 2, DIM, generator=torch.Generator().manual_seed(tokens))
        y, state = prefill(x[:, :tokens])
        expected, memory = layer(x[:, :tokens], return_memory=True, path="dense")
        close(y, expected)
        step = nn.DecodeStep(layer, memory)
        wanted = step.state(memory)
        assert state.keys() == wanted.keys()
        for token in x[:, tokens:].split(1, 1):
            (y, state), (expected, wanted) = step(token, state), step(token, wanted)
            close(y, expected)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exported_says_so(name: str) -> None:
    make, words = REFUSED[name]
    layer, x = make(), torch.randn(2, 9, DIM)
    shapes = {"x": {1: torch.export.Dim("tokens", min=3, max=512)}}
    with zonal.portable(), torch.no_grad(), pytest.raises(Exception, match=words):  # one of torch's
        torch.export.export(layer, (x,), dynamic_shapes=shapes)


def test_the_page_lists_what_is_tested() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "export.md").read_text(encoding="utf-8")
    section = page.partition("## What can be exported")[2].partition("\n## ")[0]
    listed: dict[str, set[str]] = {"yes": set(), "no": set()}
    for row in re.findall(r"^\| (`.*?) \| (yes|no) \|", section, flags=re.MULTILINE):
        listed[row[1]] |= {name.replace("`", "") for name in row[0].split(", ")}
    assert listed == {"yes": {name.replace("`", "") for name in EXPORTED}, "no": set(REFUSED)}


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def made(layers: str, **settings: Any) -> CausalLM:
    return build(ModelConfig(vocab_size=31, dim=16, layers=layers, heads=4, init_std=0.3, **settings), seed=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "settings",
    [
        {"layers": "softmax, squared_affine", "rotary": True},
        {"mlp": "koopman"},
        {"mlp": "experts", "experts": 3},
        {"layers": "performer, performer"},
    ],
    ids=str,
)
@torch.no_grad()
def test_a_model_is_two_programs(settings: dict[str, Any]) -> None:
    """Saved, loaded, and run token by token, on prompts of other lengths than that of the export."""
    model = made(**{"layers": "linear", **settings})
    programs = export(model, batch=2)
    assert not own_operators(programs.prefill) | own_operators(programs.step)
    prefill, step = (stored(program) for program in programs)
    for length in (3, 40):
        tokens = torch.randint(31, (2, length + 4), generator=torch.Generator().manual_seed(length))
        logits, state = prefill(tokens[:, :length])
        expected, memory = model.prefill(tokens[:, :length])
        close(logits, expected)
        for token in tokens[:, length:].split(1, 1):
            logits, state = step(token, state)
            expected, memory = model.step(token, memory)
            close(logits, expected[:, -1])
    after = ModelStep(model, memory).memory(state)  # back to a memory
    assert after.position == memory.position
    close(model.step(tokens[:, :2], after)[0], model.step(tokens[:, :2], memory)[0])


def test_portable_switches_kernels_off_and_on_again() -> None:
    before = native.switched_off()
    with zonal.portable():
        assert native.switched_off()
        with zonal.portable():
            pass
        assert native.switched_off()
        plan = zonal.explain("squared_affine", (1, 2, 64, 8), causal=True)
        assert "C++" not in str(plan)
        assert "torch sums" in str(plan)
    assert native.switched_off() is before


def test_what_is_no_program_is_refused() -> None:
    model = made("softmax")
    for sizes in ({"batch": 0}, {"shortest": 2}, {"longest": 3}, {"batch": 1.5}, {"longest": "9"}):
        with pytest.raises(ArgumentError, match="whole numbers, batch >= 1 and 3 <= shortest < longest are required"):
            export(model, **sizes)
    for layers in ("ska(fading=True)", "local_global(window=4)"):
        with pytest.raises(ArgumentError, match="one program does not hold for all prompts of 3 to 4096"):
            export(made(layers))
    encoder = TextEncoder(ModelConfig(31, DIM, "softmax", heads=4), seed=0)
    for call in (export, ModelPrefill):
        with pytest.raises(ArgumentError, match=r"a zonal\.models\.CausalLM is required, received TextEncoder"):
            call(encoder)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="the memory holds 1 layers, the model has 2"):
        ModelStep(made("softmax*2"), model.empty_memory(1))
    with pytest.raises(ArgumentError, match=r"waits for whole chunks"):
        nn.Prefill(nn.Attention(DIM, 4, "ska(chunk=8)"))
    with pytest.raises(ArgumentError, match="a causal layer is required"):
        nn.Prefill(nn.Attention(DIM, 4, "sinkhorn", causal=False))
