"""Calls the compiled kernel for the largest of some candidates (sparse.cpp) on float32 tensors of the CPU; any strides but the last."""

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.formula import FORMULAS
from zonal.kernels.cpp import library
from zonal.kernels.cpp.sums_library import plain

SOURCE = "sparse"
CODE = FORMULAS["identity"]
"""It knows no link, so that one library serves all."""
KINDS = ("euclidean", "squared", "sphere", "hyperbolic")
_POINTERS = ("q", "k", "v", "order", "start", "stop", "walk", "kinds", "sizes", "eps")
_STRIDED = ("qs", "ks", "vs", "dys")
_SIZES = ("B", "H", "Hkv", "T", "S", "D", "P", "L", "F", "top")
_RESULTS = ("y", "least", "whole", "met", "dy", "dq", "dk", "dv")
_CODES = ("asked", "held", "lo", "hi", "position", "reach", "key_mask")
_PLACES = ("order", "start", "stop", "walk")
# tokens that are hashed together: their products stay in a cache
_ROWS = 2048


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "token")]


class _Sparse(ctypes.Structure):
    """``Sparse`` of sparse.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS), *((name, _Strides) for name in _STRIDED), *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in _RESULTS),
    ]  # fmt: skip


class _Places(ctypes.Structure):
    """``Places`` of sparse.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _CODES), *((name, ctypes.c_int64) for name in ("B", "H", "Hkv", "T", "S", "L")),
        *((name, ctypes.c_void_p) for name in _PLACES),
    ]  # fmt: skip


class Candidates(NamedTuple):
    """The keys that each query meets: order[b, g, l, start[b, h, t, l] : stop[b, h, t, l]] of every table l, each key once.

    order (B, Hkv, L, S), start, stop (B, H, T, L), walk (B, H, T): queries in an order in which neighbours meet the same keys; all int32.
    """

    order: Tensor
    start: Tensor
    stop: Tensor
    walk: Tensor


class Factors(NamedTuple):
    """The distances that a score is minus the weighted sum of: their kinds, the sizes of their parts of a point, where they become smooth.

    None at all: scores are dot products. Points are rows of D numbers, after which queries have weights, radii and sinh of radii, one a factor, and keys
    radii and their sinh. Angles are between directions, whose radius is 1 where the direction is missing, else 0.
    """

    kinds: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    eps: tuple[float, ...] = ()


class Function(NamedTuple):
    """What all hash tables do to one part of a point: numbers x @ directions, or x itself, and the cells that they lie in.

    x (B, H, tokens, d). directions (d, tables * n); None: x has one number, the same for all tables. offsets (tables * n,): floor(number / width + offset)
    are n cells; None: n signs, together one cell.
    """

    x: Tensor
    directions: Tensor | None
    offsets: Tensor | None = None
    width: float = 1.0


