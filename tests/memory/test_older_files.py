"""Files of memories that an earlier version wrote (commit a50e5c6) load to the same numbers."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from zonal import Memory, nn

FIXTURES = Path(__file__).parent / "fixtures"
READS = load_file(FIXTURES / "reads.safetensors")
KINDS = {
    "features": ("squared_affine", "chunks", "linear", "squared_affine-spans", "hedgehog"),
    "decayed": ("retention", "retention-spans"),
    "ridge": ("ridge", "ska", "ska-chunks", "ska-spans", "lifted"),
    "fading": ("ska-fading", "ska-fading-spans"),
    "keys": ("softmax", "window", "softmax-spans"),
}
LAYERS = {
    "attention": lambda: nn.Attention(8, 2, "ska(power=1)", conv=2, rotary=True),
    "mamba2": lambda: nn.Mamba2(8, state=2, head_dim=4),
    "mamba3": lambda: nn.Mamba3(8, state=4, head_dim=4),
    "gated_deltanet": lambda: nn.GatedDeltaNet(8, head_dim=4),
}


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KINDS.items() for name in names])
def test_memories(kind: str, name: str, tmp_path: Path) -> None:
    """As they were written, and written again by this version."""
    memory, q = Memory.load(FIXTURES / f"{name}.safetensors"), drawn(0, 2, 4, 6, 3)
    memory.save(tmp_path / "again.safetensors")
    for found in (memory, Memory.load(tmp_path / "again.safetensors")):
        assert found.kind == kind
        assert torch.allclose(found.read(q), READS[name], rtol=1e-6, atol=1e-6)
        if name.endswith("-spans"):
            assert [(span.name, span.count) for span in found.spans()] == [("a", 6), ("b", 2)]
            expected = READS[name.replace("-spans", "-forgotten")]
            assert torch.allclose(found.forget("a").read(q), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["retention", "ska-fading", "ska"])
def test_borders_are_read(name: str) -> None:
    """What was merged can still be taken out of a memory whose past fades."""
    memory = Memory.load(FIXTURES / f"{name}.safetensors")
    generator = torch.Generator().manual_seed(0)
    _, k, v = (torch.randn(2, heads, 6, dim, generator=generator) for heads, dim in ((4, 3), (2, 3), (2, 2)))
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[0, :2] = False
    rest = memory.subtract(Memory.empty(memory.operator, 2, 2, 3, 2).absorb(k, v, mask))
    assert rest.count == 4


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_memories_of_layers(name: str) -> None:
    layer = LAYERS[name]()
    for seed, parameter in enumerate(layer.parameters()):
        parameter.copy_(0.3 * drawn(seed, *parameter.shape))
    memory = layer.load_memory(FIXTURES / f"layer-{name}.safetensors")
    y, _ = layer(drawn(5, 2, 7, 8)[:, 6:], memory)
    assert torch.allclose(y, READS[f"layer-{name}"], rtol=1e-5, atol=1e-6)
