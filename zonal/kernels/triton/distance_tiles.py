"""What the kernels for attention by distance share: points prepared once, and a tile of distances with their slopes.

Products of raw points give squared differences, gap = |a|^2 + |b|^2 - 2 a.b, of points (plane) or of their directions
(sphere, hyperbolic space). When points are so near, or directions so nearly opposite, that a product has too few digits
left, the pair is ``close``. Its gap and gradient are then summed from differences, where each direction is two float32
numbers. Only tiles with a close pair do this.
"""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zonal.formula import Term
from zonal.kernels.abi import plain
from zonal.kernels.distance import DistanceInputs, DistanceSpec
from zonal.kernels.triton import tiles
from zonal.kernels.triton.sizes import ceil_div, padded
from zonal.kernels.triton.tiles import LN2, LOG2E, tile_rows, weighted

# of the sum of two squared lengths: a gap below has lost more than five bits
NEAR: tl.constexpr = tl.constexpr(1 / 64)
# squared: nearer than that are directions of float vectors only by rounding
SAME: tl.constexpr = tl.constexpr(1e-30)
# beyond it sinh(a) sinh(b) leaves float32
RADIUS: tl.constexpr = tl.constexpr(40.0)
# where a direction is smooth
ORIGIN: tl.constexpr = tl.constexpr(1e-6)

# Notes of a point in one space. direction = point (INVERSE + INVERSE_REST); SQUARE is its squared length. For a radius
# r: r / 2 = HALF + HALF_REST, sinh r and coth r; FREE: d(r) / d|point|
SQUARE: tl.constexpr = tl.constexpr(0)
INVERSE: tl.constexpr = tl.constexpr(1)
INVERSE_REST: tl.constexpr = tl.constexpr(2)
HALF: tl.constexpr = tl.constexpr(3)
HALF_REST: tl.constexpr = tl.constexpr(4)
SINH: tl.constexpr = tl.constexpr(5)
COTH: tl.constexpr = tl.constexpr(6)
FREE: tl.constexpr = tl.constexpr(7)
NOTES: tl.constexpr = tl.constexpr(8)

# columns of gradients that a kernel has room for, and what a thread may take
_HELD, REGISTERS = 64, 255


@dataclass(frozen=True)
class Part:
    """A distance as kernels are compiled for it: of ``size`` numbers from ``start`` on, in tiles of ``width``.

    square: eps squared. least: the distance that eps gives.
    """

    kind: str
    start: int
    size: int
    width: int
    scale: float
    square: float
    least: float

    @property
    def directed(self) -> bool:
        """Whether it is of directions."""
        return self.kind in ("sphere", "hyperbolic")


