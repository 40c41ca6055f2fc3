"""y_t = factor_t sum_s l(S_ts) v_s in time linear in the tokens, for polynomial links of degree 1 or 2.

Keys add to sums over features (sums_state), which are known at borders some hundred or thousand keys apart. A block of
queries reads the sums of one border strip by strip. It compares the keys after that border directly, through the link,
as the tile kernels do.
"""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from zonal.kernels.op import Results
from zonal.kernels.sums import SumsInputs, SumsSpec
from zonal.kernels.triton import sums_layout, sums_state, tiles
from zonal.kernels.triton.sums_state import columns, mass_places, narrowed, plus_sums, products, strip_blocks
from zonal.kernels.triton.tiles import (
    SMALLEST,
    fading,
    key_ranges,
    load_keys,
    load_queries,
    load_values,
    marks,
    put_rows,
    row_numbers,
    scores,
    visible_keys,
    visible_pairs,
    weighted,
)


@triton.jit
def read(
    q, place, batch, head, kv_line, first, there, border, gain, c, rows, sizes, like, traits: tl.constexpr,
    shape: tl.constexpr,
):  # fmt: skip
    """(sums (queries, P) of w psi(q) M, (queries,) of w psi(q) m) at a border.

    gain (queries,): the factor of q. c: three numbers. rows: strips to read, 0 = none.
    """
    total = tl.zeros([shape.queries, shape.value_width], tl.float32)
    mass = tl.zeros([shape.queries], tl.float32)
    width = sizes.value_dim
    for strip in tl.range(0, rows):
        left, right, times = strip_blocks(place, strip, shape)
        a = (
            columns(q, batch, head, first, there, left, sizes.key_dim, shape.queries, shape.left)
            * (gain * gain * (tl.load(c + 2) * times))[:, None]
        )
        made = products(
            a,
            columns(q, batch, head, first, there, right, sizes.key_dim, shape.queries, shape.block),
            shape,
            shape.queries,
        )
        row = strip * shape.features
        made = narrowed(made, like, traits)
        total = plus_sums(total, made, place, kv_line, border, row, width, like, traits, shape, shape.features)
        if traits.anchor == "row":
            mass += tl.sum(
                made.to(tl.float32)
                * tl.load(mass_places(place, kv_line, border, row, width, shape, shape.features))[None, :],
                1,
            )
    return total, mass


@triton.jit
def read_rest(
    total, mass, q, place, batch, head, kv_line, first, there, border, gain, c, sizes, like, traits: tl.constexpr,
    shape: tl.constexpr,
):  # fmt: skip
    """The same of the vectors themselves and of 1."""
    width = sizes.value_dim
    row = place.pairs * (shape.block * shape.block)
    made = (
        columns(q, batch, head, first, there, 0, sizes.key_dim, shape.queries, shape.key_width)
        * (gain * tl.load(c + 1))[:, None]
    )
    made = narrowed(made, like, traits)
    total = plus_sums(total, made, place, kv_line, border, row, width, like, traits, shape, shape.key_width)
    column = tl.arange(0, shape.value_width)
    start = place.sums + (tl.cast(kv_line, tl.int64) * (place.count + 1) + border) * place.size
    constant = tl.load(c)
    total += (
        constant * tl.load(start + (row + shape.key_width) * width + column, mask=column < width, other=0.0)[None, :]
    )
    if traits.anchor == "row":
        at = mass_places(place, kv_line, border, row, width, shape, shape.key_width)
        mass += tl.sum(made.to(tl.float32) * tl.load(at)[None, :], 1)
        mass += constant * tl.load(start + tl.cast(row + shape.key_width + 1, tl.int64) * width + row + shape.key_width)
    return total, mass


