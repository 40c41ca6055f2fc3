"""Calls the compiled kernels before and behind a recurrence (mixer.cpp) on float32 tensors of the CPU: the short convolution and the gated norm."""

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.formula import FORMULAS
from zonal.kernels import native
from zonal.kernels.cpp import library

SOURCE = "mixer"
CODE = FORMULAS["identity"]
"""It knows no link, so that one library serves all."""
WIDEST = 64
"""The widest window of the convolution."""
_RANGE = 128  # tokens whose sums are made together, RANGE of mixer.cpp
_PARTS = 3


class _Rows(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("batch", "token", "head"))]


class _Convolution(ctypes.Structure):
    """``Convolution`` of mixer.cpp."""

    _fields_ = [
        ("x", _Rows), *((name, ctypes.c_void_p) for name in ("tail", "taps", "bias", "order", "present", "reach")),
        *((name, ctypes.c_int64) for name in ("B", "T", "channels", "width", "silu", "parts")), ("heads", ctypes.c_int64 * _PARTS),
        ("widths", ctypes.c_int64 * _PARTS), ("y", _Rows * _PARTS), ("dy", _Rows * _PARTS), *((name, ctypes.c_void_p) for name in ("dx", "dtail", "sums")),
    ]  # fmt: skip


class _Gated(ctypes.Structure):
    """``Gated`` of mixer.cpp."""

    _fields_ = [
        *((name, _Rows) for name in ("y", "v", "z", "out", "dy", "dv", "dz", "dout")), *((name, ctypes.c_void_p) for name in ("skip", "gain")),
        *((name, ctypes.c_int64) for name in ("B", "T", "heads", "width", "groups")), ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("dgain", "dskip")),
    ]  # fmt: skip


def _rows(x: Tensor | None, *shape: int) -> _Rows:
    """A float32 tensor (B, T, n) or (B, T, heads, n) as the kernels read it."""
    at = library.address(x, torch.float32, shape, strided=True)
    return (
        _Rows(None, 0, 0, 0) if x is None else _Rows(at, x.stride(0), x.stride(1), x.stride(2) if x.dim() == 4 else 0)
    )


def _pointer(x: Tensor | None, *shape: int, dtype: torch.dtype = torch.float32) -> int:
    return library.address(x, dtype, shape)


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


class Seen(NamedTuple):
    """Which tokens a convolution sees: order (B, T) int32, the tokens that are there in order and then the others, and present (B,) int32, how
    many they are; or reach (T,) int32, how many earlier tokens the document of each has; or neither: all, one after the other."""

    order: Tensor | None = None
    present: Tensor | None = None
    reach: Tensor | None = None


