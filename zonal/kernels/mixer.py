"""The kernels before and behind a recurrence (mixer.cpp) on the CPU: the short convolution and the gated norm."""

from typing import NamedTuple

import torch
from torch import Tensor

from zonal.formula import FORMULAS
from zonal.kernels import abi
from zonal.kernels.abi import Arguments, dense_last, empty, zeros
from zonal.kernels.native import Family
from zonal.kernels.op import Body, Gradients, Op, Results

FAMILY = Family("mixer", FORMULAS["identity"], cuda=False)
WIDEST = 64
"""The widest window of the convolution."""
_RANGE = 128  # tokens whose sums are made together, RANGE of mixer.cpp
_PARTS = 3
_CONVOLUTION, _GATED = abi.Struct("mixer.cpp", "Convolution"), abi.Struct("mixer.cpp", "Gated")


class ConvolutionInputs(NamedTuple):
    """x (B, T, channels); tail (B, w - 1, channels), the tokens before the first; taps (channels, w), the token's own
    first; bias (channels,).

    The tokens seen are given by order (B, T) int32, the indices of real tokens followed by the others, and present (B,)
    int32, the number of real tokens; or by reach (T,) int32, how many earlier tokens belong to each one's document.
    Without either, all tokens are seen in order.
    """

    x: Tensor
    tail: Tensor | None
    taps: Tensor
    bias: Tensor | None
    order: Tensor | None = None
    present: Tensor | None = None
    reach: Tensor | None = None


class ConvolutionSpec(NamedTuple):
    """silu: what comes out goes through it. parts: of the channels, up to three; ``heads``: of the first."""

    silu: bool
    heads: int
    parts: tuple[int, ...]


def _by_head(like: Tensor, *shape: int) -> Tensor:
    """An empty float32 tensor (B, T, heads, n) that lies as (B, heads, T, n), as a recurrence reads it."""
    batch, length, heads, width = shape
    return like.new_empty((batch, heads, length, width), dtype=torch.float32).transpose(1, 2)


def _point_at_rows(call: Arguments, name: str, x: Tensor | None, shape: tuple[int, ...]) -> None:
    """Let ``Rows`` point to a float32 tensor (B, T, n) or (B, T, heads, n)."""
    call.point(f"{name}.data", x, shape, last=True)
    if x is not None:
        batch, token, *head = x.stride()[:-1]
        call.set({f"{name}.batch": batch, f"{name}.token": token, f"{name}.head": head[0] if head else 0})


