"""The work of routes that visit every pair of a query and a key: dense, tiles, plans, a tree of blocks."""

import itertools
from collections.abc import Callable
from typing import cast

from zonal.algebra.anchor import Hierarchical
from zonal.execution.paths import tiled
from zonal.execution.shape import EXPONENTIAL, Shape
from zonal.execution.work.common import COLUMN, PACKED, SELECT, Work, joined, numbers_of_tokens

# cost of torch's search for the k-th largest, relative to an addition
_TOP = 60.0
# the most torch calls that score, link and log prior of a block take
_CALLS = 20.0
# In compiled kernels, multiply-adds per pair of tokens: an exponential; the roots and logarithms of distances by kind.
_EXPONENTIAL = 7.0
_DISTANCES = {"euclidean": 3.0, "squared": 1.0, "sphere": 6.0, "hyperbolic": 13.0, "product": 0.0}
# Iterations of a plan and of its gradient's linear system. The true numbers depend on the scores: these are guesses.
_ITERATIONS, _SOLVES = 10, 8


def dense(s: Shape) -> Work:
    """Every block in memory, each step a call of torch over all of it."""
    keys, heads = s.keys + s.past * (s.kind == "keys"), s.batch * s.heads
    n, link = heads * s.queries * keys, s.bound.link
    multiply_adds = n * float(s.dim + s.value_dim) * s.back
    steps = 3 + 2 * SELECT + s.steps + 2 * s.tags.normalises
    live = 2.0 + (1 if s.tags.log_space else link.operations > 2 and not s.coefficients) + 2 * s.biased
    calls = 36.0 + min(s.steps, _CALLS)
    kept = 0.0
    if s.tags.top:
        steps, live = steps + _TOP, live + 2
    if s.tags.couples:
        multiply_adds += n * 24.0
        steps += 2 * _ITERATIONS * (EXPONENTIAL + 8)
        calls += 700.0
        live, kept = live + 3, 6.0
    elif s.tags.solves:
        more, alive, later, made = _dense_solve(s, keys)
        multiply_adds, live, kept, calls = multiply_adds + more, live + alive, kept + later, calls + made
    elif s.tags.normalises:
        live += 1
    if s.gradients:
        calls *= 2.6
        live += 2.0 + kept + 2 * s.tags.normalises + (0 if s.tags.log_space else link.operations)
    small = heads * s.queries * (s.value_dim + s.dim) + (s.groups > 1) * heads * keys * (s.dim + s.value_dim)
    peak = (live * n + small) * s.itemsize + 2.0 * (s.batch if s.padded else 1) * s.queries * keys
    taken, copied, joins = joined(s)
    moved = (2 * steps * n + small) * (2 if s.gradients else 1) + copied + numbers_of_tokens(s) * s.back
    buffer = max(n, live * n / 2) * s.itemsize  # the heap gives back what is free beyond twice a large buffer
    return Work(multiply_adds + taken, moved * s.itemsize, peak, calls + joins, buffer=buffer)


def _dense_solve(s: Shape, keys: int) -> tuple[float, float, float, float]:
    """Of a dense solve: multiply-adds, score blocks alive forward, more of them backward, and torch calls."""
    heads, n, square = s.batch * s.heads, s.batch * s.heads * s.queries * keys, s.batch * s.heads * keys * float(keys)
    ratio, shifts = square / max(n, 1), s.tags.shifts
    if s.tags.decays:
        gram = s.batch * s.heads * s.dim * float(s.dim)
        work = gram * s.queries * (10.0 + s.dim / 3 + 2 * shifts) * s.back
        return work, 2 * ratio + 4 + 5 * gram * keys / max(n, 1), 2 * ratio + 10 * gram * keys / max(n, 1), 14.0 * keys
    kernel = square * s.dim + 2 * square * s.steps
    if s.tags.by_query or s.window:  # a factorisation a query
        return (
            kernel + heads * s.queries * (keys**3 / 6 + keys**2 * (1 + 2 * shifts)) * s.back,
            4 * ratio + 1,
            (3.0 * s.queries + 2) * ratio,
            12.0 * s.queries,
        )
    work = kernel + square * (keys / 6 + s.queries * (1 + 2 * shifts)) * s.back
    return work, 3 * ratio + 2 * (shifts > 0), 2 * ratio * (1 + shifts), 44.0