@triton.jit
def add_values(
    total, mass, q_tile, gain, whole, rest, lo, hi, begin, stop, batch, kv_head, k, v, c, given,
    value: tl.constexpr, traits: tl.constexpr, shape: tl.constexpr, FADED: tl.constexpr, CUT: tl.constexpr,
):  # fmt: skip
    """Add keys [begin, stop) to the sums of a block of queries.

    total (rows, P) = sum K v, and for the row anchor mass (rows,) = sum K, of the same rounded K. CUT: the tiles hold
    keys that some query does not see.
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
        weight = value(x, c, traits.n)
        if FADED:
            key_whole, key_rest = marks(given.fade_keys, line, first, sizes.keys, shape.keys, float("inf"))
            weight = weight * fading(whole[:, None], rest[:, None], key_whole[None, :], key_rest[None, :])
        if CUT or traits.key_mask:
            weight = tl.where(visible_pairs(x, first, lo, hi, batch, given, traits, shape.keys, CUT), weight, 0.0)
        weight = narrowed(weight, v, traits)
        if traits.anchor == "row":
            mass += tl.sum(weight.to(tl.float32), 1)
        total = weighted(weight, v_tile, total, traits)
    return total, mass


@triton.jit
def read_kernel(
    q, k, v, y, factor, place, border_of, weights, given, from_border, value: tl.constexpr, traits: tl.constexpr,
    shape: tl.constexpr, FADED: tl.constexpr, POSITIVE: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head. from_border: the first border whose sums are not all 0.

    factor: written for the row anchor, otherwise read.
    """
    sizes = given.sizes
    blocks = tl.cdiv(sizes.queries, shape.queries)
    line = tl.program_id(0) // blocks
    batch, head = line // sizes.heads, line % sizes.heads
    kv_head = head // sizes.groups
    kv_line = batch * (sizes.heads // sizes.groups) + kv_head
    begin = (blocks - 1 - tl.program_id(0) % blocks) * shape.queries
    last = tl.minimum(begin + shape.queries, sizes.queries) - 1
    row = begin + tl.arange(0, shape.queries)
    t = tl.minimum(row, last)
    lo, hi = visible_keys(t, given, traits)
    lo_first, hi_first = visible_keys(begin, given, traits)
    lo_last, hi_last = visible_keys(last, given, traits)
    c = given.coefficients + head * traits.stride
    gain = tl.zeros([shape.queries], tl.float32) + tl.load(given.scale + head)
    if traits.normalise:
        gain = gain * row_numbers(given.q_inverse, line, begin, sizes.queries, shape.queries, 0.0)
    border = tl.load(border_of + begin)
    reads = border >= from_border
    known = tl.minimum(border * place.chunk, sizes.keys)
    there = row < sizes.queries
    total, mass = read(
        q, place, batch, head, kv_line, begin, there, border, gain, weights + head * 3,
        tl.where(reads, place.pairs * (shape.block // shape.left), 0), sizes, v, traits, shape,
    )  # fmt: skip
    if reads:
        total, mass = read_rest(
            total, mass, q, place, batch, head, kv_line, begin, there, border, gain, weights + head * 3, sizes, v,
            traits, shape,
        )  # fmt: skip
    whole_mark, rest_mark = mass, mass
    if FADED:
        share = row_numbers(given.fade_rows, kv_line * 3 + 2, begin, sizes.queries, shape.queries, 0.0)
        total, mass = total * share[:, None], mass * share
        whole_mark, rest_mark = marks(given.fade_rows, kv_line, begin, sizes.queries, shape.queries, float("-inf"))
    if traits.packed:
        total = tl.where((lo < known)[:, None], total, 0.0)
        mass = tl.where(lo < known, mass, 0.0)
    q_tile = load_queries(q, batch, head, begin, given, traits, shape, True)
    gain = gain[:, None]
    start = tl.maximum(known, lo_first // shape.keys * shape.keys)
    begins, stops = key_ranges(start, hi_first, lo_last, hi_last, traits, shape.keys)
    for i in tl.static_range(tl.constexpr(0 if traits.edged else 1), 3):
        total, mass = add_values(
            total, mass, q_tile, gain, whole_mark, rest_mark, lo, hi, begins[i], stops[i], batch, kv_head, k, v,
            c, given, value, traits, shape, FADED, i != 1,
        )  # fmt: skip
    if traits.anchor == "row":
        empty = tl.abs(mass) < SMALLEST
        by = tl.where(empty, 0.0, 1 / tl.where(empty, 1.0, mass))
        if POSITIVE:
            # a sum of what is not negative that comes out negative is nothing but rounding
            by = tl.where(mass < 0, float("nan"), by)
        tl.store(factor + tl.cast(line, tl.int64) * sizes.queries + row, by, mask=there)
    else:
        by = row_numbers(factor, line, begin, sizes.queries, shape.queries, 0.0)
    put_rows(
        y, total * by[:, None], batch, head, begin, sizes.queries, sizes.value_dim, shape.queries, shape.value_width
    )


def forward(inputs: SumsInputs, spec: SumsSpec) -> Results:
    """(y (B, H, T, P), the rows' factors (B, H, T), the state after the last key, no row summed apart), all float32.

    The state is empty unless ``spec.keeps``.

    ``spec.degree`` <= 2; q, k, v of one of float32, bfloat16, float16.
    """
    inputs = tiles.levelled(inputs, spec.normalise)[0].by_head()
    q, k, v = inputs[:3]
    batch, heads, queries, _ = q.shape
    y = torch.empty(batch, heads, queries, v.shape[3], dtype=torch.float32, device=q.device)
    with tiles.on(q.device):
        call = sums_state.prepare(inputs, spec)
        factor = row_factors(call, q, inputs.before, spec)
        sums = sums_state.known(call, k, v, inputs.initial)
        tile = call.tile
        strips = sums_state.choose("read", q, v, tile.traits, call.faded)
        tiles.launch(
            read_kernel,
            batch * heads * tiles.ceil_div(queries, strips.rows),
            (*(tiles.rows_of(x) for x in (q, k, v, y)), factor, call.place(sums), call.borders.border, call.weights,
             tile.given, int(inputs.initial is None)),
            {"value": tile.functions.value, "traits": tile.traits, "shape": call.shape(strips), "FADED": call.faded,
             "POSITIVE": spec.guards},
            strips.tiling(),
        )  # fmt: skip
        final = torch.empty(0, dtype=torch.float32, device=q.device)
        if spec.keeps:
            final = sums_layout.to_memory(sums[:, :, -1], call.form, v.shape[3])
    return y, factor, final, q.new_zeros(q.shape[:3] if spec.guards else (0,), dtype=torch.uint8)


def row_factors(call: sums_state.SumsCall, q: Tensor, before: Tensor | None, spec: SumsSpec) -> Tensor:
    """(B, H, T) float32: room for the row anchor's, else what each row is multiplied by."""
    shape = q.shape[:3]
    if spec.anchor == "row":
        return torch.empty(*shape, dtype=torch.float32, device=q.device)
    if spec.anchor == "raw":
        return torch.ones(*shape, dtype=torch.float32, device=q.device)
    lo, hi = call.borders.edges.long()
    counts = call.tile.given.key_counts
    seen = (hi - lo)[None] if counts is None else counts[:, hi] - counts[:, lo]
    if before is not None:
        seen = seen + before[:, None]
    return torch.where(seen > 0, 1 / seen.clamp(min=1).float(), 0.0)[:, None].expand(shape).contiguous()


__all__ = ["forward", "read_kernel", "row_factors"]
