"""Gradients of attention by distance, by recomputing every tile. Two kernels run over blocks of keys (dV, dK), one over
blocks of queries.

Let dx_ts be the gradient of a sum x_ts of weighted distances, and G_f = dx w_f d(d_f)/d(gap) that of a gap. Points (or
directions) u of one side get sum_s G_f (u - v_s). It is computed from products, u sum_s G_f - sum_s G_f v_s, except for
close pairs. Their differences are summed one number at a time, as a slope is large where points are near and their
difference is small. Each number is written by one program, and the same call gives the same bits.
"""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
import torch
import triton
import triton.language as tl

from zonal.kernels.distance import DistanceInputs, DistanceSpec
from zonal.kernels.op import Gradients, Results
from zonal.kernels.triton import backward as tile_backward
from zonal.kernels.triton import distance_tiles, tiles
from zonal.kernels.triton.backward import row_terms, slopes
from zonal.kernels.triton.distance_forward import prepared
from zonal.kernels.triton.distance_tiles import (
    FREE,
    INVERSE,
    added,
    apart,
    broadcast,
    distance,
    multiplied,
    note,
    part_tiles,
    tile_of,
    unmarked,
    waves,
    weights_of,
)
from zonal.kernels.triton.tiles import (
    LOG2E,
    between,
    first_query_past,
    first_query_seeing,
    head_and_block,
    load_slopes,
    load_values,
    put_rows,
    real_keys,
    tile_rows_again,
    visible_keys,
    visible_pairs,
)


@triton.jit
def pulled(slope, rows, total):
    """total + slope rows. A slope exceeds float16's range, and needs more digits than bfloat16: terms cancel."""
    if rows.dtype == tl.float32:
        return tl.dot(slope, rows, total, input_precision="tf32x3")
    else:
        return tl.dot(slope, rows.to(tl.float32), total, input_precision="tf32")


@triton.jit
def nothing_of(f: tl.constexpr, metric: tl.constexpr, ROWS: tl.constexpr):
    part: tl.constexpr = metric.parts[f]
    width: tl.constexpr = part.width  # Triton 3.6 takes no plain int beside a constexpr
    row = tl.zeros([ROWS], tl.float32)
    tile = tl.zeros([ROWS, width], tl.float32)
    return tile, row, row, row, tile if metric.product else row


