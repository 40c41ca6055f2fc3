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

from zonal.kernels.abi import plain
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
    log2_kernel,
    marks,
    put_rows,
    real_keys,
    row_numbers,
    scores,
    tile_rows,
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
def put_queries(
    dq, dscale, grad, q, scale, batch, head, begin, sizes, traits: tl.constexpr, QUERIES: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
):  # fmt: skip
    """Write dQ of a block, and its part of dscale, from the gradients of scale q^, with q^ = q or q / |q|."""
    # d/dscale of scale q^ . k^ needs no tile of its own: it is q^ times what has been summed
    raw = tile_rows_again(q, batch, head, begin, sizes.queries, sizes.key_dim, QUERIES, KEY_WIDTH, ".cg")
    along, square = tl.sum(grad * raw, 1), tl.sum(raw * raw, 1)
    if traits.normalise:
        tl.store(dscale, tl.sum(along / tl.maximum(tl.sqrt(square), SHORTEST), 0))
    else:
        tl.store(dscale, tl.sum(along, 0))
    grad = grad * scale
    if traits.normalise:
        raw = tile_rows_again(q, batch, head, begin, sizes.queries, sizes.key_dim, QUERIES, KEY_WIDTH, ".ca")
        grad = through_norm(grad, raw, along * scale, square)
    put_rows(dq, grad, batch, head, begin, sizes.queries, sizes.key_dim, QUERIES, KEY_WIDTH)


@triton.jit
def put_keys(
    dk, grad, k, batch, kv_head, begin, sizes, traits: tl.constexpr, KEYS: tl.constexpr, KEY_WIDTH: tl.constexpr
):
    """Write dK of a block, from the gradients of k or k / |k|."""
    if traits.normalise:
        raw = tile_rows_again(k, batch, kv_head, begin, sizes.keys, sizes.key_dim, KEYS, KEY_WIDTH, ".cg")
        along, square = tl.sum(grad * raw, 1), tl.sum(raw * raw, 1)
        raw = tile_rows_again(k, batch, kv_head, begin, sizes.keys, sizes.key_dim, KEYS, KEY_WIDTH, ".ca")
        grad = through_norm(grad, raw, along, square)
    put_rows(dk, grad, batch, kv_head, begin, sizes.keys, sizes.key_dim, KEYS, KEY_WIDTH)


