"""What the tile kernels share: how tensors are passed, who sees whom, and how a tile becomes scores.

Query t sees the keys of one interval [lo_t, hi_t), and neither end decreases as t grows. So the tiles of a block of
queries (or keys) are one range, whose inner part is fully visible and needs no mask.
"""

# bodies of jit functions are triton's language, whose declared types change from version to version
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false, reportOperatorIssue=false
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from zonal.formula import Formula
from zonal.kernels.abi import plain
from zonal.kernels.tile import TileInputs, TileSpec
from zonal.kernels.triton.sizes import ceil_div, padded
from zonal.kernels.triton.tilings import Tiling, tiling_of

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
# the smallest normal number of float32: a sum below it counts as none
SMALLEST: tl.constexpr = tl.constexpr(1.1754943508222875e-38)
# only rows of zeros are shorter (see ``levelled``), and their gradients are set to zero afterwards
SHORTEST: tl.constexpr = tl.constexpr(1e-12)


class Strided(NamedTuple):
    """A tensor of 3 or 4 axes (batch, head, row, column): where it starts, and its strides in elements."""

    start: Any
    batch: Any
    head: Any
    row: Any
    column: Any


class Sizes(NamedTuple):
    """H, H / Hkv, T, S, D, P, and the numbers of the visibility rules."""

    heads: Any
    groups: Any
    queries: Any
    keys: Any
    key_dim: Any
    value_dim: Any
    left: Any
    right: Any
    chunk: Any


class Given(NamedTuple):
    """What all programs of a call read; None is what a call does not have.

    scale (H,), coefficients (H, ``Traits.stride``): float32. q_inverse (B, H, T), k_inverse (B, Hkv, S): 1 / length, 0
    for zeros, when scores normalise. key_mask (B, S) uint8. key_counts (B, S + 1) int32: the number of real keys before
    s, for a count with a key mask (counting per tile would take more registers than all else). edges:
    ``document_edges``. fade_rows, fade_keys: the marks of ``sums_state.Fade``.
    """

    scale: Any
    coefficients: Any
    q_inverse: Any
    k_inverse: Any
    key_mask: Any
    key_counts: Any
    edges: Any
    fade_rows: Any
    fade_keys: Any
    sizes: Any


@dataclass(frozen=True)
class TileShape:
    """Queries and keys of a kernel's tiles, and the powers of two that hold D and P.

    left, block: of a strip of features, and of a pair of blocks of coordinates (``sums_state``).
    """

    queries: int
    keys: int
    key_width: int
    value_width: int
    left: int = 0
    block: int = 0

    @property
    def features(self) -> int:
        """Of a strip."""
        return self.left * self.block


class Functions(NamedTuple):
    """A link's jit functions, in log space those of the map before exp; None for the link exp alone."""

    value: Any
    derivative: Any
    base: Any


@dataclass(frozen=True)
class Traits:
    """What is known when a kernel is compiled.

    mapped: in log space, whether the scores are mapped before exp. stride, n: the number of the link's coefficients,
    with its constants and without. low, high: the range that scores are clamped to, in the kernel's own unit. grouped:
    several query heads share a key head. key_mask, packed: whether these tensors were given. listed: the keys of each
    query are a list and not rules. narrow_key, narrow_value: D, P are below the padded width. wide: weights and their
    gradients are multiplied as float32 rounded to tf32, as float16 lacks the range.
    """

    log: bool
    mapped: bool
    anchor: Literal["row", "count", "raw"]
    stride: int
    n: int
    clamped: bool
    low: float
    high: float
    normalise: bool
    grouped: bool
    causal: bool
    strict: int
    chunked: bool
    window: bool
    right: bool
    packed: bool
    key_mask: bool
    narrow_key: bool
    narrow_value: bool
    wide: bool
    listed: bool = False

    @property
    def online(self) -> bool:
        """Whether the running maximum is taken out of the exponent."""
        return self.log and self.anchor == "row"

    @property
    def bits(self) -> bool:
        """Whether scores are multiplied so that they are log2 K."""
        return self.log and not self.mapped

    @property
    def edged(self) -> bool:
        """Whether a query's first visible key is not always key 0."""
        return self.window or self.packed


