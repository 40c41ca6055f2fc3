"""y_t = factor_t sum_s l(S_ts) v_s on tiles, for every link and sum anchor; few queries split keys over programs."""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
import math
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from zonal.kernels.op import Results
from zonal.kernels.tile import TileInputs, TileSpec
from zonal.kernels.triton import tiles
from zonal.kernels.triton.sizes import padded, power_of_two
from zonal.kernels.triton.tiles import (
    LN2,
    LOG2E,
    SMALLEST,
    Tiling,
    as_multiplied,
    key_ranges,
    load_keys,
    load_queries,
    load_values,
    log2_kernel,
    put_rows,
    row_numbers,
    scores,
    visible_keys,
    visible_pairs,
    weighted,
)

# a block of this many queries at most is read by split keys: above, the blocks of queries fill the device
DECODE_QUERIES = 16
# keys a split has at least, and programs after which more splits do not help
_SPLIT_KEYS, _PROGRAMS, _MOST_SPLITS = 256, 512, 32


@triton.jit
def exponentials(x, total, mass, top, traits: tl.constexpr):
    """Weights of a tile of log2 K, with the sums so far. For a row anchor the running maximum is subtracted from all
    log2 K, and mass includes the weights."""
    if traits.online:
        highest = tl.maximum(top, tl.max(x, 1))
        safe = tl.where(highest == float("-inf"), 0.0, highest)
        weight = tl.exp2(x - safe[:, None])
        keep = tl.exp2(top - safe)
        mass = mass * keep + tl.sum(weight, 1)
        total = total * keep[:, None]
        top = highest
    else:
        weight = tl.exp2(x)
    return weight, total, mass, top