@triton.jit
def nothing(metric: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """The zero of what ``pull`` accumulates, for parts FIRST to LAST.

    Per part: the gradient without ``own`` u, own, the gradient of the radius, that of the weight, and what the dot
    product adds.
    """
    found = ()
    for f in tl.static_range(FIRST, LAST):
        found = found + (nothing_of(f, metric, ROWS),)  # noqa: RUF005
    return found


@triton.jit
def pull_part(
    sums,
    dx,
    weights,
    found,
    a,
    b,
    b_tiles,
    f: tl.constexpr,
    metric: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ACROSS: tl.constexpr,
):
    part: tl.constexpr = metric.parts[f]
    grad, own, radius, worth, straight = sums
    marks, some = found
    # made again: kept from where x was made of them, slopes of all parts would take too many registers
    gap, close = unmarked(marks)
    d, along, radial = distance(gap, a, b, f, metric, ROWS, COLUMNS)
    if not ACROSS:  # a has the weights
        worth += tl.sum(dx * d, 1)
    g = dx * broadcast(weights[f], ACROSS)
    slope = g * along
    if part.directed:
        slope = tl.where(gap == 0, 0.0, slope)  # the same direction, but for rounding
    far = tl.where(close == 0, slope, 0.0)
    if part.kind != "sphere":  # whose points do not move along themselves
        own += tl.sum(far, 1)
    if part.directed:
        far = far * note(b, INVERSE, f, metric, COLUMNS)[None, :]
    grad = pulled(-far, b_tiles[f], grad)
    if some:
        near = slope * close
        place = tl.arange(0, part.width)
        for column in tl.range(0, part.size, disable_licm=True):
            number = tl.sum(near * apart(a, b, close, column, f, metric, ROWS, COLUMNS), 1)
            grad += tl.where((place == column)[None, :], number[:, None], 0.0)
    if part.kind == "hyperbolic":
        radius += tl.sum(g * radial, 1)
    if metric.product:
        straight = pulled(dx * broadcast(weights[metric.count], ACROSS), b_tiles[f], straight)
    return grad, own, radius, worth, straight


@triton.jit
def pull(
    sums, dx, weights, gaps, a, b, b_tiles, metric: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    ACROSS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Add a tile to the gradients of parts FIRST to LAST of the points of a, and of their weights.

    dx: the gradient of log K without waves. gaps: as in ``tile_of``.
    """
    found = ()
    for f in tl.static_range(FIRST, LAST):
        found = found + (  # noqa: RUF005 (Triton joins tuples so)
            pull_part(sums[f - FIRST], dx, weights, gaps[f - FIRST], a, b, b_tiles, f, metric, ROWS, COLUMNS, ACROSS),
        )
    return found


@triton.jit
def put_part(out, sums, a, keep, f: tl.constexpr, metric: tl.constexpr, ROWS: tl.constexpr):
    part: tl.constexpr = metric.parts[f]
    x, _, batch, head, _, first, limit = a
    grad, own, radius, _, straight = sums
    unit = tile_rows_again(x, batch, head, first, limit, part.size, ROWS, part.width, ".cg", part.start)
    if part.directed:
        inverse = note(a, INVERSE, f, metric, ROWS)
        unit = unit * inverse[:, None]
        grad += own[:, None] * unit
        # a direction does not move along itself
        back = tl.sum(grad * unit, 1) * inverse
        if part.kind == "hyperbolic":
            back -= radius * note(a, FREE, f, metric, ROWS)
        grad = grad * inverse[:, None] - back[:, None] * unit
    else:
        grad += own[:, None] * unit
    if metric.product:
        grad += straight
    put_rows(
        out, tl.where(keep[:, None], grad, 0.0), batch, head, first, limit, part.size, ROWS, part.width, part.start
    )


@triton.jit
def put_points(out, sums, a, keep, metric: tl.constexpr, ROWS: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr):
    """Write the gradients of the points of a from the sums of ``pull``; zeros where they are not to ``keep``."""
    for f in tl.static_range(FIRST, LAST):
        put_part(out, sums[f - FIRST], a, keep, f, metric, ROWS)


@triton.jit
def block_of_keys(given, traits: tl.constexpr, shape: tl.constexpr):
    """(batch, key head, line, first key, first query that sees one of its keys, blocks of such queries)."""
    sizes = given.sizes
    blocks = tl.cdiv(sizes.keys, shape.keys)
    line = tl.program_id(0) // blocks
    kv_heads = sizes.heads // sizes.groups
    begin = tl.program_id(0) % blocks * shape.keys
    last = tl.minimum(begin + shape.keys, sizes.keys) - 1
    start = first_query_seeing(begin, given, traits) // shape.queries * shape.queries
    steps = tl.maximum(tl.cdiv(first_query_past(last, given, traits) - start, shape.queries), 0)
    return line // kv_heads, line % kv_heads, line, begin, start, steps


@triton.jit
def block_of_queries(index, kv_head, start, steps, sizes, traits: tl.constexpr, QUERIES: tl.constexpr):
    """(head, first query) of a step. One loop runs over blocks of all heads: nested loops would need more registers."""
    head, block = head_and_block(index, kv_head, steps, sizes, traits)
    return head, start + block * QUERIES


@triton.jit
def keys_seen(s, first, given, traits: tl.constexpr, QUERIES: tl.constexpr):
    """Which of the keys s a block of queries sees, (keys, queries)."""
    lo, hi = visible_keys(tl.minimum(first + tl.arange(0, QUERIES), given.sizes.queries - 1), given, traits)
    return between(s[:, None], lo[None, :], hi[None, :], traits)


@triton.jit
def distance_values_kernel(
    q, k, dy, dv, factor, delta, query_notes, key_notes, weights, coefficients, given, metric: tl.constexpr,
    traits: tl.constexpr, shape: tl.constexpr,
):  # fmt: skip
    """dV of a block of keys, summed over queries of all heads that share it. Tiles are transposed: (keys, queries)."""
    batch, kv_head, line, begin, start, steps = block_of_keys(given, traits, shape)
    sizes = given.sizes
    a = (k, key_notes, batch, kv_head, line, begin, sizes.keys)
    k_tiles = part_tiles(a, metric, shape.keys)
    s = begin + tl.arange(0, shape.keys)
    total = tl.zeros([shape.keys, shape.value_width], tl.float32)
    for index in tl.range(0, steps * sizes.groups, disable_licm=True):
        head, first = block_of_queries(index, kv_head, start, steps, sizes, traits, shape.queries)
        query_line = batch * sizes.heads + head
        b = (q, query_notes, batch, head, query_line, first, sizes.queries)
        weighs = weights_of(weights, query_line, first, sizes.queries, metric, shape.queries)
        x = tile_of(
            a, b, k_tiles, part_tiles(b, metric, shape.queries), weighs, metric, shape.keys, shape.queries, True
        )[0]
        if metric.waves > 0:
            x = waves(x, coefficients + head * 3 * metric.waves, metric.waves)[0]
        dy_tile = load_slopes(dy, batch, head, first, given, traits, shape, True)
        kept = row_terms(factor, delta, query_line, first, sizes.queries, traits, shape.queries)[0]
        visible = keys_seen(s, first, given, traits, shape.queries)
        weight = tile_backward.weights(x * LOG2E, kept[None, :], visible, coefficients, None, traits, True)
        total = added(weight, dy_tile, total, traits)
    if traits.key_mask:
        # rows of the gradient are apart, so a key nobody sees is struck out here and not in every tile
        total = tl.where(real_keys(begin, batch, given, shape.keys)[:, None], total, 0.0)
    put_rows(dv, total, batch, kv_head, begin, sizes.keys, sizes.value_dim, shape.keys, shape.value_width)


@triton.jit
def distance_keys_kernel(
    q, k, v, dy, dk, factor, delta, query_notes, key_notes, weights, coefficients, given, metric: tl.constexpr,
    traits: tl.constexpr, shape: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """dK of a block of keys, for parts FIRST to LAST only, as all parts together would not fit in registers."""
    batch, kv_head, line, begin, start, steps = block_of_keys(given, traits, shape)
    sizes = given.sizes
    a = (k, key_notes, batch, kv_head, line, begin, sizes.keys)
    k_tiles = part_tiles(a, metric, shape.keys)
    v_tile = load_values(v, batch, kv_head, begin, given, traits, shape, True)
    s = begin + tl.arange(0, shape.keys)
    sums = nothing(metric, shape.keys, FIRST, LAST)
    for index in tl.range(0, steps * sizes.groups, disable_licm=True):
        head, first = block_of_queries(index, kv_head, start, steps, sizes, traits, shape.queries)
        query_line = batch * sizes.heads + head
        b = (q, query_notes, batch, head, query_line, first, sizes.queries)
        q_tiles = part_tiles(b, metric, shape.queries)
        weighs = weights_of(weights, query_line, first, sizes.queries, metric, shape.queries)
        found = tile_of(a, b, k_tiles, q_tiles, weighs, metric, shape.keys, shape.queries, True, FIRST, LAST)
        x = found[0]
        if metric.waves > 0:
            turned = waves(x, coefficients + head * 3 * metric.waves, metric.waves)
            x = turned[0]
        dy_tile = load_slopes(dy, batch, head, first, given, traits, shape, True)
        kept, taken = row_terms(factor, delta, query_line, first, sizes.queries, traits, shape.queries)
        visible = keys_seen(s, first, given, traits, shape.queries)
        weight = tile_backward.weights(x * LOG2E, kept[None, :], visible, coefficients, None, traits, True)
        dp = multiplied(v_tile, tl.trans(dy_tile))
        dx = slopes(x, weight, dp, kept[None, :], taken[None, :], visible, coefficients, None, traits, True)[0]
        if metric.waves > 0:
            dx = dx * turned[1]
        sums = pull(sums, dx, weighs, found[1], a, b, q_tiles, metric, shape.keys, shape.queries, True, FIRST, LAST)
    keep = s < sizes.keys
    if traits.key_mask:
        keep = real_keys(begin, batch, given, shape.keys)
    put_points(dk, sums, a, keep, metric, shape.keys, FIRST, LAST)


@triton.jit
def distance_queries_kernel(
    q, k, v, dy, dq, dweights, dcoefficients, factor, delta, query_notes, key_notes, weights, coefficients, given,
    metric: tl.constexpr, traits: tl.constexpr, shape: tl.constexpr, LEARNED: tl.constexpr, FIRST: tl.constexpr,
    LAST: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries, for parts FIRST to LAST, and the gradient of their weights (B, H, T, terms).

    If LEARNED also its part of dcoefficients (B, H, blocks, 3 waves).
    """
    sizes = given.sizes
    blocks = tl.cdiv(sizes.queries, shape.queries)
    line = tl.program_id(0) // blocks
    batch, head = line // sizes.heads, line % sizes.heads
    kv_head = head // sizes.groups
    block = blocks - 1 - tl.program_id(0) % blocks
    begin = block * shape.queries
    last = tl.minimum(begin + shape.queries, sizes.queries) - 1
    t = tl.minimum(begin + tl.arange(0, shape.queries), last)
    lo, hi = visible_keys(t, given, traits)
    start = visible_keys(begin, given, traits)[0] // shape.keys * shape.keys
    stop = visible_keys(last, given, traits)[1]
    a = (q, query_notes, batch, head, line, begin, sizes.queries)
    q_tiles = part_tiles(a, metric, shape.queries)
    dy_tile = load_slopes(dy, batch, head, begin, given, traits, shape, True)
    kept, taken = row_terms(factor, delta, line, begin, sizes.queries, traits, shape.queries)
    kept, taken = kept[:, None], taken[:, None]
    weighs = weights_of(weights, line, begin, sizes.queries, metric, shape.queries)
    of_product = tl.zeros([shape.queries], tl.float32)
    of_waves = ()
    for _ in tl.static_range(tl.constexpr(3 * metric.waves if LEARNED else 0)):
        of_waves = of_waves + (tl.zeros([shape.queries], tl.float32),)  # noqa: RUF005
    c = coefficients + head * 3 * metric.waves
    kv_line = batch * (sizes.heads // sizes.groups) + kv_head
    sums = nothing(metric, shape.queries, FIRST, LAST)
    for first in tl.range(start, stop, shape.keys, disable_licm=True):
        b = (k, key_notes, batch, kv_head, kv_line, first, sizes.keys)
        k_tiles = part_tiles(b, metric, shape.keys)
        x, gaps, whole = tile_of(a, b, q_tiles, k_tiles, weighs, metric, shape.queries, shape.keys, False, FIRST, LAST)
        if metric.waves > 0:
            x, turned, d, evens, odds = waves(x, c, metric.waves)
        visible = visible_pairs(x, first, lo, hi, batch, given, traits, shape.keys, True)
        v_tile = load_values(v, batch, kv_head, first, given, traits, shape, True)
        weight = tile_backward.weights(x * LOG2E, kept, visible, c, None, traits, True)
        dp = multiplied(dy_tile, tl.trans(v_tile))
        dx = slopes(x, weight, dp, kept, taken, visible, c, None, traits, True)[0]
        if metric.waves > 0:
            if LEARNED:
                of_waves = add_waves(of_waves, dx, d, evens, odds, c, metric.waves)
            dx = dx * turned
        of_product += tl.sum(dx * whole, 1)
        sums = pull(sums, dx, weighs, gaps, a, b, k_tiles, metric, shape.queries, shape.keys, False, FIRST, LAST)
    place = begin + tl.arange(0, shape.queries)
    row = dweights + (tl.cast(line, tl.int64) * sizes.queries + place) * metric.weights
    for f in tl.static_range(FIRST, LAST):
        tl.store(row + f, sums[f - FIRST][3], mask=place < sizes.queries)
    if metric.product and FIRST == 0:
        tl.store(row + metric.count, of_product, mask=place < sizes.queries)
    part = tl.cast(line, tl.int64) * blocks + block
    for j in tl.static_range(tl.constexpr(3 * metric.waves if LEARNED else 0)):
        tl.store(dcoefficients + part * (3 * metric.waves) + j, tl.sum(of_waves[j], 0))
    put_points(dq, sums, a, place < sizes.queries, metric, shape.queries, FIRST, LAST)


@triton.jit
def add_waves(sums, dx, d, evens, odds, c, n: tl.constexpr):
    """sums of a query each + those of a tile: gradients of amplitudes, decays and frequencies."""
    amplitudes, decays, frequencies = (), (), ()
    for k in tl.static_range(n):
        a = tl.load(c + k)
        amplitudes = amplitudes + (sums[k] + tl.sum(dx * evens[k], 1),)  # noqa: RUF005
        decays = decays + (sums[n + k] - a * tl.sum(dx * d * evens[k], 1),)  # noqa: RUF005
        frequencies = frequencies + (sums[2 * n + k] - a * tl.sum(dx * d * odds[k], 1),)  # noqa: RUF005
    return amplitudes + decays + frequencies


def backward(
    grads: Gradients, inputs: DistanceInputs, results: Results, spec: DistanceSpec, asked: frozenset[str]
) -> Gradients:
    """(dq, dk, dv, dweights, dcoefficients): like k and v; (B, H, T, terms) float32; (H, 3 waves) float64, or None."""
    (dy,), (y, factor), inputs = grads, results, prepared(inputs)
    assert dy is not None
    q, k, v, _, coefficients, *_ = inputs
    learned = "coefficients" in asked
    batch, heads, queries, _ = q.shape
    kv_heads = batch * k.shape[1]
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    with tiles.on(q.device):
        call = distance_tiles.call(inputs, spec)
        metric = call.metric
        delta = tiles.row_products(dy, y) if spec.rules.anchor == "row" else None
        points, values, slope = (tiles.rows_of(q), tiles.rows_of(k)), tiles.rows_of(v), tiles.rows_of(dy.to(v.dtype))
        rest = factor, delta, call.query_notes, call.key_notes, call.weights, coefficients, call.tiles.given
        tiling = distance_tiles.choose("values", q, v, metric)
        common = (*points, slope, tiles.rows_of(dv), *rest)
        tiles.launch(
            distance_values_kernel,
            kv_heads * tiles.ceil_div(k.shape[2], tiling.keys),
            common,
            distance_tiles.constants(call, tiling, q, v),
            tiling,
        )
        dweights = torch.empty(batch, heads, queries, metric.weights, dtype=torch.float32, device=q.device)
        parts = None
        for first, last in metric.groups:
            tiling = distance_tiles.choose("keys", q, v, metric)
            which = {**distance_tiles.constants(call, tiling, q, v), "FIRST": first, "LAST": last}
            common = (*points, values, slope, tiles.rows_of(dk), *rest)
            tiles.launch(
                distance_keys_kernel, kv_heads * tiles.ceil_div(k.shape[2], tiling.keys), common, which, tiling
            )
            tiling = distance_tiles.choose("queries", q, v, metric)
            blocks = tiles.ceil_div(queries, tiling.queries)
            which = {
                **distance_tiles.constants(call, tiling, q, v),
                "FIRST": first,
                "LAST": last,
                "LEARNED": learned and metric.waves > 0 and not first,
            }
            if which["LEARNED"]:
                parts = torch.empty(batch, heads, blocks, 3 * metric.waves, dtype=torch.float32, device=q.device)
            common = (*points, values, slope, tiles.rows_of(dq), dweights, parts, *rest)
            tiles.launch(distance_queries_kernel, batch * heads * blocks, common, which, tiling)
    # float32 inside a block, float64 across blocks: the sums run over all queries and keys
    return dq, dk, dv, dweights, None if parts is None else parts.sum((0, 2), dtype=torch.float64)


__all__ = ["backward"]
