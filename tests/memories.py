"""What tests of memories share: tokens, queries, and which memory each operator of the matrix keeps."""

from dataclasses import dataclass

import torch
from matrix import OPERATORS, randomised
from torch import Tensor

import zonal
from zonal.memory import (
    CompactStatistics,
    DecayedSums,
    FadingStatistics,
    FeatureSums,
    KeyValues,
    Memory,
    RidgeStatistics,
    WindowedSums,
)  # fmt: skip

BATCH, KV, GROUPS, DIM, VALUE, TOKENS = 2, 2, 2, 5, 3, 23
KINDS: dict[str, type[Memory]] = {
    "keys": KeyValues,
    "features": FeatureSums,
    "decayed": DecayedSums,
    "ridge": RidgeStatistics,
    "compact": CompactStatistics,
    "fading": FadingStatistics,
    "windowed": WindowedSums,
}
EXPECTED = {
    "softmax": "keys",
    "cosine": "keys",
    "yat": "keys",
    "softmax-alibi": "keys",
    "softmax-window": "keys",
    "sko-chebyshev": "keys",
    "distance": "keys",
    "distance-squared": "keys",
    "distance-count": "keys",
    "yat-decay": "keys",
    "ridge-yat": "keys",
    "koopman-exp": "keys",
    "ridge-window": "keys",
    "softmax-strict": "keys",
    "softmax-count": "keys",
    "yat-raw": "keys",
    "linear": "features",
    "sko": "features",
    "sko-fractional": "features",
    "sko-reproducing": "features",
    "squared_affine": "features",
    "polynomial_square": "features",
    "sko-chunk": "features",
    "retention": "decayed",
    "local_global": "windowed",
    "local_global-hedgehog": "windowed",
    "local_global-learned": "windowed",
    "local_global-first": "windowed",
    "ridge": "ridge",
    "ska-0": "ridge",
    "ska-1": "ridge",
    "ska-2": "ridge",
    "ska-compact": "compact",
    "ska-paper": "ridge",
    "ridge-chunk": "ridge",
    "ska-mixed": "ridge",
    "ska-relative": "ridge",
    "ska-fading": "fading",
    "kernel_ridge": "ridge",
    "kernel_ridge-sko": "ridge",
    "kernel_ridge-yat": "keys",
    "kernel_ridge-slay": "ridge",
    "kernel_ridge-chunk": "ridge",
}
NAMES = [name for name in OPERATORS if name in EXPECTED]


@dataclass
class Span:
    """Tokens to absorb."""

    k: Tensor
    v: Tensor
    mask: Tensor | None

    def part(self, start: int, stop: int) -> "Span":
        piece = slice(start, stop)
        return Span(self.k[:, :, piece], self.v[:, :, piece], None if self.mask is None else self.mask[:, piece])

    def into(self, memory: Memory) -> Memory:
        return memory.absorb(self.k, self.v, self.mask)


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def span(padded: bool = False, seed: int = 0, tokens: int = TOKENS) -> Span:
    mask = torch.rand(BATCH, tokens, generator=torch.Generator().manual_seed(seed + 3)) > 0.3 if padded else None
    return Span(draw(BATCH, KV, tokens, DIM, seed=seed), draw(BATCH, KV, tokens, VALUE, seed=seed + 1), mask)


def queries(seed: int = 9) -> Tensor:
    return draw(BATCH, KV * GROUPS, 3, DIM, seed=seed)


def operator(name: str) -> zonal.Operator:
    return randomised(OPERATORS[name]())


def empty(op: zonal.Operator, kind: str | None = None) -> Memory:
    return Memory.empty(op, BATCH, KV, DIM, VALUE, torch.float64, kind=kind)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-9) -> None:
    assert a.shape == b.shape
    assert torch.isfinite(b).all()
    assert (a - b).abs().max() <= tolerance * (1 + b.abs().max())
