"""Mixtures of layers: their equation, memories with every verb, masks, causality, and models that are made of them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from zonal import mechanisms as m
from zonal.errors import ArgumentError, FileFormatError
from zonal.models import CausalLM, ModelConfig, build, layer_list
from zonal.models.layers import entry_of
from zonal.nn import Attention, LayerMemory, Mamba2, Mixture


def same(got: Any, expected: Any, tolerance: float = 1e-9) -> None:
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def make(seed: int = 0, causal: bool = True) -> Mixture:
    """A plane, a tree and a state of sums, the second with a convolution and grouped heads, with a gate that
    decides.
    """
    torch.manual_seed(seed)
    parts = [
        Attention(12, 2, m.rewa(), head_dim=6, rotary=True, causal=causal),
        Attention(12, 4, m.rewa_riemannian(units=2), kv_heads=2, conv=3, qk_norm=True, causal=causal),
        Attention(12, 2, "linear", causal=causal),
    ]
    layer = Mixture(parts, hidden=5).double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, dtype=torch.float64))
    return layer


def tokens(batch: int = 2, length: int = 13, seed: int = 1) -> Tensor:
    return torch.randn(batch, length, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def read(layer: Mixture, x: Tensor, memory: LayerMemory | None = None) -> tuple[Tensor, LayerMemory]:
    found = layer(x, memory, return_memory=True)
    assert isinstance(found, tuple)
    return found


def test_the_layer_is_its_equation() -> None:
    """With all gradients, every parameter's among them."""
    layer, x = make(), tokens().requires_grad_()
    inner = x @ layer.gate_in.weight.T + layer.gate_in.bias
    gate = (F.silu(inner) @ layer.gate_out.weight.T + layer.gate_out.bias).softmax(-1)
    assert gate.std(dim=1).min() > 0.01  # it decides by the token
    expected = torch.stack([part(x) for part in layer.parts], -1) @ gate.unsqueeze(-1)
    y = layer(x)
    assert isinstance(y, Tensor)
    same(y, expected.squeeze(-1))
    leaves = [x, *layer.parameters()]
    for one, other in zip(*(torch.autograd.grad(z.sin().sum(), leaves) for z in (y, expected)), strict=True):
        assert one.abs().max() > 0
        same(one, other)
    assert {"part 1 kernel_curve", "part 3 kernel_curve"} <= set(layer.learned())


@pytest.mark.parametrize("split", [[1] * 13, [4, 9], [1, 5, 2, 5]], ids=str)
def test_pieces_with_memory_equal_one_pass(split: list[int]) -> None:
    layer, x = make(), tokens()
    memory, parts = layer.empty_memory(2), []
    for piece in x.split(split, dim=1):
        y, memory = read(layer, piece, memory)
        parts.append(y)
    same(torch.cat(parts, 1), layer(x))
    assert [part.memory.kind for part in (memory, *memory.others)] == ["keys", "keys", "features"]
    assert memory.others[1].length == memory.length == 13
    assert layer.memory_bytes(13) * 2 == memory.nbytes


def test_masks_and_causality() -> None:
    layer, x = make(), tokens(1, 9)
    padded, mask = torch.cat([tokens(1, 4, seed=5), x], 1), torch.tensor([[False] * 4 + [True] * 9])
    y = layer(padded, key_padding_mask=mask)
    assert isinstance(y, Tensor)
    same(y[mask], layer(x)[0])
    documents = [tokens(1, n, seed=n) for n in (1, 5, 3)]
    same(
        layer(torch.cat(documents, 1), cu_seqlens=torch.tensor([0, 1, 6, 9])),
        torch.cat([layer(d) for d in documents], 1),
    )
    changed = x.clone()
    changed[:, 5:] *= 30
    same(layer(changed)[:, :5], layer(x)[:, :5])
    both = make(causal=False)
    assert (both(changed)[:, :5] - both(x)[:, :5]).abs().max() > 1e-3  # type: ignore[index]


def test_every_verb_is_for_all_parts(tmp_path: Path) -> None:
    """Rows, spans, forks and files of a mixture's memory go on as those of its parts."""
    layer, x, more = make(), tokens(), tokens(length=3, seed=2)
    _, memory = read(layer, x)
    wanted, _ = read(layer, more, memory)
    # rows: in another order, one replaced, stacked and taken apart
    same(read(layer, more[[1, 0, 1]], memory.gather([1, 0, 1]))[0], wanted[[1, 0, 1]])
    other = read(layer, tokens(1, 5, seed=7))[1]
    replaced = memory.scatter([0], other)
    alone = read(layer, more[:1], other)[0]
    same(read(layer, more, replaced)[0], torch.cat([alone, wanted[1:]]))
    stacked = LayerMemory.stack([other, memory])
    same(read(layer, more[[0, 0, 1]], stacked)[0], torch.cat([alone, wanted]))
    for row, one in enumerate(stacked.unbind()):
        assert len(one.others) == 2
        same(read(layer, more[:1] if row < 2 else more[1:], one)[0], torch.cat([alone, wanted])[row : row + 1])
    # spans: forgotten as if they had never come
    spanned = read(layer, tokens(length=4, seed=8), memory.open("aside"))[1]
    assert [span.name for span in spanned.others[1].spans()] == [span.name for span in spanned.spans()]
    assert (read(layer, more, spanned)[0] - wanted).abs().max() > 1e-3
    same(read(layer, more, spanned.close().forget("aside"))[0], wanted)
    merged = memory.merge(read(layer, tokens(length=4, seed=8))[1], span="read apart")
    assert all(part.memory.count == 17 for part in (merged, *merged.others))
    same(read(layer, more, merged.unnamed())[0], read(layer, more, merged)[0])
    # files and copies
    same(read(layer, more, memory.fork())[0], wanted, 0.0)
    path = tmp_path / "memory.safetensors"
    memory.save(path)
    loaded = layer.load_memory(path)
    assert loaded.nbytes == memory.nbytes
    same(read(layer, more, loaded)[0], wanted, 0.0)
    with pytest.raises(FileFormatError, match="holds 3 layers, 1 were required"):
        layer.parts[0].load_memory(path)  # type: ignore[operator]
    assert layer.empty_memory(2).at(5).others[0].length == 5