def empty_parts(x: Tensor, heads: int, parts: list[int]) -> list[Tensor]:
    """What a convolution fills in: the first part (B, T, heads, numbers), lying head by head as a recurrence reads it, the others (B, T, numbers)."""
    batch, length, _ = x.shape
    return [
        _by_head(x, batch, length, heads, parts[0] // heads),
        *(x.new_empty((batch, length, part), dtype=torch.float32) for part in parts[1:]),
    ]


def _part(x: Tensor, heads: int, parts: list[int], i: int) -> tuple[int, ...]:
    """The shape of a part of a convolution of x."""
    return (*x.shape[:2], *((parts[i],) if i else (heads, parts[0] // heads)))


def _call(
    x: Tensor,
    tail: Tensor | None,
    taps: Tensor,
    bias: Tensor | None,
    seen: Seen,
    silu: bool,
    heads: int,
    parts: list[int],
) -> _Convolution:
    batch, length, channels = x.shape
    counts, numbers, width = [heads, 1, 1], [parts[0] // heads, *parts[1:], 0, 0], taps.shape[0]
    order, present, reach = (
        _pointer(index, *shape, dtype=torch.int32)
        for index, shape in zip(seen, ((batch, length), (batch,), (length,)), strict=True)
    )
    return _Convolution(
        x=_rows(x, *x.shape), tail=_pointer(tail, batch, width - 1, channels), taps=_pointer(taps, width, channels), bias=_pointer(bias, channels), order=order,
        present=present, reach=reach, B=batch, T=length, channels=channels, width=width, silu=silu, parts=len(parts),
        heads=(ctypes.c_int64 * _PARTS)(*counts), widths=(ctypes.c_int64 * _PARTS)(*numbers[:_PARTS]),
    )  # fmt: skip


def convolution(
    x: Tensor,
    tail: Tensor | None,
    taps: Tensor,
    bias: Tensor | None,
    seen: Seen,
    silu: bool,
    heads: int,
    parts: list[int],
) -> list[Tensor]:
    """y_t = f(b + Σ_i a_i ⊙ x_{t−i}), f SiLU or the identity, in up to three parts of its channels (``empty_parts``); zero where no token is.

    x (B, T, channels); tail (B, w − 1, channels), the tokens before the first, or None; taps (channels, w), the token's own first; bias (channels,).
    """
    x, tail, bias, across = (
        library.dense_last(x, torch.float32),
        _contiguous(tail),
        _contiguous(bias),
        taps.float().t().contiguous(),
    )
    found = empty_parts(x, heads, parts)
    call = _call(x, tail, across, bias, seen, silu, heads, parts)
    for i, y in enumerate(found):
        call.y[i] = _rows(y, *_part(x, heads, parts, i))
    _run(native.load(CODE, SOURCE).zonal_convolution_forward, call)
    return found


def convolution_backward(
    dy: list[Tensor | None],
    x: Tensor,
    tail: Tensor | None,
    taps: Tensor,
    bias: Tensor | None,
    seen: Seen,
    silu: bool,
    heads: int,
    parts: list[int],
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of x, tail, taps (channels, w) and bias (channels,), from those of the parts; None: a part has none."""
    x, tail, bias, across = (
        library.dense_last(x, torch.float32),
        _contiguous(tail),
        _contiguous(bias),
        taps.float().t().contiguous(),
    )
    batch, length, channels = x.shape
    given = [None if g is None else library.dense_last(g, torch.float32) for g in dy]
    dx, dtail = library.empty(batch, length, channels), None if tail is None else library.empty(*tail.shape)
    ranges, width = batch * -(-length // _RANGE), taps.shape[1]
    sums = library.zeros(ranges, width + 1, channels)
    call = _call(x, tail, across, bias, seen, silu, heads, parts)
    for i, g in enumerate(given):
        call.dy[i] = _rows(g, *_part(x, heads, parts, i))
    call.dx, call.dtail = _pointer(dx, batch, length, channels), _pointer(dtail, batch, width - 1, channels)
    call.sums = _pointer(sums, ranges, width + 1, channels)
    _run(native.load(CODE, SOURCE).zonal_convolution_backward, call)
    total = sums.sum(0)
    return dx, dtail, total[:-1].t().contiguous(), total[-1].clone()


def _gated(
    y: Tensor, v: Tensor | None, z: Tensor, skip: Tensor | None, gain: Tensor, groups: int, eps: float
) -> _Gated:
    batch, length, heads, width = y.shape
    return _Gated(
        y=_rows(y, *y.shape),
        v=_rows(v, *y.shape),
        z=_rows(z, batch, length, heads * width),
        skip=_pointer(skip, heads),
        gain=_pointer(gain, heads * width),
        B=batch,
        T=length,
        heads=heads,
        width=width,
        groups=groups,
        eps=eps,
    )


def gated_norm(
    y: Tensor, v: Tensor | None, z: Tensor, skip: Tensor | None, gain: Tensor, groups: int, eps: float
) -> Tensor:
    """g ⊙ u / √(mean(u²) + ε) with u = (y + D v) ⊙ SiLU(z), the mean over each of ``groups`` parts of a row.

    y, v (B, T, heads, n); z (B, T, heads · n); skip D (heads,); gain g (heads · n,). Returns (B, T, heads · n).
    """
    y, z, gain, skip = (
        library.dense_last(y, torch.float32),
        library.dense_last(z, torch.float32),
        gain.float().contiguous(),
        _contiguous(skip),
    )
    v = None if v is None else library.dense_last(v, torch.float32)
    out = library.empty(*z.shape)
    call = _gated(y, v, z, skip, gain, groups, eps)
    call.out = _rows(out, *z.shape)
    _run(native.load(CODE, SOURCE).zonal_gated_forward, call)
    return out


def gated_norm_backward(
    dout: Tensor, y: Tensor, v: Tensor | None, z: Tensor, skip: Tensor | None, gain: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor]:
    """Gradients of y, v, z, skip and gain. Those of y and v lie head by head, (B, heads, T, n) in memory, as a recurrence takes them."""
    y, z, gain, skip = (
        library.dense_last(y, torch.float32),
        library.dense_last(z, torch.float32),
        gain.float().contiguous(),
        _contiguous(skip),
    )
    v, dout = None if v is None else library.dense_last(v, torch.float32), library.dense_last(dout, torch.float32)
    batch, length, heads, width = y.shape
    dy, dz = head_by_head(y), library.empty(*z.shape)
    dv = None if v is None else head_by_head(v)
    ranges = batch * -(-length // _RANGE)
    dgain, dskip = library.zeros(ranges, heads * width), None if v is None else library.zeros(ranges, heads * width)
    call = _gated(y, v, z, skip, gain, groups, eps)
    call.dout, call.dz = (_rows(x, *z.shape) for x in (dout, dz))
    call.dy, call.dv = (_rows(x, *y.shape) for x in (dy, dv))
    call.dgain, call.dskip = _pointer(dgain, ranges, heads * width), _pointer(dskip, ranges, heads * width)
    _run(native.load(CODE, SOURCE).zonal_gated_backward, call)
    return dy, dv, dz, None if dskip is None else dskip.sum(0).view(heads, width).sum(1), dgain.sum(0)


def head_by_head(x: Tensor) -> Tensor:
    """An empty float32 tensor of the shape (B, T, heads, n) of x that lies as (B, heads, T, n)."""
    return _by_head(x, *x.shape)


def _by_head(like: Tensor, batch: int, length: int, heads: int, width: int) -> Tensor:
    return like.new_empty((batch, heads, length, width), dtype=torch.float32).transpose(1, 2)


def _run(function: object, call: ctypes.Structure) -> None:
    if function(ctypes.byref(call)):  # type: ignore[operator]
        raise MemoryError("nn: the CPU kernel could not allocate its buffers.")


__all__ = [
    "CODE", "SOURCE", "WIDEST", "Seen", "convolution", "convolution_backward", "empty_parts", "gated_norm", "gated_norm_backward", "head_by_head",
]  # fmt: skip