@dataclass(frozen=True)
class Metric:
    """The parts of a point, whether a dot product of whole points is added, and the number of waves made of the sum."""

    parts: tuple[Part, ...]
    product: bool
    waves: int

    @property
    def count(self) -> int:
        return len(self.parts)

    @property
    def weights(self) -> int:
        return len(self.parts) + self.product

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The parts whose gradients one kernel holds at once, from which to which: as many as stay in registers."""
        found, begin, held = [], 0, 0
        for f, part in enumerate(self.parts):
            columns = part.width * (1 + self.product)
            if f > begin and held + columns > _HELD:
                found.append((begin, f))
                begin, held = f, 0
            held += columns
        return (*found, (begin, self.count))


# ---- points ----


@triton.jit
def split_in_two(x):
    """x in float64 as two numbers in float32."""
    first = x.to(tl.float32)
    return first, (x - first.to(tl.float64)).to(tl.float32)


@triton.jit
def put_notes(x, out, batch, head, line, first, rows, f: tl.constexpr, metric: tl.constexpr, ROWS: tl.constexpr):
    """Write the notes of a block of points in one part."""
    part: tl.constexpr = metric.parts[f]
    row = tl.arange(0, ROWS)
    inside = first + row < rows
    point = tile_rows(x, batch, head, first, rows, part.size, ROWS, part.width, True, True, part.start).to(tl.float64)
    square = tl.sum(point * point, 1)
    place = (
        out
        + (tl.cast(line, tl.int64) * rows + first) * (metric.count * NOTES)
        + row * (metric.count * NOTES)
        + f * NOTES
    )
    if part.kind == "sphere":
        # a vector without direction: no product with it, and so a right angle
        long = square > 1e-24
        inverse = tl.where(long, 1 / tl.sqrt(tl.where(long, square, 1.0)), 0.0)
        square = square * 0 + 1
    elif part.kind == "hyperbolic":
        length = tl.sqrt(square * (part.scale * part.scale) + ORIGIN * ORIGIN)
        radius = tl.where(length > RADIUS, RADIUS, length)
        inverse = part.scale / length
        square = square * inverse * inverse
        up = tl.exp(radius)
        small = radius * radius
        small = radius * (1 + small / 6 * (1 + small / 20 * (1 + small / 42)))
        sinh = tl.where(radius < 0.1, small, (up - 1 / up) / 2)
        half, half_rest = split_in_two(radius / 2)
        tl.store(place + HALF, half, mask=inside)
        tl.store(place + HALF_REST, half_rest, mask=inside)
        tl.store(place + SINH, sinh.to(tl.float32), mask=inside)
        tl.store(place + COTH, (tl.sqrt(1 + sinh * sinh) / sinh).to(tl.float32), mask=inside)
        tl.store(place + FREE, tl.where(length <= RADIUS, part.scale, 0.0), mask=inside)
    else:
        inverse = square * 0 + 1
    inverse, inverse_rest = split_in_two(inverse)
    tl.store(place + INVERSE, inverse, mask=inside)
    tl.store(place + INVERSE_REST, inverse_rest, mask=inside)
    tl.store(place + SQUARE, square.to(tl.float32), mask=inside)


@triton.jit
def notes_kernel(x, out, heads, rows, metric: tl.constexpr, ROWS: tl.constexpr):
    """out (B, H, rows, parts, NOTES) of points x."""
    blocks = tl.cdiv(rows, ROWS)
    line = tl.program_id(0) // blocks
    for f in tl.static_range(tl.constexpr(metric.count)):
        put_notes(x, out, line // heads, line % heads, line, tl.program_id(0) % blocks * ROWS, rows, f, metric, ROWS)


# -- a tile of pairs: blocks of points a (rows) and b (columns), each (x, notes, batch, head, line, first, limit) --


@triton.jit
def numbers(x, line, first, limit, place, MANY: tl.constexpr, ROWS: tl.constexpr):
    """(ROWS,) the number at ``place`` of each row of one line of a contiguous (lines, limit, MANY) array, else 0.

    All that is known of a row lies together: one address serves all of it.
    """
    row = tl.arange(0, ROWS)
    start = x + (tl.cast(line, tl.int64) * limit + first) * MANY
    return tl.load(start + (row * MANY + place), mask=first + row < limit, other=0.0)


@triton.jit
def weights_of(weights, line, first, limit, metric: tl.constexpr, ROWS: tl.constexpr):
    """What the distances of a block's queries weigh, and last the dot product."""
    found = ()
    for f in tl.static_range(tl.constexpr(metric.weights)):
        # kernels know no starred tuples
        found = found + (numbers(weights, line, first, limit, f, metric.weights, ROWS),)  # noqa: RUF005
    return found


@triton.jit
def note(side, which: tl.constexpr, f: tl.constexpr, metric: tl.constexpr, ROWS: tl.constexpr):
    """(ROWS,) notes of a block's points in one part; zeros past their end."""
    _, notes, _, _, line, first, limit = side
    return numbers(notes, line, first, limit, f * NOTES + which, metric.count * NOTES, ROWS)


@triton.jit
def part_tile(side, f: tl.constexpr, metric: tl.constexpr, ROWS: tl.constexpr):
    part: tl.constexpr = metric.parts[f]
    x, _, batch, head, _, first, limit = side
    return tile_rows(
        x, batch, head, first, limit, part.size, ROWS, part.width, True, part.size != part.width, part.start
    )


@triton.jit
def part_tiles(side, metric: tl.constexpr, ROWS: tl.constexpr):
    """The points of a block, part by part."""
    found = ()
    for f in tl.static_range(tl.constexpr(metric.count)):
        found = found + (part_tile(side, f, metric, ROWS),)  # noqa: RUF005
    return found


@triton.jit
def coordinate(side, column, ROWS: tl.constexpr):
    """(ROWS,) one number of each point of a block."""
    x, _, batch, head, _, first, limit = side
    row = tl.arange(0, ROWS)
    start = (
        x.start
        + tl.cast(batch, tl.int64) * x.batch
        + tl.cast(head, tl.int64) * x.head
        + tl.cast(first, tl.int64) * x.row
    )
    return tl.load(start + row * x.row + column * x.column, mask=first + row < limit, other=0.0)


