"""Calls the compiled kernel for ridge and Koopman read-outs (ridge.cpp) on float32 tensors of the CPU; any strides but the last."""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.errors import NonFiniteError
from zonal.formula import FORMULAS
from zonal.kernels.cpp import library
from zonal.kernels.cpp.sums_library import Places, plain

SOURCE = "ridge"
CODE = FORMULAS["identity"]
"""It knows no link, so that one library serves all."""
_INPUTS = ("q", "k", "v", "scale", "ridge", "powers", "index", "lo", "hi", "edges", "gram", "cross", "shift", "last")
_SIZES = ("B", "H", "Hkv", "T", "S", "D", "P", "segments", "by_batch", "power")
_RESULTS = ("y", "outcome", "dy", "dq", "dk", "dv", "dscale", "dridge", "dgram", "dcross", "dshift", "dlast")
_GOOD, DOUBLE, _INDEFINITE = range(3)


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "token")]


class _Ridge(ctypes.Structure):
    """``Ridge`` of ridge.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _INPUTS), *((name, _Strides) for name in ("qs", "ks", "vs")),
        *((name, ctypes.c_int64) for name in _SIZES), ("limit", ctypes.c_double), *((name, ctypes.c_void_p) for name in _RESULTS),
    ]  # fmt: skip


_PACKED = struct.Struct(f"={len(_INPUTS) + 9 + len(_SIZES)}qd{8 * len(_RESULTS)}x")
"""``_Ridge`` as long as its results are not pointed to: field by field it takes five times as long, a good part of a short call."""
assert _PACKED.size == ctypes.sizeof(_Ridge)


@functools.lru_cache(maxsize=64)
def _powers(powers: tuple[int, ...]) -> Tensor:
    return torch.tensor(powers, dtype=torch.int64)


class Before(NamedTuple):
    """A memory before the first key, float64: gram (B, Hkv, r, r), cross (B, Hkv, P, r), and for powers past 0 shift (B, Hkv, r, r) and last (B, Hkv, r)."""

    gram: Tensor | None = None
    cross: Tensor | None = None
    shift: Tensor | None = None
    last: Tensor | None = None


class _Arguments:
    """A filled-in ``_Ridge`` and the tensors it points to, which must live as long."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, ridge: Tensor, seen: Places, before: Before, powers: Sequence[int], limit: float
    ) -> None:
        batch, heads, queries, dim = q.shape
        keys, value_dim = k.shape[2], v.shape[3]
        q, k, v = (library.dense_last(x, torch.float32) for x in (q, k, v))
        memory = (None if x is None else plain(x, torch.float64) for x in before)
        tensors = (q, k, v, plain(scale, torch.float32), plain(ridge, torch.float64), _powers(tuple(powers)), seen.index, seen.lo, seen.hi, seen.edges, *memory)
        segments = seen.edges.shape[0] - 1
        sizes = (batch, heads, k.shape[1], queries, keys, dim, value_dim, segments, seen.lo.shape[0] > 1, max(powers))
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        self.tasks = batch * k.shape[1] * segments
        self.kept: list[object] = [tensors]
        self.call = _Ridge.from_buffer_copy(_PACKED.pack(*(0 if x is None else x.data_ptr() for x in tensors), *strides, *sizes, limit))

    def point(self, tensors: dict[str, Tensor | None]) -> None:
        for name, x in tensors.items():
            setattr(self.call, name, None if x is None else x.data_ptr())
            self.kept.append(x)


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, ridge: Tensor, seen: Places, before: Before, powers: Sequence[int], limit: float
) -> tuple[Tensor, Tensor]:
    """(y (B, H, T, P) float32, int32 (B * Hkv * documents,): ``DOUBLE`` for those that ran in float64, because float32 would have lost three digits).

    y_t = C_t P_t (M_t P_t)^powers_h scale_h q_t over the keys that each query sees, P = (G + ridge I)^-1; keys longer than ``limit``
    are shortened to it (0: none are). scale (H,), ridge (Hkv,).

    Raises: NonFiniteError when G + ridge I is not positive definite, which keys that are not finite cause.
    """
    batch, heads, queries, _ = q.shape
    y = torch.empty(batch, heads, queries, v.shape[3])
    arguments = _Arguments(q, k, v, scale, ridge, seen, before, powers, limit)
    outcome = torch.empty(arguments.tasks, dtype=torch.int32)
    arguments.point({"y": y, "outcome": outcome})
    if _run(library.load(CODE, SOURCE).zonal_ridge_forward, arguments) == _INDEFINITE:
        raise NonFiniteError("attention: kernel + ridge is not positive definite in float64 (or not finite). Look for keys that are not finite, or raise the ridge.")
    return y, outcome


class Gradients(NamedTuple):
    """What ``backward`` returns: of q, k, v (float32), scale (H,) and ridge (Hkv,) (float64), and of the memory where asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    ridge: Tensor
    before: Before


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, ridge: Tensor, doubled: Tensor, seen: Places, before: Before, powers: Sequence[int],
    limit: float, started: bool,
) -> Gradients:  # fmt: skip
    """The gradients of ``forward``, where ``doubled``, bool (B, Hkv, documents), tells which ran in float64. started: whether the memory gets some."""
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    arguments = _Arguments(q, k, v, scale, ridge, seen, before, powers, limit)
    memory = Before(*(torch.zeros(x.shape, dtype=torch.float64) if started and x is not None else None for x in before))
    # an unfinished sum a task, so that the order of threads does not matter
    dscale, dridge = torch.zeros(arguments.tasks, heads // kv_heads, dtype=torch.float64), torch.zeros(arguments.tasks, dtype=torch.float64)
    dq, dk, dv = torch.zeros(q.shape), torch.zeros(k.shape), torch.zeros(v.shape)
    arguments.point(
        {
            "outcome": torch.where(doubled, DOUBLE, _GOOD).to(torch.int32).contiguous(), "dy": dy.float().contiguous(), "dq": dq, "dk": dk, "dv": dv,
            "dscale": dscale, "dridge": dridge, **{f"d{name}": x for name, x in memory._asdict().items()},
        }
    )  # fmt: skip
    _run(library.load(CODE, SOURCE).zonal_ridge_backward, arguments)
    return Gradients(
        dq, dk, dv, dscale.view(batch, kv_heads, -1, heads // kv_heads).sum((0, 2)).view(heads), dridge.view(batch, kv_heads, -1).sum((0, 2)), memory
    )


def _run(function: Callable[..., int], arguments: _Arguments) -> int:
    code = function(ctypes.byref(arguments.call))
    if code == 1:
        raise MemoryError("attention: the CPU kernel could not allocate its buffers.")
    return code


__all__ = ["CODE", "DOUBLE", "SOURCE", "Before", "Gradients", "backward", "forward"]
