"""The kernels before and behind a recurrence as torch operators: ``zonal::short_convolution``, ``zonal::gated_norm`` and their backwards."""

from typing import Any

import torch
from torch import Tensor

from zonal.errors import PathError
from zonal.kernels.cpp import mixer_library
from zonal.kernels.cpp.mixer_library import Seen


@torch.library.custom_op("zonal::short_convolution", mutates_args=(), device_types="cpu")
def short_convolution(
    x: Tensor, tail: Tensor | None, taps: Tensor, bias: Tensor | None, order: Tensor | None, present: Tensor | None, reach: Tensor | None,
    silu: bool, heads: int, parts: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``mixer_library.convolution`` in three parts, those that are not asked for empty. Gradients flow to x, tail, taps and bias."""
    first, *others = mixer_library.convolution(x, tail, taps, bias, Seen(order, present, reach), silu, heads, parts)
    return first, others[0] if others else x.new_empty(0), others[1] if len(others) > 1 else x.new_empty(0)


@short_convolution.register_fake
def _(
    x: Tensor, tail: Tensor | None, taps: Tensor, bias: Tensor | None, order: Tensor | None, present: Tensor | None, reach: Tensor | None,
    silu: bool, heads: int, parts: list[int],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    first, second, third = [*mixer_library.empty_parts(x, heads, parts), x.new_empty(0), x.new_empty(0)][:3]
    return first, second, third


@torch.library.custom_op("zonal::short_convolution_backward", mutates_args=(), device_types="cpu")
def short_convolution_backward(
    dfirst: Tensor | None, dsecond: Tensor | None, dthird: Tensor | None, x: Tensor, tail: Tensor | None, taps: Tensor, bias: Tensor | None,
    order: Tensor | None, present: Tensor | None, reach: Tensor | None, silu: bool, heads: int, parts: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, tail (empty without one), taps and bias."""
    seen, dy = Seen(order, present, reach), [dfirst, dsecond, dthird][: len(parts)]
    dx, dtail, dtaps, dbias = mixer_library.convolution_backward(dy, x, tail, taps, bias, seen, silu, heads, parts)
    return dx, x.new_empty(0) if dtail is None else dtail, dtaps, dbias


@short_convolution_backward.register_fake
def _(
    dfirst: Tensor | None, dsecond: Tensor | None, dthird: Tensor | None, x: Tensor, tail: Tensor | None, taps: Tensor, bias: Tensor | None,
    order: Tensor | None, present: Tensor | None, reach: Tensor | None, silu: bool, heads: int, parts: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        x.new_empty(x.shape),
        x.new_empty(0 if tail is None else tail.shape),
        taps.new_empty(taps.shape),
        taps.new_empty(taps.shape[0]),
    )


def _setup_convolution(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.silu, ctx.heads, ctx.parts = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward_convolution(ctx: Any, *dy: Tensor | None) -> tuple[Tensor | None, ...]:
    _refuse_second("short_convolution")
    found = short_convolution_backward(*dy, *ctx.saved_tensors, ctx.silu, ctx.heads, ctx.parts)
    return (
        *(gradient if needed else None for gradient, needed in zip(found, ctx.needs_input_grad[:4], strict=True)),
        *(None,) * 6,
    )


short_convolution.register_autograd(_backward_convolution, setup_context=_setup_convolution)


@torch.library.custom_op("zonal::gated_norm", mutates_args=(), device_types="cpu")
def gated_norm(
    y: Tensor, v: Tensor | None, z: Tensor, skip: Tensor | None, gain: Tensor, groups: int, eps: float
) -> Tensor:
    """``mixer_library.gated_norm``. Gradients flow to all tensors."""
    return mixer_library.gated_norm(y, v, z, skip, gain, groups, eps)


@gated_norm.register_fake
def _(y: Tensor, v: Tensor | None, z: Tensor, skip: Tensor | None, gain: Tensor, groups: int, eps: float) -> Tensor:
    return z.new_empty(z.shape)


@torch.library.custom_op("zonal::gated_norm_backward", mutates_args=(), device_types="cpu")
def gated_norm_backward(
    dout: Tensor, y: Tensor, v: Tensor | None, z: Tensor, skip: Tensor | None, gain: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of y, v, z, skip and gain; those of v and skip empty without them."""
    dy, dv, dz, dskip, dgain = mixer_library.gated_norm_backward(dout, y, v, z, skip, gain, groups, eps)
    return dy, z.new_empty(0) if dv is None else dv, dz, z.new_empty(0) if dskip is None else dskip, dgain


@gated_norm_backward.register_fake
def _(
    dout: Tensor, y: Tensor, v: Tensor | None, z: Tensor, skip: Tensor | None, gain: Tensor, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    nothing = z.new_empty(0)
    return (
        mixer_library.head_by_head(y), z.new_empty(0) if v is None else mixer_library.head_by_head(v), z.new_empty(z.shape),
        nothing if skip is None else skip.new_empty(skip.shape), gain.new_empty(gain.shape),
    )  # fmt: skip


def _setup_norm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.groups, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward_norm(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    _refuse_second("gated_norm")
    found = gated_norm_backward(dout, *ctx.saved_tensors, ctx.groups, ctx.eps)
    return (
        *(gradient if needed else None for gradient, needed in zip(found, ctx.needs_input_grad[:5], strict=True)),
        None,
        None,
    )


gated_norm.register_autograd(_backward_norm, setup_context=_setup_norm)


def _refuse_second(name: str) -> None:
    if torch.is_grad_enabled():
        raise PathError(
            f"nn: the compiled {name} has no second derivative. Set ZONAL_KERNELS=off where you need create_graph=True, and torch runs."
        )


__all__ = ["gated_norm", "gated_norm_backward", "short_convolution", "short_convolution_backward"]
