"""Ridge and Koopman read-outs on CUDA, exact per token: the state at the start of each block of keys, and the rows that
update it through the block.

At the start of a block the kernels hold P = (G + rho I)^-1, the regression W = C P and the step A = M P, rounded from
float64. A float32 error then counts by |z|^2 / rho and not by the condition of G. Where that is large, all buffers are
float64, and so is what the kernels compute from them. Within the block each of them is a sum of
products of rows, of which a query sees a part: ``P_t = P - sum h_s h_s^T``, ``W_t = W + sum e_s h_s^T``,
``A_t = A - sum a_s h_s^T + sum z_s p_s^T``. With K = I + Z P Z^T = L L^T:
``H = L^-1 Z P``, ``E = L^-1 (V - Z W^T)``, ``p_s = P_{s+1} z_{s-1}`` and, of the rows before,
``a = L^-1 (Z A^T + low(Z p^T) Z)``.

A block is a chunk. Every block starts from its own inverse, and all blocks run at once. For r = P = 64 and power 1 the
inverses of blocks of 32 keys take 50 thousand operations per key in float64, and G, C and M 25 thousand. Shorter blocks
would need more inverses and states.
"""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from zonal.kernels.abi import plain
from zonal.kernels.ridge import Before, RidgeInputs, RidgeSpec
from zonal.kernels.triton import sizes, tiles
from zonal.kernels.triton.sizes import ceil_div, padded
from zonal.kernels.triton.tiles import Tiling


class Shape(NamedTuple):
    """H, H / Hkv, T, S, D, P, blocks of keys, and numbers of a key head's state at the start of one, padded."""

    heads: Any
    groups: Any
    queries: Any
    keys: Any
    key_dim: Any
    value_dim: Any
    blocks: Any
    size: Any


class PreparedKeys(NamedTuple):
    """The rows of a call's keys, (B, Hkv, S, …): z and h, e of V's width, and for powers above 0 the key before
    each, a and p.

    Widths are padded with zeros to powers of two, which kernels know: a row's address then takes one register.
    """

    z: Any
    half: Any
    gain: Any
    earlier: Any
    moved: Any
    after: Any


# ---- on the device ----


@triton.jit
def product(a, b):
    """a b by matrix units: float64, or float32 as three tf32 products that keep 21 bits. Scalar float32 needs more
    registers."""
    if a.dtype == tl.float64:
        return tl.dot(a, b, input_precision="ieee", out_dtype=tl.float64)
    else:
        return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def full(x):
    """x in float64 if it is, else in float32."""
    if x.dtype == tl.float64:
        return x
    else:
        return x.to(tl.float32)


