"""Files of memories that earlier versions wrote load to the same numbers.

A folder of fixtures is named after the commit that wrote it. Its ``reads.safetensors`` holds what that version read.
"""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zonal import Memory, nn

FIXTURES = Path(__file__).parent / "fixtures"
KINDS = {
    "a50e5c6": {
        "features": ("squared_affine", "chunks", "linear", "squared_affine-spans", "hedgehog"),
        "decayed": ("retention", "retention-spans"),
        "ridge": ("ridge", "ska", "ska-chunks", "ska-spans", "lifted"),
        "fading": ("ska-fading", "ska-fading-spans"),
        "keys": ("softmax", "window", "softmax-spans"),
    },
    "3b0c1e3": {
        "features": ("squared_affine", "squared_affine-spans", "linear", "linear-spans", "chunks", "performer"),
        "decayed": ("retention", "retention-spans", "given-decay", "given-decay-spans"),
        "ridge": (
            "ska",
            "ska-spans",
            "ska-chunks",
            "ridge-moving",
            "ridge-moving-spans",
            "kernel_ridge",
            "kernel_ridge-spans",
        ),
        "fading": ("ska-fading", "ska-fading-spans"),
        "keys": ("softmax", "softmax-spans"),
    },
}
LAYERS = {
    "a50e5c6": {
        "attention": lambda: nn.Attention(8, 2, "ska(power=1)", conv=2, rotary=True),
        "mamba2": lambda: nn.Mamba2(8, state=2, head_dim=4),
        "mamba3": lambda: nn.Mamba3(8, state=4, head_dim=4),
        "gated_deltanet": lambda: nn.GatedDeltaNet(8, head_dim=4),
    },
    "3b0c1e3": {
        "attention": lambda: nn.Attention(8, 2, "ska(power=1)", conv=2, rotary=True),
        "fading": lambda: nn.Attention(8, 2, "ska(power=1,fading=True)"),
        "performer": lambda: nn.Attention(8, 2, "performer"),
    },
}
FILES = [(commit, kind, name) for commit, kinds in KINDS.items() for kind, names in kinds.items() for name in names]
LAYER_FILES = [(commit, name) for commit, names in LAYERS.items() for name in names]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def reads(commit: str) -> dict[str, torch.Tensor]:
    return load_file(FIXTURES / commit / "reads.safetensors")


@pytest.mark.parametrize(("commit", "kind", "name"), FILES)
def test_memories(commit: str, kind: str, name: str, tmp_path: Path) -> None:
    """As they were written, and written again by this version."""
    memory, q, expected = Memory.load(FIXTURES / commit / f"{name}.safetensors"), drawn(0, 2, 4, 6, 3), reads(commit)
    memory.save(tmp_path / "again.safetensors")
    for found in (memory, Memory.load(tmp_path / "again.safetensors")):
        assert found.kind == kind
        assert torch.allclose(found.read(q), expected[name], rtol=1e-6, atol=1e-6)
        if name.endswith("-spans"):
            assert [(span.name, span.count) for span in found.spans()] == [("a", 6), ("b", 2)]
            forgotten = expected[f"{name}-forgotten" if commit != "a50e5c6" else name.replace("-spans", "-forgotten")]
            assert torch.allclose(found.forget("a").read(q), forgotten, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["retention", "ska-fading", "ska"])
def test_borders_are_read(name: str) -> None:
    """What was merged can still be taken out of a memory whose past fades."""
    memory = Memory.load(FIXTURES / "a50e5c6" / f"{name}.safetensors")
    generator = torch.Generator().manual_seed(0)
    _, k, v = (torch.randn(2, heads, 6, dim, generator=generator) for heads, dim in ((4, 3), (2, 3), (2, 2)))
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2] = False
    beginning = Memory.empty(memory.operator, 2, 2, 3, 2).absorb(k, v, mask)
    rest = memory.subtract(beginning)
    assert rest.count == 4
    q = drawn(0, 2, 4, 6, 3)
    assert (rest.read(q) - memory.read(q)).abs().max() > 1e-2
    assert torch.allclose(beginning.merge(rest).read(q), memory.read(q), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["ska", "squared_affine", "retention", "ska-fading", "ridge-moving", "kernel_ridge"])
def test_a_beginning_that_was_merged_is_subtracted(name: str) -> None:
    """From a file that holds its borders; the tokens after it are left."""
    memory = Memory.load(FIXTURES / "3b0c1e3" / f"{name}.safetensors")
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2] = False
    empty = Memory.empty(memory.operator, 2, 2, 3, 2)
    rest = memory.subtract(empty.absorb(drawn(10, 2, 2, 6, 3), drawn(11, 2, 2, 6, 2), mask))
    expected = empty.absorb(drawn(20, 2, 2, 4, 3), drawn(21, 2, 2, 4, 2))
    expected = expected.absorb(drawn(30, 2, 2, 2, 3), drawn(31, 2, 2, 2, 2))
    assert rest.count == 6
    for key in set(expected.tensors()) - {"peak"}:  # the largest key cannot be known again
        assert torch.allclose(rest.tensors()[key], expected.tensors()[key], rtol=1e-4, atol=1e-5), key


@pytest.mark.parametrize(("commit", "name"), LAYER_FILES)
@torch.no_grad()
def test_memories_of_layers(commit: str, name: str) -> None:
    layer = LAYERS[commit][name]()
    for seed, parameter in enumerate(layer.parameters()):
        parameter.copy_(0.3 * drawn(seed, *parameter.shape))
    for seed, buffer in enumerate(layer.buffers()):
        if buffer.is_floating_point():
            buffer.copy_(drawn(100 + seed, *buffer.shape))
    memory = layer.load_memory(FIXTURES / commit / f"layer-{name}.safetensors")
    y, _ = layer(drawn(5, 2, 7, 8)[:, 6:], memory)
    assert torch.allclose(y, reads(commit)[f"layer-{name}"], rtol=1e-5, atol=1e-6)
