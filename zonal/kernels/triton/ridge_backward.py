"""Gradients of ridge_forward: no factorisation has one of its own.

With x = P_t w of each solve and u = P_t dx of its gradient, dG_t = -u x^T. Each query's x and u follow from what
forward computed (x through P, u through the transposes of W and A), and are stored. A key then gets
-u (x . z) - x (u . z) from every solve of every query that sees it, plus the terms of values and steps: directly from
its own block, and as sums from later blocks. Nothing is written twice: there are no atomics.
"""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from zonal.kernels.abi import plain
from zonal.kernels.op import Gradients, Results
from zonal.kernels.ridge import Before, RidgeInputs, RidgeSpec
from zonal.kernels.triton import ridge_state, tiles
from zonal.kernels.triton.ridge_forward import block_of_queries, moved_on
from zonal.kernels.triton.ridge_state import (
    Known,
    RidgeCall,
    choose,
    full,
    given_of,
    given_places,
    matrix,
    product,
    put_matrix,
    put_tokens,
    through,
    tokens_of,
)
from zonal.kernels.triton.sizes import padded
from zonal.kernels.triton.tiles import tile_rows


@triton.jit
def solved(x, rows, start, index, line, first, stop, limit, shape, SLICE: tl.constexpr, WIDTH: tl.constexpr):
    """Each row times its P_t."""
    out = product(x, matrix(start, index, 0, shape.size, WIDTH, WIDTH))
    return through(out, x, rows.half, rows.half, line, first, stop, limit, shape.keys, -1.0, SLICE, WIDTH, WIDTH)


@triton.jit
def moved_back(
    x, rows, start, index, line, first, stop, limit, shape, SLICE: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr
):  # fmt: skip
    """Each row times the transpose of its A_t."""
    tokens = shape.keys
    out = product(x, matrix(start, index, WIDTH + VALUE_WIDTH, shape.size, WIDTH, WIDTH))
    out = through(out, x, rows.moved, rows.half, line, first, stop, limit, tokens, -1.0, SLICE, WIDTH, WIDTH)
    return through(out, x, rows.z, rows.after, line, first, stop, limit, tokens, 1.0, SLICE, WIDTH, WIDTH)


