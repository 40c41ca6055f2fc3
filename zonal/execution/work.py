"""The work of each route for a call (``Work``), counted from its shape alone.

Each formula counts multiply-adds (including backward when gradients flow), bytes read and written, torch calls or
kernel launches, and the most bytes in use at once beyond the inputs. Elementwise operations of torch are counted by the
bytes that they move. Those of compiled kernels stay in registers, and are counted in multiply-adds.
"""

import itertools
import math
from typing import NamedTuple, cast

from zonal.algebra.anchor import Hierarchical, TopK
from zonal.algebra.hashing import LSH, MOST_BITS
from zonal.execution.paths import tiled
from zonal.execution.paths.blocks import usual_block
from zonal.execution.paths.scan import block_size
from zonal.execution.shape import EXPONENTIAL, Shape
from zonal.features import feature_map, hashing
from zonal.memory.whitened import width_of

# Costs of elementwise torch calls, relative to an addition: masked fill, search for the k-th largest.
_SELECT, _TOP = 5.0, 60.0
# the most torch calls that score, link and log prior of a block take
_CALLS = 20.0
# In compiled kernels, multiply-adds per pair of tokens: an exponential; the roots and logarithms of distances by kind.
_EXPONENTIAL = 7.0
_DISTANCES = {"euclidean": 3.0, "squared": 1.0, "sphere": 6.0, "hyperbolic": 13.0, "product": 0.0}
# A compiled kernel reads tokens row by row and packs them, which takes as long as so many passes of torch.
_PACKED = 4.0
# queries that the compiled kernels of tiles and sums take together, and the keys of a block of the sums
_COLUMN, _BLOCK = 16, 64
# rows from which on torch's products read matrices at the full bandwidth
_FEW = 16
# multiply-adds that a feature of a token costs by itself in the kernel of sums
_FEATURE = 8.0
# a token of a head costs by itself, in the kernel of sums, as much as to move so many numbers
_TOKEN = 320.0
# Iterations of a plan and of its gradient's linear system. The true numbers depend on the scores: these are guesses.
_ITERATIONS, _SOLVES = 10, 8


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


# -- every pair of query and key -------------------------------------------------------------------


def _joined(s: Shape) -> tuple[float, float, float]:
    """Multiply-adds, numbers moved and torch calls to append the call's keys to a memory after those that it has."""
    kv = s.batch * s.kv_heads
    if not s.keeps:
        return 0.0, 0.0, 0.0
    if s.kind == "keys":
        return 0.0, 2.0 * kv * (s.past + s.keys) * (s.dim + s.value_dim), 37.0
    if s.tags.solves:
        rank = _rank(s)
        return (
            kv * s.keys * rank * (2.0 * rank + s.value_dim),
            4.0 * kv * (s.keys + rank) * (2 * rank + s.value_dim),
            90.0,
        )
    features = kv * float(_features(s)[0])
    return features * s.keys * s.width, features * (6.0 * s.keys + 3 * s.width), 70.0


def _tokens(s: Shape) -> float:
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


