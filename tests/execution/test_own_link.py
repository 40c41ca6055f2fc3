"""A polynomial link that is declared outside of the library: what docs/algebra.md promises to any link with ``degree``
and ``monomials``.
"""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import zonal
from zonal.algebra.link import Link


@dataclass(frozen=True)
class Cubic(Link):
    """l(x) = 1.2 + x + x^3 / 6, at least 1/30 on [-1, 1]."""

    @property
    def positive(self) -> bool:
        return True

    @property
    def degree(self) -> int:
        return 3

    def monomials(self, c: Tensor) -> Tensor:
        return torch.tensor([1.2, 1.0, 0.0, 1 / 6], dtype=torch.float64).to(c).view(4, 1, 1, 1)

    def value(self, x: Tensor, c: Tensor) -> Tensor:
        return 1.2 + x + x**3 / 6

    def derivative(self, x: Tensor, c: Tensor) -> Tensor:
        return 1 + x.square() / 2


OPERATOR = zonal.Operator(zonal.score.Cosine(), Cubic(), zonal.anchor.Row())


def answers(path: str, dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    leaves = [
        torch.randn(2, heads, 40, 5, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]
    y = zonal.attention(*leaves, OPERATOR, causal=True, path=path)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("path", ["tiled", "chunked", "streaming", "auto"])
def test_every_path_runs_it(path: str, dtype: torch.dtype) -> None:
    for a, b in zip(answers(path, dtype), answers("dense", torch.float64), strict=True):
        assert float((a.double() - b).abs().max()) <= (1e-10 if dtype == torch.float64 else 2e-5) * float(b.abs().max())


def test_its_memory_has_one_size() -> None:
    memory = zonal.Memory.empty(OPERATOR, batch=1, heads=2, key_dim=5, value_dim=5)
    assert memory.kind == "features"
    assert memory.bytes_at(10) == memory.bytes_at(100_000)
