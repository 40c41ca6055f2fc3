"""The work of ridge and Koopman read-outs."""

from zonal.execution.paths.blocks import usual_block
from zonal.execution.shape import Shape
from zonal.execution.work.common import PACKED, Work, rank_of


def _lifting(s: Shape, vectors: float) -> float:
    """Multiply-adds of the features of so many vectors, where an anchor solves with features of keys."""
    rank = rank_of(s)
    return 0.0 if rank == s.bound.score.width(s.head_dim) else vectors * rank * (2.0 * s.dim + rank) * s.back


def compiled_ridge(s: Shape) -> Work:
    """Read-outs by a compiled kernel: sums and inverses at the start of each block of 16 keys, one factor a block.

    Where the past fades each key adds two rows to the matrix that is inverted.
    """
    rank, width, kv, shifts = rank_of(s), s.value_dim, s.batch * s.kv_heads, s.tags.shifts
    block, remake = 16, 1024
    rows = s.groups * min(s.queries, s.keys)
    # keys without a query between them are summed up where they are many
    gap, times = (s.keys - min(s.queries, s.keys), 1.0) if s.chunk is None else (s.chunk, s.keys / s.chunk)
    summed = gap * times if gap >= 8 * block else 0.0
    factored = s.keys - summed
    half, added = min(block, factored) / 2, 1 + s.tags.decays
    inverses = (times if summed else 0.0) + factored / remake + (s.past > 0)
    solve = rank * rank + 2 * added * half * rank
    taken = s.keys * (rank * rank / 2 + rank * width + (shifts > 0) * rank * rank)
    factors = (1 + added / 2) * rank * rank + added * added * half * (2 * rank + half)
    states = taken + factored * factors + 2 * inverses * rank**3
    read = (2 * shifts + 1) * solve
    done = states + rows * (read + rank * width + half * (rank + width))
    if s.gradients:
        back = 2 * read + (8 * shifts + 4) * half * rank + 2 * rank * width + half * (3 * rank + 2 * width)
        done += states + rows * (back + (2 * shifts + 1) * rank * rank)
        done += s.keys * (rank * rank + 2 * rank * width + 2 * (shifts > 0) * rank * rank)
    vectors = s.batch * (s.heads * s.queries + s.kv_heads * s.keys)
    multiply_adds = kv * done + _lifting(s, vectors)
    state = rank * (3.0 * rank + width + (shifts > 0) * rank)
    launches = 30.0 + 190 * s.gradients
    if s.keeps:  # the memory takes in the tokens by products of torch in float64
        multiply_adds += 2.0 * kv * s.keys * rank * (rank * (1 + (shifts > 0)) + width)
        launches += 40
    peak = s.batch * s.heads * s.queries * width + 2 * state + s.keeps * kv * (3 * state + 2 * s.keys * (rank + width))
    if s.gradients:
        peak += s.batch * s.heads * s.queries * rank + kv * s.keys * (rank + width)
        peak += 4.0 * (shifts + 1) * s.groups * s.keys / s.documents * rank
    moved = PACKED * s.itemsize * vectors * (rank + width) * s.back
    if s.past or s.keeps:  # sums are read and written in float64
        moved += 64.0 * kv * state
    return Work(multiply_adds, moved, peak * s.itemsize, launches, kv * s.documents)


def ridge(s: Shape) -> Work:
    """Read-outs by torch: without causality one solve, else a factor a block and two masked products a solve."""
    if s.tags.decays:
        return _fading(s)
    rank, width, kv, shifts = rank_of(s), s.value_dim, s.batch * s.kv_heads, s.tags.shifts
    keys, rows = s.keys, s.groups * (min(s.queries, s.keys) if s.tied else s.queries)
    heads, vectors = s.batch * s.heads, s.batch * (s.heads * s.queries + s.kv_heads * s.keys)
    sums_of_keys = keys * rank * (rank * (1.0 + (shifts > 0)) + width)
    if not s.tied:
        done = kv * (sums_of_keys + rows * rank * (rank * (1 + 2 * shifts) + width)) * s.back + kv * 6.0 * rank**3
        peak = heads * s.queries * (rank * (2 + shifts) * s.back + width) + kv * keys * rank * (shifts > 0)
        peak += kv * rank * (8.0 * rank + 2 * width) * s.back
        return Work(done + _lifting(s, vectors), 4 * peak * s.itemsize, peak * s.itemsize, 70.0 + 80 * s.gradients)
    usual = usual_block(rank)
    outright = s.tags.by_query or (s.chunk is not None and s.chunk > usual)
    # keys before the first query (before its chunk) are summed up at once
    inside = max(keys if s.chunk is not None else min(s.queries, keys), 1)
    size = s.chunk if outright and s.chunk is not None else min(usual, inside)
    blocks = max(-(-inside // s.documents // size), 1)
    batch, half = kv * blocks * s.documents, 0 if outright else size
    solve = rank * rank + 2 * half * rank
    factor = 8.0 * rank**3 if outright else size * (2.0 * rank * rank + 2 * size * rank + size * size / 3)
    each = (1 + 2 * shifts) * solve + (half + rank) * (rank * shifts + width) + half * rank
    done = batch * factor + kv * (sums_of_keys + rows * each * s.back)
    held = batch * (2.0 * rank * rank + rank * width + size * rank + s.groups * size * rank)
    held += batch * s.groups * size * half
    calls = 90.0 + (18 if not outright else 0) * blocks * min(s.documents, 8) + 40 * shifts + 90 * s.keeps
    peak = held + kv * keys * rank + heads * s.queries * width
    # the sums before the first query take in keys and values in float64
    peak += kv * (keys - inside) * (rank * (1.0 + (shifts > 0)) + width) * 8 / s.itemsize
    if s.gradients:
        peak += (1 + shifts) * batch * (1.5 * s.groups * size * half + 2 * s.groups * size * rank + rank * width)
        calls += 200.0 + 90 * shifts
    return Work(done + _lifting(s, vectors), 4 * held * s.back * s.itemsize, peak * s.itemsize, calls)


def _fading(s: Shape) -> Work:
    """Read-outs by torch whose past fades: blocks with two rows a key, in float64."""
    rank, width, kv, shifts = rank_of(s), s.value_dim, s.batch * s.kv_heads, s.tags.shifts
    size = min(usual_block(rank, fades=True), max(s.keys, 1))
    blocks, rows = max(-(-s.keys // size), 1), s.groups * size
    factor = 2.0 * size * rank * (2 * rank + 2 * size) + (2.0 * size) ** 3 / 6 + size * size * 4.0 * rank
    solve = rank * rank + 6.0 * size * rank + (size + rank) * width
    states = size * rank * (rank * (1 + (shifts > 0)) + width) + 2.0 * rank**3
    done = kv * blocks * (factor + states + rows * (1 + shifts) * solve * s.back)
    held = kv * blocks * (4.0 * rank * rank + 2 * rank * width + 6 * size * rank + 2 * rows * rank + 3 * rows * size)
    peak = held * (1 + 1.5 * s.gradients * (1 + shifts)) + s.batch * s.heads * s.queries * width
    calls = (150.0 + 8 * blocks + 50 * shifts) * (1 + 1.6 * s.gradients)
    return Work(2 * done, 8 * 4 * held * s.back, 8 * peak, calls)


__all__ = ["compiled_ridge", "ridge"]
