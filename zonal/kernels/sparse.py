"""The kernel for the largest among candidates (sparse.cpp), and the hash tables that give candidates, on the CPU."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.formula import FORMULAS
from zonal.kernels import abi
from zonal.kernels.abi import Arguments, address, empty, plain, zeros
from zonal.kernels.native import Family
from zonal.kernels.op import Body, Gradients, Op, Results, only_first

FAMILY = Family("sparse", FORMULAS["identity"], cuda=False)
KINDS = ("euclidean", "squared", "sphere", "hyperbolic")
_CANDIDATES = {"order": "B Hkv L S", "start": "B H T L", "stop": "B H T L", "walk": "B H T"}
_SPARSE = abi.Struct("sparse.cpp", "Sparse", {
    "q": "B H T q_width", "k": "B Hkv S k_width", "v": "B Hkv S P", "kinds": "F", "sizes": "F", "eps": "F",
    "y": "B H T P", "least": "B H T", "whole": "B H T", "met": "B H T", "dy": "B H T P", "dq": "B H T q_width",
    "dk": "B Hkv S k_width", "dv": "B Hkv S P", **_CANDIDATES,
})  # fmt: skip
_PLACES = abi.Struct("sparse.cpp", "Places", {
    "asked": "B H L T", "held": "B Hkv L S", "lo": "T", "hi": "T", "position": "T", "reach": "L", "key_mask": "B S",
    **_CANDIDATES,
})  # fmt: skip
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


def codes(functions: Sequence[tuple[Tensor, Tensor | None, Tensor | None, float]], tables: int) -> Tensor:
    """The combined cells of float32 points, (B, H, 1 + tables, tokens) int32 below 2^16. Table 0 has one bucket.

    functions: of hash tables, each (x, directions, offsets, width) as ``features.hashing.Function`` has them.

    Numbers are made for some tokens at a time and never kept: all of them are many times what the points are.
    """
    batch, heads, tokens, _ = functions[0][0].shape
    found, kernel = zeros(batch, heads, 1 + tables, tokens, dtype=torch.int32), FAMILY.load()
    at, count, cells = ctypes.c_void_p(found.data_ptr()), batch * heads * tokens, 0
    for points, *numbers, width in functions:
        x = plain(points, torch.float32).flatten(0, 2)
        directions, offsets = (None if t is None else plain(t, torch.float32) for t in numbers)
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
                ctypes.c_float(width), *sizes, at,
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
    tensors = {"asked": asked, "held": held, "lo": lo, "hi": hi, "position": position, "reach": reach}
    for name, x in tensors.items():
        call.point(name, x)
    call.point("key_mask", key_mask)
    found = Candidates(*(call.new(name) for name in Candidates._fields))
    call.run(FAMILY.load().zonal_sparse_places)
    return found


def _arguments(inputs: SparseInputs, spec: SparseSpec) -> Arguments:
    (batch, heads, queries, width), (_, kv_heads, keys, value_dim) = inputs.q.shape, inputs.v.shape
    factors, count = spec.factors, len(spec.factors.kinds)
    call = Arguments(_SPARSE, {
        "B": batch, "H": heads, "Hkv": kv_heads, "T": queries, "S": keys, "D": width - 3 * count, "P": value_dim,
        "L": inputs.order.shape[2], "F": count, "top": spec.top,
    }, {"q_width": width, "k_width": inputs.k.shape[3]})  # fmt: skip
    for name, x in zip(inputs._fields, inputs, strict=True):
        call.point(name, x)
    kinds = [KINDS.index(kind) for kind in factors.kinds]
    call.point("kinds", torch.tensor(kinds, dtype=torch.int64, device="cpu"))
    call.point("sizes", torch.tensor(factors.sizes, dtype=torch.int64, device="cpu"))
    call.point("eps", torch.tensor(factors.eps, dtype=torch.float32, device="cpu"))
    return call


def forward(inputs: SparseInputs, spec: SparseSpec) -> Results:
    """(y (B, H, T, P) in the type of v; per row (B, H, T), in float32, the least kept score and the log of the sum
    of its kernel; and in int32, how many keys it compared)."""
    call = _arguments(inputs, spec)
    y, least, whole, met = (call.new(name) for name in ("y", "least", "whole", "met"))
    call.run(FAMILY.load().zonal_sparse_forward)
    return y.to(inputs.v.dtype), least, whole, met


def backward(
    grads: Gradients, inputs: SparseInputs, results: Results, spec: SparseSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of q, k and v, in float32, of what each row kept."""
    (dy,), (y, least, whole, _) = grads, results
    call = _arguments(inputs, spec)
    for name, x in (("y", y), ("least", least), ("whole", whole), ("dy", dy)):
        call.point(name, x)
    found = tuple(call.new(name, zero=True) for name in ("dq", "dk", "dv"))
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
    bodies={"cpu": Body(forward, backward)},
    shapes=_shapes,
    fixed=(1, 2, 3),
    refusal=only_first("sparse"),
)
"""The results of ``forward``; y has gradients."""

__all__ = ["FAMILY", "KINDS", "Candidates", "Factors", "SparseInputs", "SparseSpec", "codes", "places", "sparse"]
