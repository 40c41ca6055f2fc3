"""Gradients of sums over features. Features are computed again, and keys receive the terms of queries as sums too.

With u_t = factor_t [dy_t, -dy_t . y_t] (the second part for the row anchor) queries get dq from M u_t at their border.
Their own terms, w psi(q_t) u_t^T, are carried backwards: keys before a border get dk from [v_s, 1] and dv from
psi(k_s), summed over all later borders. Between neighbouring borders it works as in the tile kernels. Each number is
written by one program. There are no atomics, and the same call gives the same bits.
"""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAssignmentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl

from zonal.kernels.op import Gradients, Results
from zonal.kernels.sums import SumsInputs, SumsSpec, decay_gradient
from zonal.kernels.tile import padded
from zonal.kernels.triton import sums_layout, sums_state, tiles
from zonal.kernels.triton.backward import add_keys, add_queries, put_keys, put_queries, row_terms
from zonal.kernels.triton.sums_state import (
    against_sums,
    columns,
    mass_places,
    narrowed,
    plus_sums,
    products,
    strip_blocks,
)
from zonal.kernels.triton.tiles import (
    key_ranges,
    load_keys,
    load_queries,
    load_slopes,
    load_values,
    marks,
    put_rows,
    real_keys,
    row_numbers,
    visible_keys,
)


