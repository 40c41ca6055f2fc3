"""Sums over features on CUDA: what each stretch of tokens adds to them, and how the parts become sums at every border.

Features are computed for one tile of tokens and one strip of a pair of blocks (see sums_layout) at a time, on the chip.
"""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from zonal.kernels.sums import SumsInputs, SumsSpec
from zonal.kernels.tile import TileInputs, TileSpec
from zonal.kernels.triton import sums_layout, tiles
from zonal.kernels.triton.sizes import ceil_div, padded
from zonal.kernels.triton.sums_layout import Borders, Layout
from zonal.kernels.triton.tiles import TileShape, Tiling, Traits, row_numbers, weighted


class Place(NamedTuple):
    """What kernels know of the sums: address, numbers per head and border, pairs, their blocks, number of borders."""

    sums: Any
    size: Any
    left: Any
    right: Any
    pairs: Any
    count: Any
    chunk: Any


# ---- on the device ----


@triton.jit
def columns(x, batch, head, first, there, column, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """(ROWS, WIDTH) float32 from row ``first`` and column ``column`` on; 0 in missing rows, and from ``width`` on."""
    row, at = tl.arange(0, ROWS), column + tl.arange(0, WIDTH)
    start = (
        x.start
        + tl.cast(batch, tl.int64) * x.batch
        + tl.cast(head, tl.int64) * x.head
        + tl.cast(first, tl.int64) * x.row
    )
    return tl.load(
        start + (row[:, None] * x.row + at[None, :] * x.column), mask=there[:, None] & (at < width)[None, :], other=0.0
    ).to(tl.float32)


@triton.jit
def strip_blocks(place, strip, shape: tl.constexpr):
    """(first coordinate on the left, on the right, how often a product counts) of a strip, a part of a pair."""
    pair = strip // (shape.block // shape.left)
    left, right = tl.load(place.left + pair), tl.load(place.right + pair)
    return (
        left * shape.block + strip % (shape.block // shape.left) * shape.left,
        right * shape.block,
        tl.where(left == right, 1.0, 2.0),
    )


@triton.jit
def products(a, b, shape: tl.constexpr, ROWS: tl.constexpr):
    """(ROWS, shape.left shape.block): a_i b_j of each row."""
    return tl.reshape(a[:, :, None] * b[:, None, :], [ROWS, shape.features])


@triton.jit
def places(place, line, border, row, width, shape: tl.constexpr, ROWS: tl.constexpr):
    """(addresses (ROWS, shape.value_width) of rows of the sums from ``row`` on, their mask)."""
    start = place.sums + (tl.cast(line, tl.int64) * (place.count + 1) + border) * place.size + row * width
    column = tl.arange(0, shape.value_width)
    return start + (tl.arange(0, ROWS)[:, None] * width + column[None, :]), tl.broadcast_to(
        (column < width)[None, :], [ROWS, shape.value_width]
    )


@triton.jit
def mass_places(place, line, border, row, width, shape: tl.constexpr, ROWS: tl.constexpr):
    """Addresses (ROWS,) of the same rows' sums of ones."""
    rows = place.pairs * (shape.block * shape.block) + shape.key_width + 1
    return (
        place.sums
        + (tl.cast(line, tl.int64) * (place.count + 1) + border) * place.size
        + tl.cast(rows, tl.int64) * width
        + row
        + tl.arange(0, ROWS)
    )


@triton.jit
def to_tf32(x):
    """float32 rounded to the digits that products of tf32 read, halves away from zero."""
    rounded = ((x.to(tl.uint32, bitcast=True) + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    return tl.where(x == x, rounded, x)


@triton.jit
def narrowed(x, like, traits: tl.constexpr):
    """A side of a product as products read it: rows are divided by the sums of what is in their products."""
    if traits.wide:
        return to_tf32(x.to(tl.float32))
    else:
        return x.to(like.start.dtype.element_ty)


@triton.jit
def against(a, b, traits: tl.constexpr):
    """a b^T of sides in one type, float32 sums."""
    if traits.wide:
        return tl.dot(a, tl.trans(b), input_precision="tf32")
    else:
        return tl.dot(a, tl.trans(b), input_precision="ieee")


@triton.constexpr_function
def in_two(traits: Traits, kind: tl.dtype) -> bool:
    """Whether sums are two short numbers each: those of the row anchor are, as rows are divided by unrounded sums."""
    return traits.anchor == "row" and (traits.wide or kind != tl.float32)


@triton.jit
def plus_sums(
    total, made, place, line, border, row, width, like, traits: tl.constexpr, shape: tl.constexpr, ROWS: tl.constexpr
):
    """total + made M over rows of the sums."""
    at, inside = places(place, line, border, row, width, shape, ROWS)
    found = tl.load(at, mask=inside, other=0.0)
    side = narrowed(found, like, traits)
    total = weighted(made, side, total, traits)
    if in_two(traits, like.start.dtype.element_ty):
        total = weighted(made, narrowed(found - side.to(tl.float32), like, traits), total, traits)
    return total


@triton.jit
def against_sums(
    rows, place, line, border, row, width, like, traits: tl.constexpr, shape: tl.constexpr, ROWS: tl.constexpr
):
    """rows M^T over rows of the sums."""
    at, inside = places(place, line, border, row, width, shape, ROWS)
    found = tl.load(at, mask=inside, other=0.0)
    side = narrowed(found, like, traits)
    slope = against(rows, side, traits)
    if in_two(traits, like.start.dtype.element_ty):
        slope += against(rows, narrowed(found - side.to(tl.float32), like, traits), traits)
    return slope


@triton.jit
def token_terms(
    first, stop, line, batch, head, border, factor, delta, given, groups, tokens, place, traits: tl.constexpr,
    OF_KEYS: tl.constexpr, FADED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """(which tokens are real, the factors of their vectors, those of their features, their terms for v = 1)."""
    row = first + tl.arange(0, ROWS)
    there = row < stop
    gain = there.to(tl.float32)
    if traits.normalise:
        gain = row_numbers(given.k_inverse if OF_KEYS else given.q_inverse, line, first, tokens, ROWS, 0.0)
    number = tl.full([ROWS], 1.0, tl.float32)
    if OF_KEYS:
        if traits.key_mask:
            there = there & (row_numbers(given.key_mask, batch, first, tokens, ROWS, 0) != 0)
        kept = there.to(tl.float32)
    else:
        gain = gain * tl.load(given.scale + head)
        if traits.packed:
            there = there & (
                tl.load(given.edges + row, mask=there, other=0) < tl.minimum(border * place.chunk, given.sizes.keys)
            )
        kept = tl.where(there, row_numbers(factor, line, first, tokens, ROWS, 0.0), 0.0)
        if traits.anchor == "row":
            number = -tl.where(there, row_numbers(delta, line, first, tokens, ROWS, 0.0), 0.0)
    if FADED:
        fade = given.fade_keys if OF_KEYS else given.fade_rows
        kept = tl.where(there, kept * row_numbers(fade, line // groups * 3 + 2, first, tokens, ROWS, 0.0), 0.0)
    return there, gain, kept, number


@triton.jit
def absorb_kernel(
    x, rows, place, ranges, factor, delta, weights, given, tokens, heads, groups, from_border, traits: tl.constexpr,
    shape: tl.constexpr, OF_KEYS: tl.constexpr, FADED: tl.constexpr, SQUARES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What tokens add to one strip of the sums of a key head at one border.

    Keys add psi(k) [v, 1], queries w psi(q) [dy, -delta] factor. ranges (2, count + 1): the tokens of each border.
    SQUARES: a strip of products of two coordinates; otherwise the vectors themselves and 1.
    """
    sizes = given.sizes
    strips = place.pairs * (shape.block // shape.left) if SQUARES else 1
    strip = tl.program_id(0) % strips
    borders = place.count + 1 - from_border
    border = tl.program_id(0) // strips % borders + from_border
    kv_line = tl.program_id(0) // strips // borders
    kv_heads = heads // groups
    batch, kv_head = kv_line // kv_heads, kv_line % kv_heads
    start, stop = tl.load(ranges + border), tl.load(ranges + place.count + 1 + border)
    FEATURES: tl.constexpr = shape.features if SQUARES else shape.key_width
    total = tl.zeros([FEATURES, shape.value_width], tl.float32)
    mass = tl.zeros([FEATURES], tl.float32)
    constant = tl.zeros([shape.value_width], tl.float32)
    constant_mass = 0.0
    left, right, times = 0, 0, 1.0
    if SQUARES:
        left, right, times = strip_blocks(place, strip, shape)
    blocks = tl.cdiv(tl.maximum(stop - start, 0), ROWS)
    for index in tl.range(0, blocks * groups):
        head = kv_head * groups + index // tl.maximum(blocks, 1)
        first = start + index % tl.maximum(blocks, 1) * ROWS
        there, gain, kept, number = token_terms(
            first, stop, batch * heads + head, batch, head, border, factor, delta, given, groups, tokens, place,
            traits, OF_KEYS, FADED, ROWS,
        )  # fmt: skip
        row_tile = columns(rows, batch, head, first, there, 0, sizes.value_dim, ROWS, shape.value_width)
        if SQUARES:
            by = kept * gain * gain
            if not OF_KEYS:
                by = by * (tl.load(weights + head * 3 + 2) * times)
            a = columns(x, batch, head, first, there, left, sizes.key_dim, ROWS, shape.left) * by[:, None]
            made = products(
                a, columns(x, batch, head, first, there, right, sizes.key_dim, ROWS, shape.block), shape, ROWS
            )
        else:
            by, one = kept * gain, kept
            if not OF_KEYS:
                by, one = by * tl.load(weights + head * 3 + 1), one * tl.load(weights + head * 3)
            made = columns(x, batch, head, first, there, 0, sizes.key_dim, ROWS, shape.key_width) * by[:, None]
            constant += tl.sum(row_tile * one[:, None], 0)
            constant_mass += tl.sum(number * one, 0)
        made = narrowed(made, rows, traits)
        total = weighted(tl.trans(made), narrowed(row_tile, rows, traits), total, traits)
        if traits.anchor == "row":
            mass += tl.sum(made.to(tl.float32) * number[:, None], 0)
    row = strip * FEATURES if SQUARES else place.pairs * (shape.block * shape.block)
    width = sizes.value_dim
    at, inside = places(place, kv_line, border, row, width, shape, FEATURES)
    tl.store(at, total, mask=inside)
    if traits.anchor == "row":
        tl.store(mass_places(place, kv_line, border, row, width, shape, FEATURES), mass)
    if not SQUARES:
        last = (tl.cast(kv_line, tl.int64) * (place.count + 1) + border) * place.size
        column = tl.arange(0, shape.value_width)
        tl.store(place.sums + last + (row + shape.key_width) * width + column, constant, mask=column < width)
        if traits.anchor == "row":
            tl.store(
                place.sums + last + tl.cast(row + shape.key_width + 1, tl.int64) * width + row + shape.key_width,
                constant_mass,
            )


@triton.jit
def carry_kernel(
    sums,
    kept,
    steps,
    size,
    count,
    PACKED: tl.constexpr,
    FADED: tl.constexpr,
    REVERSE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Replace parts by sums in place: border b gets all parts up to b (REVERSE: from b on), as far as they continue.

    steps (B Hkv, count + 1): what is left at each border of the one before it.
    """
    blocks = tl.cdiv(size, WIDTH)
    column = tl.program_id(0) % blocks * WIDTH + tl.arange(0, WIDTH)
    line = sums + tl.cast(tl.program_id(0) // blocks, tl.int64) * (count + 1) * size
    left = steps
    if FADED:
        left = steps + tl.program_id(0) // blocks * (count + 1)
    running = tl.load(line + tl.cast(count if REVERSE else 0, tl.int64) * size + column, mask=column < size, other=0.0)
    for step in tl.range(0, count):
        border = count - 1 - step if REVERSE else step + 1
        if PACKED:
            goes_on = tl.load(kept + (border if REVERSE else border - 1)) != 0
            running = tl.where(goes_on, running, 0.0)
        if FADED:
            running = running * tl.load(left + (border + 1 if REVERSE else border))
        at = line + tl.cast(border, tl.int64) * size + column
        running += tl.load(at, mask=column < size, other=0.0)
        tl.store(at, running, mask=column < size)


# ---- on the host ----

# numbers of the sums that a program carries on
_CARRIED = 1024


class Strips(NamedTuple):
    """Tile sizes of a kernel over strips: tokens, coordinates on the left of a strip (of at most a block), tokens on
    the other side of scores (0 = no scores), warps, stages of loads in flight, and registers per thread (None =
    any)."""

    rows: int
    left: int
    others: int
    warps: int
    stages: int
    registers: int | None = None

    def tiling(self) -> Tiling:
        return Tiling(self.rows, self.others, self.warps, self.stages, self.registers)


# By (kernel, kind of products, padded width): the largest tiles whose numbers stay in registers (see tools/triton_aot).
_STRIPS: dict[tuple[str, str, int], Strips] = {
    ("absorb", "half", 64): Strips(32, 8, 0, 8, 2),
    ("absorb", "half", 128): Strips(32, 8, 0, 8, 2),
    ("absorb", "half", 256): Strips(32, 2, 0, 8, 1),
    ("read", "half", 64): Strips(128, 2, 64, 8, 2),
    ("read", "half", 128): Strips(64, 4, 32, 8, 1),
    ("read", "half", 256): Strips(32, 2, 16, 8, 1),
    ("read_back", "half", 64): Strips(32, 4, 64, 8, 1),
    ("read_back", "half", 128): Strips(32, 4, 32, 8, 1),
    ("read_back", "half", 256): Strips(16, 2, 16, 8, 1),
    ("keys_back", "half", 64): Strips(32, 4, 32, 8, 1),
    ("keys_back", "half", 128): Strips(32, 4, 32, 8, 1),
    ("keys_back", "half", 256): Strips(16, 2, 16, 8, 1),
    ("absorb", "wide", 64): Strips(32, 2, 0, 8, 1),
    ("absorb", "wide", 128): Strips(32, 2, 0, 8, 1),
    ("absorb", "wide", 256): Strips(16, 2, 0, 8, 1),
    ("read", "wide", 64): Strips(32, 4, 32, 8, 1),
    ("read", "wide", 128): Strips(32, 2, 16, 8, 1),
    ("read", "wide", 256): Strips(16, 2, 16, 8, 1),
    ("read_back", "wide", 64): Strips(16, 4, 32, 8, 1),
    ("read_back", "wide", 128): Strips(16, 2, 16, 8, 1),
    ("read_back", "wide", 256): Strips(16, 2, 16, 8, 1),
    ("keys_back", "wide", 64): Strips(16, 4, 16, 8, 1),
    ("keys_back", "wide", 128): Strips(16, 2, 16, 8, 1),
    ("keys_back", "wide", 256): Strips(16, 2, 16, 8, 1),
    ("absorb", "single", 64): Strips(16, 4, 0, 8, 2, 255),
    ("absorb", "single", 128): Strips(16, 2, 0, 8, 1),
    ("absorb", "single", 256): Strips(16, 1, 0, 8, 1),
    ("read", "single", 64): Strips(16, 4, 16, 8, 1),
    ("read", "single", 128): Strips(16, 2, 16, 8, 1),
    ("read", "single", 256): Strips(16, 1, 16, 8, 1),
    ("read_back", "single", 64): Strips(16, 2, 16, 8, 1),
    ("read_back", "single", 128): Strips(16, 1, 16, 8, 1),
    ("read_back", "single", 256): Strips(16, 1, 16, 8, 1),
    ("keys_back", "single", 64): Strips(16, 2, 16, 8, 1),
    ("keys_back", "single", 128): Strips(16, 1, 16, 8, 1),
    ("keys_back", "single", 256): Strips(16, 1, 16, 8, 1),
}


# Hopper's matrix instruction takes both sides from shared memory, and blocks of 64 rows
_HOPPER: dict[tuple[str, str, int], Strips] = {
    ("read", "half", 64): Strips(128, 4, 64, 8, 2),
    ("read_back", "half", 64): Strips(64, 4, 64, 8, 1),
    ("keys_back", "half", 64): Strips(64, 4, 64, 8, 1),
}
# marks of decays and key biases, and what their gradients sum, take registers of their own
_FADED: dict[tuple[str, str, int], Strips] = {("keys_back", "half", 128): Strips(16, 2, 32, 8, 1)}
_FADED_HOPPER: dict[tuple[str, str, int], Strips] = {("keys_back", "half", 64): Strips(16, 4, 32, 8, 1)}


def choose(kernel: str, q: Tensor, v: Tensor, traits: Traits, faded: bool) -> Strips:
    """Tile sizes of a kernel ("absorb", "read", "read_back", "keys_back")."""
    kind = "wide" if traits.wide else "half" if q.element_size() == 2 else "single"
    key = kernel, kind, max(64, padded(q.shape[3]), padded(v.shape[3]))
    tables = [_STRIPS]
    hopper = tiles.capability_of(q) >= (9, 0)
    if hopper:
        tables.append(_HOPPER)
    if faded:
        tables += [_FADED, _FADED_HOPPER] if hopper else [_FADED]
    return next(table[key] for table in reversed(tables) if key in table)


class Fade(NamedTuple):
    """What decays and key biases make of weights; None where there are neither.

    A weight is e^(c_t - c_s + b_s) l(S_ts), with c the running sum of log decays. Rows and keys have marks, c_t and
    c_s - b_s to base 2, in two numbers each. Their differences lose no digits even if the running sums are long.
    rows (B Hkv, 3, T), keys (B Hkv, 3, S): the two numbers of each mark, and the share of its border that a row still
    sees, or the share of an earlier key at its border. steps (B Hkv, count + 1): the share of a border
    left at the next one.
    """

    rows: Tensor | None
    keys: Tensor | None
    steps: Tensor | None


class SumsCall(NamedTuple):
    """A call's part that forward and backward share.

    weights (H, 3): what powers 0, 1, 2 of the score count. steps: of ``Fade``.
    """

    tile: tiles.TileCall
    form: Layout
    borders: Borders
    weights: Tensor
    mass: bool
    steps: Tensor | None

    @property
    def faded(self) -> bool:
        return self.steps is not None

    @property
    def size(self) -> int:
        """Numbers of a key head's sums at one border."""
        return self.form.rows * (self.tile.given.sizes.value_dim + self.mass)

    def place(self, sums: Tensor) -> Place:
        """``sums`` (B, Hkv, count + 1, size) as kernels take them."""
        return Place(
            sums, self.size, self.form.left, self.form.right, self.form.pairs, self.borders.count, self.borders.chunk
        )

    def empty(self, like: Tensor) -> Tensor:
        return torch.empty(
            like.shape[0], like.shape[1], self.borders.count + 1, self.size, dtype=torch.float32, device=like.device
        )

    def shape(self, strips: Strips, of_keys: bool = False) -> TileShape:
        """Of a kernel's tiles, whose rows are queries or keys. Matrix units take no fewer than 16 features."""
        queries, keys = (strips.others, strips.rows) if of_keys else (strips.rows, strips.others)
        block = self.form.block
        left = min(max(strips.left, 16 // block), block)
        return TileShape(queries, keys, self.form.width, padded(self.tile.given.sizes.value_dim), left, block)


def absorb(
    call: SumsCall,
    sums: Tensor,
    x: Tensor,
    rows: Tensor,
    factor: Tensor | None,
    delta: Tensor | None,
    from_border: int,
) -> None:
    """Write what tokens add to each border from ``from_border`` on: keys and values, or with ``factor`` queries and
    their gradients."""
    of_keys = factor is None
    batch, kv_heads = sums.shape[:2]
    strips = choose("absorb", x, rows, call.tile.traits, call.faded)
    shape = call.shape(strips)
    line_borders = batch * kv_heads * (call.borders.count + 1 - from_border)
    for squares in (True, False):
        programs = line_borders * (call.form.pairs * (shape.block // shape.left) if squares else 1)
        tiles.launch(
            absorb_kernel,
            programs,
            (tiles.rows_of(x), tiles.rows_of(rows), call.place(sums),
             call.borders.keys if of_keys else call.borders.queries, factor, delta, call.weights, call.tile.given,
             x.shape[2], x.shape[1], x.shape[1] // kv_heads, from_border),
            {"traits": call.tile.traits, "shape": shape, "OF_KEYS": of_keys, "FADED": call.faded, "SQUARES": squares,
             "ROWS": strips.rows},
            strips.tiling(),
        )  # fmt: skip


def carry(call: SumsCall, sums: Tensor, reverse: bool) -> None:
    """Parts into sums, in place."""
    tiles.launch(
        carry_kernel,
        sums.shape[0] * sums.shape[1] * ceil_div(call.size, _CARRIED),
        (sums, call.borders.kept, call.steps, call.size, call.borders.count),
        {"PACKED": call.tile.traits.packed, "FADED": call.faded, "REVERSE": reverse, "WIDTH": _CARRIED},
        Tiling(_CARRIED, 0, 4, 1),
    )


def prepare(inputs: SumsInputs, spec: SumsSpec) -> SumsCall:
    """What the kernels of a call are told, with a head of queries and keys for every head."""
    q, k, v = inputs[:3]
    assert inputs.lo is not None
    assert inputs.hi is not None
    block = sums_layout.block_of(q.shape[3])
    form = sums_layout.layout(spec.degree, spec.lowest, q.shape[3], block, q.device)
    chunk = sums_layout.chunk_of(form.rows, q.shape[3], v.shape[3], q.element_size())
    start = inputs.segment_start
    found = sums_layout.borders(inputs.lo, inputs.hi, start, k.shape[2], chunk, spec.keeps, q.device)
    tile = tiles.call(
        TileInputs(q, k, v, inputs.scale, inputs.coefficients, inputs.key_mask),
        TileSpec(spec.link, spec.anchor, spec.normalise, causal=False),
    )
    monomials = inputs.monomials
    weights = torch.nn.functional.pad(monomials.float(), (0, 3 - monomials.shape[1])).contiguous()
    fade = fade_of(inputs.log_decay, inputs.key_bias, q.shape[2], k, found)
    tile = tile._replace(
        traits=replace(tile.traits, listed=True, packed=start is not None),
        given=tile.given._replace(edges=found.edges, fade_rows=fade.rows, fade_keys=fade.keys),
    )
    return SumsCall(tile, form, found, weights, spec.anchor == "row", fade.steps)


def fade_of(log_decay: Tensor | None, key_bias: Tensor | None, queries: int, k: Tensor, found: Borders) -> Fade:
    """The numbers of ``Fade``, from running sums in float64. log_decay (B or 1, Hkv, S), key_bias (B, Hkv, S)."""
    if log_decay is None and key_bias is None:
        return Fade(None, None, None)
    batch, kv_heads, keys, _ = k.shape
    running = torch.zeros(batch, kv_heads, keys + 1, dtype=torch.float64, device=k.device)
    if log_decay is not None:
        running[..., 1:] = log_decay.double().cumsum(-1)
    of_keys = running[..., 1:] if key_bias is None else running[..., 1:] - key_bias.double()
    at = (torch.arange(queries, device=k.device) + (keys - queries + 1)).clamp(0, keys)
    of_rows = running[..., at]
    ends = (torch.arange(found.count + 1, device=k.device) * found.chunk).clamp(max=keys)
    of_borders = running[..., ends]
    behind = ((torch.arange(keys, device=k.device) // found.chunk + 1) * found.chunk).clamp(max=keys)

    def numbers(mark: Tensor, share: Tensor) -> Tensor:
        exponent = mark * tiles.LOG2E.value
        whole = exponent.round().float().double()  # above 2^24 not every integer is in float32: the rest holds it
        rest = torch.where(whole.isinf(), 0.0, exponent - whole)  # of a bias of -infinity, which hides its key
        return torch.stack([whole, rest, share.exp()], 2).flatten(0, 1).float().contiguous()

    rows = numbers(of_rows, of_rows - of_borders[..., found.border.clamp(max=found.count).long()])
    steps = torch.nn.functional.pad(of_borders.diff(dim=-1), (1, 0)).exp().float().flatten(0, 1).contiguous()
    return Fade(rows, numbers(of_keys, running[..., behind] - of_keys), steps)


def known(call: SumsCall, k: Tensor, v: Tensor, initial: Tensor | None) -> Tensor:
    """The sums at every border, (B, Hkv, count + 1, size)."""
    sums = call.empty(k)
    sums[:, :, 0] = 0 if initial is None else sums_layout.from_memory(initial, call.form, v.shape[3])
    if call.borders.count:
        absorb(call, sums, k, v, None, None, 1)
        carry(call, sums, False)
    return sums


__all__ = [
    "Fade",
    "Place",
    "Strips",
    "SumsCall",
    "absorb",
    "absorb_kernel",
    "carry",
    "carry_kernel",
    "choose",
    "known",
    "prepare",
]
