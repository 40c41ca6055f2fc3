"""The kernel for the largest among candidates (sparse.cpp), and the hash tables that give candidates, on the CPU."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.formula import FORMULAS
from zonal.kernels import abi
from zonal.kernels.abi import Arguments, address, dense_last, empty, plain, zeros
from zonal.kernels.native import Family
from zonal.kernels.op import Body, Gradients, Op, Results, only_first

FAMILY = Family("sparse", FORMULAS["identity"], cuda=False)
KINDS = ("euclidean", "squared", "sphere", "hyperbolic")
_SPARSE, _PLACES = abi.Struct("sparse.cpp", "Sparse"), abi.Struct("sparse.cpp", "Places")
# tokens that are hashed together: their products stay in a cache
_ROWS = 2048


class Candidates(NamedTuple):
    """The keys of each query: order[b, g, l, start[b, h, t, l] : stop[b, h, t, l]] per table l. A key appears once.

    order (B, Hkv, L, S); start, stop (B, H, T, L); walk (B, H, T): queries ordered so that neighbours compare the same
    keys. All int32.
    """

    order: Tensor
    start: Tensor
    stop: Tensor
    walk: Tensor


class Factors(NamedTuple):
    """The distances in a score, which is minus their weighted sum.

    They have a kind, the size of their part of a point, and the distance below which they are smooth. None of them
    means that scores are dot products. Points are rows of D numbers. Queries then have weights, radii and sinh of
    radii, one per factor, and keys radii and their sinh. Angles are between directions; a missing direction has radius
    1, else 0.
    """

    kinds: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    eps: tuple[float, ...] = ()


class Function(NamedTuple):
    """What all hash tables do with one part of a point: they take numbers, x @ directions or x, and find their cells.

    x (B, H, tokens, d). directions (d, tables * n); None: x has one number, the same for all tables.
    offsets (tables * n,): floor(number / width + offset) gives n cells; None: n signs form one cell.
    """

    x: Tensor
    directions: Tensor | None
    offsets: Tensor | None = None
    width: float = 1.0


class SparseSpec(NamedTuple):
    """The distances of a score, and how many keys each row keeps."""

    factors: Factors
    top: int


class SparseInputs(NamedTuple):
    """q (B, H, T, n), k (B, Hkv, S, n) as ``Factors`` says, v (B, Hkv, S, P), and ``Candidates``."""

    q: Tensor
    k: Tensor
    v: Tensor
    order: Tensor
    start: Tensor
    stop: Tensor
    walk: Tensor


def codes(functions: list[Function], tables: int) -> Tensor:
    """The combined cells of float32 points, (B, H, 1 + tables, tokens) int32 below 2^16. Table 0 has one bucket.

    Numbers are made for some tokens at a time and never kept: all of them are many times what the points are.
    """
    batch, heads, tokens, _ = functions[0].x.shape
    found, kernel = (
        zeros(batch, heads, 1 + tables, tokens, dtype=torch.int32),
        FAMILY.load(),
    )
    at, count, cells = ctypes.c_void_p(found.data_ptr()), batch * heads * tokens, 0
    for function in functions:
        x = plain(function.x, torch.float32).flatten(0, 2)
        directions, offsets = (None if t is None else plain(t, torch.float32) for t in function[1:3])
        wide, step = (1, 0) if directions is None else (directions.shape[1], directions.shape[1] // tables)
        made = empty(min(_ROWS, count) + 16, wide)  # the kernel looks sixteen numbers past the end
        for first in range(0, count, _ROWS):
            rows = x[first : first + _ROWS]
            if directions is None:
                made[: rows.shape[0]] = rows
            else:
                torch.mm(rows, directions, out=made[: rows.shape[0]])
            sizes = (ctypes.c_int64(n) for n in (first, rows.shape[0], tokens, tables))
            kernel.zonal_sparse_hash(
                ctypes.c_void_p(made.data_ptr()), *(ctypes.c_int64(n) for n in (wide, step, max(step, 1))),
                ctypes.c_void_p(address(offsets, torch.float32, (tables * max(step, 1),))),
                ctypes.c_float(function.width), *sizes, at,
            )  # fmt: skip
        cells += 1 if offsets is None else max(step, 1)
    kernel.zonal_sparse_fold(ctypes.c_int64(cells), ctypes.c_int64(found.numel()), at)
    return found


def places(
    asked: Tensor, held: Tensor, lo: Tensor, hi: Tensor, position: Tensor, reach: Tensor, key_mask: Tensor | None
) -> Candidates:
    """Candidates from codes in [0, 2^16) of queries (B, H, L, T) and keys (B, Hkv, L, S).

    They are the visible keys [lo, hi) with the query's own code, at most ``reach`` (L,) per table, the nearest
    to ``position``. lo, hi, position (T,); key_mask (B, S).
    """
    batch, heads, tables, queries = asked.shape
    kv_heads, keys = held.shape[1], held.shape[3]
    call = Arguments(_PLACES, {"B": batch, "H": heads, "Hkv": kv_heads, "T": queries, "S": keys, "L": tables})
    call.point("asked", plain(asked, torch.int32), (batch, heads, tables, queries))
    call.point("held", plain(held, torch.int32), (batch, kv_heads, tables, keys))
    for name, x in (("lo", lo), ("hi", hi), ("position", position)):
        call.point(name, plain(x, torch.int32), (queries,))
    call.point("reach", plain(reach, torch.int32), (tables,))
    call.point("key_mask", None if key_mask is None else key_mask.contiguous(), (batch, keys), dtype=torch.bool)
    shapes = _shapes_of(batch, heads, kv_heads, tables, queries, keys)
    found = Candidates(*(empty(*shape, dtype=torch.int32) for shape in shapes))
    for name, x, shape in zip(found._fields, found, shapes, strict=True):
        call.point(name, x, shape)
    call.run(FAMILY.load().zonal_sparse_places)
    return found


def _shapes_of(
    batch: int, heads: int, kv_heads: int, tables: int, queries: int, keys: int
) -> tuple[tuple[int, ...], ...]:
    """Of the four tensors of ``Candidates``."""
    by_table = (batch, heads, queries, tables)
    return (batch, kv_heads, tables, keys), by_table, by_table, (batch, heads, queries)


def _arguments(inputs: SparseInputs, spec: SparseSpec) -> Arguments:
    (batch, heads, queries, width), (_, kv_heads, keys, value_dim) = inputs.q.shape, inputs.v.shape
    factors, tables = spec.factors, inputs.order.shape[2]
    count = len(factors.kinds)
    call = Arguments(_SPARSE, {
        "B": batch, "H": heads, "Hkv": kv_heads, "T": queries, "S": keys, "D": width - 3 * count, "P": value_dim,
        "L": tables, "F": count, "top": spec.top,
    })  # fmt: skip
    shapes = inputs.q.shape, inputs.k.shape, (batch, kv_heads, keys, value_dim)
    for name, x, shape in zip("qkv", inputs[:3], shapes, strict=True):
        call.point(name, dense_last(x, torch.float32), shape, strides=f"{name}s")
    shapes = _shapes_of(batch, heads, kv_heads, tables, queries, keys)
    for name, x, shape in zip(Candidates._fields, inputs[3:], shapes, strict=True):
        call.point(name, plain(x, torch.int32), shape)
    kinds = [KINDS.index(kind) for kind in factors.kinds]
    call.point("kinds", torch.tensor(kinds, dtype=torch.int64, device="cpu"), (count,))
    call.point("sizes", torch.tensor(factors.sizes, dtype=torch.int64, device="cpu"), (count,))
    call.point("eps", torch.tensor(factors.eps, dtype=torch.float32, device="cpu"), (count,))
    return call


def forward(inputs: SparseInputs, spec: SparseSpec) -> Results:
    """(y (B, H, T, P) in the type of v; per row (B, H, T), in float32, the least kept score and the log of the sum
    of its kernel; and in int32, how many keys it compared)."""
    rows, value_dim = inputs.q.shape[:3], inputs.v.shape[3]
    y, least, whole, met = empty(*rows, value_dim), empty(*rows), empty(*rows), empty(*rows, dtype=torch.int32)
    call = _arguments(inputs, spec)
    call.point("y", y, (*rows, value_dim))
    for name, x in (("least", least), ("whole", whole), ("met", met)):
        call.point(name, x, rows)
    call.run(FAMILY.load().zonal_sparse_forward)
    return y.to(inputs.v.dtype), least, whole, met


def backward(
    grads: Gradients, inputs: SparseInputs, results: Results, spec: SparseSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of q, k and v, in float32, of what each row kept."""
    (dy,), (y, least, whole, _), tokens = grads, results, inputs[:3]
    assert dy is not None
    found = tuple(zeros(*x.shape) for x in tokens)
    rows, shape = inputs.q.shape[:3], (*inputs.q.shape[:3], inputs.v.shape[3])
    call = _arguments(inputs, spec)
    call.point("y", plain(y, torch.float32), shape)
    call.point("least", least.contiguous(), rows)
    call.point("whole", whole.contiguous(), rows)
    call.point("dy", dense_last(dy, torch.float32), shape, strides="dys")
    for name, gradient, x in zip(("dq", "dk", "dv"), found, tokens, strict=True):
        call.point(name, gradient, x.shape)
    call.run(FAMILY.load().zonal_sparse_backward)
    return found


def _shapes(inputs: SparseInputs, spec: SparseSpec) -> Results:
    q, v, rows = inputs.q, inputs.v, inputs.q.shape[:3]
    numbers = [q.new_empty(rows, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.int32)]
    return v.new_empty((*rows, v.shape[3])), *numbers


sparse = Op(
    "sparse",
    SparseInputs,
    SparseSpec,
    results=4,
    learned=("q", "k", "v"),
    cpu=Body(forward, backward),
    shapes=_shapes,
    fixed=(1, 2, 3),
    refusal=only_first("sparse"),
)
"""The results of ``forward``; y has gradients."""

__all__ = [
    "FAMILY",
    "KINDS",
    "Candidates",
    "Factors",
    "Function",
    "SparseInputs",
    "SparseSpec",
    "codes",
    "places",
    "sparse",
]