@triton.jit
def add_queries(
    dk, dv, lost, k_tile, v_tile, key_gain, key_whole, key_rest, first_key, begin, stop, batch, kv_head, q, dy,
    q_inverse, factor, delta, scale, coefficients, edges, fade_rows, sizes, value: tl.constexpr,
    derivative: tl.constexpr, traits: tl.constexpr, FADED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, STRIDE: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add queries [begin, stop) of the heads that share a key head to the gradients of a block of keys.

    Tiles are transposed: (keys, queries).

    Where something fades, key_whole and key_rest are the keys' marks, and for the row anchor lost (keys,) gets
    sum_t W_ts dy_t . y_t. Otherwise the marks may be None, and lost is a number that is returned as it is (Triton 3.6
    cannot return None).
    """
    s = first_key + tl.arange(0, KEYS)
    blocks = tl.maximum(tl.cdiv(stop - begin, QUERIES), 0)
    # one loop over the blocks of all heads: loops inside a loop would keep the addresses of each of them in registers
    for index in tl.range(0, blocks * sizes.groups):
        head, block = head_and_block(index, kv_head, blocks, sizes, traits)
        first = begin + block * QUERIES
        line = batch * sizes.heads + head
        c = coefficients + head * STRIDE
        q_tile = tile_rows(
            q, batch, head, first, sizes.queries, sizes.key_dim, QUERIES, KEY_WIDTH, CUT, traits.narrow_key
        )
        dy_tile = tile_rows(
            dy, batch, head, first, sizes.queries, sizes.value_dim, QUERIES, VALUE_WIDTH, CUT, traits.narrow_value
        )
        kept, taken = row_terms(factor, delta, line, first, sizes.queries, traits, QUERIES)
        query_gain = tl.load(scale + head)
        if traits.normalise:
            query_gain = (query_gain * row_numbers(q_inverse, line, first, sizes.queries, QUERIES, 0.0))[None, :]
        unit = query_gain * LOG2E if traits.bits else query_gain
        x = scores(k_tile, q_tile, unit, key_gain, traits)
        visible = None
        if CUT:
            t = tl.minimum(first + tl.arange(0, QUERIES), sizes.queries - 1)
            lo, hi = visible_keys(t, edges, sizes, traits)
            visible = between(s[:, None], lo[None, :], hi[None, :], traits)
        by, less = kept[None, :], taken[None, :]
        if FADED:
            row_whole, row_rest = marks(
                fade_rows, batch * (sizes.heads // sizes.groups) + kv_head, first, sizes.queries, QUERIES, float("-inf")
            )
            fade = fading(row_whole[None, :], row_rest[None, :], key_whole[:, None], key_rest[:, None])
            by, less = by * fade, less * fade
        weight = weights(x, by, visible, c, value, traits, CUT)
        dv = weighted(weight, dy_tile, dv, traits)
        if FADED and traits.anchor == "row":
            lost += tl.sum(weight * row_numbers(delta, line, first, sizes.queries, QUERIES, 0.0)[None, :], 1)
        dp = tl.dot(v_tile, tl.trans(dy_tile), input_precision="ieee")
        _, ds = slopes(x, weight, dp, by, less, visible, c, derivative, traits, CUT)
        dk = weighted(ds * query_gain, q_tile, dk, traits)
    return dk, dv, lost


@triton.jit
def keys_kernel(
    q, k, v, dy, dk, dv, factor, delta, scale, coefficients, q_inverse, k_inverse, key_mask, edges, sizes,
    value: tl.constexpr, derivative: tl.constexpr, traits: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys: a sum over the queries of all heads that share it."""
    blocks = tl.cdiv(sizes.keys, KEYS)
    line = tl.program_id(0) // blocks
    kv_heads = sizes.heads // sizes.groups
    batch, kv_head = line // kv_heads, line % kv_heads
    begin = tl.program_id(0) % blocks * KEYS
    last = tl.minimum(begin + KEYS, sizes.keys) - 1
    k_tile = tile_rows(k, batch, kv_head, begin, sizes.keys, sizes.key_dim, KEYS, KEY_WIDTH, True, traits.narrow_key)
    v_tile = tile_rows(
        v, batch, kv_head, begin, sizes.keys, sizes.value_dim, KEYS, VALUE_WIDTH, True, traits.narrow_value
    )
    key_gain = 1.0
    if traits.normalise:
        key_gain = row_numbers(k_inverse, line, begin, sizes.keys, KEYS, 0.0)[:, None]
    # queries in [outer, stop) see some of the keys, in [inner, whole) all of them
    outer = first_query_seeing(begin, edges, sizes, traits) // QUERIES * QUERIES
    stop = first_query_past(last, edges, sizes, traits)
    inner = tl.maximum(outer, tl.cdiv(first_query_seeing(last, edges, sizes, traits), QUERIES) * QUERIES)
    whole = tl.maximum(inner, first_query_past(begin, edges, sizes, traits) // QUERIES * QUERIES)
    dk_tile = tl.zeros([KEYS, KEY_WIDTH], tl.float32)
    dv_tile = tl.zeros([KEYS, VALUE_WIDTH], tl.float32)
    begins, stops = (outer, inner, whole), (tl.minimum(inner, stop), whole, stop)
    for i in tl.static_range(3):
        dk_tile, dv_tile, _ = add_queries(
            dk_tile, dv_tile, 0.0, k_tile, v_tile, key_gain, None, None, begin, begins[i], stops[i], batch, kv_head, q,
            dy, q_inverse, factor, delta, scale, coefficients, edges, None, sizes, value, derivative, traits, False,
            QUERIES, KEYS, KEY_WIDTH, VALUE_WIDTH, STRIDE, i != 1,
        )  # fmt: skip
    if traits.key_mask:
        # rows of the gradients are apart, so a key nobody sees is struck out here and not in every tile
        real = real_keys(begin, batch, key_mask, sizes, KEYS)[:, None]
        dk_tile = tl.where(real, dk_tile, 0.0)
        dv_tile = tl.where(real, dv_tile, 0.0)
    put_rows(dv, dv_tile, batch, kv_head, begin, sizes.keys, sizes.value_dim, KEYS, VALUE_WIDTH)
    put_keys(dk, dk_tile, k, batch, kv_head, begin, sizes, traits, KEYS, KEY_WIDTH)


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
    dq, sums, q_tile, dy_tile, gain, kept, taken, whole, rest, lo, hi, begin, stop, batch, kv_head, k, v, k_inverse,
    key_mask, fade_keys, c, sizes, value: tl.constexpr, derivative: tl.constexpr, base: tl.constexpr,
    traits: tl.constexpr, LEARNED: tl.constexpr, FADED: tl.constexpr, KEYS: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add keys [begin, stop) to the gradients of a block of queries.

    kept and taken (rows, 1): of ``row_terms``. whole and rest: the queries' marks where something fades, else None.
    """
    line = batch * (sizes.heads // sizes.groups) + kv_head
    for first in tl.range(begin, stop, KEYS):
        k_tile = tile_rows(k, batch, kv_head, first, sizes.keys, sizes.key_dim, KEYS, KEY_WIDTH, CUT, traits.narrow_key)
        v_tile = tile_rows(
            v, batch, kv_head, first, sizes.keys, sizes.value_dim, KEYS, VALUE_WIDTH, CUT, traits.narrow_value
        )
        key_gain = 1.0
        if traits.normalise:
            key_gain = row_numbers(k_inverse, line, first, sizes.keys, KEYS, 0.0)[None, :]
        x = scores(q_tile, k_tile, gain, key_gain, traits)
        dp = tl.dot(dy_tile, tl.trans(v_tile), input_precision="ieee")
        visible = None
        if CUT or traits.key_mask:
            visible = visible_pairs(x, first, lo, hi, batch, key_mask, sizes, traits, KEYS, CUT)
        masked: tl.constexpr = CUT or traits.key_mask
        by, less = kept, taken
        if FADED:
            key_whole, key_rest = marks(fade_keys, line, first, sizes.keys, KEYS, float("inf"))
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
    q, k, v, dy, dq, dscale, dcoefficients, factor, delta, scale, coefficients, q_inverse, k_inverse, key_mask, edges,
    sizes, value: tl.constexpr, derivative: tl.constexpr, base: tl.constexpr, traits: tl.constexpr,
    LEARNED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries, and its part of two sums.

    They are dscale (B, H, blocks) and dcoefficients (B, H, blocks, LEARNED).
    """
    blocks = tl.cdiv(sizes.queries, QUERIES)
    line = tl.program_id(0) // blocks
    batch, head = line // sizes.heads, line % sizes.heads
    kv_head = head // sizes.groups
    block = blocks - 1 - tl.program_id(0) % blocks
    begin = block * QUERIES
    last = tl.minimum(begin + QUERIES, sizes.queries) - 1
    t = tl.minimum(begin + tl.arange(0, QUERIES), last)
    lo, hi = visible_keys(t, edges, sizes, traits)
    lo_first, hi_first = visible_keys(begin, edges, sizes, traits)
    lo_last, hi_last = visible_keys(last, edges, sizes, traits)
    c = coefficients + head * STRIDE
    q_tile = tile_rows(q, batch, head, begin, sizes.queries, sizes.key_dim, QUERIES, KEY_WIDTH, True, traits.narrow_key)
    dy_tile = tile_rows(
        dy, batch, head, begin, sizes.queries, sizes.value_dim, QUERIES, VALUE_WIDTH, True, traits.narrow_value
    )
    kept, taken = row_terms(factor, delta, line, begin, sizes.queries, traits, QUERIES)
    kept, taken = kept[:, None], taken[:, None]
    scale_of_head = tl.load(scale + head)
    gain = scale_of_head * LOG2E if traits.bits else scale_of_head
    if traits.normalise:
        gain = (gain * row_numbers(q_inverse, line, begin, sizes.queries, QUERIES, 0.0))[:, None]
    grad = tl.zeros([QUERIES, KEY_WIDTH], tl.float32)
    sums = ()
    for _ in tl.static_range(LEARNED):
        sums = sums + (tl.zeros([QUERIES], tl.float32),)  # noqa: RUF005
    begins, stops = key_ranges(lo_first // KEYS * KEYS, hi_first, lo_last, hi_last, traits, KEYS)
    for i in tl.static_range(tl.constexpr(0 if traits.edged else 1), 3):
        grad, sums = add_keys(
            grad, sums, q_tile, dy_tile, gain, kept, taken, None, None, lo, hi, begins[i], stops[i], batch, kv_head, k,
            v, k_inverse, key_mask, None, c, sizes, value, derivative, base, traits, LEARNED, False, KEYS, KEY_WIDTH,
            VALUE_WIDTH, i != 1,
        )  # fmt: skip
    part = tl.cast(line, tl.int64) * blocks + block
    for j in tl.static_range(LEARNED):
        tl.store(dcoefficients + part * LEARNED + j, tl.sum(sums[j], 0))
    put_queries(dq, dscale + part, grad, q, scale_of_head, batch, head, begin, sizes, traits, QUERIES, KEY_WIDTH)


def backward(
    grads: Gradients, inputs: TileInputs, results: Results, spec: TileSpec, asked: frozenset[str]
) -> Gradients:
    """(dq, dk, dv, dscale, dcoefficients): like q, k, v; (H,) float32; (H, n) float64, 0 for constants. Or None."""
    inputs, powers = tiles.levelled(inputs, spec.normalise)
    (dy,), (q, k, v, *_), (y, factor, _) = grads, inputs, results
    assert dy is not None
    scale, coefficients = plain(inputs.scale, torch.float32), plain(inputs.coefficients, torch.float32)
    needs = [name in asked for name in ("q", "k", "v", "scale", "coefficients")]
    batch, heads, queries, _ = q.shape
    learned = spec.learned if needs[4] else 0
    dq = dk = dv = dscale = dcoefficients = None
    with tiles.on(q.device):
        call = tiles.call(inputs, spec)
        delta = tiles.row_products(dy, y) if spec.anchor == "row" else None
        tokens = tuple(tiles.rows_of(x) for x in (q, k, v, dy))
        rest = factor, delta, scale, coefficients, call.q_inverse, call.k_inverse, call.key_mask, call.edges, call.sizes
        code = {
            "value": call.functions.value,
            "derivative": call.functions.derivative,
            "traits": call.traits,
            "STRIDE": coefficients.shape[1],
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
                keys_kernel, programs, (*tokens, *outputs, *rest), {**code, **tiles.widths(tiling, q, v)}, tiling
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
                {**code, **more, **tiles.widths(tiling, q, v)},
                tiling,
            )
            # float32 inside a block, float64 across blocks: the sums run over all queries and keys
            dscale = scale_parts.sum((0, 2), dtype=torch.float64).float() if needs[3] else None
            dcoefficients = padded(parts.sum((0, 2), dtype=torch.float64), coefficients) if learned else None
    dq, dk = tiles.through_powers((dq if needs[0] else None, dk if needs[1] else None), powers)
    return dq, dk, dv if needs[2] else None, dscale, dcoefficients


__all__ = ["backward"]
