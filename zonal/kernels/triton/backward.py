"""Gradients by recomputing every tile. One kernel runs over blocks of keys (dK, dV), one over blocks of queries (dQ,
scale, coefficients).

With D_t = dy_t . y_t for a row anchor (0 otherwise) and g_ts = factor_t (dy_t . v_s - D_t):
dv_s = sum_t factor_t K_ts dy_t, dS_ts = g_ts l'(S_ts), dc_k = sum_ts g_ts base(S_ts) S_ts^k; in log space
dS_ts = W_ts (dy_t . v_s - D_t). Each number is written by one program. There are no atomics, and the same call gives
the same bits.
"""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl

from zonal.kernels.op import Gradients, Results
from zonal.kernels.tile import TileInputs, TileSpec, padded
from zonal.kernels.triton import tiles
from zonal.kernels.triton.tiles import (
    LOG2E,
    SHORTEST,
    between,
    fading,
    first_query_past,
    first_query_seeing,
    head_and_block,
    key_ranges,
    load_keys,
    load_queries,
    load_slopes,
    load_values,
    log2_kernel,
    marks,
    put_rows,
    real_keys,
    row_numbers,
    scores,
    tile_rows_again,
    visible_keys,
    visible_pairs,
    weighted,
)


@triton.jit
def row_terms(factor, delta, line, first, queries, traits: tl.constexpr, ROWS: tl.constexpr):
    """(factor, or the log to subtract from log2 K; what to subtract from dy . v) per query; weight 0 past the end."""
    if traits.online:
        kept = row_numbers(factor, line, first, queries, ROWS, float("inf")) * LOG2E
    else:
        kept = row_numbers(factor, line, first, queries, ROWS, 0.0)
    taken = kept * 0
    if traits.anchor == "row":
        taken = row_numbers(delta, line, first, queries, ROWS, 0.0)
        if not traits.log:
            taken = taken * kept
    return kept, taken


@triton.jit
def weights(x, kept, visible, c, value: tl.constexpr, traits: tl.constexpr, CUT: tl.constexpr):
    """W of a tile from its scores; kept broadcasts over it."""
    if traits.online:
        weight = tl.exp2(log2_kernel(x, c, value, traits) - kept)
    elif traits.log:
        weight = tl.exp2(log2_kernel(x, c, value, traits)) * kept
    else:
        weight = value(x, c, traits.n) * kept
    if CUT:
        weight = tl.where(visible, weight, 0.0)
    return weight


@triton.jit
def slopes(x, weight, dp, kept, taken, visible, c, derivative: tl.constexpr, traits: tl.constexpr, CUT: tl.constexpr):
    """(the factor of base in a coefficient's gradient, dS) of a tile, from its scores, W and dp = dy . v.

    kept and taken broadcast over the tile.
    """
    if traits.log:
        g = dp
        if traits.anchor == "row":
            g = dp - taken
        g = weight * g
        if traits.mapped:
            return g, g * derivative(x, c, traits.n)
        else:
            return g, g
    else:
        g = dp * kept
        if traits.anchor == "row":
            g = g - taken
        if CUT:
            g = tl.where(visible, g, 0.0)
        return g, g * derivative(x, c, traits.n)


@triton.jit
def through_norm(grad, raw, along, square):
    """The gradient of raw from that of raw / |raw|. along = grad . raw, square = |raw|^2."""
    norm = tl.sqrt(square)
    inverse = 1 / tl.maximum(norm, SHORTEST)
    # a step along raw changes nothing
    along = tl.where(norm >= SHORTEST, along * inverse * inverse, 0.0)
    return (grad - along[:, None] * raw) * inverse[:, None]


@triton.jit
def put_queries(dq, dscale, grad, q, scale, batch, head, begin, sizes, traits: tl.constexpr, shape: tl.constexpr):
    """Write dQ of a block, and its part of dscale, from the gradients of scale q^, with q^ = q or q / |q|."""
    # d/dscale of scale q^ . k^ needs no tile of its own: it is q^ times what has been summed
    raw = tile_rows_again(q, batch, head, begin, sizes.queries, sizes.key_dim, shape.queries, shape.key_width, ".cg")
    along, square = tl.sum(grad * raw, 1), tl.sum(raw * raw, 1)
    if traits.normalise:
        tl.store(dscale, tl.sum(along / tl.maximum(tl.sqrt(square), SHORTEST), 0))
    else:
        tl.store(dscale, tl.sum(along, 0))
    grad = grad * scale
    if traits.normalise:
        raw = tile_rows_again(
            q, batch, head, begin, sizes.queries, sizes.key_dim, shape.queries, shape.key_width, ".ca"
        )
        grad = through_norm(grad, raw, along * scale, square)
    put_rows(dq, grad, batch, head, begin, sizes.queries, sizes.key_dim, shape.queries, shape.key_width)


