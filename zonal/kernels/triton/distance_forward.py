"""y_t = factor_t sum_s K_ts v_s on tiles. log K is a weighted sum of distances, or waves of it.

For few queries the keys are split over programs.
"""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
import torch
import triton
import triton.language as tl

from zonal.kernels.abi import plain
from zonal.kernels.distance import DistanceInputs, DistanceSpec
from zonal.kernels.op import Results
from zonal.kernels.triton import distance_tiles, tiles
from zonal.kernels.triton.distance_tiles import added, part_tiles, tile_of, waves, weights_of
from zonal.kernels.triton.forward import DECODE_QUERIES, combine, exponentials, row_factor, splits_of
from zonal.kernels.triton.tiles import LOG2E, load_values, put_rows, visible_keys, visible_pairs


@triton.jit
def distance_forward_kernel(
    q, k, v, y, factor, totals, masses, tops, query_notes, key_notes, weights, coefficients, given, splits, length,
    metric: tl.constexpr, traits: tl.constexpr, shape: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head.

    SPLIT: only keys [i length, (i + 1) length), whose sums go to totals (B, H, T, splits, P), masses and tops.
    """
    sizes = given.sizes
    blocks = tl.cdiv(sizes.queries, shape.queries)
    split = tl.program_id(0) % splits
    index = tl.program_id(0) // splits
    line = index // blocks
    batch, head = line // sizes.heads, line % sizes.heads
    kv_head = head // sizes.groups
    # causal blocks with many keys first: they end last
    begin = (blocks - 1 - index % blocks) * shape.queries
    last = tl.minimum(begin + shape.queries, sizes.queries) - 1
    t = tl.minimum(begin + tl.arange(0, shape.queries), last)
    lo, hi = visible_keys(t, given, traits)
    start = visible_keys(begin, given, traits)[0] // shape.keys * shape.keys
    stop = visible_keys(last, given, traits)[1]
    if SPLIT:
        start = tl.maximum(start, split * length)
        stop = tl.minimum(stop, split * length + length)
    a = (q, query_notes, batch, head, line, begin, sizes.queries)
    q_tiles = part_tiles(a, metric, shape.queries)
    weighs = weights_of(weights, line, begin, sizes.queries, metric, shape.queries)
    kv_line = batch * (sizes.heads // sizes.groups) + kv_head
    total = tl.zeros([shape.queries, shape.value_width], tl.float32)
    mass = tl.zeros([shape.queries], tl.float32)
    top = tl.full([shape.queries], float("-inf"), tl.float32)
    # one loop over all tiles, whether they need a mask or not: beside the distances it costs little
    for first in tl.range(start, stop, shape.keys, disable_licm=True):
        b = (k, key_notes, batch, kv_head, kv_line, first, sizes.keys)
        x = tile_of(a, b, q_tiles, part_tiles(b, metric, shape.keys), weighs, metric, shape.queries, shape.keys, False)[
            0
        ]
        if metric.waves > 0:
            x = waves(x, coefficients + head * 3 * metric.waves, metric.waves)[0]
        visible = visible_pairs(x, first, lo, hi, batch, given, traits, shape.keys, True)
        x = tl.where(visible, x * LOG2E, float("-inf"))
        v_tile = load_values(v, batch, kv_head, first, given, traits, shape, True)
        weight, total, mass, top = exponentials(x, total, mass, top, traits)
        total = added(weight, v_tile, total, traits)
    place = begin + tl.arange(0, shape.queries)
    inside = place < sizes.queries
    slot = tl.cast(line, tl.int64) * sizes.queries + place
    if SPLIT:
        slot = slot * splits + split
        tl.store(masses + slot, mass, mask=inside)
        tl.store(tops + slot, top, mask=inside)
        column = tl.arange(0, shape.value_width)
        tl.store(
            totals + slot[:, None] * sizes.value_dim + column[None, :],
            total,
            mask=inside[:, None] & (column < sizes.value_dim)[None, :],
        )
    else:
        row, kept = row_factor(mass, top, lo, hi, batch, given, traits)
        put_rows(
            y,
            total * row[:, None],
            batch,
            head,
            begin,
            sizes.queries,
            sizes.value_dim,
            shape.queries,
            shape.value_width,
        )
        tl.store(factor + slot, kept, mask=inside)


def prepared(inputs: DistanceInputs) -> DistanceInputs:
    """In the type of keys: queries that came in it are in float32 for the sake of their weights alone."""
    return inputs._replace(q=inputs.q.to(inputs.k.dtype), coefficients=plain(inputs.coefficients, torch.float32))


def forward(inputs: DistanceInputs, spec: DistanceSpec) -> Results:
    """(y (B, H, T, P), factor (B, H, T)), float32, factor as ``forward.forward`` has it.

    k, v: one of float32, bfloat16, float16, any strides, D and P up to 256.
    """
    inputs = prepared(inputs)
    q, k, v, _, coefficients, *_ = inputs
    batch, heads, queries, _ = q.shape
    y = torch.empty(batch, heads, queries, v.shape[3], dtype=torch.float32, device=q.device)
    factor = torch.empty(batch, heads, queries, dtype=torch.float32, device=q.device)
    with tiles.on(q.device):
        call = distance_tiles.call(inputs, spec)
        own = call.tiles
        few = queries <= DECODE_QUERIES
        tiling = distance_tiles.choose("decode" if few else "forward", q, v, call.metric)
        programs = batch * heads * tiles.ceil_div(queries, tiling.queries)
        splits, length = splits_of(programs, k.shape[2], tiling.keys) if few else (1, 0)
        totals = masses = tops = None
        if splits > 1:
            totals = torch.empty(batch, heads, queries, splits, v.shape[3], dtype=torch.float32, device=q.device)
            masses, tops = torch.empty(2, batch, heads, queries, splits, dtype=torch.float32, device=q.device)
        tiles.launch(
            distance_forward_kernel,
            programs * splits,
            (*(tiles.rows_of(x) for x in (q, k, v, y)), factor, totals, masses, tops, call.query_notes, call.key_notes,
             call.weights, coefficients, own.given, splits, length),
            {**distance_tiles.constants(call, tiling, q, v), "SPLIT": splits > 1},
            tiling,
        )  # fmt: skip
        if splits > 1:
            combine(totals, masses, tops, y, factor, own)
    return y, factor


__all__ = ["forward", "prepared"]