# ---- on the device ----


@triton.jit
def head_and_block(index, kv_head, blocks, sizes, traits: tl.constexpr):
    """(head, block) of a step of one loop over the blocks of all heads that share a key head.

    Loads of a first step run ahead of the loop, even of a loop that has no step. A division by 0 blocks there leaves to
    the compiler whether they happen, and from where.
    """
    if traits.grouped:
        return kv_head * sizes.groups + index // tl.maximum(blocks, 1), index % tl.maximum(blocks, 1)
    else:
        return kv_head, index


@triton.jit
def tile_rows(
    x,
    batch,
    head,
    first,
    limit,
    width,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    EDGE: tl.constexpr,
    NARROW: tl.constexpr,
    SKIP: tl.constexpr = 0,
):
    """(ROWS, WIDTH) from row ``first`` and column SKIP on; 0 past ``limit`` rows (EDGE), ``width`` columns (NARROW)."""
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    # Heads and far rows may be 2^31 elements apart. Inside a tile 32 bits suffice (see rows_of), in half the registers.
    start = (
        x.start
        + tl.cast(batch, tl.int64) * x.batch
        + tl.cast(head, tl.int64) * x.head
        + tl.cast(first, tl.int64) * x.row
        + SKIP * x.column
    )
    place = start + (row[:, None] * x.row + column[None, :] * x.column)
    if EDGE and NARROW:
        return tl.load(place, mask=(first + row < limit)[:, None] & (column < width)[None, :], other=0.0)
    elif EDGE:
        return tl.load(place, mask=(first + row < limit)[:, None], other=0.0)
    elif NARROW:
        return tl.load(place, mask=(column < width)[None, :], other=0.0)
    else:
        return tl.load(place)


@triton.jit
def load_queries(q, batch, head, first, given, traits: tl.constexpr, shape: tl.constexpr, EDGE: tl.constexpr):
    """A tile of queries. EDGE: it may reach past the last one. The same for the gradients dy of rows, keys, values."""
    sizes = given.sizes
    return tile_rows(
        q, batch, head, first, sizes.queries, sizes.key_dim, shape.queries, shape.key_width, EDGE, traits.narrow_key
    )


@triton.jit
def load_slopes(dy, batch, head, first, given, traits: tl.constexpr, shape: tl.constexpr, EDGE: tl.constexpr):
    sizes = given.sizes
    return tile_rows(
        dy, batch, head, first, sizes.queries, sizes.value_dim, shape.queries, shape.value_width, EDGE,
        traits.narrow_value,
    )  # fmt: skip


@triton.jit
def load_keys(k, batch, kv_head, first, given, traits: tl.constexpr, shape: tl.constexpr, EDGE: tl.constexpr):
    sizes = given.sizes
    return tile_rows(
        k, batch, kv_head, first, sizes.keys, sizes.key_dim, shape.keys, shape.key_width, EDGE, traits.narrow_key
    )


@triton.jit
def load_values(v, batch, kv_head, first, given, traits: tl.constexpr, shape: tl.constexpr, EDGE: tl.constexpr):
    sizes = given.sizes
    return tile_rows(
        v, batch, kv_head, first, sizes.keys, sizes.value_dim, shape.keys, shape.value_width, EDGE, traits.narrow_value
    )


@triton.jit
def late_places(x, batch, head, first, limit, width, ROWS: tl.constexpr, WIDTH: tl.constexpr, SKIP: tl.constexpr = 0):
    """(addresses, whether they are inside) of a tile that is read or written when the loops are over.

    The addresses have 64 bits and count from ``first``. With those of ``tile_rows`` the compiler would keep registers.
    """
    row, column = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    start = (
        x.start
        + tl.cast(batch, tl.int64) * x.batch
        + tl.cast(head, tl.int64) * x.head
        + tl.cast(first, tl.int64) * x.row
        + SKIP * x.column
    )
    place = start + (row.to(tl.int64)[:, None] * x.row + column.to(tl.int64)[None, :] * x.column)
    return place, (row < limit - first)[:, None] & (column < width)[None, :]