def codes(functions: list[Function], tables: int) -> Tensor:
    """The cells of float32 points put together, (B, H, 1 + tables, tokens) int32 below 2^16; the first table has one bucket.

    Numbers are made for some tokens at a time and never kept: all of them are many times what the points are.
    """
    batch, heads, tokens, _ = functions[0].x.shape
    found, kernel = torch.zeros(batch, heads, 1 + tables, tokens, dtype=torch.int32), library.load(CODE, SOURCE)
    at, count, cells = ctypes.c_void_p(found.data_ptr()), batch * heads * tokens, 0
    for function in functions:
        x = plain(function.x, torch.float32).flatten(0, 2)
        directions, offsets = (None if t is None else plain(t, torch.float32) for t in function[1:3])
        wide, step = (1, 0) if directions is None else (directions.shape[1], directions.shape[1] // tables)
        made = torch.empty(min(_ROWS, count) + 16, wide)  # the kernel looks sixteen numbers past the end
        for first in range(0, count, _ROWS):
            rows = x[first : first + _ROWS]
            if directions is None:
                made[: rows.shape[0]] = rows
            else:
                torch.mm(rows, directions, out=made[: rows.shape[0]])
            sizes = (ctypes.c_int64(n) for n in (first, rows.shape[0], tokens, tables))
            kernel.zonal_sparse_hash(
                ctypes.c_void_p(made.data_ptr()), *(ctypes.c_int64(n) for n in (wide, step, max(step, 1))),
                None if offsets is None else ctypes.c_void_p(offsets.data_ptr()), ctypes.c_float(function.width), *sizes, at,
            )  # fmt: skip
        cells += 1 if offsets is None else max(step, 1)
    kernel.zonal_sparse_fold(ctypes.c_int64(cells), ctypes.c_int64(found.numel()), at)
    return found


def places(asked: Tensor, held: Tensor, lo: Tensor, hi: Tensor, position: Tensor, reach: Tensor, key_mask: Tensor | None) -> Candidates:
    """Candidates from codes in [0, 2^16) of queries (B, H, L, T) and keys (B, Hkv, L, S): those with the query's own code among the keys [lo, hi) that
    it may see, at most ``reach`` (L,) of each table, the nearest to ``position``. lo, hi, position (T,); key_mask (B, S)."""
    batch, heads, tables, queries = asked.shape
    kv_heads, keys = held.shape[1], held.shape[3]
    found = Candidates(
        torch.empty(batch, kv_heads, tables, keys, dtype=torch.int32), torch.empty(batch, heads, queries, tables, dtype=torch.int32),
        torch.empty(batch, heads, queries, tables, dtype=torch.int32), torch.empty(batch, heads, queries, dtype=torch.int32),
    )  # fmt: skip
    kept = {name: plain(x, torch.int32) for name, x in zip(_CODES[:6], (asked, held, lo, hi, position, reach), strict=True)}
    mask = None if key_mask is None else key_mask.contiguous()
    call = _Places(B=batch, H=heads, Hkv=kv_heads, T=queries, S=keys, L=tables)
    for name, x in (*kept.items(), ("key_mask", mask), *found._asdict().items()):
        setattr(call, name, None if x is None else x.data_ptr())
    _run(library.load(CODE, SOURCE).zonal_sparse_places, call)
    return found


class _Arguments:
    """A filled-in ``_Sparse`` and the tensors it points to, which must live as long."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, found: Candidates, factors: Factors, top: int) -> None:
        batch, heads, queries, width = q.shape
        count = len(factors.kinds)
        q, k, v = (library.dense_last(x, torch.float32) for x in (q, k, v))
        self.call = _Sparse(
            qs=_Strides(*q.stride()[:3]), ks=_Strides(*k.stride()[:3]), vs=_Strides(*v.stride()[:3]), B=batch, H=heads, Hkv=k.shape[1], T=queries,
            S=k.shape[2], D=width - 3 * count, P=v.shape[3], L=found.order.shape[2], F=count, top=top,
        )  # fmt: skip
        self.kept: list[Tensor | None] = []
        self.point(
            {
                "q": q, "k": k, "v": v, **{name: plain(x, torch.int32) for name, x in found._asdict().items()},
                "kinds": torch.tensor([KINDS.index(kind) for kind in factors.kinds], dtype=torch.int64),
                "sizes": torch.tensor(factors.sizes, dtype=torch.int64), "eps": torch.tensor(factors.eps, dtype=torch.float32),
            }
        )  # fmt: skip

    def point(self, tensors: dict[str, Tensor | None]) -> None:
        for name, x in tensors.items():
            setattr(self.call, name, None if x is None else x.data_ptr())
            self.kept.append(x)


def forward(q: Tensor, k: Tensor, v: Tensor, found: Candidates, factors: Factors, top: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y (B, H, T, P), the least score that each row keeps, the logarithm of the sum of its kernel, how many keys it met), rows (B, H, T); float32, and int32."""
    rows = q.shape[:3]
    y, least, whole, met = torch.empty(*rows, v.shape[3]), torch.empty(rows), torch.empty(rows), torch.empty(rows, dtype=torch.int32)
    arguments = _Arguments(q, k, v, found, factors, top)
    arguments.point({"y": y, "least": least, "whole": whole, "met": met})
    _run(library.load(CODE, SOURCE).zonal_sparse_forward, arguments.call)
    return y, least, whole, met


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, least: Tensor, whole: Tensor, found: Candidates, factors: Factors, top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in float32, of what each row kept."""
    dq, dk, dv = torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
    arguments = _Arguments(q, k, v, found, factors, top)
    dy = library.dense_last(dy, torch.float32)
    arguments.call.dys = _Strides(*dy.stride()[:3])
    arguments.point({"y": y.contiguous(), "least": least.contiguous(), "whole": whole.contiguous(), "dy": dy, "dq": dq, "dk": dk, "dv": dv})
    _run(library.load(CODE, SOURCE).zonal_sparse_backward, arguments.call)
    return dq, dk, dv


def _run(function: Callable[..., int], call: ctypes.Structure) -> None:
    if function(ctypes.byref(call)):
        raise MemoryError("attention: the CPU kernel could not allocate its buffers.")


__all__ = ["CODE", "KINDS", "SOURCE", "Candidates", "Factors", "Function", "backward", "codes", "forward", "places"]
