"""Inputs of a decoder's kernel, and the calls that run it piece by piece."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import zonal
from zonal import Memory, Operator

PIECES = (1, 1, 3, 16, 1, 2, 8, 1, 7)


def draw(shape: tuple[int, int, int, int], tokens: int, batch: int = 2) -> list[Tensor]:
    heads, kv_heads, dim, value_dim = shape
    generator = torch.Generator().manual_seed(sum(shape))
    sizes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    return [torch.randn(batch, n, tokens, d, generator=generator, dtype=torch.float64) for n, d in sizes]


def pieces(
    operator: Operator,
    tensors: list[Tensor],
    sizes: tuple[int, ...],
    path: str = "streaming",
    memory: Memory | None = None,
) -> tuple[Tensor, Memory]:
    """The tokens in pieces, each after the memory of those before it."""
    q, k, v = tensors
    memory = (
        Memory.empty(operator, k.shape[0], k.shape[1], k.shape[3], v.shape[3], dtype=k.dtype)
        if memory is None
        else memory
    )
    found = []
    for start, stop in itertools.pairwise((0, *itertools.accumulate(sizes))):
        part = slice(start, stop)
        y, memory = zonal.attention(
            q[:, :, part], k[:, :, part], v[:, :, part], operator, causal=True, memory=memory, path=path
        )
        found.append(y)
    return torch.cat(found, 2), memory


def taken(monkeypatch: pytest.MonkeyPatch, steps: type, name: str) -> list[int]:
    """The number of tokens of every call that the kernel takes from now on: calls of a method of ``steps`` with y."""
    called: list[int] = []
    original = getattr(steps, name)

    def counted(taken: Any, q: Tensor, *others: Any, **named: Any) -> Tensor | None:
        y = original(taken, q, *others, **named)
        called.extend([] if y is None else [q.shape[2]])
        return y

    monkeypatch.setattr(steps, name, counted)
    return called
