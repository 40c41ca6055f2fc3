"""Memories of operators that are declared alike and have drawn other numbers do not mix."""

from collections.abc import Callable

import pytest
import torch

import zonal
from zonal import Memory, Operator, nn
from zonal import mechanisms as m
from zonal.errors import ArgumentError, FileFormatError

VERBS: dict[str, Callable[[Memory, Memory], object]] = {
    "merge": lambda a, b: a.merge(b),
    "subtract": lambda a, b: a.subtract(b),
    "stack": lambda a, b: Memory.stack([a, b]),
    "scatter": lambda a, b: a.scatter([0], b),
}


def layers() -> list[Operator]:
    torch.manual_seed(0)
    return [nn.Attention(16, 2, "performer").operator for _ in range(2)]


def memory(operator: Operator) -> Memory:
    k = torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(0))
    return Memory.empty(operator, 1, 2, 8, 8).absorb(k, k)


@pytest.mark.parametrize("verb", VERBS)
def test_two_layers_are_refused(verb: str) -> None:
    first, second = layers()
    for index, operator in enumerate((first, second)):  # whatever they start with
        for x in operator.fixed_parts.buffers():
            x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(index)))
    assert (first.score, first.link) == (second.score, second.link)
    with pytest.raises(ArgumentError, match=rf"Memory.{verb}: .* drawn numbers differ .*each layer draws its own"):
        VERBS[verb](memory(first), memory(second))
    VERBS[verb](memory(first), memory(first))


def test_a_call_and_a_file_of_another_layer(tmp_path) -> None:
    first, second = layers()
    for x in second.fixed_parts.buffers():
        x.add_(0.1)
    q = torch.randn(1, 2, 1, 8)
    with pytest.raises(ArgumentError, match=r"attention: .* drawn numbers differ"):
        zonal.attention(q, q, q, second, causal=True, memory=memory(first))
    memory(first).save(tmp_path / "memory.safetensors")
    assert Memory.load(tmp_path / "memory.safetensors", first).count == 4
    with pytest.raises(FileFormatError, match="drew other numbers"):
        Memory.load(tmp_path / "memory.safetensors", second)


@torch.no_grad()
def test_a_file_of_another_layers_memory(tmp_path) -> None:
    torch.manual_seed(0)
    first, second = nn.Attention(16, 2, "performer"), nn.Attention(16, 2, "performer")
    second.load_state_dict(first.state_dict())
    _, memory = first(torch.randn(1, 4, 16), first.empty_memory(1))
    memory.save(tmp_path / "memory.safetensors")
    assert second.load_memory(tmp_path / "memory.safetensors").memory.count == 4
    for x in second.operator.fixed_parts.buffers():
        x.add_(0.1)
    with pytest.raises(FileFormatError, match=r"load layer memories: .* layer 0: its operator drew other numbers \("):
        second.load_memory(tmp_path / "memory.safetensors")


@torch.no_grad()
def test_a_layer_is_known_again_in_another_type(tmp_path) -> None:
    torch.manual_seed(0)
    layer, other = nn.Attention(16, 2, "performer"), nn.Attention(16, 2, "performer")
    _, memory = layer(torch.randn(1, 4, 16), layer.empty_memory(1))
    memory.save(tmp_path / "wide.safetensors")
    memory.memory.save(tmp_path / "operator.safetensors")
    layer.to(torch.bfloat16)
    layer.empty_memory(1).save(tmp_path / "narrow.safetensors")
    assert layer.load_memory(tmp_path / "wide.safetensors").memory.count == 4
    assert Memory.load(tmp_path / "operator.safetensors", layer.operator).count == 4
    for x in other.operator.fixed_parts.buffers():
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(1)))
    for name in ("wide", "narrow"):
        with pytest.raises(FileFormatError, match="drew other numbers"):
            other.load_memory(tmp_path / f"{name}.safetensors")
    with pytest.raises(FileFormatError, match="drew other numbers"):
        Memory.load(tmp_path / "operator.safetensors", other.operator.to(torch.bfloat16))


def test_equal_numbers_of_more_heads_pass() -> None:
    operator = m.performer()
    k = torch.randn(1, 2, 4, 8)
    sized = operator.for_heads(2, dim=8)
    assert memory(sized).merge(memory(sized.for_heads(2))).count == 8
    assert zonal.attention(k, k, k, sized.for_heads(2), causal=True, memory=memory(sized))[1].count == 8