@triton.jit
def tile_rows_again(
    x,
    batch,
    head,
    first,
    limit,
    width,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    CACHE: tl.constexpr,
    SKIP: tl.constexpr = 0,
):
    """The same rows in float32, loaded again: keeping them between uses would take registers.

    CACHE: ".cg" or ".ca", the cache to load from. Each use has another one, or the compiler would merge the loads.
    """
    place, inside = late_places(x, batch, head, first, limit, width, ROWS, WIDTH, SKIP)
    return tl.load(place, mask=inside, other=0.0, cache_modifier=CACHE).to(tl.float32)


@triton.jit
def put_rows(
    x, tile, batch, head, first, limit, width, ROWS: tl.constexpr, WIDTH: tl.constexpr, SKIP: tl.constexpr = 0
):
    """Write a tile, cut to ``limit`` rows and ``width`` columns."""
    place, inside = late_places(x, batch, head, first, limit, width, ROWS, WIDTH, SKIP)
    tl.store(place, tile.to(x.start.dtype.element_ty), mask=inside)


@triton.jit
def row_numbers(x, line, first, limit, ROWS: tl.constexpr, other: tl.constexpr):
    """(ROWS,) numbers of line ``line`` of a contiguous (lines, limit) array, ``other`` past its end."""
    row = first + tl.arange(0, ROWS)
    return tl.load(x + tl.cast(line, tl.int64) * limit + row, mask=row < limit, other=other)


