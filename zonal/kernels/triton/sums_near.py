"""Sums over features on CUDA: pairs of queries and keys between two borders, tile by tile, through the link.

With decays and key biases a weight is e^(c_t - c_s + b_s) l(S_ts), with c the running sum of log decays. Rows and keys
have marks, c_t and c_s - b_s to base 2, in two numbers each. Their differences lose no digits even if the running sums
are long.
"""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
import triton
import triton.language as tl

from zonal.kernels.triton.backward import add_powers, row_terms, slopes, weights
from zonal.kernels.triton.sums_state import narrowed
from zonal.kernels.triton.tiles import (
    between,
    head_and_block,
    row_numbers,
    scores,
    tile_rows,
    visible_keys,
    visible_pairs,
    weighted,
)


@triton.jit
def marks(fade, line, first, limit, ROWS: tl.constexpr, past: tl.constexpr):
    """(whole, rest) of ROWS tokens' marks, of ``Fade.rows`` or ``Fade.keys``.

    past: the mark past the end, -inf of rows and inf of keys, so that pairs with such a token weigh nothing.
    """
    return row_numbers(fade, line * 3, first, limit, ROWS, past), row_numbers(
        fade, line * 3 + 1, first, limit, ROWS, 0.0
    )


@triton.jit
def fading(row_whole, row_rest, key_whole, key_rest):
    """e^(c_t - c_s + b_s) of pairs from their marks, which broadcast. It may be inf for hidden pairs, to be masked."""
    return tl.exp2((row_whole - key_whole) + (row_rest - key_rest))


@triton.jit
def add_values(
    total, mass, q_tile, gain, whole, rest, lo, hi, begin, stop, batch, kv_head, k, v, k_inverse, key_mask, fade_keys,
    c, sizes, value: tl.constexpr, traits: tl.constexpr, FADED: tl.constexpr, KEYS: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add keys [begin, stop) to the sums of a block of queries.

    total (rows, P) = sum K v, and for the row anchor mass (rows,) = sum K, of the same rounded K. CUT: the tiles hold
    keys that some query does not see.
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
        weight = value(x, c, traits.n)
        if FADED:
            key_whole, key_rest = marks(fade_keys, line, first, sizes.keys, KEYS, float("inf"))
            weight = weight * fading(whole[:, None], rest[:, None], key_whole[None, :], key_rest[None, :])
        if CUT or traits.key_mask:
            weight = tl.where(visible_pairs(x, first, lo, hi, batch, key_mask, sizes, traits, KEYS, CUT), weight, 0.0)
        weight = narrowed(weight, v, traits)
        if traits.anchor == "row":
            mass += tl.sum(weight.to(tl.float32), 1)
        total = weighted(weight, v_tile, total, traits)
    return total, mass


@triton.jit
def add_keys(
    dq, sums, q_tile, dy_tile, gain, kept, taken, whole, rest, lo, hi, begin, stop, batch, kv_head, k, v, k_inverse,
    key_mask, fade_keys, c, sizes, value: tl.constexpr, derivative: tl.constexpr, base: tl.constexpr,
    traits: tl.constexpr, LEARNED: tl.constexpr, FADED: tl.constexpr, KEYS: tl.constexpr, KEY_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add keys [begin, stop) to the gradients of a block of queries; kept and taken (rows, 1): of ``row_terms``."""
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
def add_queries(
    dk, dv, lost, k_tile, v_tile, key_gain, key_whole, key_rest, first_key, begin, stop, batch, kv_head, q, dy,
    q_inverse, factor, delta, scale, coefficients, edges, fade_rows, sizes, value: tl.constexpr,
    derivative: tl.constexpr, traits: tl.constexpr, FADED: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
    KEY_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, STRIDE: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add queries [begin, stop) of the heads that share a key head to the gradients of a block of keys.

    Tiles are transposed: (keys, queries).

    lost (keys,): where something fades and the anchor is the row's, sum_t W_ts dy_t . y_t.
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
        x = scores(k_tile, q_tile, query_gain, key_gain, traits)
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


__all__ = ["add_keys", "add_queries", "add_values", "fading", "marks"]