@triton.jit
def tokens_of(x, line, first, stop, tokens, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(ROWS, WIDTH) of a contiguous array (lines, tokens, WIDTH), tokens ``first`` to ``stop``, then 0."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = x + (tl.cast(line, tl.int64) * tokens + first) * WIDTH + (row[:, None] * WIDTH + column[None, :])
    return tl.load(at, mask=(first + row < stop)[:, None], other=0.0)


@triton.jit
def put_tokens(x, tile, line, first, stop, tokens, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write such a tile."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = x + (tl.cast(line, tl.int64) * tokens + first) * WIDTH + (row[:, None] * WIDTH + column[None, :])
    tl.store(at, tile, mask=(first + row < stop)[:, None])


@triton.jit
def given_places(x, line, first, stop, tokens, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(addresses (ROWS, WIDTH), whether they are inside) of a contiguous array (lines, tokens, width) as it came."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = x + (tl.cast(line, tl.int64) * tokens + first) * width + (row[:, None] * width + column[None, :])
    return at, (first + row < stop)[:, None] & (column < width)[None, :]


@triton.jit
def given_of(x, line, first, stop, tokens, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Such a tile in float32 or float64, zeros outside."""
    at, inside = given_places(x, line, first, stop, tokens, width, ROWS, WIDTH)
    return full(tl.load(at, mask=inside, other=0.0))


@triton.jit
def matrix_places(state, index, row, size, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Addresses of ROWS rows from ``row`` on of the index-th state.

    A state has WIDTH rows of G or P, then V's width of C or W, and then M or A if it has them.
    """
    i, j = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    return state + tl.cast(index, tl.int64) * size + row * WIDTH + (i[:, None] * WIDTH + j[None, :])


@triton.jit
def matrix(state, index, row, size, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Such rows."""
    return tl.load(matrix_places(state, index, row, size, ROWS, WIDTH))


@triton.jit
def put_matrix(state, x, index, row, size, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write such rows."""
    tl.store(matrix_places(state, index, row, size, ROWS, WIDTH), x.to(state.dtype.element_ty))


@triton.jit
def sums_kernel(
    z, v, earlier, state, table, shape, SHIFTED: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr
):
    """G, C and M of one block of keys of one key head, float64. Key by key: few matrix units multiply float64."""
    index = tl.program_id(0)
    block, line = index % shape.blocks, index // shape.blocks
    start, stop = tl.load(table + block), tl.load(table + shape.blocks + block)
    i, p = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    gram = tl.zeros([WIDTH, WIDTH], tl.float64)
    cross = tl.zeros([VALUE_WIDTH, WIDTH], tl.float64)
    shift = tl.zeros([WIDTH, WIDTH], tl.float64)
    for s in tl.range(start, stop):
        at = tl.cast(line, tl.int64) * shape.keys + s
        key = tl.load(z + at * WIDTH + i).to(tl.float64)
        value = tl.load(v + at * shape.value_dim + p, mask=p < shape.value_dim, other=0.0).to(tl.float64)
        gram += key[:, None] * key[None, :]
        cross += value[:, None] * key[None, :]
        if SHIFTED:
            before = tl.load(earlier + at * WIDTH + i).to(tl.float64)
            shift += key[:, None] * before[None, :]
    put_matrix(state, gram, index, 0, shape.size, WIDTH, WIDTH)
    put_matrix(state, cross, index, WIDTH, shape.size, VALUE_WIDTH, WIDTH)
    if SHIFTED:
        put_matrix(state, shift, index, WIDTH + VALUE_WIDTH, shape.size, WIDTH, WIDTH)


@triton.jit
def carry_kernel(state, initial, final, table, shape, PACKED: tl.constexpr, REVERSE: tl.constexpr, WIDTH: tl.constexpr):
    """Replace the sums of blocks by sums of all earlier blocks (REVERSE: later ones), in place and in float64.

    initial: the state before the first block. final: that after all.
    """
    parts = tl.cdiv(shape.size, WIDTH)
    line = tl.cast(tl.program_id(0) // parts, tl.int64)
    column = tl.program_id(0) % parts * WIDTH + tl.arange(0, WIDTH)
    inside = column < shape.size
    running = tl.zeros([WIDTH], tl.float64)
    if initial is not None:
        running = tl.load(initial + line * shape.size + column, mask=inside, other=0.0)
    for step in tl.range(0, shape.blocks):
        block = shape.blocks - 1 - step if REVERSE else step
        at = state + (line * shape.blocks + block) * shape.size + column
        part = tl.load(at, mask=inside, other=0.0).to(tl.float64)
        opens = False
        if PACKED:
            opens = tl.load(table + 4 * shape.blocks + block) != 0
        if PACKED and not REVERSE:
            running = tl.where(opens, 0.0, running)
        tl.store(at, running.to(state.dtype.element_ty), mask=inside)
        running += part
        if PACKED and REVERSE:
            running = tl.where(opens, 0.0, running)
    if final is not None:
        tl.store(final + line * shape.size + column, running, mask=inside)


@triton.jit
def swept(x, row, j, pivot, column):
    """x after elimination of column j: one step of x G^-1, where row is G's row and pivot is G_jj at this step."""
    of = tl.sum(tl.where(column[None, :] == j, x, 0.0), 1) / pivot
    return tl.where(column[None, :] == j, of[:, None], x - of[:, None] * row[None, :])


@triton.jit
def inverse_kernel(
    state, start, rho, table, shape, SHIFTED: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr
):  # fmt: skip
    """P, W = C P and A = M P of one block, if any query starts from them, by Gauss-Jordan without pivoting, which the
    positive definite G + rho I does not need.

    A pivot that is not positive makes everything NaN.
    """
    index = tl.program_id(0)
    block, line = index % shape.blocks, index // shape.blocks
    if tl.load(table + 2 * shape.blocks + block) == tl.load(table + 3 * shape.blocks + block):
        return
    i = tl.arange(0, WIDTH)
    ridge = tl.load(rho + line % (shape.heads // shape.groups))
    gram = matrix(state, index, 0, shape.size, WIDTH, WIDTH) + tl.where(i[:, None] == i[None, :], ridge, 0.0)
    cross = matrix(state, index, WIDTH, shape.size, VALUE_WIDTH, WIDTH)
    if SHIFTED:
        shift = matrix(state, index, WIDTH + VALUE_WIDTH, shape.size, WIDTH, WIDTH)
    # beyond a key's numbers G is zero, and stays as it is
    for j in tl.range(0, shape.key_dim):
        row = tl.sum(tl.where(i[:, None] == j, gram, 0.0), 0)
        pivot = tl.sum(tl.where(i == j, row, 0.0), 0)
        pivot = tl.where(pivot > 0, pivot, float("nan"))
        cross = swept(cross, row, j, pivot, i)
        if SHIFTED:
            shift = swept(shift, row, j, pivot, i)
        own = tl.where(i == j, 1 / pivot, -row / pivot)
        gram = tl.where(i[:, None] == j, own[None, :], swept(gram, row, j, pivot, i))
    put_matrix(start, gram, index, 0, shape.size, WIDTH, WIDTH)
    put_matrix(start, cross, index, WIDTH, shape.size, VALUE_WIDTH, WIDTH)
    if SHIFTED:
        put_matrix(start, shift, index, WIDTH + VALUE_WIDTH, shape.size, WIDTH, WIDTH)


@triton.jit
def root_inverse(x, BLOCK: tl.constexpr):
    """L^-1 of a positive definite x = L L^T, row by row."""
    i = tl.arange(0, BLOCK)
    inverse = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(x.dtype)
    for j in tl.range(0, BLOCK):
        row = tl.sum(tl.where(i[:, None] == j, x, 0.0), 0)
        root = tl.rsqrt(tl.sum(tl.where(i == j, row, 0.0), 0))
        made = tl.sum(tl.where(i[:, None] == j, inverse, 0.0), 0) * root
        # x is symmetric where it is still to be worked on
        below = tl.where(i > j, tl.sum(tl.where(i[None, :] == j, x, 0.0), 1) * root, 0.0)
        x = x - below[:, None] * (row * root)[None, :]
        inverse = tl.where(i[:, None] == j, made[None, :], inverse - below[:, None] * made[None, :])
    return inverse


@triton.jit
def through(
    out, x, a, b, line, first, stop, limit, tokens, SIGN: tl.constexpr, SLICE: tl.constexpr, A_WIDTH: tl.constexpr,
    B_WIDTH: tl.constexpr,
):  # fmt: skip
    """out (ROWS, B_WIDTH) + SIGN sum of (x . a_s) b_s, over the keys s of [first, stop) before each row's limit.

    A few keys are taken at a time, to suit the matrix units.
    """
    for s in tl.range(first, tl.minimum(stop, tl.max(limit, 0)), SLICE):
        weight = product(x, tl.trans(tokens_of(a, line, s, stop, tokens, SLICE, A_WIDTH)))
        weight = tl.where((s + tl.arange(0, SLICE))[None, :] < limit[:, None], SIGN * weight, 0.0)
        out += product(weight, tokens_of(b, line, s, stop, tokens, SLICE, B_WIDTH))
    return out


@triton.jit
def lowered(
    root,
    x,
    line,
    first,
    stop,
    row,
    tokens,
    ROWS: tl.constexpr,
    SLICE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rows [row, row + ROWS) of L^-1 x. root: where L^-1 lies."""
    out = tl.zeros([ROWS, WIDTH], x.dtype.element_ty)
    i, j = tl.arange(0, ROWS), tl.arange(0, SLICE)
    for s in tl.range(0, tl.minimum(row + ROWS, stop - first), SLICE):
        part = tl.load(root + ((row + i)[:, None] * BLOCK + (s + j)[None, :]))
        out += product(part, tokens_of(x, line, first + s, stop, tokens, SLICE, WIDTH))
    return out


@triton.jit
def factor_kernel(
    v, rows, near, rest, roots, start, cut, table, shape, SHIFTED: tl.constexpr, ROWS: tl.constexpr,
    SLICE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """The rows of one block (``PreparedKeys``).

    near, rest, roots: room for Z P, V - Z W^T and L^-1, which other threads of the program read back.

    cut (lines, blocks): the first key that is not finite; it and what follows are zeros here.
    """
    index = tl.program_id(0)
    block, line = index % shape.blocks, index // shape.blocks
    if tl.load(table + 2 * shape.blocks + block) == tl.load(table + 3 * shape.blocks + block):
        return
    first, stop = tl.load(table + block), tl.load(table + shape.blocks + block)
    tokens, size = shape.keys, shape.size
    i, j, c = tl.arange(0, BLOCK), tl.arange(0, WIDTH), tl.arange(0, SLICE)
    z = tokens_of(rows.z, line, first, stop, tokens, BLOCK, WIDTH)
    odd = tl.sum(z * 0.0, 1) + tl.sum(
        given_of(v, line, first, stop, tokens, shape.value_dim, BLOCK, VALUE_WIDTH) * 0.0, 1
    )
    good = first + tl.min(tl.where(odd == 0.0, BLOCK, i), 0)
    tl.store(cut + index, good)
    good = tl.minimum(good, stop)
    z = tl.where((first + i < good)[:, None], z, 0.0)
    # Z P and Z P Z^T, a few columns of P at a time
    base = start + tl.cast(index, tl.int64) * size
    here = (tl.cast(line, tl.int64) * tokens + first) * WIDTH
    system = tl.where(i[:, None] == i[None, :], 1.0, 0.0).to(z.dtype)
    for column in tl.range(0, WIDTH, SLICE):
        part = product(z, tl.load(base + (j[:, None] * WIDTH + (column + c)[None, :])))
        at = here + (i[:, None] * WIDTH + (column + c)[None, :])
        tl.store(near + at, part, mask=(first + i < stop)[:, None])
        system += product(part, tl.trans(tl.load(rows.z + at, mask=(first + i < good)[:, None], other=0.0)))
    root = roots + tl.cast(index, tl.int64) * (BLOCK * BLOCK)
    tl.store(root + (i[:, None] * BLOCK + i[None, :]), root_inverse(system, BLOCK))
    for row in tl.range(0, stop - first, ROWS):
        tile = tokens_of(rows.z, line, first + row, good, tokens, ROWS, WIDTH)
        tile = product(tile, tl.trans(matrix(start, index, WIDTH, size, VALUE_WIDTH, WIDTH)))
        tile = given_of(v, line, first + row, good, tokens, shape.value_dim, ROWS, VALUE_WIDTH) - tile
        put_tokens(rest, tile, line, first + row, stop, tokens, ROWS, VALUE_WIDTH)
    tl.debug_barrier()
    for row in tl.range(0, stop - first, ROWS):
        tile = lowered(root, near, line, first, stop, row, tokens, ROWS, SLICE, BLOCK, WIDTH)
        put_tokens(rows.half, tile, line, first + row, stop, tokens, ROWS, WIDTH)
    for row in tl.range(0, stop - first, ROWS):
        tile = lowered(root, rest, line, first, stop, row, tokens, ROWS, SLICE, BLOCK, VALUE_WIDTH)
        put_tokens(rows.gain, tile, line, first + row, stop, tokens, ROWS, VALUE_WIDTH)
    if SHIFTED:
        tl.debug_barrier()
        for row in tl.range(0, stop - first, ROWS):
            behind = first + row + tl.arange(0, ROWS) + 1
            tile = tokens_of(rows.earlier, line, first + row, good, tokens, ROWS, WIDTH)
            out = product(tile, matrix(start, index, 0, size, WIDTH, WIDTH))
            out = through(out, tile, rows.half, rows.half, line, first, stop, behind, tokens, -1.0, SLICE, WIDTH, WIDTH)
            put_tokens(rows.after, out, line, first + row, stop, tokens, ROWS, WIDTH)
        tl.debug_barrier()
        for row in tl.range(0, stop - first, ROWS):
            own = first + row + tl.arange(0, ROWS)
            tile = tokens_of(rows.z, line, first + row, good, tokens, ROWS, WIDTH)
            out = product(tile, tl.trans(matrix(start, index, WIDTH + VALUE_WIDTH, size, WIDTH, WIDTH)))
            out = through(out, tile, rows.after, rows.z, line, first, good, own, tokens, 1.0, SLICE, WIDTH, WIDTH)
            put_tokens(near, out, line, first + row, stop, tokens, ROWS, WIDTH)
        tl.debug_barrier()
        for row in tl.range(0, stop - first, ROWS):
            tile = lowered(root, near, line, first, stop, row, tokens, ROWS, SLICE, BLOCK, WIDTH)
            put_tokens(rows.moved, tile, line, first + row, stop, tokens, ROWS, WIDTH)


# ---- on the host ----

# numbers of a state that a program carries on
_CARRIED = 256
# rows of a tile, and keys or queries that meet them at a time
_ROWS, _SLICE = 16, 16
# the part of a gradient that float32 may lose
_LOST = 1e-3


def loses_digits(inputs: RidgeInputs, spec: RidgeSpec) -> bool:
    """Whether float32 would lose three digits of gradients: it loses eps (|z|^2 / rho)^2, as P z cancels from 1 / rho.

    The answer is one number that the host waits for.
    """
    if not inputs.k.numel():
        return False
    longest = torch.linalg.vector_norm(inputs.k, dim=-1, dtype=torch.float64).amax(-1)
    if spec.limit > 0:
        longest = longest.clamp(max=spec.limit)
    lost = torch.finfo(torch.float32).eps * (longest.square() / inputs.rho).square()
    return bool((lost > _LOST).any())


class Places(NamedTuple):
    """Blocks of keys, none across documents.

    table (5, blocks) int32: the first key, the end of keys, the first query that starts from the block, the end of such
    queries, and whether a document begins there. hi (T,) int32: how far each query sees. opens (S,) int64: where each
    key's document begins; None: at 0.
    """

    table: Tensor
    hi: Tensor
    opens: Tensor | None


def places(
    lo: Tensor, hi: Tensor, segment_start: Tensor | None, keys: int, documents: int, block: int, device: torch.device
) -> Places:
    """Arguments as in ``RidgeInputs``. Nothing waits for the device where they are on the CPU, as calls have them."""
    hi = torch.maximum(lo, hi)
    starts, owner = torch.zeros(1, dtype=torch.int64, device=lo.device), torch.zeros_like(lo)
    if segment_start is not None:
        owner = F.pad((segment_start[1:] != segment_start[:-1]).long(), (1, 0)).cumsum(0)
        starts = torch.zeros(documents, dtype=torch.int64, device=lo.device).scatter(0, owner, segment_start)
    ends = F.pad(starts[1:], (0, 1), value=keys)
    first = F.pad(((ends - starts + block - 1) // block).clamp(min=1).cumsum(0), (1, 0))
    number = torch.arange(
        max(1, ceil_div(keys, block)) if segment_start is None else ceil_div(keys, block) + starts.shape[0],
        device=lo.device,
    )
    document = torch.searchsorted(first[1:], number, right=True).clamp(max=starts.shape[0] - 1)
    start = torch.minimum(starts[document] + (number - first[document]) * block, ends[document])
    stop = torch.minimum(start + block, ends[document])
    # A query that sees exactly what precedes a block starts from that block, unless the block begins another document.
    far = hi + owner
    begin = torch.searchsorted(far, start + document)
    end = torch.searchsorted(far, stop + document + (number == first[document + 1] - 1).long())
    end = torch.where(number < first[-1], end, begin)
    table = torch.stack([start, stop, begin, end, (number == first[document]).long()]).to(torch.int32)
    opens = None
    if segment_start is not None:
        among = torch.searchsorted(starts, torch.arange(keys, device=lo.device), right=True) - 1
        opens = starts[among].to(device)
    return Places(table.to(device), hi.to(torch.int32).to(device), opens)


class RidgeCall(NamedTuple):
    """The part of a call that forward and backward share.

    number: the type of all buffers, float32 or float64.
    before (B or 1, S): 1 + the index of the previous key, 0 = what precedes the call; None: always the adjacent key.
    """

    places: Places
    shape: Shape
    number: torch.dtype
    block: int
    shifted: bool
    z: Tensor
    v: Tensor
    earlier: Tensor | None
    before: Tensor | None
    packed: bool

    def widths(self) -> dict[str, int]:
        return {"WIDTH": padded(self.shape.key_dim), "VALUE_WIDTH": padded(self.shape.value_dim)}

    def tiles(self) -> dict[str, int]:
        """The shapes of a kernel's tiles: rows, keys that meet them at a time, keys of a block."""
        return {"ROWS": min(_ROWS, self.block), "SLICE": _SLICE, "BLOCK": self.block, **self.widths()}

    @property
    def lines(self) -> int:
        """Key heads of the batch."""
        return self.z.shape[0] * self.z.shape[1]

    def state(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(*self.z.shape[:2], self.shape.blocks, self.shape.size, dtype=dtype, device=self.z.device)


def choose(shape: Shape) -> Tiling:
    """Tile sizes of the kernels: as few warps as still hold all numbers in registers, of which a thread may take all
    (see tools/triton_aot)."""
    widest = max(padded(shape.key_dim), padded(shape.value_dim))
    return Tiling(_ROWS, _SLICE, 8 if widest > 32 else 4, 1, 255)


def previous(key_mask: Tensor | None, opens: Tensor | None, keys: int) -> Tensor | None:
    """``RidgeCall.before``: padding is passed over, and a document's first key has none before it."""
    if key_mask is None and opens is None:
        return None
    if key_mask is None:
        assert opens is not None
        place = torch.arange(keys, device=opens.device)[None]
    else:
        place = torch.where(key_mask, torch.arange(1, keys + 1, device=key_mask.device), 0).cummax(-1).values
        place = F.pad(place[:, :-1], (1, 0))
    return place if opens is None else torch.where(place > opens, place, 0)


def prepare(inputs: RidgeInputs, spec: RidgeSpec, double: bool) -> RidgeCall:
    """What the kernels of a call are told, whose heads have one power."""
    number = torch.float64 if double else torch.float32
    (q, k, v), key_mask, power, limit = inputs[:3], inputs.key_mask, spec.powers[0], spec.limit
    assert inputs.lo is not None
    assert inputs.hi is not None
    heads, queries, dim = q.shape[1:]
    kv_heads, keys, width = k.shape[1], k.shape[2], v.shape[3]
    block = sizes.RIDGE_BLOCK
    seen = places(inputs.lo, inputs.hi, inputs.segment_start, keys, inputs.documents, block, q.device)
    z, v = F.pad(k.to(number), (0, padded(dim) - dim)), v.double() if double else v
    if limit > 0:
        norm = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
        z = z * torch.where(norm <= limit, 1.0, limit / norm)
    if key_mask is not None:
        z, v = (x.masked_fill(~key_mask[:, None, :, None], 0) for x in (z, v))
    earlier = index = None
    if power:
        first = z.new_zeros(*z.shape[:2], 1, z.shape[3])
        if inputs.last is not None:
            first[:, :, 0, :dim] = inputs.last
        shifted, index = torch.cat([first, z], 2), previous(key_mask, seen.opens, keys)
        earlier = shifted[:, :, :-1] if index is None else shifted.gather(2, index[:, None, :, None].expand(z.shape))
    wide = padded(dim)
    size = wide * (wide * (2 if power else 1) + padded(width))
    shape = Shape(heads, heads // kv_heads, queries, keys, dim, width, seen.table.shape[1], size)
    return RidgeCall(
        seen,
        shape,
        number,
        block,
        power > 0,
        plain(z, z.dtype),
        plain(v, v.dtype),
        None if earlier is None else earlier.contiguous(),
        index,
        inputs.segment_start is not None,
    )


def carry(call: RidgeCall, state: Tensor, initial: Tensor | None, final: Tensor | None, reverse: bool) -> None:
    """What blocks bring into what lies before or after them, in place."""
    tiles.launch(
        carry_kernel,
        call.lines * ceil_div(call.shape.size, _CARRIED),
        (state, initial, final, call.places.table, call.shape),
        {"PACKED": call.packed, "REVERSE": reverse, "WIDTH": _CARRIED},
        Tiling(_CARRIED, 0, 4, 1),
    )


class Known(NamedTuple):
    """The state at each block's start and the rows of its keys.

    start (B, Hkv, blocks, size): P, W and A; rows: those of the keys; cut (B, Hkv, blocks): the first key that
    is not finite.
    """

    start: Tensor
    rows: PreparedKeys
    cut: Tensor


def known(call: RidgeCall, rho: Tensor, before: Before) -> Known:
    """All that rows are read from."""
    state, start, z, v = call.state(torch.float64), call.state(call.number), call.z, call.v
    programs = call.lines * call.shape.blocks
    table, shape = call.places.table, call.shape
    constants = {"SHIFTED": call.shifted, **call.widths()}
    tiles.launch(sums_kernel, programs, (z, v, call.earlier, state, table, shape), constants, choose(shape))
    initial = None
    if before.gram is not None:
        parts = [x for x in (before.gram, before.cross, before.shift if call.shifted else None) if x is not None]
        initial = torch.cat(
            [
                F.pad(x.double(), (0, padded(x.shape[3]) - x.shape[3], 0, padded(x.shape[2]) - x.shape[2]))
                for x in parts
            ],
            2,
        )
    carry(call, state, initial, None, False)
    tiles.launch(
        inverse_kernel, programs, (state, start, plain(rho, torch.float64), table, shape), constants, choose(shape)
    )
    half, near = (torch.empty(z.shape, dtype=call.number, device=z.device) for _ in range(2))
    gain, rest = (torch.empty(*v.shape[:3], padded(v.shape[3]), dtype=call.number, device=v.device) for _ in range(2))
    moved = after = None
    if call.shifted:
        moved, after = (torch.empty(z.shape, dtype=call.number, device=z.device) for _ in range(2))
    rows = PreparedKeys(z, half, gain, call.earlier, moved, after)
    roots = torch.empty(programs, call.block, call.block, dtype=call.number, device=z.device)
    cut = torch.zeros(state.shape[:3], dtype=torch.int32, device=z.device)
    tiles.launch(
        factor_kernel,
        programs,
        (v, rows, near, rest, roots, start, cut, table, shape),
        {**constants, **call.tiles()},
        choose(shape),
    )
    return Known(start, rows, cut)


__all__ = [
    "Known",
    "PreparedKeys",
    "RidgeCall",
    "Shape",
    "carry",
    "full",
    "given_of",
    "given_places",
    "known",
    "loses_digits",
    "matrix",
    "prepare",
    "previous",
    "product",
    "put_matrix",
    "put_tokens",
    "through",
    "tokens_of",
]