@triton.jit
def marks(fade, line, first, limit, ROWS: tl.constexpr, past: tl.constexpr):
    """(whole, rest) of ROWS tokens' marks (``sums_state.Fade``).

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
def visible_keys(t, given, traits: tl.constexpr):
    """[lo, hi): the keys that query t < T may see, none if hi <= lo.

    given.edges (2, T): the first key and the end of each query's document, or lo and hi.
    """
    edges, sizes = given.edges, given.sizes
    position = t + (sizes.keys - sizes.queries)
    lo = t * 0
    if traits.packed:
        lo = tl.load(edges + t)
    if traits.listed:
        hi = tl.load(edges + sizes.queries + t)
    elif traits.causal:
        hi = position + 1 - traits.strict
    elif traits.chunked:
        # Division rounds towards zero. It differs from floor only for positions before key 0, which see nothing anyway.
        hi = lo + (position - lo) // sizes.chunk * sizes.chunk
    elif traits.packed:
        hi = tl.load(edges + sizes.queries + t)
    else:
        hi = t * 0 + sizes.keys
    if traits.window:
        lo = tl.maximum(lo, position - sizes.left)
        if traits.right:
            hi = tl.minimum(hi, position + sizes.right + 1)
    return lo, hi


@triton.jit
def between(s, lo, hi, traits: tl.constexpr):
    """Whether lo <= s < hi."""
    if traits.edged:
        return (s >= lo) & (s < hi)
    else:
        return s < hi


@triton.jit
def visible_pairs(x, first, lo, hi, batch, given, traits: tl.constexpr, KEYS: tl.constexpr, CUT: tl.constexpr):
    """Which keys from ``first`` on a tile of scores x may use: those in [lo, hi) if the tile is CUT, without padding.

    Asked for one of both.
    """
    if CUT:
        visible = between((first + tl.arange(0, KEYS))[None, :], lo[:, None], hi[:, None], traits)
        if traits.key_mask:
            visible = visible & real_keys(first, batch, given, KEYS)[None, :]
    else:
        visible = tl.broadcast_to(real_keys(first, batch, given, KEYS)[None, :], x.shape)
    return visible


@triton.jit
def key_ranges(start, hi_first, lo_last, hi_last, traits: tl.constexpr, KEYS: tl.constexpr):
    """(begins, stops) of three ranges of keys from ``start`` on: a block of queries may see some keys of the first and
    of the last range, and all keys of the one between. Unless ``traits.edged`` the first is empty.
    """
    inner = start
    if traits.edged:
        inner = tl.maximum(start, tl.cdiv(lo_last, KEYS) * KEYS)
    whole = tl.maximum(inner, hi_first // KEYS * KEYS)
    return (start, inner, whole), (tl.minimum(inner, hi_last), whole, hi_last)


@triton.jit
def real_keys(first, batch, given, KEYS: tl.constexpr):
    """Whether KEYS keys from ``first`` on are no padding."""
    return row_numbers(given.key_mask, batch, first, given.sizes.keys, KEYS, 0) != 0


@triton.jit
def first_query_seeing(s, given, traits: tl.constexpr):
    """The first t with hi_t > s, T if there is none."""
    edges, sizes = given.edges, given.sizes
    offset = sizes.keys - sizes.queries
    t = s * 0
    if traits.causal:
        t = tl.maximum(t, s + traits.strict - offset)
    elif traits.chunked:
        start = tl.load(edges + s) if traits.packed else 0
        t = tl.maximum(t, start + ((s - start) // sizes.chunk + 1) * sizes.chunk - offset)
    if traits.window and traits.right:
        t = tl.maximum(t, s - sizes.right - offset)
    if traits.packed:
        # later documents see (and pass over) all of this one; earlier ones see nothing of it
        t = tl.minimum(tl.maximum(t, tl.load(edges + s)), tl.load(edges + sizes.queries + s))
    return tl.minimum(t, sizes.queries)


@triton.jit
def first_query_past(s, given, traits: tl.constexpr):
    """The first t with lo_t > s, T if there is none."""
    edges, sizes = given.edges, given.sizes
    t = s * 0 + sizes.queries
    if traits.packed:
        t = tl.load(edges + sizes.queries + s)
    if traits.window:
        t = tl.minimum(t, s + 1 + sizes.left - (sizes.keys - sizes.queries))
    return tl.maximum(t, 0)


@triton.jit
def scores(a, b, gain_a, gain_b, traits: tl.constexpr):
    """(rows of a, rows of b): a b^T times gains that broadcast over it, clamped to the link's domain."""
    # float32 inputs are multiplied as float32: a score's error is magnified by the link
    x = tl.dot(a, tl.trans(b), input_precision="ieee") * gain_a
    if traits.normalise:
        x = x * gain_b
    if traits.clamped:
        x = tl.clamp(x, traits.low, traits.high, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def log2_kernel(x, c, value: tl.constexpr, traits: tl.constexpr):
    """log2 K of a tile of scores, in log space."""
    if traits.mapped:
        return value(x, c, traits.n) * LOG2E
    else:
        return x


@triton.jit
def as_multiplied(weight, rows, traits: tl.constexpr):
    """Weights as ``weighted`` multiplies them: the first 10 bits of a float32 (TF32), or the type of the rows."""
    if traits.wide:
        return (weight.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    else:
        return weight.to(rows.dtype)


@triton.jit
def weighted(weight, rows, total, traits: tl.constexpr):
    """total + weight rows, in the type of the rows; float32 sums."""
    if traits.wide:
        return tl.dot(weight, rows.to(tl.float32), total, input_precision="tf32")
    else:
        return tl.dot(weight.to(rows.dtype), rows, total, input_precision="ieee")


@triton.jit
def row_products_kernel(
    a, b, out, heads, rows, width, INVERSE_NORM: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    """out (B, H, rows) = sum over columns of a b, or 1 / |a|, which is 0 for zeros."""
    blocks = tl.cdiv(rows, ROWS)
    first = tl.program_id(0) % blocks * ROWS
    line = tl.program_id(0) // blocks
    left = tile_rows(a, line // heads, line % heads, first, rows, width, ROWS, WIDTH, True, True).to(tl.float32)
    if INVERSE_NORM:
        square = tl.sum(left * left, 1)
        number = tl.where(square > 0, 1 / tl.sqrt(tl.where(square > 0, square, 1.0)), 0.0)
    else:
        number = tl.sum(
            left
            * tile_rows(b, line // heads, line % heads, first, rows, width, ROWS, WIDTH, True, True).to(tl.float32),
            1,
        )
    row = first + tl.arange(0, ROWS)
    tl.store(out + tl.cast(line, tl.int64) * rows + row, number, mask=row < rows)


# ---- on the host ----


class Launch(NamedTuple):
    """One start of a kernel: how many programs, its arguments in order, its compile-time arguments by name."""

    kernel: Any
    programs: int
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    tiling: Tiling


class Record(NamedTuple):
    """The launches of calls for a device of this compute capability."""

    capability: tuple[int, int]
    launches: list[Launch]


_record: ContextVar[Record | None] = ContextVar("record", default=None)


@contextmanager
def recorded(capability: tuple[int, int]) -> Iterator[list[Launch]]:
    """Inside, kernels are noted down instead of started."""
    record = Record(capability, [])
    token = _record.set(record)
    try:
        yield record.launches
    finally:
        _record.reset(token)


def launch(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], tiling: Tiling) -> None:
    """Start a kernel unless it has nothing to do."""
    if not programs:
        return
    record = _record.get()
    if record is not None:
        record.launches.append(Launch(kernel, programs, arguments, constants, tiling))
        return
    kernel[(programs,)](*arguments, **constants, **options(tiling))


def options(tiling: Tiling) -> dict[str, Any]:
    """What the compiler is told. The default of fusing a multiplication and an addition differs between versions."""
    return {
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
        "maxnreg": tiling.registers,
        "enable_fp_fusion": True,
    }


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, kernels start on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def rows_of(x: Tensor) -> Strided:
    """A tensor (B, H, rows, columns) as kernels take it; copied if a tile of it would span 2^31 elements."""
    x = x.resolve_neg()
    if max(x.stride()[2:]) >= _WIDEST_STRIDE:
        x = x.contiguous()
    return Strided(x, *x.stride())


def levelled(inputs: Any, normalise: bool) -> tuple[Any, tuple[Tensor, ...]]:
    """(inputs with q and k so that the largest number of each row is 1/2 to 1, the powers of two that multiply them).

    Only where scores are normalised, which changes no score. Squares and products of very short or very long rows would
    leave the range of float32; those of float16 are in it. Rows of zeros stay, with the factor 0.
    """
    if not normalise:
        return inputs, ()
    made, powers = [], []
    for x in (inputs.q, inputs.k):
        largest = torch.linalg.vector_norm(x, float("inf"), dim=-1, keepdim=True, dtype=torch.float32)
        power = (largest != 0).to(x.dtype)
        if x.dtype != torch.float16:
            power = power * torch.exp2(-torch.frexp(largest).exponent.clamp(min=-126).float()).to(x.dtype)
            x = x * power
        made.append(x)
        powers.append(power)
    return inputs._replace(q=made[0], k=made[1]), tuple(powers)


def through_powers(gradients: Iterable[Tensor | None], powers: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Gradients of q and k, in place, from those of rows that ``levelled`` multiplied. Rows of zeros have none."""
    if not powers:
        return tuple(gradients)
    return tuple(
        None if gradient is None else gradient.mul_(power).masked_fill_(power == 0, 0)
        for gradient, power in zip(gradients, powers, strict=True)
    )


def shape(tiling: Tiling, q: Tensor, v: Tensor) -> TileShape:
    """The shape of a kernel's tiles."""
    return TileShape(tiling.queries, tiling.keys, padded(q.shape[3]), padded(v.shape[3]))


def functions(link: Formula) -> Functions:
    """The jit functions that a link names."""
    if link.log and not link.triton:
        return Functions(None, None, None)
    module, _, prefix = link.triton.partition(":")
    found = import_module(module)
    return Functions(
        getattr(found, prefix + "_value"), getattr(found, prefix + "_derivative"), getattr(found, prefix + "_base")
    )


def traits(
    spec: TileSpec,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    coefficients: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
) -> Traits:
    """What a call's kernels are compiled for."""
    low, high = spec.link.domain or (0.0, 0.0)
    mapped = spec.link.log and bool(spec.link.triton)
    unit = LOG2E.value if spec.link.log and not mapped else 1.0
    online = spec.link.log and spec.anchor == "row"
    return Traits(
        log=spec.link.log,
        mapped=mapped,
        anchor=spec.anchor,
        stride=coefficients.shape[1],
        n=coefficients.shape[1] - len(spec.link.constants),
        clamped=spec.link.domain is not None,
        low=low * unit,
        high=high * unit,
        normalise=spec.normalise,
        grouped=q.shape[1] != k.shape[1],
        causal=spec.causal and not spec.chunk,
        strict=0 if spec.include_self else 1,
        chunked=spec.chunk > 0,
        window=spec.left is not None,
        right=spec.left is not None and spec.right is not None,
        packed=cu_seqlens is not None,
        key_mask=key_mask is not None,
        narrow_key=q.shape[3] != padded(q.shape[3]),
        narrow_value=v.shape[3] != padded(v.shape[3]),
        wide=q.dtype == torch.float16 and not online,
    )


def sizes(spec: TileSpec, q: Tensor, k: Tensor, v: Tensor) -> Sizes:
    """The numbers of a call."""
    (_, heads, queries, key_dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
    return Sizes(
        heads, heads // kv_heads, queries, keys, key_dim, value_dim, spec.left or 0, spec.right or 0, max(spec.chunk, 1)
    )


class TileCall(NamedTuple):
    """A call's part that forward and backward share."""

    functions: Functions
    traits: Traits
    given: Given


def call(inputs: TileInputs, spec: TileSpec) -> TileCall:
    """Prepare a call's kernels."""
    q, k, v, scale, coefficients, key_mask, cu_seqlens = inputs[:7]
    coefficients = plain(coefficients, torch.float32)
    return TileCall(
        functions(spec.link),
        traits(spec, q, k, v, coefficients, key_mask, cu_seqlens),
        Given(
            plain(scale, torch.float32),
            coefficients,
            row_products(q, None) if spec.normalise else None,
            row_products(k, None) if spec.normalise else None,
            None if key_mask is None else key_mask.contiguous().view(torch.uint8),
            None
            if key_mask is None or spec.anchor != "count"
            else F.pad(key_mask.cumsum(1, dtype=torch.int32), (1, 0)),
            document_edges(cu_seqlens, q.shape[2]),
            None,
            None,
            sizes(spec, q, k, v),
        ),
    )


def document_edges(cu_seqlens: Tensor | None, tokens: int) -> Tensor | None:
    """(2, T) int32: the first token of each token's document, and its end. Nothing waits for the device."""
    if cu_seqlens is None:
        return None
    document = torch.bucketize(torch.arange(tokens, device=cu_seqlens.device), cu_seqlens[1:].contiguous(), right=True)
    return torch.stack([cu_seqlens[:-1][document], cu_seqlens[1:][document]]).int()


# tiles have up to 256 rows and columns
_WIDEST_STRIDE = 2**31 // 512


def capability_of(q: Tensor) -> tuple[int, int]:
    """The compute capability of the device that launches are for."""
    record = _record.get()
    return (
        record.capability if record is not None else torch.cuda.get_device_capability(q.device) if q.is_cuda else (9, 0)
    )


def choose(kernel: str, q: Tensor, v: Tensor, traits: Traits) -> Tiling:
    """Tile sizes of a kernel ("forward", "decode", "keys", "queries") by head size, type, device and its inner loop."""
    narrow = any(padded(x.shape[3]) != x.shape[3] for x in (q, v))
    crowded = traits.edged or traits.key_mask or traits.wide
    return tiling_of(
        kernel,
        q.element_size(),
        max(64, padded(q.shape[3]), padded(v.shape[3])),
        capability_of(q),
        narrow=narrow,
        crowded=crowded,
        wide=traits.wide,
    )


def row_products(a: Tensor, b: Tensor | None) -> Tensor:
    """(B, H, rows) float32: sum over the last axis of a b; without b, 1 / |a|, which is 0 for zeros."""
    batch, heads, rows, width = a.shape
    out = torch.empty(batch, heads, rows, dtype=torch.float32, device=a.device)
    block = 4096 // padded(width)
    launch(
        row_products_kernel,
        batch * heads * ceil_div(rows, block),
        (rows_of(a), rows_of(a if b is None else b), out, heads, rows, width),
        {"INVERSE_NORM": b is None, "ROWS": block, "WIDTH": padded(width)},
        Tiling(block, 0, 4, 1),
    )
    return out
