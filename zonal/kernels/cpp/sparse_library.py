"""Calls the compiled kernel for the largest of some candidates (sparse.cpp) on float32 tensors of the CPU; any strides but the last."""

import ctypes
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.formula import FORMULAS
from zonal.kernels import native
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
    found, kernel = (
        library.zeros(batch, heads, 1 + tables, tokens, dtype=torch.int32),
        native.load(CODE, SOURCE),
    )
    at, count, cells = ctypes.c_void_p(found.data_ptr()), batch * heads * tokens, 0
    for function in functions:
        x = plain(function.x, torch.float32).flatten(0, 2)
        directions, offsets = (None if t is None else plain(t, torch.float32) for t in function[1:3])
        wide, step = (1, 0) if directions is None else (directions.shape[1], directions.shape[1] // tables)
        made = library.empty(min(_ROWS, count) + 16, wide)  # the kernel looks sixteen numbers past the end
        for first in range(0, count, _ROWS):
            rows = x[first : first + _ROWS]
            if directions is None:
                made[: rows.shape[0]] = rows
            else:
                torch.mm(rows, directions, out=made[: rows.shape[0]])
            sizes = (ctypes.c_int64(n) for n in (first, rows.shape[0], tokens, tables))
            kernel.zonal_sparse_hash(
                ctypes.c_void_p(made.data_ptr()), *(ctypes.c_int64(n) for n in (wide, step, max(step, 1))),
                ctypes.c_void_p(library.address(offsets, torch.float32, (tables * max(step, 1),))), ctypes.c_float(function.width), *sizes, at,
            )  # fmt: skip
        cells += 1 if offsets is None else max(step, 1)
    kernel.zonal_sparse_fold(ctypes.c_int64(cells), ctypes.c_int64(found.numel()), at)
    return found


def places(
    asked: Tensor, held: Tensor, lo: Tensor, hi: Tensor, position: Tensor, reach: Tensor, key_mask: Tensor | None
) -> Candidates:
    """Candidates from codes in [0, 2^16) of queries (B, H, L, T) and keys (B, Hkv, L, S): those with the query's own code among the keys [lo, hi) that
    it may see, at most ``reach`` (L,) of each table, the nearest to ``position``. lo, hi, position (T,); key_mask (B, S)."""
    batch, heads, tables, queries = asked.shape
    kv_heads, keys = held.shape[1], held.shape[3]
    shapes = _shapes(batch, heads, kv_heads, tables, queries, keys)
    found = Candidates(*(library.empty(*shape, dtype=torch.int32) for shape in shapes))
    kept = tuple(plain(x, torch.int32) for x in (asked, held, lo, hi, position, reach))
    given = (
        (batch, heads, tables, queries),
        (batch, kv_heads, tables, keys),
        (queries,),
        (queries,),
        (queries,),
        (tables,),
    )
    mask = None if key_mask is None else key_mask.contiguous()
    call = _Places(B=batch, H=heads, Hkv=kv_heads, T=queries, S=keys, L=tables)
    for name, x, shape in zip((*_CODES[:6], *_PLACES), (*kept, *found), (*given, *shapes), strict=True):
        setattr(call, name, library.address(x, torch.int32, shape))
    call.key_mask = library.address(mask, torch.bool, (batch, keys))
    _run(native.load(CODE, SOURCE).zonal_sparse_places, call)
    return found


def _shapes(batch: int, heads: int, kv_heads: int, tables: int, queries: int, keys: int) -> tuple[tuple[int, ...], ...]:
    """Of the four tensors of ``Candidates``."""
    return (
        (batch, kv_heads, tables, keys),
        (batch, heads, queries, tables),
        (batch, heads, queries, tables),
        (batch, heads, queries),
    )


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
        self.kept: list[Tensor] = []
        kv_heads, keys = k.shape[1:3]
        for name, x, shape in (("q", q, q.shape), ("k", k, k.shape), ("v", v, (batch, kv_heads, keys, v.shape[3]))):
            self.point(name, x, torch.float32, shape, strided=True)
        for name, x, shape in zip(
            _PLACES, found, _shapes(batch, heads, kv_heads, found.order.shape[2], queries, keys), strict=True
        ):
            self.point(name, plain(x, torch.int32), torch.int32, shape)
        kinds = [KINDS.index(kind) for kind in factors.kinds]
        for name, numbers, dtype in (
            ("kinds", kinds, torch.int64),
            ("sizes", factors.sizes, torch.int64),
            ("eps", factors.eps, torch.float32),
        ):
            self.point(name, torch.tensor(numbers, dtype=dtype, device="cpu"), dtype, (count,))

    def point(self, name: str, x: Tensor, dtype: torch.dtype, shape: Sequence[int], *, strided: bool = False) -> None:
        """Let a field of the call point to a tensor, which ``library.address`` checks."""
        setattr(self.call, name, library.address(x, dtype, shape, strided=strided))
        self.kept.append(x)


def forward(
    q: Tensor, k: Tensor, v: Tensor, found: Candidates, factors: Factors, top: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y (B, H, T, P), the least score that each row keeps, the logarithm of the sum of its kernel, how many keys it met), rows (B, H, T); float32, and int32."""
    rows, value_dim = q.shape[:3], v.shape[3]
    y, least, whole, met = (
        library.empty(*rows, value_dim),
        library.empty(*rows),
        library.empty(*rows),
        library.empty(*rows, dtype=torch.int32),
    )
    arguments = _Arguments(q, k, v, found, factors, top)
    arguments.point("y", y, torch.float32, (*rows, value_dim))
    arguments.point("least", least, torch.float32, rows)
    arguments.point("whole", whole, torch.float32, rows)
    arguments.point("met", met, torch.int32, rows)
    _run(native.load(CODE, SOURCE).zonal_sparse_forward, arguments.call)
    return y, least, whole, met


def backward(
    dy: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    y: Tensor,
    least: Tensor,
    whole: Tensor,
    found: Candidates,
    factors: Factors,
    top: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, in float32, of what each row kept."""
    dq, dk, dv = (library.zeros(*x.shape) for x in (q, k, v))
    arguments = _Arguments(q, k, v, found, factors, top)
    dy = library.dense_last(dy, torch.float32)
    arguments.call.dys = _Strides(*dy.stride()[:3])
    rows, shape = q.shape[:3], (*q.shape[:3], v.shape[3])
    arguments.point("y", y.contiguous(), torch.float32, shape)
    arguments.point("least", least.contiguous(), torch.float32, rows)
    arguments.point("whole", whole.contiguous(), torch.float32, rows)
    arguments.point("dy", dy, torch.float32, shape, strided=True)
    for name, gradient, x in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        arguments.point(name, gradient, torch.float32, x.shape)
    _run(native.load(CODE, SOURCE).zonal_sparse_backward, arguments.call)
    return dq, dk, dv


def _run(function: Callable[..., int], call: ctypes.Structure) -> None:
    if function(ctypes.byref(call)):
        raise MemoryError("attention: the CPU kernel could not allocate its buffers.")


__all__ = ["CODE", "KINDS", "SOURCE", "Candidates", "Factors", "Function", "backward", "codes", "forward", "places"]