def test_what_does_not_fit_is_refused() -> None:
    layer, plain = make(), Attention(12, 2, "softmax").double()
    with pytest.raises(
        ArgumentError, match="two or more layers, none of them a mixture, are required, received Mixture, Attention"
    ):
        Mixture([layer, plain])
    with pytest.raises(ArgumentError, match="two or more layers"):
        Mixture([plain])
    with pytest.raises(ArgumentError, match="parts of one dim, all causal or none"):
        Mixture([plain, Attention(16, 2, "softmax")])
    with pytest.raises(ArgumentError, match="hidden must be at least 1"):
        Mixture([plain, plain], hidden=0)
    with pytest.raises(ArgumentError, match="from another kind of layer"):
        layer(tokens(), dataclasses.replace(layer.empty_memory(2), others=()))


LINE = (
    "mixture(parts=('rewa', 'rewa_topological(neighbours=2)'), hidden=8), softmax, mixture(parts=('linear', "
    "'mamba2(state=8, head_dim=8)'))"
)


def test_models_of_mixtures(tmp_path: Path) -> None:
    """By name in a list of layers; heads shared out among parts; decoding, files and learning as with any layer."""
    config = ModelConfig(23, 16, layer_list(LINE), 4, rotary=True)
    assert ModelConfig.from_dict(config.to_dict()) == config
    assert layer_list(entry_of(config.layers)) == config.layers
    model = build(config, seed=3).double()
    first, _, last = (block.attention for block in model.blocks)
    assert isinstance(first, Mixture)
    assert isinstance(last, Mixture)
    assert [(part.heads, part.head_dim, part.operator.name) for part in first.parts] == [
        (2, 4, "rewa"),
        (2, 4, "rewa_topological"),
    ]  # type: ignore[union-attr]
    assert isinstance(last.parts[1], Mamba2)
    x = torch.randint(0, 23, (2, 15), generator=torch.Generator().manual_seed(1))
    memory, found = model.empty_memory(2), []
    for piece in x.split([6, 1, 8], dim=1):
        logits, memory = model.step(piece, memory)
        found.append(logits)
    same(torch.cat(found, 1), model(x))
    assert model.memory_bytes(15) * 2 == memory.nbytes
    memory.save(tmp_path / "memory.safetensors")
    model.save(tmp_path / "model.safetensors")
    again = CausalLM.load(tmp_path / "model.safetensors").double()
    same(again.step(x[:, :1], again.load_memory(tmp_path / "memory.safetensors"))[0], model.step(x[:, :1], memory)[0])
    targets = torch.cat([x[:, 1:], torch.full((2, 1), -100)], 1)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        total, count = model.loss(x, targets)
        optimiser.zero_grad()
        (total / count).backward()
        optimiser.step()
        losses.append((total / count).item())
    assert losses[-1] < 0.5 * losses[0]
    assert [set(layer) >= {"layer", "operator"} for layer in model.learned()] == [True] * 3


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mixture(parts=('rewa',))", "two or more specs, none of them a mixture"),
        ("mixture(parts=('rewa', \"mixture(parts=('rewa', 'linear'))\"))", "none of them a mixture"),
        ("mixture(parts=('rewa', 'softmx'))", "Did you mean 'softmax'"),
        ("mixture(parts=('rewa', 'softmax'), hiden=3)", "Did you mean 'hidden'"),
        ("mixture(parts=('rewa', 'softmax'), hidden=0)", "hidden >= 1"),
        ("mixtur(parts=('rewa', 'softmax'))", "Did you mean 'mixture'"),
        ("mixture", "wrong type"),
    ],
)
def test_specs_that_cannot_be_read(line: str, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        ModelConfig(23, 16, (line,), 4)


def test_heads_are_shared_out_evenly() -> None:
    with pytest.raises(ArgumentError, match="in multiples of 3, received 4"):
        build(ModelConfig(23, 16, ("mixture(parts=('rewa', 'softmax', 'linear'))",), 4), seed=0)
