"""Hash codes of points for ``hashing.LSH``: near points share them more often than distant ones.

SimHash: the sign of x.w, w ~ N(0, I), is equal for two vectors with probability 1 - angle / pi. Grid: for w ~ N(0, I /
D) and u uniform on [0, r), the cells floor((x.w + u)/r) of x and y are equal with probability (1 - |(x - y).w| / r)_+
over u.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.hashing import LSH
from zonal.algebra.metric import Euclidean, Hyperbolic, Metric, Product, Sphere, SquaredEuclidean
from zonal.algebra.score import NegativeDistance, Score
from zonal.tracing import concrete

CODES = 1 << 16
# of the mixing of cells: odd, so that no digit is lost
_MIX = 0x9E3779B1


class Drawn(NamedTuple):
    """The random numbers of a family for D numbers and L tables: directions (D, L n) and offsets (L n,) in [0, 1)."""

    directions: Tensor
    offsets: Tensor


class Function(NamedTuple):
    """What all hash tables do with one part of a point: they take numbers, x @ directions or x, and find their cells.

    x (B, H, tokens, d). directions (d, tables * n); None: x has one number, the same for all tables.
    offsets (tables * n,): floor(number / width + offset) gives n cells; None: n signs form one cell.
    """

    x: Tensor
    directions: Tensor | None
    offsets: Tensor | None = None
    width: float = 1.0


def drawn(dim: int, tables: int, count: int, seed: int) -> Drawn:
    """The same numbers for the same arguments."""
    with concrete():
        generator = torch.Generator().manual_seed(seed)
        return Drawn(
            torch.randn(dim, tables * count, generator=generator, dtype=torch.float32),
            torch.rand(tables * count, generator=generator, dtype=torch.float32),
        )


def spaces(score: Score) -> int:
    """How many spaces of a score are hashed."""
    metric = score.metric if isinstance(score, NegativeDistance) else None
    return len(metric.factors) if isinstance(metric, Product) else 1


def simhash(x: Tensor, search: LSH, seed: int) -> Function:
    """Signs of projections of x (…, tokens, D), ``search.bits`` of a table."""
    assert search.bits is not None
    return Function(x, drawn(x.shape[-1], search.tables, search.bits, seed).directions.to(x))


def grid(x: Tensor, search: LSH, seed: int) -> Function:
    """Cells of projections of x (…, tokens, D), ``search.projections`` of a table."""
    numbers = drawn(x.shape[-1], search.tables, search.projections, seed)
    return Function(x, numbers.directions.to(x), numbers.offsets.to(x), x.shape[-1] ** 0.5 * search.width)


def cells(function: Function, tables: int) -> list[Tensor]:
    """The cells of a function by torch, (…, tokens, tables) int64 each."""
    x, directions, offsets, width = function
    found = x if directions is None else x @ directions
    if offsets is not None:
        # what is not finite lies in the cell of zero
        whole = (found / width + offsets).nan_to_num(0.0, 0.0, 0.0).clamp(-(2.0**31), 2.0**31).floor().long()
        return list(whole.unflatten(-1, (tables, -1)).unbind(-1))
    found = found.unflatten(-1, (tables, -1))
    # packed by a product, in which sums up to 2^16 are exact
    powers = 2.0 ** torch.arange(found.shape[-1], dtype=x.dtype, device=x.device)
    return [((found > 0).to(x.dtype) @ powers).long()]


def _mixed(parts: list[Tensor]) -> Tensor:
    """Cells (…, tables) joined to one code below ``CODES``."""
    code = parts[0]
    for part in parts[1:]:
        code = (code * _MIX + part) & 0xFFFFFFFF
    return code & (CODES - 1) if len(parts) == 1 else ((code * _MIX) & 0xFFFFFFFF) >> 16


def _hashed(metric: Metric) -> bool:
    """Whether a space has a hash family."""
    if isinstance(metric, Product):
        return all(map(_hashed, metric.factors))
    return isinstance(metric, Euclidean | SquaredEuclidean | Sphere | Hyperbolic)


def hashing_refusal(score: Score) -> str | None:
    """Why points of a score have no hash family, or None when they have."""
    if score.bilinear:
        return None
    if not isinstance(score, NegativeDistance):
        return f"score {type(score).__name__} has no hash family"
    if score.dot is not None:
        return "a distance beside a dot product has no hash family"
    return None if _hashed(score.metric) else f"metric {type(score.metric).__name__} has no hash family"


def functions(score: Score, search: LSH, x: Tensor, width: int) -> list[Function]:
    """The functions whose cells make the codes of prepared queries or keys (B, H, tokens, …).

    The last ``width`` numbers of a query or key are the point.
    """
    x = x.detach()[..., x.shape[-1] - width :]
    if score.bilinear:
        return [simhash(x, search, search.seed)]
    return _of(score.metric, search, x, search.seed)  # type: ignore[attr-defined]


def codes(found: list[Function], tables: int) -> Tensor:
    """Codes (B, H, 1 + tables, tokens), int32 below ``CODES``. The first is zero for all: its bucket has every key."""
    parts = [cell for function in found for cell in cells(function, tables)]
    return F.pad(_mixed(parts).to(torch.int32).transpose(-1, -2), (0, 0, 1, 0))


def _of(metric: Metric, search: LSH, x: Tensor, seed: int) -> list[Function]:
    """The functions whose cells make a code."""
    if isinstance(metric, Product):
        parts = x.split(metric.parts(x.shape[-1]), -1)
        return [
            function
            for i, (factor, part) in enumerate(zip(metric.factors, parts, strict=True))
            for function in _of(factor, search, part, seed + 7919 * (i + 1))
        ]
    if isinstance(metric, Sphere):
        return [simhash(x, search, seed)]
    if isinstance(metric, Hyperbolic):
        offsets = drawn(1, search.tables, 1, seed + 1).offsets.to(x)
        return [Function(metric.polar(x)[0], None, offsets, search.width), simhash(x, search, seed)]
    return [grid(x, search, seed)]


__all__ = [
    "CODES", "Function", "cells", "codes", "drawn", "functions", "grid", "hashing_refusal", "simhash", "spaces",
]  # fmt: skip
