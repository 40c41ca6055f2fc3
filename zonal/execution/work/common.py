"""What the formulas of all routes share: ``Work``, the tokens themselves, and keys that join a memory."""

import math
from typing import NamedTuple

from zonal.execution.shape import Shape
from zonal.features.serve import powers_of
from zonal.memory.whitened import width_of

SELECT = 5.0
"""Cost of a masked fill by torch, relative to an addition."""
PACKED = 4.0
"""A compiled kernel reads tokens row by row and packs them, which takes as long as so many passes of torch."""
COLUMN, BLOCK = 16, 64
"""Queries that the compiled kernels of tiles and sums take together, and the keys of a block of the sums."""
# rows from which on torch's products read matrices at the full bandwidth
_FEW = 16


class Work(NamedTuple):
    """What a route does for a call. tasks: independent parts that threads can share. buffer: bytes of the largest
    buffer that is made anew at every step.
    """

    multiply_adds: float
    bytes: float
    peak_bytes: float
    launches: float
    tasks: float = math.inf
    buffer: float = 0.0


def rank_of(s: Shape) -> int:
    """Numbers of a key in ridge statistics."""
    return width_of(s.bound, s.head_dim)


def far(s: Shape) -> Shape:
    """The call as one of sums before the window only."""
    before = s.bound.far
    assert before is not None
    bound, tags = before.bound, s.tags._replace(window=0, log_space=False, degree=before.bound.link.degree)
    return s._replace(bound=bound, tags=tags, dim=before.width(s.dim), coefficients=bound.coefficients.shape[0])


def both(s: Shape, near: Work, far: Work) -> Work:
    """A window and sums, one after the other, and their merge."""
    rows = s.batch * s.heads * s.queries * float(s.value_dim + 1)
    return Work(
        near.multiply_adds + far.multiply_adds, near.bytes + far.bytes + 6 * rows * s.itemsize * s.back,
        near.peak_bytes + far.peak_bytes + 3 * rows * s.itemsize, near.launches + far.launches + 30.0 * s.back,
        min(near.tasks, far.tasks), max(near.buffer, far.buffer),
    )  # fmt: skip


def features_of(s: Shape) -> tuple[int, bool]:
    """How many features a key that is summed up has, and whether they are its own numbers."""
    s = far(s) if s.tags.window else s
    found = powers_of(s.bound.link)
    return found.dimension(s.dim), found.trivial


def joined(s: Shape) -> tuple[float, float, float]:
    """Multiply-adds, numbers moved and torch calls to append the call's keys to a memory after those that it has."""
    kv = s.batch * s.kv_heads
    if not s.keeps:
        return 0.0, 0.0, 0.0
    if s.kind == "keys":
        return 0.0, 2.0 * kv * (s.past + s.keys) * (s.dim + s.value_dim), 37.0
    if s.tags.solves:
        rank = rank_of(s)
        return (
            kv * s.keys * rank * (2.0 * rank + s.value_dim),
            4.0 * kv * (s.keys + rank) * (2 * rank + s.value_dim),
            90.0,
        )
    features = kv * float(features_of(s)[0])
    return features * s.keys * s.width, features * (6.0 * s.keys + 3 * s.width), 70.0


def numbers_of_tokens(s: Shape) -> float:
    """Numbers that torch moves for the tokens themselves.

    Products of few rows read keys and values several times slower than others. A score that changes keys takes norms of
    queries and keys and divides; reductions over short rows take as long as several passes. A distance maps its points.
    """
    score, queries, keys = s.bound.score, s.batch * s.heads * s.queries, s.batch * s.kv_heads * s.keys
    held = keys + s.batch * s.kv_heads * s.past * (s.kind == "keys")
    read = (3.0 if s.queries < _FEW else 1.0) * held * (s.dim + s.value_dim) + queries * s.dim
    if not score.bilinear:
        return read + 30.0 * (queries + held) * s.dim
    return read if score.keeps_keys else read + 10.0 * (queries + keys) * s.dim


__all__ = [
    "BLOCK", "COLUMN", "PACKED", "SELECT", "Work", "both", "far", "features_of", "joined", "numbers_of_tokens",
    "rank_of",
]  # fmt: skip
