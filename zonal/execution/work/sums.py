"""The work of sums over features, of all keys and of those before a window."""

import math

from zonal.execution.paths.scan import block_size
from zonal.execution.shape import EXPONENTIAL, Shape
from zonal.execution.work.common import BLOCK, COLUMN, PACKED, SELECT, Work, both, far, features_of, numbers_of_tokens
from zonal.execution.work.pairs import compiled_tiles
from zonal.features.serve import powers_of

# multiply-adds that a feature of a token costs by itself in the kernel of sums
_FEATURE = 8.0
# pairs of tokens take the kernel of sums as long as the kernel of tiles forward, and so many times as long backward:
# 1.1 to 1.3 was measured with heads of 32 and 64 and 512 to 2,048 tokens
_PAIR_BACK = 1.25
# a token of a head costs by itself, in the kernel of sums, as much as to move so many numbers
_TOKEN = 320.0


def compiled_sums(s: Shape) -> Work:
    """Sums by a compiled kernel. The state absorbs every key and each query reads it; keys of a query's own block are
    compared one by one.

    Without a memory the first keys, and short sequences as a whole, are met one by one where that is less.
    """
    (features, _), kv, groups = features_of(s), s.batch * s.kv_heads, s.groups
    if s.device.type == "cpu":
        s = s._replace(dim=s.bound.score.factors(s.head_dim))
    each, pair = features * (s.width + _FEATURE), float(s.dim + s.width)
    length = s.keys / s.documents
    rows = max(s.queries / s.documents, 1.0)
    near = 0.0 if s.past else min(max(BLOCK, each / pair), length)
    late = max(min(rows, length - near), 0.0) if s.tied else rows
    whole = groups * (s.pairs / s.documents + COLUMN / 2 * rows)
    absorbed = length if s.keeps or late > 0 or not s.tied else 0.0
    inside = groups * ((rows - late) * near / 2 + late * BLOCK / 2) if s.tied else 0.0
    states = (absorbed + groups * late) * each
    done = states + inside * pair
    ratio = (3 * absorbed + 2 * groups * late) / max(absorbed + groups * late, 1.0)
    pair_back = _PAIR_BACK * (3 * s.dim + 2 * s.width)
    back = ratio * states + inside * pair_back
    if not s.past and not s.keeps and whole * pair < done:
        done, back, features = whole * pair, whole * pair_back, 0
    state = kv * features * float(s.width)
    tasks = kv * s.documents
    tokens = s.batch * (s.heads * s.queries + s.kv_heads * s.keys)
    moved = (PACKED * (s.dim + s.value_dim) + _TOKEN) * tokens + (6 * state if s.past or s.keeps else 0)
    peak = s.batch * s.heads * s.queries * (s.value_dim + 1.0) + state * (s.keeps + 1 / max(kv, 1))
    if s.gradients:
        peak += s.batch * (s.heads * s.queries * s.dim + s.kv_heads * s.keys * (s.dim + s.value_dim))
    multiply_adds = kv * s.documents * (done + s.gradients * back)
    # where there are few heads the kernel shares out the values of each
    tasks = tasks * max(1, s.value_dim // 8) if tasks < 8 else tasks
    launches = 33.0 + 200 * s.gradients
    return Work(multiply_adds, s.itemsize * moved * s.back, peak * s.itemsize, launches, tasks)


def sums(s: Shape) -> Work:
    """Sums by torch, block by block: scores within a block, features before and after it."""
    (features, trivial), heads, kv = features_of(s), s.batch * s.heads, s.batch * s.kv_heads
    alone = s.tags.family == "sums" and not (s.past or s.keeps)
    itemsize = 8 if alone and s.tags.cancels else s.itemsize
    length = s.keys // s.documents
    fresh = s.tied and not s.past and not s.keeps
    block = block_size(powers_of(s.bound.link), (s.batch, s.heads, length, s.dim, s.value_dim), fresh)
    block = block if s.chunk is None else s.chunk * max(1, block // s.chunk)
    blocks = max(-(-length // block), 1) * min(s.documents, 8)
    carried = 0.0 if block >= length and fresh and s.queries >= s.keys else 1.0
    rows, state = min(s.queries, s.keys) if s.tied else s.queries, kv * features * float(s.width)
    near = heads * rows * min(block, length) * (1.0 if s.tied else 0.0)
    written = carried * (kv * s.keys + heads * rows)
    multiply_adds = near * (s.dim + s.width) + written * features * s.width
    steps = (2 * (0 if trivial else s.bound.link.operations) + 2 + s.tags.decays * (5 + EXPONENTIAL)) * near
    steps += written * features * (1.0 if trivial else 3.5) + 3 * blocks * state * carried
    calls = 70.0 + blocks * (26 + 30 * carried * (not trivial) + 16 * s.tags.decays) * (1 if s.tied else 0.6)
    wide = min(block, length)
    scratch = carried * (0 if trivial else features * max(heads * min(rows, wide), kv * wide)) + 2.0 * s.tied * (
        heads * min(rows, wide) * wide
    )
    peak = heads * s.queries * (s.width + s.value_dim) + kv * s.keys * s.width * s.tags.normalises
    peak += 3 * state * carried + scratch
    if s.gradients:
        kept = blocks if state * blocks <= 2 * (heads * s.queries + kv * s.keys) * s.dim else 2 * math.isqrt(blocks)
        peak += heads * s.queries * (s.dim + s.width) + kv * s.keys * (s.dim + s.width)
        peak += state * (kept + 3) * carried + 2 * scratch
        calls, steps = calls * 3.0, steps * 3.0
    moved = (2 * steps + numbers_of_tokens(s) * s.back) * itemsize
    multiply_adds *= s.back * itemsize / s.itemsize
    return Work(multiply_adds, moved, peak * itemsize, calls, buffer=scratch * itemsize)


def _near(s: Shape) -> Shape:
    """The call as one of a window only."""
    reach = s.tags.window
    return s._replace(
        tags=s.tags._replace(window=0), pairs=min(s.pairs, float(s.queries * reach)), past=min(s.past, reach),
        keeps=False, kind="keys",
    )  # fmt: skip


def compiled_window(s: Shape) -> Work:
    """Tiles of the window and sums before it, by compiled kernels."""
    return both(s, compiled_tiles(_near(s)), compiled_sums(far(s)))


def window(s: Shape) -> Work:
    """Blocks of a window by torch, each with the keys that any of its queries sees, and sums before it."""
    pairs = s.batch * s.heads * s.queries * (2.0 * s.tags.window)
    steps = (EXPONENTIAL + SELECT + 6) * pairs
    near = Work(
        pairs * (s.dim + s.value_dim) * s.back, 2 * steps * s.back * s.itemsize,
        (3.0 + 2 * s.gradients) * pairs * s.itemsize, 60.0 * s.back, buffer=pairs * s.itemsize,
    )  # fmt: skip
    return both(s, near, sums(far(s)))


__all__ = ["compiled_sums", "compiled_window", "sums", "window"]