def tiles(s: Shape) -> Work:
    """Tiles by torch: made, used and forgotten; backward makes each again."""
    keys, heads = s.keys + s.past, s.batch * s.heads
    sequences, rows, columns = tiled.blocks(s.heads, s.queries, keys, s.tags.top > 0)
    batch = max(min(sequences, s.batch), 1)
    count = (s.pairs / (rows * columns) + 0.5 * s.tied * s.queries / rows + s.documents - 1) * -(-s.batch // batch)
    n = count * rows * columns * batch * s.heads
    multiply_adds = n * (s.dim + s.value_dim) * (3.5 if s.gradients else 1.0)
    steps = s.steps + 3 + 0.5 * s.tied + s.padded * SELECT + (_TOP + s.steps) * (s.tags.top > 0)
    steps += s.gradients * (2 * s.steps + 8)
    calls = count * (34 + 2 * min(s.steps, _CALLS)) * (2.6 if s.gradients else 1.0) + 36.0 * -(-s.queries // rows)
    tile = batch * s.heads * rows * columns
    buffers = 1.5 if s.tags.log_space else 2.0
    out = batch * s.heads * min(rows, s.queries) * s.value_dim
    whole = batch * s.heads * rows * keys * 1.5 if s.tags.top else 0.0
    peak = heads * s.queries * (1.0 + (s.tags.top > 0) + s.value_dim) + whole + (buffers + 3.5 * s.biased) * tile
    if s.gradients:
        peak += heads * s.queries * (s.value_dim + s.dim) + s.batch * s.kv_heads * keys * (s.dim + s.value_dim) + tile
    taken, copied, joins = joined(s)
    return Work(
        multiply_adds + taken,
        (2 * steps * n + copied + numbers_of_tokens(s) * s.back) * s.itemsize,
        (peak + 3.0 * out) * s.itemsize,
        calls + joins,
    )


def compiled_tiles(s: Shape) -> Work:
    """Tiles by a compiled kernel: forward two products a tile, backward five, each with score and link in registers."""
    keys, heads = s.keys + s.past, s.batch * s.heads
    columns = -(-s.queries // COLUMN) * COLUMN / max(s.queries, 1)
    pairs = heads * (s.pairs * columns + COLUMN / 2 * s.tied * s.queries)
    link = s.bound.link
    each = _EXPONENTIAL if s.tags.log_space else link.operations / 2 + 1
    each += s.biased * (3.0 if s.tags.log_space else 3.0 + _EXPONENTIAL)
    multiply_adds = pairs * (s.dim + s.value_dim + each)
    if s.gradients:
        multiply_adds += pairs * (3 * s.dim + 2 * s.value_dim + 2 * each + s.learned)
    moved = heads * s.queries * (s.dim + s.value_dim)
    moved += -(-s.queries // (COLUMN * COLUMN)) * s.batch * s.kv_heads * keys * (s.dim + s.value_dim)
    peak = heads * s.queries * (s.value_dim + 1.0)
    if s.gradients:
        peak += heads * s.queries * s.dim + s.batch * s.kv_heads * keys * (s.dim + s.value_dim)
        peak += 2.0 * s.biased * heads * (s.queries + keys)
    tasks = heads * -(-s.queries // COLUMN)
    taken, copied, joins = joined(s)
    moved = s.itemsize * (PACKED * moved * s.back + copied)
    return Work(multiply_adds + taken, moved, peak * s.itemsize, 16.0 + joins + 150 * s.gradients, tasks)


def distances(s: Shape) -> Work:
    """Tiles of distances by a compiled kernel: a difference and a product per number of a pair, then roots and logs."""
    terms = s.bound.score.terms(s.dim) or ()
    found = compiled_tiles(s)
    pairs = s.batch * s.heads * (s.pairs + COLUMN / 2 * s.tied * s.queries)
    more = sum(term.size for term in terms) + sum(_DISTANCES[term.kind] for term in terms)
    launches = found.launches + 12 + 180 * s.gradients
    return found._replace(multiply_adds=found.multiply_adds + pairs * more * s.back, launches=launches)


def _transport(s: Shape, of_tiles: Callable[[Shape], Work]) -> Work:
    """A plan by tiles: a pass with values, as row attention has it with a key head for each query head, and passes that
    sum rows or columns.
    """
    row = s._replace(tags=s.tags._replace(couples=False, normalises=True), kv_heads=s.heads)
    once, sums = of_tiles(row), of_tiles(row._replace(value_dim=1, gradients=False))
    passes = 2 * _ITERATIONS + (2 * _SOLVES + 2 if s.gradients else 0)
    more = 2.0 * s.itemsize * s.batch * s.heads * (s.queries + s.keys) * (s.dim + 3)
    return Work(
        once.multiply_adds + passes * sums.multiply_adds, once.bytes + passes * sums.bytes, once.peak_bytes + more,
        once.launches + passes * sums.launches, once.tasks,
    )  # fmt: skip


def plan_tiles(s: Shape) -> Work:
    """Passes of a plan by torch's tiles."""
    return _transport(s, tiles)


def plan_compiled(s: Shape) -> Work:
    """Passes of a plan by the compiled kernel of tiles."""
    return _transport(s, compiled_tiles)


def tree(s: Shape) -> Work:
    """Smallest blocks by themselves, and their means above; backward by torch."""
    spans, heads = cast(Hierarchical, s.bound.anchor).spans(s.keys), s.batch * s.heads
    size = spans[0] if spans and spans[0] else 1
    pairs = heads * float(s.queries) * size
    for child, parent in itertools.pairwise(spans):
        if child:
            nodes = -(-s.queries // child)
            pairs += heads * nodes * (parent // child if parent < s.queries else nodes)
    levels = max(len(spans), 1)
    small = heads * s.queries * (2.0 * s.dim + 3 * s.value_dim)
    return Work(
        pairs * (s.dim + s.value_dim) * s.back,
        (2 * pairs * (EXPONENTIAL + 6) + 3 * small) * s.itemsize * s.back,
        (small + (4 if s.gradients else 2) * pairs) * s.itemsize,
        60.0 * levels * s.back,
    )


__all__ = ["compiled_tiles", "dense", "distances", "plan_compiled", "plan_tiles", "tiles", "tree"]