@triton.jit
def put_keys(dk, grad, k, batch, kv_head, begin, sizes, traits: tl.constexpr, shape: tl.constexpr):
    """Write dK of a block, from the gradients of k or k / |k|."""
    if traits.normalise:
        raw = tile_rows_again(k, batch, kv_head, begin, sizes.keys, sizes.key_dim, shape.keys, shape.key_width, ".cg")
        along, square = tl.sum(grad * raw, 1), tl.sum(raw * raw, 1)
        raw = tile_rows_again(k, batch, kv_head, begin, sizes.keys, sizes.key_dim, shape.keys, shape.key_width, ".ca")
        grad = through_norm(grad, raw, along, square)
    put_rows(dk, grad, batch, kv_head, begin, sizes.keys, sizes.key_dim, shape.keys, shape.key_width)


@triton.jit
def add_queries(
    dk, dv, lost, k_tile, v_tile, key_gain, key_whole, key_rest, first_key, begin, stop, batch, kv_head, q, dy, factor,
    delta, given, value: tl.constexpr, derivative: tl.constexpr, traits: tl.constexpr, shape: tl.constexpr,
    FADED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add queries [begin, stop) of the heads that share a key head to the gradients of a block of keys.

    Tiles are transposed: (keys, queries).

    Where something fades, key_whole and key_rest are the keys' marks, and for the row anchor lost (keys,) gets
    sum_t W_ts dy_t . y_t. Otherwise the marks may be None, and lost is a number that is returned as it is (Triton 3.6
    cannot return None).
    """
    sizes = given.sizes
    s = first_key + tl.arange(0, shape.keys)
    blocks = tl.maximum(tl.cdiv(stop - begin, shape.queries), 0)
    # one loop over the blocks of all heads: loops inside a loop would keep the addresses of each of them in registers
    for index in tl.range(0, blocks * sizes.groups):
        head, block = head_and_block(index, kv_head, blocks, sizes, traits)
        first = begin + block * shape.queries
        line = batch * sizes.heads + head
        c = given.coefficients + head * traits.stride
        q_tile = load_queries(q, batch, head, first, given, traits, shape, CUT)
        dy_tile = load_slopes(dy, batch, head, first, given, traits, shape, CUT)
        kept, taken = row_terms(factor, delta, line, first, sizes.queries, traits, shape.queries)
        query_gain = tl.load(given.scale + head)
        if traits.normalise:
            query_gain = (query_gain * row_numbers(given.q_inverse, line, first, sizes.queries, shape.queries, 0.0))[
                None, :
            ]
        unit = query_gain * LOG2E if traits.bits else query_gain
        x = scores(k_tile, q_tile, unit, key_gain, traits)
        visible = None
        if CUT:
            t = tl.minimum(first + tl.arange(0, shape.queries), sizes.queries - 1)
            lo, hi = visible_keys(t, given, traits)
            visible = between(s[:, None], lo[None, :], hi[None, :], traits)
        by, less = kept[None, :], taken[None, :]
        if FADED:
            row_whole, row_rest = marks(
                given.fade_rows,
                batch * (sizes.heads // sizes.groups) + kv_head,
                first,
                sizes.queries,
                shape.queries,
                float("-inf"),
            )
            fade = fading(row_whole[None, :], row_rest[None, :], key_whole[:, None], key_rest[:, None])
            by, less = by * fade, less * fade
        weight = weights(x, by, visible, c, value, traits, CUT)
        dv = weighted(weight, dy_tile, dv, traits)
        if FADED and traits.anchor == "row":
            lost += tl.sum(weight * row_numbers(delta, line, first, sizes.queries, shape.queries, 0.0)[None, :], 1)
        dp = tl.dot(v_tile, tl.trans(dy_tile), input_precision="ieee")
        _, ds = slopes(x, weight, dp, by, less, visible, c, derivative, traits, CUT)
        dk = weighted(ds * query_gain, q_tile, dk, traits)
    return dk, dv, lost


@triton.jit
def keys_kernel(
    q, k, v, dy, dk, dv, factor, delta, given, value: tl.constexpr, derivative: tl.constexpr, traits: tl.constexpr,
    shape: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys: a sum over the queries of all heads that share it."""
    sizes = given.sizes
    blocks = tl.cdiv(sizes.keys, shape.keys)
    line = tl.program_id(0) // blocks
    kv_heads = sizes.heads // sizes.groups
    batch, kv_head = line // kv_heads, line % kv_heads
    begin = tl.program_id(0) % blocks * shape.keys
    last = tl.minimum(begin + shape.keys, sizes.keys) - 1
    k_tile = load_keys(k, batch, kv_head, begin, given, traits, shape, True)
    v_tile = load_values(v, batch, kv_head, begin, given, traits, shape, True)
    key_gain = 1.0
    if traits.normalise:
        key_gain = row_numbers(given.k_inverse, line, begin, sizes.keys, shape.keys, 0.0)[:, None]
    # queries in [outer, stop) see some of the keys, in [inner, whole) all of them
    outer = first_query_seeing(begin, given, traits) // shape.queries * shape.queries
    stop = first_query_past(last, given, traits)
    inner = tl.maximum(outer, tl.cdiv(first_query_seeing(last, given, traits), shape.queries) * shape.queries)
    whole = tl.maximum(inner, first_query_past(begin, given, traits) // shape.queries * shape.queries)
    dk_tile = tl.zeros([shape.keys, shape.key_width], tl.float32)
    dv_tile = tl.zeros([shape.keys, shape.value_width], tl.float32)
    begins, stops = (outer, inner, whole), (tl.minimum(inner, stop), whole, stop)
    for i in tl.static_range(3):
        dk_tile, dv_tile, _ = add_queries(
            dk_tile, dv_tile, 0.0, k_tile, v_tile, key_gain, None, None, begin, begins[i], stops[i], batch, kv_head, q,
            dy, factor, delta, given, value, derivative, traits, shape, False, i != 1,
        )  # fmt: skip
    if traits.key_mask:
        # rows of the gradients are apart, so a key nobody sees is struck out here and not in every tile
        real = real_keys(begin, batch, given, shape.keys)[:, None]
        dk_tile = tl.where(real, dk_tile, 0.0)
        dv_tile = tl.where(real, dv_tile, 0.0)
    put_rows(dv, dv_tile, batch, kv_head, begin, sizes.keys, sizes.value_dim, shape.keys, shape.value_width)
    put_keys(dk, dk_tile, k, batch, kv_head, begin, sizes, traits, shape)


@triton.jit
def add_powers(sums, x, g, LEARNED: tl.constexpr):
    """sums[k] + sum over keys of g x^k, for k < LEARNED: one number a query each."""
    found = ()
    term = g
    for k in tl.static_range(LEARNED):
        found = found + (sums[k] + tl.sum(term, 1),)  # noqa: RUF005 (kernels know no starred tuples)
        if k + 1 < LEARNED:
            term = term * x
    return found


@triton.jit
def add_keys(
    dq, sums, q_tile, dy_tile, gain, kept, taken, whole, rest, lo, hi, begin, stop, batch, kv_head, k, v, c, given,
    value: tl.constexpr, derivative: tl.constexpr, base: tl.constexpr, traits: tl.constexpr, shape: tl.constexpr,
    LEARNED: tl.constexpr, FADED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add keys [begin, stop) to the gradients of a block of queries.

    kept and taken (rows, 1): of ``row_terms``. whole and rest: the queries' marks where something fades, else None.
    """
    sizes = given.sizes
    line = batch * (sizes.heads // sizes.groups) + kv_head
    for first in tl.range(begin, stop, shape.keys):
        k_tile = load_keys(k, batch, kv_head, first, given, traits, shape, CUT)
        v_tile = load_values(v, batch, kv_head, first, given, traits, shape, CUT)
        key_gain = 1.0
        if traits.normalise:
            key_gain = row_numbers(given.k_inverse, line, first, sizes.keys, shape.keys, 0.0)[None, :]
        x = scores(q_tile, k_tile, gain, key_gain, traits)
        dp = tl.dot(dy_tile, tl.trans(v_tile), input_precision="ieee")
        visible = None
        if CUT or traits.key_mask:
            visible = visible_pairs(x, first, lo, hi, batch, given, traits, shape.keys, CUT)
        masked: tl.constexpr = CUT or traits.key_mask
        by, less = kept, taken
        if FADED:
            key_whole, key_rest = marks(given.fade_keys, line, first, sizes.keys, shape.keys, float("inf"))
            fade = fading(whole[:, None], rest[:, None], key_whole[None, :], key_rest[None, :])
            by, less = kept * fade, taken * fade
        weight = weights(x, by, visible, c, value, traits, masked)
        g, ds = slopes(x, weight, dp, by, less, visible, c, derivative, traits, masked)
        if LEARNED > 0:
            sums = add_powers(sums, x, g * base(x, c, traits.n), LEARNED)
        if traits.normalise:
            ds = ds * key_gain
        dq = weighted(ds, k_tile, dq, traits)
    return dq, sums


@triton.jit
def queries_kernel(
    q, k, v, dy, dq, dscale, dcoefficients, factor, delta, given, value: tl.constexpr, derivative: tl.constexpr,
    base: tl.constexpr, traits: tl.constexpr, shape: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries, and its part of two sums.

    They are dscale (B, H, blocks) and dcoefficients (B, H, blocks, LEARNED).
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
    lo_first, hi_first = visible_keys(begin, given, traits)
    lo_last, hi_last = visible_keys(last, given, traits)
    c = given.coefficients + head * traits.stride
    q_tile = load_queries(q, batch, head, begin, given, traits, shape, True)
    dy_tile = load_slopes(dy, batch, head, begin, given, traits, shape, True)
    kept, taken = row_terms(factor, delta, line, begin, sizes.queries, traits, shape.queries)
    kept, taken = kept[:, None], taken[:, None]
    scale_of_head = tl.load(given.scale + head)
    gain = scale_of_head * LOG2E if traits.bits else scale_of_head
    if traits.normalise:
        gain = (gain * row_numbers(given.q_inverse, line, begin, sizes.queries, shape.queries, 0.0))[:, None]
    grad = tl.zeros([shape.queries, shape.key_width], tl.float32)
    sums = ()
    for _ in tl.static_range(LEARNED):
        sums = sums + (tl.zeros([shape.queries], tl.float32),)  # noqa: RUF005
    begins, stops = key_ranges(lo_first // shape.keys * shape.keys, hi_first, lo_last, hi_last, traits, shape.keys)
    for i in tl.static_range(tl.constexpr(0 if traits.edged else 1), 3):
        grad, sums = add_keys(
            grad, sums, q_tile, dy_tile, gain, kept, taken, None, None, lo, hi, begins[i], stops[i], batch, kv_head, k,
            v, c, given, value, derivative, base, traits, shape, LEARNED, False, i != 1,
        )  # fmt: skip
    part = tl.cast(line, tl.int64) * blocks + block
    for j in tl.static_range(LEARNED):
        tl.store(dcoefficients + part * LEARNED + j, tl.sum(sums[j], 0))
    put_queries(dq, dscale + part, grad, q, scale_of_head, batch, head, begin, sizes, traits, shape)


def backward(
    grads: Gradients, inputs: TileInputs, results: Results, spec: TileSpec, asked: frozenset[str]
) -> Gradients:
    """(dq, dk, dv, dscale, dcoefficients): like q, k, v; (H,) float32; (H, n) float64, 0 for constants. Or None."""
    inputs, powers = tiles.levelled(inputs, spec.normalise)
    (dy,), (q, k, v, *_), (y, factor, _) = grads, inputs, results
    assert dy is not None
    needs = [name in asked for name in ("q", "k", "v", "scale", "coefficients")]
    batch, heads, queries, _ = q.shape
    learned = spec.learned if needs[4] else 0
    dq = dk = dv = dscale = dcoefficients = None
    with tiles.on(q.device):
        call = tiles.call(inputs, spec)
        delta = tiles.row_products(dy, y) if spec.anchor == "row" else None
        tokens = tuple(tiles.rows_of(x) for x in (q, k, v, dy))
        rest = factor, delta, call.given
        code = {
            "value": call.functions.value,
            "derivative": call.functions.derivative,
            "traits": call.traits,
        }
        if needs[1] or needs[2]:
            dk, dv = (
                torch.empty(k.shape, dtype=k.dtype, device=k.device),
                torch.empty(v.shape, dtype=v.dtype, device=v.device),
            )
            tiling = tiles.choose("keys", q, v, call.traits)
            programs = batch * k.shape[1] * tiles.ceil_div(k.shape[2], tiling.keys)
            outputs = tiles.rows_of(dk), tiles.rows_of(dv)
            tiles.launch(
                keys_kernel, programs, (*tokens, *outputs, *rest), {**code, "shape": tiles.shape(tiling, q, v)}, tiling
            )
        if needs[0] or needs[3] or needs[4]:
            dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            tiling = tiles.choose("queries", q, v, call.traits)
            blocks = tiles.ceil_div(queries, tiling.queries)
            scale_parts = torch.empty(batch, heads, blocks, dtype=torch.float32, device=q.device)
            parts = torch.empty(batch, heads, blocks, learned, dtype=torch.float32, device=q.device)
            more = {"base": call.functions.base, "LEARNED": learned}
            outputs = tiles.rows_of(dq), scale_parts, parts
            tiles.launch(
                queries_kernel,
                batch * heads * blocks,
                (*tokens, *outputs, *rest),
                {**code, **more, "shape": tiles.shape(tiling, q, v)},
                tiling,
            )
            # float32 inside a block, float64 across blocks: the sums run over all queries and keys
            dscale = scale_parts.sum((0, 2), dtype=torch.float64).float() if needs[3] else None
            dcoefficients = padded(parts.sum((0, 2), dtype=torch.float64), call.given.coefficients) if learned else None
    dq, dk = tiles.through_powers((dq if needs[0] else None, dk if needs[1] else None), powers)
    return dq, dk, dv if needs[2] else None, dscale, dcoefficients


__all__ = ["backward"]