def _part_shapes(x: Tensor, spec: ConvolutionSpec) -> list[tuple[int, ...]]:
    """(B, T, heads, n) of the first part, (B, T, n) of the others."""
    first, *others = spec.parts
    return [(*x.shape[:2], spec.heads, first // spec.heads), *((*x.shape[:2], n) for n in others)]


def _empty_parts(inputs: ConvolutionInputs, spec: ConvolutionSpec) -> Results:
    """The parts to fill in, the first lying head by head; those that are not there are empty."""
    x, (first, *others) = inputs.x, _part_shapes(inputs.x, spec)
    found = [_by_head(x, *first), *(x.new_empty(shape, dtype=torch.float32) for shape in others)]
    return (*found, *(x.new_empty(0, dtype=torch.float32) for _ in range(_PARTS - len(found))))


def _convolution(inputs: ConvolutionInputs, spec: ConvolutionSpec) -> Arguments:
    x, taps = inputs.x, inputs.taps.float().t().contiguous()
    batch, length, channels = x.shape
    width, shapes = taps.shape[0], _part_shapes(x, spec)
    call = Arguments(_CONVOLUTION, {
        "B": batch, "T": length, "channels": channels, "width": width, "silu": spec.silu, "parts": len(shapes),
        **{f"heads.{i}": spec.heads if i == 0 else 1 for i in range(_PARTS)},
        **{f"widths.{i}": shape[-1] for i, shape in enumerate(shapes)},
    })  # fmt: skip
    _point_at_rows(call, "x", dense_last(x, torch.float32), x.shape)
    call.point("taps", taps, (width, channels))
    call.point("tail", _contiguous(inputs.tail), (batch, width - 1, channels))
    call.point("bias", _contiguous(inputs.bias), (channels,))
    for name, shape in (("order", (batch, length)), ("present", (batch,)), ("reach", (length,))):
        call.point(name, getattr(inputs, name), shape)
    return call


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.float().contiguous()


def _convolve(inputs: ConvolutionInputs, spec: ConvolutionSpec) -> Results:
    """y_t = f(b + Σ_i a_i ⊙ x_{t−i}), f SiLU or the identity, in three parts of its channels; zero on padding."""
    found, call = _empty_parts(inputs, spec), _convolution(inputs, spec)
    for i, shape in enumerate(_part_shapes(inputs.x, spec)):
        _point_at_rows(call, f"y.{i}", found[i], shape)
    call.run(FAMILY.load().zonal_convolution_forward, "nn")
    return found


def _convolve_backward(
    grads: Gradients, inputs: ConvolutionInputs, results: Results, spec: ConvolutionSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of x, tail, taps (channels, w) and bias (channels,)."""
    (batch, length, channels), width, tail = inputs.x.shape, inputs.taps.shape[1], inputs.tail
    call = _convolution(inputs, spec)
    for i, (shape, dy) in enumerate(zip(_part_shapes(inputs.x, spec), grads, strict=False)):
        _point_at_rows(call, f"dy.{i}", None if dy is None else dense_last(dy, torch.float32), shape)
    dx, dtail = empty(batch, length, channels), None if tail is None else empty(*tail.shape)
    ranges = batch * -(-length // _RANGE)
    sums = zeros(ranges, width + 1, channels)
    call.point("dx", dx, dx.shape)
    call.point("dtail", dtail, (batch, width - 1, channels))
    call.point("sums", sums, sums.shape)
    call.run(FAMILY.load().zonal_convolution_backward, "nn")
    total = sums.sum(0)
    return dx, dtail, total[:-1].t().contiguous(), total[-1].clone()


class NormInputs(NamedTuple):
    """y, v (B, T, heads, n); z (B, T, heads · n); skip D (heads,); gain g (heads · n,). v and skip come together."""

    y: Tensor
    v: Tensor | None
    z: Tensor
    skip: Tensor | None
    gain: Tensor


class NormSpec(NamedTuple):
    """groups: parts of a row with a mean each. eps: added to it."""

    groups: int
    eps: float


def _gated(inputs: NormInputs, spec: NormSpec) -> Arguments:
    batch, length, heads, width = shape = inputs.y.shape
    call = Arguments(
        _GATED, {"B": batch, "T": length, "heads": heads, "width": width, "groups": spec.groups, "eps": spec.eps}
    )
    _point_at_rows(call, "y", dense_last(inputs.y, torch.float32), shape)
    _point_at_rows(call, "v", None if inputs.v is None else dense_last(inputs.v, torch.float32), shape)
    _point_at_rows(call, "z", dense_last(inputs.z, torch.float32), (batch, length, heads * width))
    call.point("skip", _contiguous(inputs.skip), (heads,))
    call.point("gain", _contiguous(inputs.gain), (heads * width,))
    return call


def _norm(inputs: NormInputs, spec: NormSpec) -> Results:
    """g ⊙ u / √(mean(u²) + ε), (B, T, heads · n), u = (y + D v) ⊙ SiLU(z), means over ``groups`` parts of a row."""
    out, call = empty(*inputs.z.shape), _gated(inputs, spec)
    _point_at_rows(call, "out", out, out.shape)
    call.run(FAMILY.load().zonal_gated_forward, "nn")
    return (out,)


def _norm_backward(
    grads: Gradients, inputs: NormInputs, results: Results, spec: NormSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of y, v, z, skip and gain. Those of y and v lie head by head, as a recurrence takes them."""
    (dout,), (y, v, z, *_) = grads, inputs
    assert dout is not None
    batch, length, heads, width = y.shape
    dy, dz, dv = _by_head(y, *y.shape), empty(*z.shape), None if v is None else _by_head(v, *y.shape)
    ranges = batch * -(-length // _RANGE)
    dgain, dskip = zeros(ranges, heads * width), None if v is None else zeros(ranges, heads * width)
    call = _gated(inputs, spec)
    for name, x in (("dout", dense_last(dout, torch.float32)), ("dz", dz)):
        _point_at_rows(call, name, x, z.shape)
    for name, x in (("dy", dy), ("dv", dv)):
        _point_at_rows(call, name, x, y.shape)
    for name, x in (("dgain", dgain), ("dskip", dskip)):
        call.point(name, x, dgain.shape)
    call.run(FAMILY.load().zonal_gated_backward, "nn")
    return dy, dv, dz, None if dskip is None else dskip.sum(0).view(heads, width).sum(1), dgain.sum(0)


def _refusal(name: str) -> str:
    return (
        f"nn: the compiled {name} has no second derivative. "
        "Set ZONAL_KERNELS=off where you need create_graph=True, and torch runs."
    )


short_convolution = Op(
    "short_convolution",
    ConvolutionInputs,
    ConvolutionSpec,
    results=_PARTS,
    learned=("x", "tail", "taps", "bias"),
    cpu=Body(_convolve, _convolve_backward),
    shapes=_empty_parts,
    refusal=_refusal("short_convolution"),
)
"""``_convolve``: three parts, those that are not asked for empty."""
gated_norm = Op(
    "gated_norm",
    NormInputs,
    NormSpec,
    results=1,
    learned=NormInputs._fields,
    cpu=Body(_norm, _norm_backward),
    shapes=lambda inputs, spec: (inputs.z.new_empty(inputs.z.shape, dtype=torch.float32),),
    laid={name: lambda x: _by_head(x, *x.shape) for name in ("y", "v")},
    refusal=_refusal("gated_norm"),
)

__all__ = [
    "FAMILY", "WIDEST", "ConvolutionInputs", "ConvolutionSpec", "NormInputs", "NormSpec", "gated_norm",
    "short_convolution",
]  # fmt: skip