def dense(s: Shape) -> Work:
    """Every block in memory, each step a call of torch over all of it."""
    keys, heads = s.keys + s.past * (s.kind == "keys"), s.batch * s.heads
    n, link = heads * s.queries * keys, s.bound.link
    multiply_adds = n * float(s.dim + s.value_dim) * s.back
    steps = 3 + 2 * _SELECT + s.steps + 2 * s.tags.normalises
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
    taken, copied, joins = _joined(s)
    moved = (2 * steps * n + small) * (2 if s.gradients else 1) + copied + _tokens(s) * s.back
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
    steps = s.steps + 3 + 0.5 * s.tied + s.padded * _SELECT + (_TOP + s.steps) * (s.tags.top > 0)
    steps += s.gradients * (2 * s.steps + 8)
    calls = count * (34 + 2 * min(s.steps, _CALLS)) * (2.6 if s.gradients else 1.0) + 36.0 * -(-s.queries // rows)
    tile = batch * s.heads * rows * columns
    buffers = 1.5 if s.tags.log_space else 2.0
    out = batch * s.heads * min(rows, s.queries) * s.value_dim
    whole = batch * s.heads * rows * keys * 1.5 if s.tags.top else 0.0
    peak = heads * s.queries * (1.0 + (s.tags.top > 0) + s.value_dim) + whole + (buffers + 3.5 * s.biased) * tile
    if s.gradients:
        peak += heads * s.queries * (s.value_dim + s.dim) + s.batch * s.kv_heads * keys * (s.dim + s.value_dim) + tile
    taken, copied, joins = _joined(s)
    return Work(
        multiply_adds + taken,
        (2 * steps * n + copied + _tokens(s) * s.back) * s.itemsize,
        (peak + 3.0 * out) * s.itemsize,
        calls + joins,
    )


def compiled_tiles(s: Shape) -> Work:
    """Tiles by a compiled kernel: forward two products a tile, backward five, each with score and link in registers."""
    keys, heads = s.keys + s.past, s.batch * s.heads
    columns = -(-s.queries // _COLUMN) * _COLUMN / max(s.queries, 1)
    pairs = heads * (s.pairs * columns + _COLUMN / 2 * s.tied * s.queries)
    link = s.bound.link
    each = _EXPONENTIAL if s.tags.log_space else link.operations / 2 + 1
    each += s.biased * (3.0 if s.tags.log_space else 3.0 + _EXPONENTIAL)
    multiply_adds = pairs * (s.dim + s.value_dim + each)
    if s.gradients:
        multiply_adds += pairs * (3 * s.dim + 2 * s.value_dim + 2 * each + s.learned)
    moved = heads * s.queries * (s.dim + s.value_dim)
    moved += -(-s.queries // (_COLUMN * _COLUMN)) * s.batch * s.kv_heads * keys * (s.dim + s.value_dim)
    peak = heads * s.queries * (s.value_dim + 1.0)
    if s.gradients:
        peak += heads * s.queries * s.dim + s.batch * s.kv_heads * keys * (s.dim + s.value_dim)
        peak += 2.0 * s.biased * heads * (s.queries + keys)
    tasks = heads * -(-s.queries // _COLUMN)
    taken, copied, joins = _joined(s)
    moved = s.itemsize * (_PACKED * moved * s.back + copied)
    return Work(multiply_adds + taken, moved, peak * s.itemsize, 16.0 + joins + 150 * s.gradients, tasks)


def distances(s: Shape) -> Work:
    """Tiles of distances by a compiled kernel: a difference and a product per number of a pair, then roots and logs."""
    terms = s.bound.score.terms(s.dim) or ()
    found = compiled_tiles(s)
    pairs = s.batch * s.heads * (s.pairs + _COLUMN / 2 * s.tied * s.queries)
    more = sum(term.size for term in terms) + sum(_DISTANCES[term.kind] for term in terms)
    launches = found.launches + 12 + 180 * s.gradients
    return found._replace(multiply_adds=found.multiply_adds + pairs * more * s.back, launches=launches)


def transport(s: Shape, once: Work, sums: Work) -> Work:
    """A plan by tiles: a pass with values, as row attention has it, and passes that sum rows or columns."""
    passes = 2 * _ITERATIONS + (2 * _SOLVES + 2 if s.gradients else 0)
    more = 2.0 * s.itemsize * s.batch * s.heads * (s.queries + s.keys) * (s.dim + 3)
    return Work(
        once.multiply_adds + passes * sums.multiply_adds, once.bytes + passes * sums.bytes, once.peak_bytes + more,
        once.launches + passes * sums.launches, once.tasks,
    )  # fmt: skip


def _row(s: Shape) -> Shape:
    """Row attention of the same shape, with a key head for each query head."""
    return s._replace(tags=s.tags._replace(couples=False, normalises=True), kv_heads=s.heads)


def plan_tiles(s: Shape) -> Work:
    """Passes of a plan by torch's tiles."""
    return transport(s, tiles(_row(s)), tiles(_row(s)._replace(value_dim=1, gradients=False)))


def plan_compiled(s: Shape) -> Work:
    """Passes of a plan by the compiled kernel of tiles."""
    return transport(s, compiled_tiles(_row(s)), compiled_tiles(_row(s)._replace(value_dim=1, gradients=False)))


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


# -- sums over features ----------------------------------------------------------------------------


def _features(s: Shape) -> tuple[int, bool]:
    """How many features a key that is summed up has, and whether they are its own numbers."""
    s = _far(s) if s.tags.window else s
    found = feature_map(s.bound.link)
    assert found is not None
    return found.dimension(s.dim), found.trivial


def compiled_sums(s: Shape) -> Work:
    """Sums by a compiled kernel. The state absorbs every key and each query reads it; keys of a query's own block are
    compared one by one.

    Without a memory the first keys, and short sequences as a whole, are met one by one where that is less.
    """
    (features, _), kv, groups = _features(s), s.batch * s.kv_heads, s.groups
    if s.device.type == "cpu":
        s = s._replace(dim=s.bound.score.factors(s.head_dim))
    each, pair = features * (s.width + _FEATURE), float(s.dim + s.width)
    length = s.keys / s.documents
    rows = max(s.queries / s.documents, 1.0)
    near = 0.0 if s.past else min(max(_BLOCK, each / pair), length)
    late = max(min(rows, length - near), 0.0) if s.tied else rows
    whole = groups * (s.pairs / s.documents + _COLUMN / 2 * rows)
    absorbed = length if s.keeps or late > 0 or not s.tied else 0.0
    inside = groups * ((rows - late) * near / 2 + late * _BLOCK / 2) if s.tied else 0.0
    states = (absorbed + groups * late) * each
    done = states + inside * pair
    ratio = (3 * absorbed + 2 * groups * late) / max(absorbed + groups * late, 1.0)
    back = ratio * states + inside * (3 * s.dim + 2 * s.width)
    if not s.past and not s.keeps and whole * pair < done:
        done, back, features = whole * pair, whole * (3 * s.dim + 2 * s.width), 0
    state = kv * features * float(s.width)
    tasks = kv * s.documents
    tokens = s.batch * (s.heads * s.queries + s.kv_heads * s.keys)
    moved = (_PACKED * (s.dim + s.value_dim) + _TOKEN) * tokens + (6 * state if s.past or s.keeps else 0)
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
    (features, trivial), heads, kv = _features(s), s.batch * s.heads, s.batch * s.kv_heads
    found = feature_map(s.bound.link)
    assert found is not None
    length = s.keys // s.documents
    fresh = s.tied and not s.past and not s.keeps
    block = block_size(found, (s.batch, s.heads, length, s.dim, s.value_dim), fresh)
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
    moved = (2 * steps + _tokens(s) * s.back) * s.itemsize
    return Work(multiply_adds * s.back, moved, peak * s.itemsize, calls, buffer=scratch * s.itemsize)


# -- a window, and sums before it ------------------------------------------------------------------


def _near(s: Shape) -> Shape:
    """The call as one of a window only."""
    reach = s.tags.window
    return s._replace(
        tags=s.tags._replace(window=0), pairs=min(s.pairs, float(s.queries * reach)), past=min(s.past, reach),
        keeps=False, kind="keys",
    )  # fmt: skip


def _far(s: Shape) -> Shape:
    """The call as one of sums before the window only."""
    far = s.bound.far
    assert far is not None
    tags = s.tags._replace(window=0, log_space=False, degree=far.bound.link.degree)
    return s._replace(bound=far.bound, tags=tags, dim=far.width(s.dim), coefficients=far.bound.coefficients.shape[0])


def _both(s: Shape, near: Work, far: Work) -> Work:
    """A window and sums, one after the other, and their merge."""
    rows = s.batch * s.heads * s.queries * float(s.value_dim + 1)
    return Work(
        near.multiply_adds + far.multiply_adds, near.bytes + far.bytes + 6 * rows * s.itemsize * s.back,
        near.peak_bytes + far.peak_bytes + 3 * rows * s.itemsize, near.launches + far.launches + 30.0 * s.back,
        min(near.tasks, far.tasks), max(near.buffer, far.buffer),
    )  # fmt: skip


def compiled_window(s: Shape) -> Work:
    """Tiles of the window and sums before it, by compiled kernels."""
    return _both(s, compiled_tiles(_near(s)), compiled_sums(_far(s)))


def window(s: Shape) -> Work:
    """Blocks of a window by torch, each with the keys that any of its queries sees, and sums before it."""
    pairs = s.batch * s.heads * s.queries * (2.0 * s.tags.window)
    steps = (EXPONENTIAL + _SELECT + 6) * pairs
    near = Work(
        pairs * (s.dim + s.value_dim) * s.back, 2 * steps * s.back * s.itemsize,
        (3.0 + 2 * s.gradients) * pairs * s.itemsize, 60.0 * s.back, buffer=pairs * s.itemsize,
    )  # fmt: skip
    return _both(s, near, sums(_far(s)))


# -- ridge and Koopman read-outs -------------------------------------------------------------------


def _rank(s: Shape) -> int:
    return width_of(s.bound, s.head_dim)


def _lifting(s: Shape, vectors: float) -> float:
    """Multiply-adds of the features of so many vectors, where an anchor solves with features of keys."""
    rank = _rank(s)
    return 0.0 if rank == s.bound.score.width(s.head_dim) else vectors * rank * (2.0 * s.dim + rank) * s.back


def compiled_ridge(s: Shape) -> Work:
    """Read-outs by a compiled kernel: sums and inverses at the start of each block of 16 keys, one factor a block.

    Where the past fades each key adds two rows to the matrix that is inverted.
    """
    rank, width, kv, shifts = _rank(s), s.value_dim, s.batch * s.kv_heads, s.tags.shifts
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
    moved = _PACKED * s.itemsize * vectors * (rank + width) * s.back
    if s.past or s.keeps:  # sums are read and written in float64
        moved += 64.0 * kv * state
    return Work(multiply_adds, moved, peak * s.itemsize, launches, kv * s.documents)


def ridge(s: Shape) -> Work:
    """Read-outs by torch: without causality one solve, else a factor a block and two masked products a solve."""
    rank, width, kv, shifts = _rank(s), s.value_dim, s.batch * s.kv_heads, s.tags.shifts
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


def fading(s: Shape) -> Work:
    """Read-outs by torch whose past fades: blocks with two rows a key, in float64."""
    rank, width, kv, shifts = _rank(s), s.value_dim, s.batch * s.kv_heads, s.tags.shifts
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


# -- token by token, and candidates ----------------------------------------------------------------


def steps(s: Shape) -> Work:
    """Token by token through the verbs of a memory, by torch."""
    heads, kv, tokens = s.batch * s.heads, s.batch * s.kv_heads, max(min(s.queries, s.keys), 0)
    prefix, back = s.keys - tokens, 1 + 2 * s.gradients
    out = 2.0 * heads * s.queries * s.value_dim
    if s.kind == "keys":
        held = s.past + prefix + (tokens + 1) / 2
        seen = held if s.window is None else min(held, s.window.left + 1)
        done = heads * seen * tokens * (s.dim + s.value_dim) * back
        row, calls = heads * seen * tokens * (s.steps + 6 + _SELECT) * back, tokens * (50.0 + 120 * s.gradients) + 5
        if s.tags.solves:
            square = heads * held * held * tokens
            done += square * (s.dim + held / 6 + 1 + s.tags.shifts) * back
            row += 2 * square * s.steps
        keys = kv * (s.past + s.keys) * (s.dim + s.value_dim) * (2.0 if s.gradients else 4.0)
        row += (s.groups > 1) * heads * seen * tokens * (s.dim + s.value_dim)
        kept = tokens * (keys / 2 + 6 * heads * seen) if s.gradients else 4 * heads * seen
        # a memory begun here takes a new buffer for its keys
        begun = 0.0 if s.past else keys
        moved = 2 * row + begun + _tokens(s) * max(tokens, 1) * back
        return Work(done, moved * s.itemsize, (out + keys + kept) * s.itemsize, calls, buffer=begun * s.itemsize / 2)
    if s.tags.solves:
        rank, shifts = _rank(s), s.tags.shifts
        square, itemsize = kv * float(rank * rank), 8
        remade = s.gradients or s.tags.by_query or s.tags.decays or not s.past
        inverse = square * rank * 6.0 * (tokens if remade and not (not s.past and not s.gradients) else 1)
        done = 2 * kv * prefix * rank * (rank + s.value_dim) + inverse * back
        done += tokens * (square * (3 + shifts) * 2 + heads * rank * (rank * (1 + 2 * shifts) + s.value_dim)) * back
        row = tokens * square * (6 + 2 * shifts) * back
        peak = out / 2 + square * (8.0 + 2.5 * tokens * s.gradients) + kv * prefix * (rank + s.value_dim)
        peak += kv * s.value_dim * rank * (2.0 + tokens * s.gradients)
        calls = tokens * (50.0 + 12 * shifts + 40 * s.tags.decays) * (1 + 1.4 * s.gradients) + 10
        return Work(done, 2 * row * itemsize, peak * itemsize, calls)
    features, trivial = _features(s)
    state = kv * features * float(s.width)
    itemsize = 8 if s.tags.cancels and not s.past and not s.keeps else s.itemsize
    done = (kv * prefix + tokens * (kv + heads)) * features * s.width * back
    done += heads * tokens * min(s.tags.window, s.past + s.keys) * float(s.dim + s.value_dim) * back
    row = tokens * (state * (2.5 + s.tags.decays) + (kv + heads) * features * (0 if trivial else 3.0)) * back
    peak = out / 2 + state * (3.0 + (2.0 if trivial else 0.5) * tokens * s.gradients) + heads * features * 3.0
    peak += kv * features * min(prefix, 4096)
    calls = tokens * (30.0 if trivial else 55.0) * (1 + 2 * s.gradients) + 40
    moved = 2 * row + (8.0 * kv * prefix * features + _tokens(s)) * back
    return Work(done, moved * itemsize, peak * itemsize, calls)


def compiled_steps(s: Shape) -> Work:
    """A few tokens after a memory of sums by a compiled kernel: the state is read once and written once."""
    features, heads, kv = _features(s)[0], s.batch * s.heads, s.batch * s.kv_heads
    state = kv * features * float(s.width)
    done = s.queries * (kv + heads) * features * float(s.width)
    return Work(done, 2 * state * 4, (2 * state + heads * s.queries * s.value_dim) * 4, 17.0, kv)


def compiled_window_steps(s: Shape) -> Work:
    """A few tokens after a window and sums by a compiled kernel: kept keys and values are read for each query."""
    kept = min(s.past + s.queries, float(s.tags.window))
    done = s.batch * s.heads * s.queries * kept * float(s.dim + s.value_dim)
    near = Work(done, s.batch * s.kv_heads * kept * float(s.dim + s.value_dim) * s.itemsize, 0.0, 0.0)
    return _both(s, near, compiled_steps(_far(s)))


def compiled_ridge_steps(s: Shape) -> Work:
    """A few tokens after ridge statistics by a compiled kernel: every sum is read and written in float64."""
    rank, kv, shifts = _rank(s), s.batch * s.kv_heads, s.tags.shifts
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
    steps_ = pairs * (_SELECT * (s.dim + s.value_dim) + 30)
    peak = kept + 4.0 * (1 << 23) + s.batch * s.heads * s.queries * float(s.value_dim)
    return Work(
        hashed + pairs * (s.dim + s.value_dim),
        2 * (steps_ + moved) * s.itemsize,
        peak * s.itemsize,
        2600.0 + 120 * s.gradients,
    )
