"""The work of steps token by token, and of reading candidates."""

from typing import cast

from zonal.algebra.anchor import TopK
from zonal.algebra.hashing import LSH, MOST_BITS
from zonal.execution.shape import Shape
from zonal.execution.work.common import SELECT, Work, both, far, features_of, numbers_of_tokens, rank_of
from zonal.features import hashing


def steps(s: Shape) -> Work:
    """Token by token through the verbs of a memory, by torch."""
    heads, kv, tokens = s.batch * s.heads, s.batch * s.kv_heads, max(min(s.queries, s.keys), 0)
    prefix, back = s.keys - tokens, s.back
    out = 2.0 * heads * s.queries * s.value_dim
    if s.kind == "keys":
        held = s.past + prefix + (tokens + 1) / 2
        seen = held if s.window is None else min(held, s.window.left + 1)
        done = heads * seen * tokens * (s.dim + s.value_dim) * back
        row, calls = heads * seen * tokens * (s.steps + 6 + SELECT) * back, tokens * (50.0 + 120 * s.gradients) + 5
        if s.tags.solves:
            square = heads * held * held * tokens
            done += square * (s.dim + held / 6 + 1 + s.tags.shifts) * back
            row += 2 * square * s.steps
        keys = kv * (s.past + s.keys) * (s.dim + s.value_dim) * (2.0 if s.gradients else 4.0)
        row += (s.groups > 1) * heads * seen * tokens * (s.dim + s.value_dim)
        kept = tokens * (keys / 2 + 6 * heads * seen) if s.gradients else 4 * heads * seen
        # a memory begun here takes a new buffer for its keys
        begun = 0.0 if s.past else keys
        moved = 2 * row + begun + numbers_of_tokens(s) * max(tokens, 1) * back
        return Work(done, moved * s.itemsize, (out + keys + kept) * s.itemsize, calls, buffer=begun * s.itemsize / 2)
    if s.tags.solves:
        rank, shifts = rank_of(s), s.tags.shifts
        square, itemsize = kv * float(rank * rank), 8
        by_token = s.gradients or (s.past and (s.tags.by_query or s.tags.decays))
        inverse = square * rank * 6.0 * (tokens if by_token else 1)  # one that tokens only update is made once
        done = 2 * kv * prefix * rank * (rank + s.value_dim) + inverse * back
        done += tokens * (square * (3 + shifts) * 2 + heads * rank * (rank * (1 + 2 * shifts) + s.value_dim)) * back
        row = tokens * square * (6 + 2 * shifts) * back
        peak = out / 2 + square * (8.0 + 2.5 * tokens * s.gradients) + kv * prefix * (rank + s.value_dim)
        peak += kv * s.value_dim * rank * (2.0 + tokens * s.gradients)
        calls = tokens * (50.0 + 12 * shifts + 40 * s.tags.decays) * (1 + 1.4 * s.gradients) + 10
        return Work(done, 2 * row * itemsize, peak * itemsize, calls)
    features, trivial = features_of(s)
    state = kv * features * float(s.width)
    itemsize = 8 if s.tags.cancels and not s.past and not s.keeps else s.itemsize
    done = (kv * prefix + tokens * (kv + heads)) * features * s.width * back
    done += heads * tokens * min(s.tags.window, s.past + s.keys) * float(s.dim + s.value_dim) * back
    row = tokens * (state * (2.5 + s.tags.decays) + (kv + heads) * features * (0 if trivial else 3.0)) * back
    peak = out / 2 + state * (3.0 + (2.0 if trivial else 0.5) * tokens * s.gradients) + heads * features * 3.0
    peak += kv * features * min(prefix, 4096)
    calls = tokens * (30.0 if trivial else 55.0) * (1 + 2 * s.gradients) + 40
    moved = 2 * row + (8.0 * kv * prefix * features + numbers_of_tokens(s)) * back
    return Work(done, moved * itemsize, peak * itemsize, calls)


def compiled_steps(s: Shape) -> Work:
    """A few tokens after a memory of sums by a compiled kernel: the state is read once and written once."""
    features, heads, kv = features_of(s)[0], s.batch * s.heads, s.batch * s.kv_heads
    state = kv * features * float(s.width)
    done = s.queries * (kv + heads) * features * float(s.width)
    return Work(done, 2 * state * 4, (2 * state + heads * s.queries * s.value_dim) * 4, 17.0, kv)