@triton.jit
def absorb(
    total, mass, top, q, gain, lo, hi, begin, stop, batch, kv_head, k, v, c, given, value: tl.constexpr,
    traits: tl.constexpr, shape: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add keys [begin, stop) to the sums of a block of queries.

    total (rows, P) = sum K v; mass (rows,) = sum K for a row anchor; top (rows,) = the subtracted maximum of log2 K.
    CUT: the tiles hold keys that some query does not see.
    """
    sizes = given.sizes
    line = batch * (sizes.heads // sizes.groups) + kv_head
    for first in tl.range(begin, stop, shape.keys):
        k_tile = load_keys(k, batch, kv_head, first, given, traits, shape, CUT)
        v_tile = load_values(v, batch, kv_head, first, given, traits, shape, CUT)
        key_gain = 1.0
        if traits.normalise:
            key_gain = row_numbers(given.k_inverse, line, first, sizes.keys, shape.keys, 0.0)[None, :]
        x = scores(q, k_tile, gain, key_gain, traits)
        if CUT or traits.key_mask:
            visible = visible_pairs(x, first, lo, hi, batch, given, traits, shape.keys, CUT)
        if traits.log:
            x = log2_kernel(x, c, value, traits)
            if CUT or traits.key_mask:
                x = tl.where(visible, x, float("-inf"))
            weight, total, mass, top = exponentials(x, total, mass, top, traits)
        else:
            weight = value(x, c, traits.n)
            if CUT or traits.key_mask:
                weight = tl.where(visible, weight, 0.0)
            if traits.anchor == "row":
                # of the weights as they are multiplied: where the sum is small, gradients magnify what is not the same
                weight = as_multiplied(weight, v_tile, traits)
                mass += tl.sum(weight.to(tl.float32), 1)
        total = weighted(weight, v_tile, total, traits)
    return total, mass, top


@triton.jit
def row_factor(mass, top, lo, hi, batch, given, traits: tl.constexpr):
    """(factor of total, number for backward). They are equal, but a log link with the row anchor keeps log-sum-exp."""
    if traits.anchor == "row":
        empty = tl.abs(mass) < SMALLEST
        scale = tl.where(empty, 0.0, 1 / tl.where(empty, 1.0, mass))
        kept = scale
        if traits.log:
            kept = tl.where(mass > 0, (top + tl.log2(tl.where(mass > 0, mass, 1.0))) * LN2, float("inf"))
    elif traits.anchor == "count":
        if traits.key_mask:
            line = given.key_counts + tl.cast(batch, tl.int64) * (given.sizes.keys + 1)
            count = tl.load(line + tl.maximum(hi, 0)) - tl.load(line + lo)
        else:
            count = hi - lo
        count = tl.maximum(count, 0).to(tl.float32)
        scale = tl.where(count > 0, 1 / tl.maximum(count, 1.0), 0.0)
        kept = scale
    else:
        scale = mass * 0 + 1
        kept = scale
    return scale, kept


@triton.jit
def forward_kernel(q, k, v, y, factor, given, value: tl.constexpr, traits: tl.constexpr, shape: tl.constexpr):
    """One block of queries of one head."""
    sizes = given.sizes
    blocks = tl.cdiv(sizes.queries, shape.queries)
    line = tl.program_id(0) // blocks
    batch, head = line // sizes.heads, line % sizes.heads
    kv_head = head // sizes.groups
    # causal blocks with many keys first: they end last
    begin = (blocks - 1 - tl.program_id(0) % blocks) * shape.queries
    last = tl.minimum(begin + shape.queries, sizes.queries) - 1
    t = tl.minimum(begin + tl.arange(0, shape.queries), last)
    lo, hi = visible_keys(t, given, traits)
    lo_first, hi_first = visible_keys(begin, given, traits)
    lo_last, hi_last = visible_keys(last, given, traits)
    c = given.coefficients + head * traits.stride
    q_tile = load_queries(q, batch, head, begin, given, traits, shape, True)
    gain = tl.load(given.scale + head)
    if traits.bits:
        gain = gain * LOG2E
    if traits.normalise:
        gain = (gain * row_numbers(given.q_inverse, line, begin, sizes.queries, shape.queries, 0.0))[:, None]
    total = tl.zeros([shape.queries, shape.value_width], tl.float32)
    mass = tl.zeros([shape.queries], tl.float32)
    top = tl.full([shape.queries], float("-inf"), tl.float32)
    begins, stops = key_ranges(lo_first // shape.keys * shape.keys, hi_first, lo_last, hi_last, traits, shape.keys)
    for i in tl.static_range(tl.constexpr(0 if traits.edged else 1), 3):
        total, mass, top = absorb(
            total, mass, top, q_tile, gain, lo, hi, begins[i], stops[i], batch, kv_head, k, v, c, given, value,
            traits, shape, i != 1,
        )  # fmt: skip
    row, kept = row_factor(mass, top, lo, hi, batch, given, traits)
    put_rows(
        y, total * row[:, None], batch, head, begin, sizes.queries, sizes.value_dim, shape.queries, shape.value_width
    )
    place = begin + tl.arange(0, shape.queries)
    tl.store(factor + tl.cast(line, tl.int64) * sizes.queries + place, kept, mask=place < sizes.queries)


@triton.jit
def decode_kernel(
    q, k, v, totals, masses, tops, given, splits, length, value: tl.constexpr, traits: tl.constexpr,
    shape: tl.constexpr,
):  # fmt: skip
    """Keys [i length, (i + 1) length) of one key head, for up to shape.queries rows of all query heads that share it.

    Row r is head r // T, query r % T.

    totals (B, H, T, splits, P), masses and tops (B, H, T, splits): the partial sums.
    """
    sizes = given.sizes
    rows = sizes.groups * sizes.queries
    blocks = tl.cdiv(rows, shape.queries)
    split = tl.program_id(0) % splits
    block = tl.program_id(0) // splits % blocks
    line = tl.program_id(0) // splits // blocks
    kv_heads = sizes.heads // sizes.groups
    batch, kv_head = line // kv_heads, line % kv_heads
    row = block * shape.queries + tl.arange(0, shape.queries)
    inside = row < rows
    row = tl.minimum(row, rows - 1)
    head, t = kv_head * sizes.groups + row // sizes.queries, row % sizes.queries
    lo, hi = visible_keys(t, given, traits)
    lo_first, hi_first = visible_keys(tl.min(t, 0), given, traits)
    lo_last, hi_last = visible_keys(tl.max(t, 0), given, traits)
    column = tl.arange(0, shape.key_width)
    start = q.start + tl.cast(batch, tl.int64) * q.batch + head.to(tl.int64) * q.head + t.to(tl.int64) * q.row
    q_tile = tl.load(
        start[:, None] + column.to(tl.int64)[None, :] * q.column,
        mask=inside[:, None] & (column < sizes.key_dim)[None, :],
        other=0.0,
    )
    gain = tl.load(given.scale + head)
    if traits.bits:
        gain = gain * LOG2E
    slot = (tl.cast(batch, tl.int64) * sizes.heads + head) * sizes.queries + t
    if traits.normalise:
        gain = gain * tl.load(given.q_inverse + slot)
    # the rows have different heads: a column of pointers stands for one
    c = (given.coefficients + head * traits.stride)[:, None]
    total = tl.zeros([shape.queries, shape.value_width], tl.float32)
    mass = tl.zeros([shape.queries], tl.float32)
    top = tl.full([shape.queries], float("-inf"), tl.float32)
    begin = tl.maximum(split * length, lo_first // shape.keys * shape.keys)
    stop = tl.minimum(split * length + length, hi_last)
    inner = tl.minimum(tl.maximum(begin, tl.cdiv(lo_last, shape.keys) * shape.keys), tl.maximum(begin, stop))
    whole = tl.maximum(inner, tl.minimum(stop, hi_first) // shape.keys * shape.keys)
    begins, stops = (begin, inner, whole), (inner, whole, stop)
    for i in tl.static_range(tl.constexpr(0 if traits.edged else 1), 3):
        total, mass, top = absorb(
            total, mass, top, q_tile, gain[:, None], lo, hi, begins[i], stops[i], batch, kv_head, k, v,
            c, given, value, traits, shape, i != 1,
        )  # fmt: skip
    part = slot * splits + split
    tl.store(masses + part, mass, mask=inside)
    tl.store(tops + part, top, mask=inside)
    column = tl.arange(0, shape.value_width)
    tl.store(
        totals + part[:, None] * sizes.value_dim + column[None, :],
        total,
        mask=inside[:, None] & (column < sizes.value_dim)[None, :],
    )


@triton.jit
def combine_kernel(
    totals, masses, tops, y, factor, given, splits, traits: tl.constexpr, SPLITS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """One row: the sum of its splits' sums, y and the factor."""
    sizes = given.sizes
    row = tl.program_id(0)
    line, t = row // sizes.queries, row % sizes.queries
    part = tl.arange(0, SPLITS)
    place = tl.cast(row, tl.int64) * splits + part
    mass = tl.load(masses + place, mask=part < splits, other=0.0)
    top = tl.load(tops + place, mask=part < splits, other=float("-inf"))
    column = tl.arange(0, VALUE_WIDTH)
    inside = (part < splits)[:, None] & (column < sizes.value_dim)[None, :]
    total = tl.load(totals + place[:, None] * sizes.value_dim + column[None, :], mask=inside, other=0.0)
    highest = tl.max(top, 0)
    if traits.online:
        keep = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
        mass = mass * keep
        total = total * keep[:, None]
    lo, hi = visible_keys(t, given, traits)
    batch = line // sizes.heads
    scale, kept = row_factor(tl.sum(mass, 0), highest, lo, hi, batch, given, traits)
    start = (
        y.start
        + tl.cast(batch, tl.int64) * y.batch
        + tl.cast(line % sizes.heads, tl.int64) * y.head
        + tl.cast(t, tl.int64) * y.row
    )
    tl.store(
        start + column * y.column,
        (tl.sum(total, 0) * scale).to(y.start.dtype.element_ty),
        mask=column < sizes.value_dim,
    )
    tl.store(factor + row, kept)


def forward(inputs: TileInputs, spec: TileSpec) -> Results:
    """y (B, H, T, P) in q's type, the rows' factors (B, H, T) float32, and nothing for what rounding left.

    q, k, v: one of float32, bfloat16, float16, any strides, D and P up to 256.
    factor: of each row's sum; for log links with the row anchor the natural log-sum-exp, +inf for empty rows.
    """
    inputs = tiles.levelled(inputs, spec.normalise)[0]
    q, k, v = inputs[:3]
    batch, heads, queries, _ = q.shape
    y = torch.empty(batch, heads, queries, v.shape[3], dtype=q.dtype, device=q.device)
    factor = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    with tiles.on(q.device):
        call = tiles.call(inputs, spec)
        if queries <= DECODE_QUERIES and k.shape[2] >= 2 * _SPLIT_KEYS:
            decode(q, k, v, call, y, factor)
        else:
            tiling = tiles.choose("forward", q, v, call.traits)
            tiles.launch(
                forward_kernel,
                batch * heads * tiles.ceil_div(queries, tiling.queries),
                (*(tiles.rows_of(x) for x in (q, k, v, y)), factor, call.given),
                {"value": call.functions.value, "traits": call.traits, "shape": tiles.shape(tiling, q, v)},
                tiling,
            )
    return y, factor, q.new_empty(0)


def decode(q: Tensor, k: Tensor, v: Tensor, call: tiles.TileCall, y: Tensor, factor: Tensor) -> None:
    """Fill y and factor for few queries: each program takes some of the keys for all query heads that share them."""
    batch, heads, queries, _ = q.shape
    tiling = tiles.choose("decode", q, v, call.traits)
    tiling = replace(tiling, queries=min(tiling.queries, tiles.padded(call.given.sizes.groups * queries)))
    programs = batch * k.shape[1] * tiles.ceil_div(call.given.sizes.groups * queries, tiling.queries)
    splits, length = splits_of(programs, k.shape[2], tiling.keys)
    totals = torch.empty(batch, heads, queries, splits, v.shape[3], dtype=torch.float32, device=q.device)
    masses, tops = torch.empty(2, batch, heads, queries, splits, dtype=torch.float32, device=q.device)
    tiles.launch(
        decode_kernel,
        programs * splits,
        (*(tiles.rows_of(x) for x in (q, k, v)), totals, masses, tops, call.given, splits, length),
        {"value": call.functions.value, "traits": call.traits, "shape": tiles.shape(tiling, q, v)},
        tiling,
    )
    combine(totals, masses, tops, y, factor, call)


def splits_of(programs: int, keys: int, block: int) -> tuple[int, int]:
    """(splits of the keys, keys of one): so many that ``programs`` times them fill a device, and whole blocks."""
    splits = max(1, min(tiles.ceil_div(keys, _SPLIT_KEYS), tiles.ceil_div(_PROGRAMS, max(programs, 1)), _MOST_SPLITS))
    length = tiles.ceil_div(tiles.ceil_div(keys, splits), block) * block
    return (tiles.ceil_div(keys, length) if length else 1), length


def combine(totals: Tensor, masses: Tensor, tops: Tensor, y: Tensor, factor: Tensor, call: tiles.TileCall) -> None:
    """Fill y and factor from sums of splits, as ``decode_kernel`` has them."""
    *rows, splits, value_dim = totals.shape
    tiles.launch(
        combine_kernel,
        math.prod(rows),
        (totals, masses, tops, tiles.rows_of(y), factor, call.given, splits),
        {"traits": call.traits, "SPLITS": power_of_two(splits), "VALUE_WIDTH": padded(value_dim)},
        Tiling(1, splits, 4, 1),
    )


__all__ = ["combine", "decode", "exponentials", "forward", "row_factor", "splits_of"]
