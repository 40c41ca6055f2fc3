"""Calls the compiled kernel for sums over features (sums.cpp) on float32 tensors of the CPU; any strides but the last."""

import ctypes
import functools
import itertools
import math
import struct
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.kernels import native
from zonal.kernels.cpp import library
from zonal.kernels.sums_spec import SumsSpec

SOURCE = "sums"
_ANCHORS = {"row": 0, "count": 1, "raw": 2}
_INPUTS = ("q", "k", "v", "scale", "coefficients", "monomials", "squares", "roots", "running", "favour")
_OF_MAP = ("left", "right", "run_end", "degree", "place", "low_left", "low_right")
_TABLES = (*_OF_MAP, "index", "present", "lo", "hi", "edges")
_SIZES = (
    "B", "H", "Hkv", "T", "S", "D", "P", "F", "low", "powers", "segments", "by_batch", "numbers", "learned", "anchor", "normalise", "split", "offset", "guards", "shares",
)  # fmt: skip
_RESULTS = (
    "apart",
    "y",
    "factor",
    "final",
    "dy",
    "dfinal",
    "dq",
    "dk",
    "dv",
    "dinitial",
    "dmass",
    "dscale",
    "dcoefficients",
    "dmonomials",
)


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "token")]


class _Sums(ctypes.Structure):
    """``Sums`` of sums.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*_INPUTS, *_TABLES, "initial", "before")), *((name, _Strides) for name in ("qs", "ks", "vs")),
        *((name, ctypes.c_int64) for name in _SIZES), ("eps", ctypes.c_float), *((name, ctypes.c_void_p) for name in _RESULTS),
    ]  # fmt: skip


_PACKED = struct.Struct(f"={len(_INPUTS) + len(_TABLES) + 2 + 9 + len(_SIZES)}qf4x{8 * len(_RESULTS)}x")
"""``_Sums`` as long as its results are not pointed to."""
assert _PACKED.size == ctypes.sizeof(_Sums)


class _Dots(ctypes.Structure):
    """``Dots`` of sums.cpp."""

    _fields_ = [
        ("a", ctypes.c_void_p), ("b", ctypes.c_void_p), ("as_", _Strides), ("bs", _Strides), *((name, ctypes.c_int64) for name in ("B", "H", "T", "P")),
        ("out", ctypes.c_void_p),
    ]  # fmt: skip


class Tables(NamedTuple):
    """How the kernel makes the features of a map: each a product of two low ones, in an order in which the first of the two rises.

    low_left, low_right: rows of products among the low features (the first 1 + D rows are 1 and the vector). left, right, degree: of
    each feature. run_end: where the run ends in which left stays and right rises by one. place: where it stands in the order of ``features.SymmetricPowers``. squares, roots: its weight there, squared and plain.
    """

    low_left: Tensor
    low_right: Tensor
    left: Tensor
    right: Tensor
    run_end: Tensor
    degree: Tensor
    place: Tensor
    squares: Tensor
    roots: Tensor


def _monomials(degree: int, lowest: int, dim: int) -> list[tuple[int, ...]]:
    """The indices of every feature, in the order of ``features.SymmetricPowers``, which memories keep."""
    found: list[tuple[int, ...]] = []
    for power in range(lowest, degree + 1):
        if power == 2 and degree == 2:  # by cyclic distance, the opposite point once
            pairs = [
                (i, (i + j) % dim) for j in range(dim // 2 + 1) for i in range(dim // 2 if j and 2 * j == dim else dim)
            ]
            found += [tuple(sorted(pair)) for pair in pairs]
        else:
            found += itertools.combinations_with_replacement(range(dim), power)
    return found


@functools.lru_cache(maxsize=64)
def tables(degree: int, lowest: int, dim: int) -> Tables:
    """The tables of all powers from ``lowest`` to ``degree`` of vectors of ``dim`` numbers."""
    half = (degree + 1) // 2
    rows: dict[tuple[int, ...], int] = {(): 0, **{(i,): 1 + i for i in range(dim)}}
    low = [(0, 0)] * (1 + dim)
    for power in range(2, half + 1):
        for each in itertools.combinations_with_replacement(range(dim), power):
            low.append((rows[each[:1]], rows[each[1:]]))
            rows[each] = len(low) - 1
    made = []
    for place, each in enumerate(_monomials(degree, lowest, dim)):
        cut = len(each) // 2
        square = math.factorial(len(each)) // math.prod(math.factorial(times) for times in Counter(each).values())
        made.append((rows[each[:cut]], rows[each[cut:]], len(each), place, square))
    made.sort()
    ends = [len(made)] * len(made)
    for a in range(len(made) - 2, -1, -1):
        follows = made[a + 1][:2] == (made[a][0], made[a][1] + 1)
        ends[a] = ends[a + 1] if follows else a + 1
    left, right, power, place, squares = (
        torch.tensor(column, dtype=torch.int32, device="cpu") for column in zip(*made, strict=True)
    )
    low_left, low_right = (torch.tensor(column, dtype=torch.int32, device="cpu") for column in zip(*low, strict=True))
    return Tables(
        low_left,
        low_right,
        left,
        right,
        torch.tensor(ends, dtype=torch.int32, device="cpu"),
        power,
        place,
        squares.float(),
        squares.double().sqrt().float(),
    )


class Places(NamedTuple):
    """Who sees whom, as the kernel reads it: int32, contiguous.

    index (B or 1, S): the keys that are there, in order, then the others; present (B or 1,): how many. lo, hi (B or 1, T): the places in
    ``index`` that each query sees, hi >= lo. edges (documents + 1,): borders of documents among the queries.
    """

    index: Tensor
    present: Tensor
    lo: Tensor
    hi: Tensor
    edges: Tensor


def places(key_mask: Tensor | None, lo: Tensor, hi: Tensor, segment_start: Tensor | None, keys: int) -> Places:
    """From lo, hi: int64 (T,), the keys each query may see before ``key_mask`` (B, S); segment_start (T,): where each query's document
    begins, None = there is only one."""
    hi = torch.maximum(lo, hi)
    if segment_start is None:
        edges = torch.tensor([0, lo.shape[0]], dtype=torch.int32, device="cpu")
    else:
        edges = torch.nn.functional.pad(
            torch.unique_consecutive(segment_start, return_counts=True)[1].cumsum(0), (1, 0)
        ).to(torch.int32)
    if key_mask is None:
        index, present = (
            torch.arange(keys, dtype=torch.int32, device="cpu")[None],
            torch.tensor([keys], dtype=torch.int32, device="cpu"),
        )
        return Places(index, present, lo.to(torch.int32)[None], hi.to(torch.int32)[None], edges)
    # intervals become intervals of places among the keys that are there
    index = torch.argsort(~key_mask, dim=1, stable=True).to(torch.int32)
    rank = torch.nn.functional.pad(key_mask.cumsum(1), (1, 0)).to(torch.int32)
    return Places(index, rank[:, -1].contiguous(), rank[:, lo].contiguous(), rank[:, hi].contiguous(), edges)


class _Arguments:
    """A filled-in ``_Sums`` and the tensors it points to, which must live as long."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, monomials: Tensor, seen: Places, initial: Tensor | None,
        before: Tensor | None, log_decay: Tensor | None, key_bias: Tensor | None, spec: SumsSpec, split: int, shares: int = 0,
    ) -> None:  # fmt: skip
        heads, (batch, kv_heads, keys, value_dim), (queries, dim) = scale.shape[0], v.shape, q.shape[2:]
        q, k, v = (library.dense_last(x, torch.float32) for x in (q, k, v))
        q, k = q.expand(-1, heads, -1, -1), k.expand(-1, kv_heads, -1, -1)
        table = tables(spec.degree, spec.lowest, dim)
        running = None if log_decay is None else log_decay.double().cumsum(-1).expand(batch, -1, -1).contiguous()
        favour = None if key_bias is None else plain(key_bias.double().exp(), torch.float32)
        small = tuple(plain(x, torch.float32) for x in (scale, coefficients, monomials))
        initial = None if initial is None else plain(initial, torch.float32)
        before = None if before is None else plain(before, torch.float64)
        features, low, rows, by_key = table.left.shape, table.low_left.shape, seen.lo.shape[0], (batch, kv_heads, keys)
        floats = (
            *zip(small, ((heads,), (heads, coefficients.shape[1]), (heads, monomials.shape[1])), strict=True), (table.squares, features), (table.roots, features),
        )  # fmt: skip
        whole = (
            *((getattr(table, name), low if name.startswith("low") else features) for name in _OF_MAP),
            *zip(seen, ((rows, keys), (rows,), (rows, queries), (rows, queries), seen.edges.shape), strict=True),
        )  # fmt: skip
        tokens = ((q, (batch, heads, queries, dim)), (k, (*by_key, dim)), (v, (*by_key, value_dim)))
        addresses = (
            *(library.address(x, torch.float32, shape, strided=True) for x, shape in tokens), *(library.address(x, torch.float32, shape) for x, shape in floats),
            library.address(running, torch.float64, by_key), library.address(favour, torch.float32, by_key),
            *(library.address(x, torch.int32, shape) for x, shape in whole),
            library.address(initial, torch.float32, state_shape(batch, kv_heads, dim, value_dim, spec)), library.address(before, torch.float64, (batch,)),
        )  # fmt: skip
        sizes = (
            batch, heads, kv_heads, queries, keys, dim, value_dim, table.left.shape[0], table.low_left.shape[0], monomials.shape[1],
            seen.edges.shape[0] - 1, seen.lo.shape[0] > 1, coefficients.shape[1], 0, _ANCHORS[spec.anchor], spec.normalise, split, keys - queries, spec.guards, shares,
        )  # fmt: skip
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        self.kept: list[object] = [q, k, v, small, table, running, favour, seen, initial, before]
        # a structure is filled in field by field in five times the time, a good part of a short call
        self.call = _Sums.from_buffer_copy(_PACKED.pack(*addresses, *strides, *sizes, spec.eps))

    def point(self, name: str, x: Tensor | None, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Let a field of the call point to a tensor, which ``library.address`` checks."""
        setattr(self.call, name, library.address(x, dtype, shape))
        self.kept.append(x)


def plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x as the kernels read small tensors: contiguous, of one type."""
    return x if x.dtype is dtype and x.is_contiguous() else x.to(dtype).contiguous()


def state_shape(batch: int, kv_heads: int, dim: int, value_dim: int, spec: SumsSpec) -> tuple[int, int, int, int]:
    """(B, Hkv, features, P, one more with the row anchor): of the state before and after a call."""
    return batch, kv_heads, spec.dimension(dim), value_dim + (spec.anchor == "row")


def _split(batch: int, kv_heads: int, segments: int, value_dim: int) -> int:
    """Parts of the values: with fewer heads than threads each head is shared out, at the price of features made more than once."""
    return max(1, min(torch.get_num_threads() // max(batch * kv_heads * segments, 1), value_dim // 8))


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, monomials: Tensor, seen: Places, initial: Tensor | None,
    before: Tensor | None, log_decay: Tensor | None, key_bias: Tensor | None, spec: SumsSpec,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y (B, H, T, P), the row's factor (B, H, T), the state after the last key, empty unless ``spec.keeps``), all float32, and which rows
    were summed without the state, uint8 (B, H, T), empty unless ``spec.guards``.

    q (B, H or 1, T, D), k (B, Hkv or 1, S, D): with one head all heads share it. scale (H,), coefficients (H, n), monomials (H, degree + 1). initial: the state before the first key; before (B,): keys in it.
    log_decay: (B or 1, Hkv, S) <= 0, 0 on padding; the queries are then the last positions. key_bias: (B, Hkv, S).

    Of a positive link with the row anchor, a row whose sum over features has cancelled to less than 1/256 of what its terms may sum to is
    summed through the link, key by key. With ``initial`` that cannot be: a row below 2^-16 of it, of which a tenth or more may be rounding, is NaN.
    """
    heads, (batch, kv_heads, _, value_dim), (queries, dim) = scale.shape[0], v.shape, q.shape[2:]
    rows, state = (batch, heads, queries), state_shape(batch, kv_heads, dim, value_dim, spec)
    y, factor = library.empty(*rows, value_dim), library.empty(*rows)
    final = library.empty(*state) if spec.keeps else library.empty(0)
    apart = library.zeros(*rows, dtype=torch.uint8) if spec.guards else library.zeros(0, dtype=torch.uint8)
    split = _split(batch, kv_heads, seen.edges.shape[0] - 1, value_dim)
    arguments = _Arguments(
        q, k, v, scale, coefficients, monomials, seen, initial, before, log_decay, key_bias, spec, split
    )
    arguments.point("y", y, torch.float32, (*rows, value_dim))
    arguments.point("factor", factor, torch.float32, rows)
    arguments.point("final", final if spec.keeps else None, torch.float32, state)
    arguments.point("apart", apart if spec.guards else None, torch.uint8, rows)
    _run(native.load(spec.link, SOURCE).zonal_sums_forward, arguments)
    return y, factor, final, apart


class Gradients(NamedTuple):
    """What ``backward`` returns: of q, k, v as they came, and where asked for of scale (H,), the link's coefficients (H, learned),
    monomials (H, degree + 1), all float64, the state before the first key, and log_decay and key_bias (B, Hkv, S), float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor | None
    coefficients: Tensor | None
    monomials: Tensor | None
    initial: Tensor | None
    log_decay: Tensor | None
    key_bias: Tensor | None


class Asked(NamedTuple):
    """Of what ``backward`` finds the gradients, beside q, k, v. learned: of how many coefficients."""

    learned: int
    scale: bool
    monomials: bool
    initial: bool
    log_decay: bool
    key_bias: bool


def backward(
    dy: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, final: Tensor, apart: Tensor, scale: Tensor,
    coefficients: Tensor, monomials: Tensor, seen: Places, initial: Tensor | None, before: Tensor | None, log_decay: Tensor | None,
    key_bias: Tensor | None, spec: SumsSpec, asked: Asked,
) -> Gradients:  # fmt: skip
    """The gradients of ``forward``, whose four results are y, factor, final and apart. The scale has none where heads share queries and keys."""
    heads, (batch, kv_heads, keys, value_dim), (queries, dim) = scale.shape[0], v.shape, q.shape[2:]
    segments = seen.edges.shape[0] - 1
    split = _split(batch, kv_heads, segments, value_dim)
    tasks = batch * kv_heads * segments * split
    groups = heads // kv_heads
    v = library.dense_last(v, torch.float32)
    shared = (q.shape[1], k.shape[1]) != (heads, kv_heads)
    shares = min(kv_heads * segments * split, max(1, 2 * torch.get_num_threads() // max(batch, 1))) if shared else 0
    parts = shares or split
    rows, by_key, state = (
        (batch, heads, queries),
        (batch, kv_heads, keys),
        state_shape(batch, kv_heads, dim, value_dim, spec),
    )
    shapes = {
        "dq": (parts, batch, q.shape[1], queries, dim), "dk": (parts, batch, k.shape[1], keys, dim), "dv": (*by_key, value_dim), "dinitial": state, "dmass": by_key,
        "dscale": (batch, heads), "dcoefficients": (tasks, groups, asked.learned), "dmonomials": (tasks, groups, monomials.shape[1]),
    }  # fmt: skip
    dq, dk, dv = (library.empty(*shapes[name]) for name in ("dq", "dk", "dv"))
    dinitial = library.empty(*state) if asked.initial else None
    dmass = library.zeros(*by_key) if spec.anchor == "row" and (asked.log_decay or asked.key_bias) else None
    dscale, dcoefficients, dmonomials = (
        library.zeros(*shapes[name], dtype=torch.float64) if wanted else None
        for name, wanted in (("dscale", asked.scale), ("dcoefficients", asked.learned), ("dmonomials", asked.monomials))
    )
    arguments = _Arguments(
        q, k, v, scale, coefficients, monomials, seen, initial, before, log_decay, key_bias, spec, split, shares
    )
    arguments.call.learned = asked.learned
    arguments.point("y", y, torch.float32, (*rows, value_dim))
    arguments.point("factor", factor, torch.float32, rows)
    arguments.point("apart", apart if spec.guards else None, torch.uint8, rows)
    arguments.point("dy", dy.float().contiguous(), torch.float32, (*rows, value_dim))
    arguments.point("dfinal", None if dfinal is None else dfinal.float().contiguous(), torch.float32, state)
    for name, x in (("dq", dq), ("dk", dk), ("dv", dv), ("dinitial", dinitial), ("dmass", dmass)):
        arguments.point(name, x, torch.float32, shapes[name])
    for name, x in (("dscale", dscale), ("dcoefficients", dcoefficients), ("dmonomials", dmonomials)):
        arguments.point(name, x, torch.float64, shapes[name])
    _run(native.load(spec.link, SOURCE).zonal_sums_backward, arguments)

    def by_head(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.view(batch, kv_heads, segments * split, groups, -1).sum((0, 2)).view(heads, -1)

    # log of what each key counts
    counted = _dots(v, dv, spec) + (0 if dmass is None else dmass) if asked.log_decay or asked.key_bias else None
    ddecay = None
    if asked.log_decay:
        assert counted is not None
        rows = None if spec.anchor == "row" else _dots(library.dense_last(dy, torch.float32), y, spec)
        ddecay = decay_gradient(counted, rows, queries, dfinal, final)
    return Gradients(
        dq[0], dk[0], dv, None if dscale is None else dscale.sum(0), by_head(dcoefficients), by_head(dmonomials), dinitial, ddecay,
        counted if asked.key_bias else None,
    )  # fmt: skip


def decay_gradient(counted: Tensor, rows: Tensor | None, queries: int, dfinal: Tensor | None, final: Tensor) -> Tensor:
    """(B, Hkv, S) float64: the gradient of log decays from ``counted`` (B, Hkv, S), that of the logarithm of what each key counts.

    A row's weights scale with e^c_t, which changes nothing where it is divided by their sum (``rows`` is None there), and each key's with e^-c_s.
    rows: (B, H, T) float64, dy . y of each row.
    """
    kv_heads, keys = counted.shape[1:]
    running, offset = -counted, keys - queries
    if rows is not None:
        running[..., max(offset, 0) :] += rows.unflatten(1, (kv_heads, -1)).sum(2)[..., max(-offset, 0) :]
    if dfinal is not None and keys:
        running[..., -1] += (dfinal.double() * final).sum((-1, -2))
    return running.flip(-1).cumsum(-1).flip(-1)


def _dots(a: Tensor, b: Tensor, spec: SumsSpec) -> Tensor:
    """Σ_p a_tp b_tp of two float32 tensors (B, H, T, P), float64 (B, H, T)."""
    batch, heads, length, width = a.shape
    out = library.empty(batch, heads, length, dtype=torch.float64)
    first, second = (library.address(x, torch.float32, a.shape, strided=True) for x in (a, b))
    call = _Dots(
        first, second, _Strides(*a.stride()[:3]), _Strides(*b.stride()[:3]), batch, heads, length, width, out.data_ptr()
    )
    native.load(spec.link, SOURCE).zonal_sums_dots(ctypes.byref(call))
    return out


def _run(function: object, arguments: _Arguments) -> None:
    if function(ctypes.byref(arguments.call)):  # type: ignore[operator]
        raise MemoryError("attention: the CPU kernel could not allocate its buffers.")


__all__ = [
    "SOURCE",
    "Asked",
    "Gradients",
    "Places",
    "Tables",
    "backward",
    "decay_gradient",
    "forward",
    "places",
    "plain",
    "state_shape",
    "tables",
]