def compiled_window_steps(s: Shape) -> Work:
    """A few tokens after a window and sums by a compiled kernel: kept keys and values are read for each query."""
    kept = min(s.past + s.queries, float(s.tags.window))
    done = s.batch * s.heads * s.queries * kept * float(s.dim + s.value_dim)
    near = Work(done, s.batch * s.kv_heads * kept * float(s.dim + s.value_dim) * s.itemsize, 0.0, 0.0)
    return both(s, near, compiled_steps(far(s)))


def compiled_ridge_steps(s: Shape) -> Work:
    """A few tokens after ridge statistics by a compiled kernel: every sum is read and written in float64."""
    rank, kv, shifts = rank_of(s), s.batch * s.kv_heads, s.tags.shifts
    state = kv * rank * (2.0 * rank + s.value_dim + rank * (shifts > 0))
    read = s.batch * s.heads * rank * ((1 + 2 * shifts) * rank + s.value_dim)
    done = 2 * s.queries * (state + kv * rank * rank + read) + (0 if s.past else 12.0 * kv * rank**3)
    return Work(done, 64 * state, 32 * state, 20.0, kv)  # sums are written to a new place


def _searched(s: Shape) -> tuple[LSH, float]:
    """The search with the bits of all spaces together, and about how many candidates a query has.

    Of each table twice the keys that a bucket had were they spread evenly, 16 at least.
    """
    anchor = cast(TopK, s.bound.anchor)
    spaces = hashing.spaces(s.bound.score)
    search = cast(LSH, anchor.search).sized(s.keys, spaces)
    assert search.bits is not None
    bits = min(search.bits * spaces, MOST_BITS)
    bucket = min(search.reach, max(16.0, 2 * (s.keys / 2 if s.tied else s.keys) / 2**bits))
    return search, min(search.window + search.tables * bucket, float(max(s.keys, 1)))


def _tables(s: Shape, search: LSH) -> tuple[float, float, float]:
    """Multiply-adds, numbers moved and numbers kept by hashing and sorting."""
    tokens, tables = s.batch * (s.heads * s.queries + s.kv_heads * s.keys), search.tables + 1
    bits = float(search.tables * (search.bits or 1))
    kept = tokens * (tables + bits) + s.batch * tables * (2.0 * s.heads * s.queries + s.kv_heads * s.keys)
    return tokens * bits * s.dim, tokens * (8.0 * tables + bits), kept


def compiled_candidates(s: Shape) -> Work:
    """Each query against its candidates by a compiled kernel, each fetched from anywhere; backward meets them again."""
    search, met = _searched(s)
    hashed, moved, kept = _tables(s, search)
    terms = s.bound.score.terms(s.dim) or ()
    pairs = s.batch * s.heads * s.queries * met * s.back
    peak = kept + s.batch * s.heads * s.queries * float(s.value_dim)
    if s.gradients:
        peak += s.batch * (s.heads * s.queries * (s.dim + 3.0) + s.kv_heads * s.keys * (s.dim + s.value_dim))
    done = hashed + pairs * (2.0 * (s.dim + s.value_dim) + 40 * len(terms))
    return Work(done, 2 * moved * s.itemsize, peak * s.itemsize, 2500.0 + 30 * s.gradients)


def candidates(s: Shape) -> Work:
    """Each query against its candidates, gathered by torch."""
    search, _ = _searched(s)
    hashed, moved, kept = _tables(s, search)
    pairs = s.batch * s.heads * s.queries * float(min(search.most, (search.tables + 1) * max(s.keys, 1))) * s.back
    steps_ = pairs * (SELECT * (s.dim + s.value_dim) + 30)
    peak = kept + 4.0 * (1 << 23) + s.batch * s.heads * s.queries * float(s.value_dim)
    return Work(
        hashed + pairs * (s.dim + s.value_dim),
        2 * (steps_ + moved) * s.itemsize,
        peak * s.itemsize,
        2600.0 + 120 * s.gradients,
    )


__all__ = [
    "candidates",
    "compiled_candidates",
    "compiled_ridge_steps",
    "compiled_steps",
    "compiled_window_steps",
    "steps",
]
