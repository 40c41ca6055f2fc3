"""y_t = C_t P_t (M_t P_t)^power scale q_t of all queries at once, from what ``ridge_state`` gives per block of keys."""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl

from zonal.kernels.abi import plain
from zonal.kernels.op import Results
from zonal.kernels.ridge import RidgeInputs, RidgeSpec
from zonal.kernels.triton import ridge_state, tiles
from zonal.kernels.triton.ridge_state import choose, full, given_places, matrix, product, through
from zonal.kernels.triton.tiles import tile_rows


@triton.jit
def moved_on(
    x, rows, start, index, line, first, stop, limit, shape, SLICE: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr
):  # fmt: skip
    """Each row times its A_t: M_t P_t x."""
    tokens = shape.keys
    out = product(x, tl.trans(matrix(start, index, WIDTH + VALUE_WIDTH, shape.size, WIDTH, WIDTH)))
    out = through(out, x, rows.half, rows.moved, line, first, stop, limit, tokens, -1.0, SLICE, WIDTH, WIDTH)
    return through(out, x, rows.after, rows.z, line, first, stop, limit, tokens, 1.0, SLICE, WIDTH, WIDTH)


@triton.jit
def block_of_queries(scale, table, shape):
    """(block, query line, key line, first key, end of keys, first query, end of queries, scale) of a program."""
    block, line = tl.program_id(0) % shape.blocks, tl.program_id(0) // shape.blocks
    batch, head = line // shape.heads, line % shape.heads
    kv_line = batch * (shape.heads // shape.groups) + head // shape.groups
    begin, end = tl.load(table + 2 * shape.blocks + block), tl.load(table + 3 * shape.blocks + block)
    return (
        block,
        line,
        kv_line,
        tl.load(table + block),
        tl.load(table + shape.blocks + block),
        begin,
        end,
        tl.load(scale + head),
    )


@triton.jit
def read_kernel(
    q, y, rows, start, cut, scale, hi, table, shape, POWER: tl.constexpr, ROWS: tl.constexpr, SLICE: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """The queries of one head that start from one block."""
    block, line, kv_line, first, stop, begin, end, gain = block_of_queries(scale, table, shape)
    tokens, index = shape.keys, kv_line * shape.blocks + block
    good = tl.load(cut + index)
    stop = tl.minimum(stop, good)  # a key that is NaN is not read: times a weight of 0 it would be NaN too
    for t in tl.range(begin, end, ROWS):
        limit = tl.load(hi + t + tl.arange(0, ROWS), mask=t + tl.arange(0, ROWS) < end, other=0)
        x = tile_rows(q, line // shape.heads, line % shape.heads, t, end, shape.key_dim, ROWS, WIDTH, True, True)
        x = full(x) * gain
        if POWER > 0:
            for _ in tl.range(0, POWER):
                x = moved_on(x, rows, start, index, kv_line, first, stop, limit, shape, SLICE, WIDTH, VALUE_WIDTH)
        out = product(x, tl.trans(matrix(start, index, WIDTH, shape.size, VALUE_WIDTH, WIDTH)))
        out = through(out, x, rows.half, rows.gain, kv_line, first, stop, limit, tokens, 1.0, SLICE, WIDTH, VALUE_WIDTH)
        out = tl.where((limit > good)[:, None], float("nan"), out)
        at, inside = given_places(y, line, t, end, shape.queries, shape.value_dim, ROWS, VALUE_WIDTH)
        tl.store(at, out, mask=inside)


def forward(inputs: RidgeInputs, spec: RidgeSpec) -> Results:
    """``forward_in``, in float64 where float32 would lose digits."""
    return forward_in(inputs, spec, ridge_state.loses_digits(inputs, spec))


def forward_in(inputs: RidgeInputs, spec: RidgeSpec, double: bool) -> Results:
    """(y (B, H, T, P) float32, which documents ran in float64: all or none) for calls whose heads share one power.

    q, k, v are of one of float32, bfloat16, float16. Where G + rho I is not positive definite, as with keys that are
    not finite, the rows that see them are NaN: an error would have to wait for the device.
    """
    q, k, v = inputs[:3]
    q = q.double() if double else q
    y = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float32, device=q.device)
    with tiles.on(q.device):
        call = ridge_state.prepare(inputs, spec, double)
        found = ridge_state.known(call, inputs.rho, inputs.before)
        tiles.launch(
            read_kernel,
            q.shape[0] * q.shape[1] * call.shape.blocks,
            (
                tiles.rows_of(q),
                y,
                found.rows,
                found.start,
                found.cut,
                plain(inputs.scale, call.number),
                call.places.hi,
                call.places.table,
                call.shape,
            ),
            {"POWER": spec.powers[0], **call.tiles()},
            choose(call.shape),
        )
    return y, torch.full((*k.shape[:2], inputs.documents), double, dtype=torch.bool, device=q.device)


__all__ = ["block_of_queries", "forward", "forward_in", "moved_on", "read_kernel"]
