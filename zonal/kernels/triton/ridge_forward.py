"""y_t = C_t P_t (M_t P_t)^power scale q_t of all queries at once, from what ``ridge_state`` knows of each block of keys."""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
import torch
import triton
import triton.language as tl
from torch import Tensor

from zonal.kernels.cpp.ridge_library import Before
from zonal.kernels.triton import ridge_state, tiles
from zonal.kernels.triton.ridge_state import Call, choose, matrix, product, put_tokens, tokens_of
from zonal.kernels.triton.tiles import tile_rows


@triton.jit
def near(x, other, seen):
    """Rows of x against rows of a block, zeros where those are not seen."""
    return tl.where(seen, product(x, tl.trans(other)), 0.0)


@triton.jit
def moved_on(
    x, rows, start, line, block, first, stop, seen, shape, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Each row times its A_t: M_t P_t x."""
    step = matrix(start, line, block, shape.key_dim + shape.value_dim, shape.key_dim, shape, WIDTH, WIDTH)
    out = product(x, tl.trans(step))
    weight = near(x, tokens_of(rows.half, line, first, stop, shape.keys, shape.key_dim, BLOCK, WIDTH), seen)
    out -= product(weight, tokens_of(rows.moved, line, first, stop, shape.keys, shape.key_dim, BLOCK, WIDTH))
    weight = near(x, tokens_of(rows.after, line, first, stop, shape.keys, shape.key_dim, BLOCK, WIDTH), seen)
    return out + product(weight, tokens_of(rows.z, line, first, stop, shape.keys, shape.key_dim, BLOCK, WIDTH))


@triton.jit
def block_of_queries(q, scale, hi, table, shape, ROWS: tl.constexpr):
    """(block, query line, key line, first key, its end, first query, its end, the queries' scale) of a program over heads and blocks."""
    block, line = tl.program_id(0) % shape.blocks, tl.program_id(0) // shape.blocks
    batch, head = line // shape.heads, line % shape.heads
    kv_line = batch * (shape.heads // shape.groups) + head // shape.groups
    begin, end = tl.load(table + 2 * shape.blocks + block), tl.load(table + 3 * shape.blocks + block)
    return block, line, kv_line, tl.load(table + block), tl.load(table + shape.blocks + block), begin, end, tl.load(scale + head)


@triton.jit
def sight(hi, t, end, first, stop, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(how far ROWS queries from ``t`` on see, (ROWS, BLOCK) whether they see each key of a block)."""
    row, key = t + tl.arange(0, ROWS), first + tl.arange(0, BLOCK)
    limit = tl.load(hi + row, mask=row < end, other=0)
    return limit, (key[None, :] < limit[:, None]) & (key < stop)[None, :]


@triton.jit
def read_kernel(
    q, y, rows, start, cut, scale, hi, table, shape, POWER: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """The queries of one head that start from one block."""
    block, line, kv_line, first, stop, begin, end, gain = block_of_queries(q, scale, hi, table, shape, ROWS)
    for t in tl.range(begin, end, ROWS):
        limit, seen = sight(hi, t, end, first, stop, ROWS, BLOCK)
        x = tile_rows(q, line // shape.heads, line % shape.heads, t, end, shape.key_dim, ROWS, WIDTH, True, True).to(tl.float32) * gain
        for _ in tl.static_range(POWER):
            x = moved_on(x, rows, start, kv_line, block, first, stop, seen, shape, BLOCK, WIDTH)
        out = product(x, tl.trans(matrix(start, kv_line, block, shape.key_dim, shape.value_dim, shape, VALUE_WIDTH, WIDTH)))
        weight = near(x, tokens_of(rows.half, kv_line, first, stop, shape.keys, shape.key_dim, BLOCK, WIDTH), seen)
        out += product(weight, tokens_of(rows.gain, kv_line, first, stop, shape.keys, shape.value_dim, BLOCK, VALUE_WIDTH))
        out = tl.where((limit > tl.load(cut + kv_line * shape.blocks + block))[:, None], float("nan"), out)
        put_tokens(y, out, line, t, end, shape.queries, shape.value_dim, ROWS, VALUE_WIDTH)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, rho: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor, segment_start: Tensor | None,
    before: Before, power: int, limit: float, documents: int,
) -> Tensor:  # fmt: skip
    """y (B, H, T, P) float32; arguments as ``zonal.kernels.cpp.ridge_library.forward`` takes them, q, k, v of one of float32, bfloat16, float16.

    Where G + rho I is not positive definite, which keys that are not finite cause, rows that see those are NaN: to raise would wait for the device.
    """
    y = torch.empty(*q.shape[:3], v.shape[3], dtype=torch.float32, device=q.device)
    with tiles.on(q.device):
        call = ridge_state.prepare(q, k, v, key_mask, lo, hi, segment_start, before, power, limit, documents)
        found = ridge_state.known(call, rho, before)
        tiles.launch(
            read_kernel,
            q.shape[0] * q.shape[1] * call.shape.blocks,
            (tiles.rows_of(q), y, found.rows, found.start, found.cut, scale.float().contiguous(), call.places.hi, call.places.table, call.shape),
            {"POWER": power, **row_sizes(call)},
            choose("read", call.shape, call.block),
        )
    return y


def row_sizes(call: Call) -> dict[str, int]:
    """The shapes of tiles of a kernel over rows."""
    return {"ROWS": call.block, "BLOCK": call.block, **call.widths()}


__all__ = ["block_of_queries", "forward", "moved_on", "near", "row_sizes", "sight"]