@triton.jit
def rows_back_kernel(
    q, dy, xs, us, lines, rows, start, scale, hi, table, shape, POWER: tl.constexpr, ROWS: tl.constexpr,
    SLICE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """x and u (power + 1, lines, T, r) of every solve of the queries of one head that start from one block.

    u of the first solve is the gradient of scale q.
    """
    block, line, kv_line, first, stop, begin, end, gain = block_of_queries(scale, table, shape)
    tokens, queries, index = shape.keys, shape.queries, kv_line * shape.blocks + block
    for t in tl.range(begin, end, ROWS):
        limit = tl.load(hi + t + tl.arange(0, ROWS), mask=t + tl.arange(0, ROWS) < end, other=0)
        x = tile_rows(q, line // shape.heads, line % shape.heads, t, end, shape.key_dim, ROWS, WIDTH, True, True)
        x = full(x) * gain
        kept = solved(x, rows, start, index, kv_line, first, stop, limit, shape, SLICE, WIDTH)
        put_tokens(xs, kept, line, t, end, queries, ROWS, WIDTH)
        if POWER > 0:
            for k in tl.range(1, POWER + 1):
                x = moved_on(x, rows, start, index, kv_line, first, stop, limit, shape, SLICE, WIDTH, VALUE_WIDTH)
                kept = solved(x, rows, start, index, kv_line, first, stop, limit, shape, SLICE, WIDTH)
                put_tokens(xs, kept, k * lines + line, t, end, queries, ROWS, WIDTH)
        given = given_of(dy, line, t, end, queries, shape.value_dim, ROWS, VALUE_WIDTH)
        u = product(given, matrix(start, index, WIDTH, shape.size, VALUE_WIDTH, WIDTH))
        u = through(u, given, rows.gain, rows.half, kv_line, first, stop, limit, tokens, 1.0, SLICE, VALUE_WIDTH, WIDTH)
        put_tokens(us, u, POWER * lines + line, t, end, queries, ROWS, WIDTH)
        if POWER > 0:
            for k in tl.range(0, POWER):
                u = moved_back(u, rows, start, index, kv_line, first, stop, limit, shape, SLICE, WIDTH, VALUE_WIDTH)
                put_tokens(us, u, (POWER - 1 - k) * lines + line, t, end, queries, ROWS, WIDTH)


@triton.jit
def row_sums_kernel(
    dy, xs, us, state, lines, table, shape, POWER: tl.constexpr, SLICE: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr
):  # fmt: skip
    """What the queries of one block add to earlier keys: sums of u x^T, dy x^T and, of the step before, u x^T."""
    index = tl.program_id(0)
    block, kv_line = index % shape.blocks, index // shape.blocks
    begin, end = tl.load(table + 2 * shape.blocks + block), tl.load(table + 3 * shape.blocks + block)
    queries, size = shape.queries, shape.size
    gram = tl.zeros([WIDTH, WIDTH], state.dtype.element_ty)
    cross = tl.zeros([VALUE_WIDTH, WIDTH], state.dtype.element_ty)
    shift = tl.zeros([WIDTH, WIDTH], state.dtype.element_ty)
    # key heads of a batch lie as its heads do: those of one are groups in a row
    for line in tl.range(kv_line * shape.groups, (kv_line + 1) * shape.groups):
        for t in tl.range(begin, end, SLICE):
            x = tokens_of(xs, POWER * lines + line, t, end, queries, SLICE, WIDTH)
            cross += product(tl.trans(given_of(dy, line, t, end, queries, shape.value_dim, SLICE, VALUE_WIDTH)), x)
            for k in tl.range(0, POWER + 1):
                u = tl.trans(tokens_of(us, k * lines + line, t, end, queries, SLICE, WIDTH))
                gram += product(u, tokens_of(xs, k * lines + line, t, end, queries, SLICE, WIDTH))
                if k > 0:
                    shift += product(u, tokens_of(xs, (k - 1) * lines + line, t, end, queries, SLICE, WIDTH))
    put_matrix(state, gram, index, 0, size, WIDTH, WIDTH)
    put_matrix(state, cross, index, WIDTH, size, VALUE_WIDTH, WIDTH)
    if POWER > 0:
        put_matrix(state, shift, index, WIDTH + VALUE_WIDTH, size, WIDTH, WIDTH)


@triton.jit
def against(x, rows, seen):
    """(rows of x, SLICE): zeros where rows do not see the keys of x."""
    return tl.where(seen, product(x, tl.trans(rows)), 0.0)


@triton.jit
def keys_back_kernel(
    dy, xs, us, v, rows, dz, dv, state, lines, hi, table, shape, POWER: tl.constexpr, ROWS: tl.constexpr,
    SLICE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Gradients of some keys of one block, but for what steps bring, and of values. state: the sums of later blocks."""
    index, tile = tl.program_id(0) // (BLOCK // ROWS), tl.program_id(0) % (BLOCK // ROWS)
    block, kv_line = index % shape.blocks, index // shape.blocks
    first, stop = tl.load(table + block) + tile * ROWS, tl.load(table + shape.blocks + block)
    begin, end = tl.load(table + 2 * shape.blocks + block), tl.load(table + 3 * shape.blocks + block)
    width, tokens, queries, size = shape.value_dim, shape.keys, shape.queries, shape.size
    z = tokens_of(rows.z, kv_line, first, stop, tokens, ROWS, WIDTH)
    value = given_of(v, kv_line, first, stop, tokens, width, ROWS, VALUE_WIDTH)
    cross = matrix(state, index, WIDTH, size, VALUE_WIDTH, WIDTH)
    of_keys = product(value, cross)
    of_values = product(z, tl.trans(cross))
    gram = matrix(state, index, 0, size, WIDTH, WIDTH)
    of_keys -= product(z, gram + tl.trans(gram))
    key = first + tl.arange(0, ROWS)
    for line in tl.range(kv_line * shape.groups, (kv_line + 1) * shape.groups):
        for t in tl.range(begin, end, SLICE):
            limit = tl.load(hi + t + tl.arange(0, SLICE), mask=t + tl.arange(0, SLICE) < end, other=0)
            seen = key[:, None] < limit[None, :]
            given = given_of(dy, line, t, end, queries, shape.value_dim, SLICE, VALUE_WIDTH)
            x = tokens_of(xs, POWER * lines + line, t, end, queries, SLICE, WIDTH)
            # keys are read again for each product: kept, they would take all registers
            z = tokens_of(rows.z, kv_line, first, stop, tokens, ROWS, WIDTH)
            of_values += product(against(z, x, seen), given)
            value = given_of(v, kv_line, first, stop, tokens, width, ROWS, VALUE_WIDTH)
            of_keys += product(against(value, given, seen), x)
    at, inside = given_places(dv, kv_line, first, stop, tokens, width, ROWS, VALUE_WIDTH)
    tl.store(at, of_values, mask=inside)
    for line in tl.range(kv_line * shape.groups, (kv_line + 1) * shape.groups):
        for t in tl.range(begin, end, SLICE):
            limit = tl.load(hi + t + tl.arange(0, SLICE), mask=t + tl.arange(0, SLICE) < end, other=0)
            seen = key[:, None] < limit[None, :]
            for k in tl.range(0, POWER + 1):
                x = tokens_of(xs, k * lines + line, t, end, queries, SLICE, WIDTH)
                u = tokens_of(us, k * lines + line, t, end, queries, SLICE, WIDTH)
                z = tokens_of(rows.z, kv_line, first, stop, tokens, ROWS, WIDTH)
                of_keys -= product(against(z, x, seen), u)
                of_keys -= product(against(z, u, seen), x)
    put_tokens(dz, of_keys, kv_line, first, stop, tokens, ROWS, WIDTH)


@triton.jit
def steps_back_kernel(
    xs, us, rows, dz, dearlier, state, lines, hi, table, shape, POWER: tl.constexpr, ROWS: tl.constexpr,
    SLICE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """What the steps M bring to some keys of one block and to those before each."""
    index, tile = tl.program_id(0) // (BLOCK // ROWS), tl.program_id(0) % (BLOCK // ROWS)
    block, kv_line = index % shape.blocks, index // shape.blocks
    first, stop = tl.load(table + block) + tile * ROWS, tl.load(table + shape.blocks + block)
    begin, end = tl.load(table + 2 * shape.blocks + block), tl.load(table + 3 * shape.blocks + block)
    tokens, queries = shape.keys, shape.queries
    shift = matrix(state, index, WIDTH + VALUE_WIDTH, shape.size, WIDTH, WIDTH)
    of_keys = tokens_of(dz, kv_line, first, stop, tokens, ROWS, WIDTH)
    of_keys += product(tokens_of(rows.earlier, kv_line, first, stop, tokens, ROWS, WIDTH), tl.trans(shift))
    of_earlier = product(tokens_of(rows.z, kv_line, first, stop, tokens, ROWS, WIDTH), shift)
    key = first + tl.arange(0, ROWS)
    for line in tl.range(kv_line * shape.groups, (kv_line + 1) * shape.groups):
        for t in tl.range(begin, end, SLICE):
            limit = tl.load(hi + t + tl.arange(0, SLICE), mask=t + tl.arange(0, SLICE) < end, other=0)
            seen = key[:, None] < limit[None, :]
            for k in tl.range(1, POWER + 1):
                x = tokens_of(xs, (k - 1) * lines + line, t, end, queries, SLICE, WIDTH)
                u = tokens_of(us, k * lines + line, t, end, queries, SLICE, WIDTH)
                z = tokens_of(rows.z, kv_line, first, stop, tokens, ROWS, WIDTH)
                of_earlier += product(against(z, u, seen), x)
                earlier = tokens_of(rows.earlier, kv_line, first, stop, tokens, ROWS, WIDTH)
                of_keys += product(against(earlier, x, seen), u)
    put_tokens(dearlier, of_earlier, kv_line, first, stop, tokens, ROWS, WIDTH)
    put_tokens(dz, of_keys, kv_line, first, stop, tokens, ROWS, WIDTH)


def backward(
    grads: Gradients, inputs: RidgeInputs, results: Results, spec: RidgeSpec, asked: frozenset[str]
) -> Gradients:
    """The gradients of ``forward``: of scale, rho and the memory in float64."""
    return backward_in(grads, inputs, spec, asked, bool(results[1].any()))


def backward_in(
    grads: Gradients, inputs: RidgeInputs, spec: RidgeSpec, asked: frozenset[str], double: bool
) -> Gradients:
    """The gradients of ``forward_in``."""
    (dy,), (q, k, v, scale, *_), key_mask, before = grads, inputs, inputs.key_mask, inputs.before
    assert dy is not None
    q = q.double() if double else q
    started, power = bool(asked & set(Before._fields)), spec.powers[0]
    with tiles.on(q.device):
        call = ridge_state.prepare(inputs, spec, double)
        found = ridge_state.known(call, inputs.rho, before)
        dy = plain(dy, call.number)
        xs, us = row_solves(call, found, dy, q, scale, power)
        state, shape, table = call.state(call.number), call.shape, call.places.table
        lines, programs = q.shape[0] * q.shape[1], call.lines * shape.blocks
        constants = {"POWER": power, **call.tiles()}
        short = {name: size for name, size in constants.items() if name not in ("ROWS", "BLOCK")}
        tiles.launch(row_sums_kernel, programs, (dy, xs, us, state, lines, table, shape), short, choose(shape))
        dim, width = k.shape[3], v.shape[3]
        # before the sums are carried on each block still has its own
        wide = padded(dim)
        drho = -state[..., : wide * wide].unflatten(-1, (wide, wide)).diagonal(dim1=-2, dim2=-1).double().sum((0, 2, 3))
        final = torch.empty(*k.shape[:2], shape.size, dtype=torch.float64, device=k.device) if started else None
        ridge_state.carry(call, state, None, final, True)
        dz, dv = (
            torch.zeros(call.z.shape, dtype=call.number, device=k.device),
            torch.zeros(v.shape, dtype=call.number, device=k.device),
        )
        dearlier = torch.zeros_like(dz) if power else None
        programs *= call.block // constants["ROWS"]
        arguments = (dy, xs, us, call.v, found.rows, dz, dv, state, lines, call.places.hi, table, shape)
        tiles.launch(keys_back_kernel, programs, arguments, constants, choose(shape))
        if dearlier is not None:
            arguments = (xs, us, found.rows, dz, dearlier, state, lines, call.places.hi, table, shape)
            tiles.launch(steps_back_kernel, programs, arguments, constants, choose(shape))
    dfirst = None
    if dearlier is not None:
        dz, dfirst = with_next(call, dz, dearlier, key_mask)
    if key_mask is not None:
        dz, dv = (x.masked_fill(~key_mask[:, None, :, None], 0) for x in (dz, dv))
    memory = Before()
    if final is not None:
        gram, cross, *shift = (
            x[:, :, :rows, :dim]
            for x, rows in zip(
                final.unflatten(-1, (-1, wide)).split([wide, padded(width), *[wide] * (power > 0)], 2),
                (dim, width, dim),
                strict=False,
            )
        )
        memory = Before(
            -0.5 * (gram + gram.mT), cross, shift[0] if shift and before.shift is not None else None,
            None if dfirst is None or before.last is None else dfirst[..., :dim].double(),
        )  # fmt: skip
    dq = us[0, ..., :dim]
    dscale = (dq * q.to(dq.dtype)).sum(-1).double().sum((0, 2))
    dk = shortened(dz[..., :dim], k, spec.limit)
    return dq * scale.to(dq.dtype)[:, None, None], dk, dv, dscale, drho, *memory, None


def row_solves(
    call: RidgeCall, found: Known, dy: Tensor, q: Tensor, scale: Tensor, power: int
) -> tuple[Tensor, Tensor]:
    """x and u, (power + 1, B, H, T, r), of every query."""
    shape, lines = call.shape, q.shape[0] * q.shape[1]
    xs, us = (
        torch.empty(power + 1, *q.shape[:3], padded(q.shape[3]), dtype=call.number, device=q.device) for _ in range(2)
    )
    tiles.launch(
        rows_back_kernel,
        lines * shape.blocks,
        (
            tiles.rows_of(q),
            dy,
            xs,
            us,
            lines,
            found.rows,
            found.start,
            plain(scale, call.number),
            call.places.hi,
            call.places.table,
            shape,
        ),
        {"POWER": power, **call.tiles()},
        choose(shape),
    )
    return xs, us


def with_next(call: RidgeCall, dz: Tensor, dearlier: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """(gradients of keys with what they get as the key before another, that of the key before the first)."""
    if call.before is None:
        given = F.pad(dearlier, (0, 0, 0, 1))
    else:
        keys = dz.shape[2]
        # For each key and for the memory: the key that it immediately precedes. Every real key has one predecessor.
        owner = call.before if key_mask is None else torch.where(key_mask, call.before, keys + 1)
        place = torch.arange(keys, device=dz.device).expand(owner.shape)
        following = torch.full((owner.shape[0], keys + 2), keys, device=dz.device, dtype=torch.int64).scatter(
            1, owner, place
        )[:, : keys + 1]
        given = F.pad(dearlier, (0, 0, 0, 1)).gather(
            2, following[:, None, :, None].expand(*dz.shape[:2], keys + 1, dz.shape[3])
        )
    return dz + given[:, :, 1:], given[:, :, 0]


def shortened(dz: Tensor, k: Tensor, limit: float) -> Tensor:
    """Gradients of keys from those of keys cut to a length: beyond it a key does not change along itself."""
    if limit <= 0:
        return dz
    k = k.to(dz.dtype)
    norm = torch.linalg.vector_norm(k, dim=-1, keepdim=True)
    along = (dz * k).sum(-1, keepdim=True) / norm.square()
    return torch.where(norm <= limit, dz, (limit / norm) * (dz - along * k))


__all__ = ["backward", "backward_in", "keys_back_kernel", "row_sums_kernel", "rows_back_kernel", "steps_back_kernel"]