@triton.jit
def placed(part, first, ROWS: tl.constexpr, PART: tl.constexpr, WIDTH: tl.constexpr):
    """(ROWS, WIDTH): the columns of a part from ``first`` on, a multiple of PART, zeros elsewhere."""
    wide = tl.reshape(tl.broadcast_to(part[:, None, :], [ROWS, WIDTH // PART, PART]), [ROWS, WIDTH])
    return tl.where((tl.arange(0, WIDTH) // PART * PART == first)[None, :], wide, 0.0)


@triton.jit
def strip_gradient(
    a, b, rows, number, place, line, border, row, like, sizes, traits: tl.constexpr, shape: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """(gradient of a (ROWS, shape.left), of b (ROWS, shape.block)) from those of their products: M rows + m number."""
    slope = against_sums(rows, place, line, border, row, sizes.value_dim, like, traits, shape, shape.features)
    if traits.anchor == "row":
        slope += (
            tl.load(mass_places(place, line, border, row, sizes.value_dim, shape, shape.features))[None, :]
            * number[:, None]
        )
    slope = tl.reshape(slope, [ROWS, shape.left, shape.block])
    return tl.sum(slope * b[:, None, :], 2), tl.sum(slope * a[:, :, None], 1)


@triton.constexpr_function
def part_of(width: int, kind: tl.dtype) -> int:
    """How many features of degree 1 are computed at a time: a thread holds whole rows that matrix units do not take."""
    return 16 if width >= 128 and kind == tl.float32 else width


@triton.jit
def vector_gradient(
    rows, number, place, line, border, like, sizes, traits: tl.constexpr, shape: tl.constexpr, ROWS: tl.constexpr
):
    """(ROWS, shape.key_width): what the features that are the vector itself get."""
    row = place.pairs * (shape.block * shape.block)
    PART: tl.constexpr = part_of(shape.key_width, like.start.dtype.element_ty)
    if shape.key_width == PART:
        slope = against_sums(rows, place, line, border, row, sizes.value_dim, like, traits, shape, shape.key_width)
    else:
        slope = tl.zeros([ROWS, shape.key_width], tl.float32)
        for first in tl.range(0, shape.key_width, PART):
            part = against_sums(rows, place, line, border, row + first, sizes.value_dim, like, traits, shape, PART)
            slope += placed(part, first, ROWS, PART, shape.key_width)
    if traits.anchor == "row":
        slope += (
            tl.load(mass_places(place, line, border, row, sizes.value_dim, shape, shape.key_width))[None, :]
            * number[:, None]
        )
    return slope


@triton.jit
def constant_sums(place, line, border, width, shape: tl.constexpr):
    """(P,): the sums of the feature that is 1."""
    start = place.sums + (tl.cast(line, tl.int64) * (place.count + 1) + border) * place.size
    column = tl.arange(0, shape.value_width)
    return tl.load(
        start + (place.pairs * (shape.block * shape.block) + shape.key_width) * width + column,
        mask=column < width,
        other=0.0,
    )


@triton.jit
def constant_mass(place, line, border, width, shape: tl.constexpr):
    """The sum of ones."""
    start = place.sums + (tl.cast(line, tl.int64) * (place.count + 1) + border) * place.size
    rows = place.pairs * (shape.block * shape.block) + shape.key_width + 1
    return tl.load(start + tl.cast(rows, tl.int64) * width + rows - 1)


@triton.jit
def read_back_kernel(
    q, k, v, dy, dq, place, border_of, dscale, dcoefficients, dweights, factor, delta, weights, given, from_border,
    value: tl.constexpr, derivative: tl.constexpr, base: tl.constexpr, traits: tl.constexpr, shape: tl.constexpr,
    FADED: tl.constexpr, LEARNED: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries, and its part of the sums of three gradients.

    They are dscale (B, H, blocks), dcoefficients (B, H, blocks, LEARNED) and dweights (B, H, blocks, 3).
    """
    sizes = given.sizes
    blocks = tl.cdiv(sizes.queries, shape.queries)
    line = tl.program_id(0) // blocks
    batch, head = line // sizes.heads, line % sizes.heads
    kv_head = head // sizes.groups
    kv_line = batch * (sizes.heads // sizes.groups) + kv_head
    block = blocks - 1 - tl.program_id(0) % blocks
    begin = block * shape.queries
    last = tl.minimum(begin + shape.queries, sizes.queries) - 1
    row = begin + tl.arange(0, shape.queries)
    there = row < sizes.queries
    t = tl.minimum(row, last)
    lo, hi = visible_keys(t, given, traits)
    lo_first, hi_first = visible_keys(begin, given, traits)
    lo_last, hi_last = visible_keys(last, given, traits)
    c, w = given.coefficients + head * traits.stride, weights + head * 3
    dy_tile = load_slopes(dy, batch, head, begin, given, traits, shape, True)
    kept, taken = row_terms(factor, delta, line, begin, sizes.queries, traits, shape.queries)
    scale_of_head = tl.load(given.scale + head)
    gain = tl.zeros([shape.queries], tl.float32) + scale_of_head
    if traits.normalise:
        gain = gain * row_numbers(given.q_inverse, line, begin, sizes.queries, shape.queries, 0.0)
    border = tl.load(border_of + begin)
    known = tl.minimum(border * place.chunk, sizes.keys)
    reads = border >= from_border
    grad = tl.zeros([shape.queries, shape.key_width], tl.float32)
    squares = tl.zeros([shape.queries], tl.float32)
    firsts = tl.zeros([shape.queries], tl.float32)
    ones = tl.zeros([shape.queries], tl.float32)
    # the rows' factors are in here, not in what is rounded
    rows = narrowed(dy_tile, v, traits)
    number = tl.where(kept != 0, -taken / tl.where(kept != 0, kept, 1.0), 0.0)
    for strip in tl.range(0, tl.where(reads, place.pairs * (shape.block // shape.left), 0)):
        left, right, times = strip_blocks(place, strip, shape)
        a = columns(q, batch, head, begin, there, left, sizes.key_dim, shape.queries, shape.left) * gain[:, None]
        b = columns(q, batch, head, begin, there, right, sizes.key_dim, shape.queries, shape.block) * gain[:, None]
        da, db = strip_gradient(
            a, b, rows, number, place, kv_line, border, strip * shape.features, v, sizes, traits, shape, shape.queries
        )
        squares += times * tl.sum(a * da, 1)
        grad += times * (
            placed(da, left, shape.queries, shape.left, shape.key_width)
            + placed(db, right, shape.queries, shape.block, shape.key_width)
        )
    grad = grad * tl.load(w + 2)
    if reads:
        slope = vector_gradient(rows, number, place, kv_line, border, v, sizes, traits, shape, shape.queries)
        grad += slope * tl.load(w + 1)
        firsts = (
            tl.sum(slope * columns(q, batch, head, begin, there, 0, sizes.key_dim, shape.queries, shape.key_width), 1)
            * gain
        )
        ones = tl.sum(
            dy_tile.to(tl.float32) * constant_sums(place, kv_line, border, sizes.value_dim, shape)[None, :],
            1,
        )
        if traits.anchor == "row":
            ones += number * constant_mass(place, kv_line, border, sizes.value_dim, shape)
    by = kept
    whole_mark, rest_mark = kept, kept
    if FADED:
        by = kept * row_numbers(given.fade_rows, kv_line * 3 + 2, begin, sizes.queries, shape.queries, 0.0)
        whole_mark, rest_mark = marks(given.fade_rows, kv_line, begin, sizes.queries, shape.queries, float("-inf"))
    if traits.packed:
        by = tl.where(lo < known, by, 0.0)
    grad = tl.where((by != 0)[:, None], grad * by[:, None], 0.0)
    part = tl.cast(line, tl.int64) * blocks + block
    tl.store(dweights + part * 3, tl.sum(tl.where(by != 0, ones * by, 0.0), 0))
    tl.store(dweights + part * 3 + 1, tl.sum(tl.where(by != 0, firsts * by, 0.0), 0))
    tl.store(dweights + part * 3 + 2, tl.sum(tl.where(by != 0, squares * by, 0.0), 0))
    q_tile = load_queries(q, batch, head, begin, given, traits, shape, True)
    gain, kept, taken = gain[:, None], kept[:, None], taken[:, None]
    sums = ()
    for _ in tl.static_range(LEARNED):
        sums = sums + (tl.zeros([shape.queries], tl.float32),)  # noqa: RUF005
    start = tl.maximum(known, lo_first // shape.keys * shape.keys)
    begins, stops = key_ranges(start, hi_first, lo_last, hi_last, traits, shape.keys)
    for i in tl.static_range(tl.constexpr(0 if traits.edged else 1), 3):
        grad, sums = add_keys(
            grad, sums, q_tile, dy_tile, gain, kept, taken, whole_mark, rest_mark, lo, hi, begins[i], stops[i], batch,
            kv_head, k, v, c, given, value, derivative, base, traits, shape, LEARNED, FADED, i != 1,
        )  # fmt: skip
    for j in tl.static_range(LEARNED):
        tl.store(dcoefficients + part * LEARNED + j, tl.sum(sums[j], 0))
    put_queries(dq, dscale + part, grad, q, scale_of_head, batch, head, begin, sizes, traits, shape)


@triton.jit
def keys_back_kernel(
    q, k, v, dy, dk, dv, counted, place, known_keys, readers, seeing, factor, delta, given, value: tl.constexpr,
    derivative: tl.constexpr, traits: tl.constexpr, shape: tl.constexpr, FADED: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys.

    place: the sums that come back from borders. known_keys, readers: ``keys`` and ``queries`` of ``Borders``.

    counted (B, Hkv, S): where something fades, the gradient of the logarithm of what each key counts.
    """
    sizes = given.sizes
    blocks = tl.cdiv(sizes.keys, shape.keys)
    line = tl.program_id(0) // blocks
    kv_heads = sizes.heads // sizes.groups
    batch, kv_head = line // kv_heads, line % kv_heads
    begin = tl.program_id(0) % blocks * shape.keys
    last = tl.minimum(begin + shape.keys, sizes.keys) - 1
    row = begin + tl.arange(0, shape.keys)
    there = row < sizes.keys
    chunk = begin // place.chunk
    behind = chunk < place.count
    border = tl.minimum(chunk + 1, place.count)
    gain = tl.full([shape.keys], 1.0, tl.float32)
    if traits.normalise:
        gain = row_numbers(given.k_inverse, line, begin, sizes.keys, shape.keys, 0.0)
    k_tile = load_keys(k, batch, kv_head, begin, given, traits, shape, True)
    v_tile = load_values(v, batch, kv_head, begin, given, traits, shape, True)
    rows = narrowed(v_tile, v, traits)
    number = there.to(tl.float32)
    dk_tile = tl.zeros([shape.keys, shape.key_width], tl.float32)
    dv_tile = tl.zeros([shape.keys, shape.value_width], tl.float32)
    brought = tl.zeros([shape.keys], tl.float32)
    for strip in tl.range(0, tl.where(behind, place.pairs * (shape.block // shape.left), 0)):
        left, right, _ = strip_blocks(place, strip, shape)
        a = columns(k, batch, kv_head, begin, there, left, sizes.key_dim, shape.keys, shape.left) * gain[:, None]
        b = columns(k, batch, kv_head, begin, there, right, sizes.key_dim, shape.keys, shape.block) * gain[:, None]
        at = strip * shape.features
        made = narrowed(products(a, b, shape, shape.keys), v, traits)
        dv_tile = plus_sums(dv_tile, made, place, line, border, at, sizes.value_dim, v, traits, shape, shape.features)
        if FADED and traits.anchor == "row":
            brought += tl.sum(
                made.to(tl.float32)
                * tl.load(mass_places(place, line, border, at, sizes.value_dim, shape, shape.features))[None, :],
                1,
            )
        da, db = strip_gradient(a, b, rows, number, place, line, border, at, v, sizes, traits, shape, shape.keys)
        dk_tile += placed(da, left, shape.keys, shape.left, shape.key_width) + placed(
            db, right, shape.keys, shape.block, shape.key_width
        )
    if behind:
        dk_tile += vector_gradient(rows, number, place, line, border, v, sizes, traits, shape, shape.keys)
        at = place.pairs * (shape.block * shape.block)
        PART: tl.constexpr = part_of(shape.key_width, v.start.dtype.element_ty)
        for first in tl.range(0, shape.key_width, PART):
            made = narrowed(
                columns(k, batch, kv_head, begin, there, first, sizes.key_dim, shape.keys, PART) * gain[:, None],
                v,
                traits,
            )
            dv_tile = plus_sums(dv_tile, made, place, line, border, at + first, sizes.value_dim, v, traits, shape, PART)
            if FADED and traits.anchor == "row":
                brought += tl.sum(
                    made.to(tl.float32)
                    * tl.load(mass_places(place, line, border, at + first, sizes.value_dim, shape, PART))[None, :],
                    1,
                )
        if FADED and traits.anchor == "row":
            brought += constant_mass(place, line, border, sizes.value_dim, shape)
        dv_tile += constant_sums(place, line, border, sizes.value_dim, shape)[None, :]
    whole_mark, rest_mark = brought, brought
    if FADED:
        share = row_numbers(given.fade_keys, line * 3 + 2, begin, sizes.keys, shape.keys, 0.0)
        dk_tile, dv_tile, brought = dk_tile * share[:, None], dv_tile * share[:, None], brought * share
        whole_mark, rest_mark = marks(given.fade_keys, line, begin, sizes.keys, shape.keys, float("inf"))
    if traits.packed:
        # of documents that end before the border nothing is in its sum
        inside = row >= tl.where(behind, tl.load(known_keys + border), sizes.keys)
        dk_tile = tl.where(inside[:, None], dk_tile, 0.0)
        dv_tile = tl.where(inside[:, None], dv_tile, 0.0)
        brought = tl.where(inside, brought, 0.0)
    lost = tl.zeros([shape.keys], tl.float32)
    # queries in [outer, stop) read an earlier border and meet some of the keys directly, in [inner, whole) all of them
    stop = tl.where(behind, tl.load(readers + border), sizes.queries)
    outer = tl.load(seeing + begin) // shape.queries * shape.queries
    inner = tl.maximum(outer, tl.cdiv(tl.load(seeing + last), shape.queries) * shape.queries)
    whole = inner
    if not traits.packed:
        whole = tl.maximum(inner, stop // shape.queries * shape.queries)
    gain = gain[:, None]
    begins, stops = (outer, inner, whole), (tl.minimum(inner, stop), tl.minimum(whole, stop), stop)
    for i in tl.static_range(3):
        dk_tile, dv_tile, lost = add_queries(
            dk_tile, dv_tile, lost, k_tile, v_tile, gain, whole_mark, rest_mark, begin, begins[i], stops[i], batch,
            kv_head, q, dy, factor, delta, given, value, derivative, traits, shape, FADED, i != 1,
        )  # fmt: skip
    if traits.key_mask:
        real = real_keys(begin, batch, given, shape.keys)[:, None]
        dk_tile = tl.where(real, dk_tile, 0.0)
        dv_tile = tl.where(real, dv_tile, 0.0)
    if FADED:
        found = tl.sum(v_tile.to(tl.float32) * dv_tile, 1) + brought - lost
        if traits.key_mask:
            found = tl.where(real_keys(begin, batch, given, shape.keys), found, 0.0)
        tl.store(counted + tl.cast(line, tl.int64) * sizes.keys + row, found, mask=there)
    put_rows(dv, dv_tile, batch, kv_head, begin, sizes.keys, sizes.value_dim, shape.keys, shape.value_width)
    put_keys(dk, dk_tile, k, batch, kv_head, begin, sizes, traits, shape)


def backward(grads: Gradients, given: SumsInputs, results: Results, spec: SumsSpec, asked: frozenset[str]) -> Gradients:
    """The gradients of ``sums_forward.forward``, as those of ``zonal.kernels.sums.backward``."""
    (dy, dfinal), (y, factor, final, _), learned = grads, results, spec.learned if "coefficients" in asked else 0
    assert dy is not None
    dfinal = dfinal if spec.keeps else None
    levelled, powers = tiles.levelled(given, spec.normalise)
    taken = levelled.by_head()
    q, k, v, _, coefficients, monomials, initial, *_ = taken
    # what rows lose by rounding dy, y must lose too: both are multiplied by the row's factor, which may be large
    dy = dy.to(q.dtype)
    batch, heads, queries, _ = q.shape
    keys, width = v.shape[2:]
    dq, dk, dv = (torch.empty(*x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    with tiles.on(q.device):
        call = sums_state.prepare(taken, spec)
        tile, found = call.tile, call.borders
        delta = tiles.row_products(dy, y) if spec.anchor == "row" else None
        sums = sums_state.known(call, k, v, initial)
        inputs = tuple(tiles.rows_of(x) for x in (q, k, v, dy))
        code = {
            "value": tile.functions.value,
            "derivative": tile.functions.derivative,
            "traits": tile.traits,
            "FADED": call.faded,
        }
        strips = sums_state.choose("read_back", q, v, tile.traits, call.faded)
        blocks = tiles.ceil_div(queries, strips.rows)
        scale_parts, weight_parts, parts = (
            torch.empty(batch, heads, blocks, *more, dtype=torch.float32, device=q.device)
            for more in ((), (3,), (learned,))
        )
        from_border = int(initial is None)
        tiles.launch(
            read_back_kernel,
            batch * heads * blocks,
            (*inputs, tiles.rows_of(dq), call.place(sums), found.border, scale_parts, parts, weight_parts, factor,
             delta, call.weights, tile.given, from_border),
            {**code, "base": tile.functions.base, "LEARNED": learned, "shape": call.shape(strips)},
            strips.tiling(),
        )  # fmt: skip
        # the same room holds what comes back
        back = sums
        if from_border:
            back[:, :, 0] = 0
        if found.count or initial is not None:
            sums_state.absorb(call, back, q, dy, factor, delta, from_border)
            if dfinal is not None:
                back[:, :, -1] += sums_layout.from_memory_gradient(dfinal, call.form, width)
            sums_state.carry(call, back, True)
        counted = torch.empty(batch, k.shape[1], keys, dtype=torch.float32, device=q.device) if call.faded else None
        strips = sums_state.choose("keys_back", q, v, tile.traits, call.faded)
        tiles.launch(
            keys_back_kernel,
            batch * k.shape[1] * tiles.ceil_div(keys, strips.rows),
            (*inputs, tiles.rows_of(dk), tiles.rows_of(dv), counted, call.place(back), found.keys, found.queries,
             found.seeing, factor, delta, tile.given),
            {**code, "shape": call.shape(strips, of_keys=True)},
            strips.tiling(),
        )  # fmt: skip
        # float32 inside a block, float64 across blocks: the sums run over all queries and keys
        dscale, dcoefficients, dweights = (
            x.sum((0, 2), dtype=torch.float64) for x in (scale_parts, parts, weight_parts)
        )
        dinitial = None
        if initial is not None:
            dinitial = sums_layout.to_memory_gradient(back[:, :, 0], call.form, width)
    ddecay = None
    if counted is not None and "log_decay" in asked:
        # what rows lose by rounding dy, keys have lost too
        rows = None if spec.anchor == "row" else (dy.double() * y).sum(-1)
        ddecay = decay_gradient(given, counted.double(), rows, dfinal, final)
    dq, dk = tiles.through_powers((dq.sum_to_size(given.q.shape), dk.sum_to_size(given.k.shape)), powers)
    return (
        dq, dk, dv, dscale,
        padded(dcoefficients, coefficients) if learned else None, dweights[:, : monomials.shape[1]], dinitial, ddecay,
        counted,
    )  # fmt: skip


__all__ = ["backward", "keys_back_kernel", "read_back_kernel"]
