"""The kernels before and behind a recurrence (mixer.cpp) on the CPU: the short convolution and the gated norm."""

from typing import NamedTuple

import torch
from torch import Tensor

from zonal.formula import FORMULAS
from zonal.kernels import abi
from zonal.kernels.abi import Arguments
from zonal.kernels.native import Family
from zonal.kernels.op import Body, Gradients, Op, Results

FAMILY = Family("mixer", FORMULAS["identity"], cuda=False)
WIDEST = 64
"""The widest window of the convolution."""
_RANGE = 128  # tokens whose sums are made together, RANGE of mixer.cpp
_PARTS = 3


def _struct(name: str, rows: dict[str, str], others: dict[str, str]) -> abi.Struct:
    """rows: those of the tensors (B, T, …) that are read or written through strides."""
    shapes = {f"{each}.data": shape for each, shape in rows.items()}
    strides = {f"{each}.data": (f"{each}.batch", f"{each}.token", f"{each}.head") for each in rows}
    return abi.Struct("mixer.cpp", name, shapes | others, strides)


_PART_SHAPES = {
    f"{y}.{i}": f"B T widths.{i}" if i else "B T heads.0 widths.0" for y in ("y", "dy") for i in range(_PARTS)
}
_CONVOLUTION = _struct("Convolution", {"x": "B T channels", **_PART_SHAPES}, {
    "taps": "width channels", "tail": "B before channels", "bias": "channels", "order": "B T", "present": "B",
    "reach": "T", "dx": "B T channels", "dtail": "B before channels", "sums": "ranges columns channels",
})  # fmt: skip
_BY_HEAD, _WHOLE = "B T heads width", "B T row"
_GATED = _struct(
    "Gated",
    {**dict.fromkeys(("y", "v", "dy", "dv"), _BY_HEAD), **dict.fromkeys(("z", "out", "dout", "dz"), _WHOLE)},
    {"skip": "heads", "gain": "row", "dgain": "ranges row", "dskip": "ranges row"},
)


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
    x, taps = inputs.x, inputs.taps
    (batch, length, channels), width, shapes = x.shape, taps.shape[1], _part_shapes(x, spec)
    ranges = batch * -(-length // _RANGE)
    call = Arguments(_CONVOLUTION, {
        "B": batch, "T": length, "channels": channels, "width": width, "silu": spec.silu, "parts": len(shapes),
        **{f"heads.{i}": spec.heads if i == 0 else 1 for i in range(_PARTS)},
        **{f"widths.{i}": shape[-1] for i, shape in enumerate(shapes)},
    }, {"before": width - 1, "ranges": ranges, "columns": width + 1})  # fmt: skip
    call.point("x.data", x)
    call.point("taps", taps.t())
    for name in ("tail", "bias", "order", "present", "reach"):
        call.point(name, getattr(inputs, name))
    return call


def _convolve(inputs: ConvolutionInputs, spec: ConvolutionSpec) -> Results:
    """y_t = f(b + Σ_i a_i ⊙ x_{t−i}), f SiLU or the identity, in three parts of its channels; zero on padding."""
    found, call = _empty_parts(inputs, spec), _convolution(inputs, spec)
    for i in range(len(spec.parts)):
        call.fill(f"y.{i}.data", found[i])
    call.run(FAMILY.load().zonal_convolution_forward, "nn")
    return found


def _convolve_backward(
    grads: Gradients, inputs: ConvolutionInputs, results: Results, spec: ConvolutionSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of x, tail, taps (channels, w) and bias (channels,)."""
    call = _convolution(inputs, spec)
    for i, dy in zip(range(len(spec.parts)), grads, strict=False):
        call.point(f"dy.{i}.data", dy)
    dx, dtail, sums = call.new("dx"), None if inputs.tail is None else call.new("dtail"), call.new("sums", zero=True)
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
    batch, length, heads, width = inputs.y.shape
    numbers = {"B": batch, "T": length, "heads": heads, "width": width, "groups": spec.groups, "eps": spec.eps}
    call = Arguments(_GATED, numbers, {"row": heads * width, "ranges": batch * -(-length // _RANGE)})
    for name in ("y", "v", "z"):
        call.point(f"{name}.data", getattr(inputs, name))
    call.point("skip", inputs.skip)
    call.point("gain", inputs.gain)
    return call


def _norm(inputs: NormInputs, spec: NormSpec) -> Results:
    """g ⊙ u / √(mean(u²) + ε), (B, T, heads · n), u = (y + D v) ⊙ SiLU(z), means over ``groups`` parts of a row."""
    call = _gated(inputs, spec)
    out = call.new("out.data")
    call.run(FAMILY.load().zonal_gated_forward, "nn")
    return (out,)


def _norm_backward(
    grads: Gradients, inputs: NormInputs, results: Results, spec: NormSpec, asked: frozenset[str]
) -> Gradients:
    """Gradients of y, v, z, skip and gain. Those of y and v lie head by head, as a recurrence takes them."""
    (dout,), (y, v, *_) = grads, inputs
    call = _gated(inputs, spec)
    call.point("dout.data", dout)
    dy, dz, dv = _by_head(y, *y.shape), call.new("dz.data"), None if v is None else _by_head(v, *y.shape)
    call.fill("dy.data", dy)
    call.fill("dv.data", dv)
    dgain, dskip = call.new("dgain", zero=True), None if v is None else call.new("dskip", zero=True)
    call.run(FAMILY.load().zonal_gated_backward, "nn")
    return dy, dv, dz, None if dskip is None else dskip.sum(0).view(y.shape[2:]).sum(1), dgain.sum(0)


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
    bodies={"cpu": Body(_convolve, _convolve_backward)},
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
    bodies={"cpu": Body(_norm, _norm_backward)},
    shapes=lambda inputs, spec: (inputs.z.new_empty(inputs.z.shape, dtype=torch.float32),),
    laid={name: lambda x: _by_head(x, *x.shape) for name in ("y", "v")},
    refusal=_refusal("gated_norm"),
)

__all__ = [
    "FAMILY", "WIDEST", "ConvolutionInputs", "ConvolutionSpec", "NormInputs", "NormSpec", "gated_norm",
    "short_convolution",
]  # fmt: skip