@triton.jit
def directed(side, number, f: tl.constexpr, metric: tl.constexpr, ROWS: tl.constexpr):
    """One number of each direction of a block, as two in float32."""
    inverse = note(side, INVERSE, f, metric, ROWS).to(tl.float64) + note(side, INVERSE_REST, f, metric, ROWS).to(
        tl.float64
    )
    return split_in_two(number.to(tl.float64) * inverse)


@triton.jit
def apart(a, b, close, column, f: tl.constexpr, metric: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """a - b of one number of a tile's points, a + b where they are opposite."""
    part: tl.constexpr = metric.parts[f]
    u, v = coordinate(a, part.start + column, ROWS), coordinate(b, part.start + column, COLUMNS)
    if part.directed:
        u, u_rest = directed(a, u, f, metric, ROWS)
        v, v_rest = directed(b, v, f, metric, COLUMNS)
        v, v_rest = v[None, :], v_rest[None, :]
        if part.kind == "sphere":
            v, v_rest = tl.where(close < 0, -v, v), tl.where(close < 0, -v_rest, v_rest)
        return (u[:, None] - v) + (u_rest[:, None] - v_rest)
    else:
        return u.to(tl.float32)[:, None] - v.to(tl.float32)[None, :]


@triton.jit
def gaps(product, a, b, f: tl.constexpr, metric: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(gap, close, whether any pair is). close: 1 = gap was summed from differences; -1 = it is that to the opposite
    point, and negative."""
    part: tl.constexpr = metric.parts[f]
    both = note(a, SQUARE, f, metric, ROWS)[:, None] + note(b, SQUARE, f, metric, COLUMNS)[None, :]
    if part.directed:
        product = product * note(a, INVERSE, f, metric, ROWS)[:, None] * note(b, INVERSE, f, metric, COLUMNS)[None, :]
    gap = both - 2 * product
    gap = tl.where(gap < 0, 0.0, gap)  # what is not a number stays so
    margin = gap - NEAR * both
    close = tl.where(margin < 0, 1, 0)
    if part.kind == "sphere":
        margin = tl.minimum(margin, 4 - 2 * NEAR - gap)
        close = tl.where(gap > 4 - 2 * NEAR, -1, close)
    some = tl.min(tl.min(margin, 1), 0) < 0
    if some:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for column in tl.range(0, part.size, disable_licm=True):
            step = apart(a, b, close, column, f, metric, ROWS, COLUMNS)
            total += step * step
        if part.kind == "sphere":
            total = tl.where(close < 0, -tl.maximum(total, SAME), total)
        if part.directed:
            total = tl.where(tl.abs(total) < SAME, 0.0, total)
        gap = tl.where(close != 0, total, gap)
    return gap, close, some


@triton.jit
def marked(gap, close):
    """Both in one number, with close as its last bit. Parts of a tile are kept until all are known, in registers."""
    return ((gap.to(tl.int32, bitcast=True) & -2) | (close & 1)).to(tl.float32, bitcast=True)


@triton.jit
def unmarked(gap):
    """(gap, close) of ``marked``."""
    bits = gap.to(tl.int32, bitcast=True)
    gap = (bits & -2).to(tl.float32, bitcast=True)
    return gap, tl.where((bits & 1) != 0, tl.where(gap < 0, -1, 1), 0)


@triton.jit
def distance(gap, a, b, f: tl.constexpr, metric: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(d, along, radial) of a part.

    d(d)/du = along (u - v), where gap is a difference of u, a point (or direction) of a, and v, one of b. d(d)/dr =
    radial, for the radius of a hyperbolic point of a.
    """
    part: tl.constexpr = metric.parts[f]
    radial = gap
    if part.kind == "euclidean":
        x = tl.where(gap > 1e38, 1e38, gap) + part.square
        along = tl.rsqrt(x)
        d = x * along - part.least
    elif part.kind == "squared":
        along = tl.full([ROWS, COLUMNS], 2.0, tl.float32)
        d = gap
    elif part.kind == "sphere":
        # a gap below zero is that to the opposite point
        near = tl.where(gap < 0, 4 + gap, gap) + part.square
        far = tl.where(gap < 0, -gap, tl.where(gap > 4, 0.0, 4 - gap)) + part.square
        x = tl.where(near > far, far, near) / (4 + 2 * part.square)
        # twice asin of the root
        rest = 1.145460045e-1 + x * (-1.447772836e-1 + x * 1.283731246e-1)
        rest = 4.400412778e-2 + x * (3.650977654e-2 + x * (-1.001800296e-2 + x * rest))
        angle = 2 * x * tl.rsqrt(x) * (1 + x * (1.666660162e-1 + x * (7.503296518e-2 + x * rest)))
        along = 2 * tl.rsqrt(near * far)
        d = tl.where(near > far, 3.14159265358979 - angle, angle) - part.least
    else:
        middle = note(a, HALF, f, metric, ROWS)[:, None] - note(b, HALF, f, metric, COLUMNS)[None, :]
        middle += note(a, HALF_REST, f, metric, ROWS)[:, None] - note(b, HALF_REST, f, metric, COLUMNS)[None, :]
        flat = middle * middle
        small = middle * (
            1 + flat * (1.666666643e-1 + flat * (8.333352593e-3 + flat * (1.983581245e-4 + flat * 2.818523940e-6)))
        )
        steep = 0.5 * (tl.exp2(middle * LOG2E) - tl.exp2(-middle * LOG2E))
        sinh = tl.where(flat < 1, small, steep)
        size = note(a, SINH, f, metric, ROWS)[:, None] * 0.25 * note(b, SINH, f, metric, COLUMNS)[None, :]
        level = sinh * sinh
        x = gap * size + (level + part.square)
        low, high = tl.rsqrt(x), tl.rsqrt(1 + x)
        rise, slope = x * low, low * high
        # twice asinh of the root
        little = rise * (
            1
            + x
            * (
                -1.666663402e-1
                + x * (7.498430582e-2 + x * (-4.436385282e-2 + x * (2.808537599e-2 - x * 1.311456426e-2)))
            )
        )
        d = 2 * tl.where(x < 0.25, little, tl.log2(rise + (1 + x) * high) * LN2) - part.least
        bent = tl.minimum(
            size * slope, 1e34
        )  # more where far points coincide: infinity times their difference were NaN
        along = 2 * bent
        radial = slope * sinh * tl.sqrt(1 + level) + note(a, COTH, f, metric, ROWS)[:, None] * (bent * gap)
    return d, along, radial


@triton.jit
def multiplied(a, b):
    """a b with float32 sums. Float32 is multiplied as three products in tf32: to 2^-21, but on matrix units."""
    return tl.dot(a, b, input_precision="tf32x3" if a.dtype == tl.float32 else "ieee")


@triton.jit
def added(weight, rows, total, traits: tl.constexpr):
    """total + weight rows, as ``tiles.weighted`` but for the way float32 is multiplied."""
    if rows.dtype == tl.float32:
        return tl.dot(weight, rows, total, input_precision="tf32x3")
    else:
        return weighted(weight, rows, total, traits)


@triton.jit
def broadcast(weight, ACROSS: tl.constexpr):
    """Weights of queries over a tile that has them down, or ACROSS."""
    if ACROSS:
        return weight[None, :]
    else:
        return weight[:, None]


@triton.jit
def tile_of(
    a, b, a_tiles, b_tiles, weights, metric: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ACROSS: tl.constexpr, FIRST: tl.constexpr = 0, LAST: tl.constexpr = 0,
):  # fmt: skip
    """(log K without waves, (marked gap, whether any pair is close) for parts FIRST to LAST, the dot product).

    ACROSS: the weights are those of b.
    """
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    whole = total
    found = ()
    for f in tl.static_range(tl.constexpr(metric.count)):
        product = multiplied(a_tiles[f], tl.trans(b_tiles[f]))
        gap, close, some = gaps(product, a, b, f, metric, ROWS, COLUMNS)
        total += broadcast(weights[f], ACROSS) * distance(gap, a, b, f, metric, ROWS, COLUMNS)[0]
        if metric.product:
            whole += product
        if f >= FIRST and f < LAST:
            found = found + ((marked(gap, close), some),)  # noqa: RUF005
    if metric.product:
        total += broadcast(weights[metric.count], ACROSS) * whole
    return total, found, whole


# ---- waves ----


@triton.jit
def circular(x):
    """Cosine and sine of x >= 0 to rounding of x, up to 1e5 (waves fade before). The compiler's own use the stack."""
    quarters = tl.floor(tl.minimum(x, 4e6) * 0.6366197723675814 + 0.5)
    r = tl.minimum(x, 4e6) - quarters * 1.5703125
    r -= quarters * 4.837512969970703125e-4
    r -= quarters * 7.549789954891e-8
    square = r * r
    sine = r * (1 + square * (-1.666665461e-1 + square * (8.332160873e-3 - square * 1.951529589e-4)))
    cosine = 1 + square * (-0.5 + square * (4.166664568e-2 + square * (-1.388731625e-3 + square * 2.443315711e-5)))
    turn = quarters.to(tl.int32)
    odd = (turn & 1) != 0
    even_part, odd_part = tl.where(odd, sine, cosine), tl.where(odd, cosine, sine)
    return tl.where(((turn + 1) & 2) != 0, -even_part, even_part), tl.where((turn & 2) != 0, -odd_part, odd_part)


@triton.jit
def waves(x, c, n: tl.constexpr):
    """(log K, its slope, d, fading cosines, fading sines) of a sum x of weighted distances.

    c: n amplitudes, n decays, n frequencies.
    """
    d = tl.where(x <= 0, -x, x * 0)
    value = tl.zeros_like(x)
    slope = value
    evens, odds = (), ()
    for k in tl.static_range(n):
        a, b, frequency = tl.load(c + k), tl.load(c + n + k), tl.load(c + 2 * n + k)
        even, odd = circular(d * tl.abs(frequency))
        fade = tl.exp2(-d * (b * LOG2E))
        even = even * fade
        odd = odd * tl.where(frequency < 0, -fade, fade)
        value += a * even
        slope += a * (b * even + frequency * odd)
        evens, odds = evens + (even,), odds + (odd,)  # noqa: RUF005
    return value, tl.where(x > 0, 0.0, slope), d, evens, odds


# ---- on the host ----


class DistanceCall(NamedTuple):
    """What forward and backward share of a call: notes of queries and keys, contiguous weights (B, H, T, terms)."""

    tiles: tiles.TileCall
    metric: Metric
    query_notes: Tensor
    key_notes: Tensor
    weights: Tensor


def part_of(term: Term) -> Part:
    """A term of a spec."""
    eps = term.eps
    square = eps * eps / 4 if term.kind == "hyperbolic" else eps * eps
    least = (
        2 * math.atan2(eps, math.sqrt(4 + eps * eps))
        if term.kind == "sphere"
        else 2 * math.asinh(eps / 2)
        if term.kind == "hyperbolic"
        else eps
    )
    return Part(term.kind, term.start, term.size, padded(term.size), term.scale, max(square, 1e-30), least)


def metric_of(spec: DistanceSpec) -> Metric:
    """The terms of a spec: distances of parts that share out a point, then the dot product where there is one."""
    parts = tuple(part_of(term) for term in spec.terms if term.kind != "product")
    return Metric(parts, len(parts) < len(spec.terms), spec.waves)


def noted(x: Tensor, metric: Metric) -> Tensor:
    """(B, H, rows, parts, NOTES) float32 of points (B, H, rows, D)."""
    batch, heads, rows, _ = x.shape
    out = torch.empty(batch, heads, rows, metric.count, NOTES.value, dtype=torch.float32, device=x.device)
    block = min(64, 2048 // max(part.width for part in metric.parts))
    tiling = tiles.Tiling(block, 0, 4, 1, REGISTERS)
    tiles.launch(
        notes_kernel,
        batch * heads * ceil_div(rows, block),
        (tiles.rows_of(x), out, heads, rows),
        {"metric": metric, "ROWS": block},
        tiling,
    )
    return out


def call(inputs: DistanceInputs, spec: DistanceSpec) -> DistanceCall:
    """Prepare a call's kernels."""
    metric = metric_of(spec)
    prepared = tiles.call(inputs.tiles, spec.rules)
    (q, k, _, weights, *_) = inputs
    return DistanceCall(prepared, metric, noted(q, metric), noted(k, metric), plain(weights, torch.float32))


def choose(kernel: str, q: Tensor, v: Tensor, metric: Metric) -> tiles.Tiling:
    """Tile sizes of a kernel ("forward", "decode", "values", "keys", "queries").

    The rows are those of one warp group, except for wide points. Columns are as few as products allow, since every pair
    needs twenty numbers or more at once.
    """
    if kernel == "decode":
        return tiles.Tiling(16, 32, 4, 1, REGISTERS)
    rows = 64 if max(sum(part.width for part in metric.parts), padded(v.shape[3])) <= 128 else 16
    return (
        tiles.Tiling(16, rows, 4, 1, REGISTERS)
        if kernel in ("values", "keys")
        else tiles.Tiling(rows, 16, 4, 1, REGISTERS)
    )


def constants(call: DistanceCall, tiling: tiles.Tiling, q: Tensor, v: Tensor) -> dict[str, Any]:
    """What both passes' kernels are compiled for."""
    return {"metric": call.metric, "traits": call.tiles.traits, "shape": tiles.shape(tiling, q, v)}


__all__ = ["DistanceCall", "Metric", "Part", "call", "choose", "constants", "metric_of", "noted"]
