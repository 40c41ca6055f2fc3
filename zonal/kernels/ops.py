"""The tile kernels as torch operators, with shapes for tracing and gradients: ``zonal::tile`` and ``zonal::tile_backward``.

The rules of a call (``TileSpec``) travel as one string, so that a traced graph holds all it needs.
"""

import ast
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zonal.errors import PathError
from zonal.formula import Formula
from zonal.kernels.cpp import library
from zonal.kernels.spec import TileSpec


def encode(spec: TileSpec) -> str:
    """The spec as a string of plain values (put together by hand: a tracer follows this, but no encoder of a library)."""
    link = spec.link
    parts = (
        link.name, link.cpp_value, link.cpp_derivative, link.cpp_base, link.triton, link.log, link.constants, link.domain, spec.anchor, spec.normalise,
        spec.eps, spec.causal, spec.include_self, spec.chunk, spec.left, spec.right, spec.inference,
    )  # fmt: skip
    return f"{parts!r}"


@functools.lru_cache(maxsize=256)
def decode(text: str) -> TileSpec:
    """What ``encode`` wrote."""
    parts = ast.literal_eval(text)
    return TileSpec(Formula(*parts[:8]), *parts[8:])


@torch.library.custom_op("zonal::tile", mutates_args=(), device_types="cpu")
def tile(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None,
    spec: str, learned: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, factor, rest) of ``TileSpec``'s equation; rest is what rounding y left, for backward on the CPU. cu_seqlens: borders of packed
    documents, int64. The first ``learned`` coefficients (H, n) have a gradient, as has scale (H,)."""
    return library.forward(q, k, v, scale, coefficients, key_mask, cu_seqlens, decode(spec))


@tile.register_kernel("cuda")
def _(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None,
    spec: str, learned: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    from zonal.kernels.triton import forward

    made = forward.forward(
        q, k, v, scale.float().contiguous(), coefficients.float().contiguous(), key_mask, cu_seqlens, decode(spec)
    )
    return *made, q.new_empty(0)


@tile.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None,
    spec: str, learned: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    shape = (q.shape[0], q.shape[1], q.shape[2], v.shape[3])
    kept = q.device.type == "cpu" and q.dtype != torch.float32 and not decode(spec).inference
    return q.new_empty(shape), q.new_empty(shape[:3], dtype=torch.float32), q.new_empty(shape if kept else 0)


@torch.library.custom_op("zonal::tile_backward", mutates_args=(), device_types="cpu")
def tile_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, rest: Tensor, scale: Tensor, coefficients: Tensor,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, spec: str, learned: int, scaled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, scale (empty unless ``scaled``) and of the learned coefficients (H, learned)."""
    dq, dk, dv, dscale, dc = library.backward(
        dy, q, k, v, y, factor, rest, scale, coefficients, key_mask, cu_seqlens, decode(spec), learned, scaled
    )
    return dq, dk, dv, *_parameters(scale, coefficients, dscale, dc)


def _parameters(scale: Tensor, coefficients: Tensor, dscale: Tensor | None, dc: Tensor | None) -> tuple[Tensor, Tensor]:
    """Gradients of what is learned in its own type; an operator has no None to return."""
    return (
        scale.new_empty(0) if dscale is None else dscale.to(scale.dtype),
        coefficients.new_empty(coefficients.shape[0], 0) if dc is None else dc.to(coefficients.dtype),
    )


@tile_backward.register_kernel("cuda")
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, rest: Tensor, scale: Tensor, coefficients: Tensor,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, spec: str, learned: int, scaled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    from zonal.kernels.triton import backward

    dq, dk, dv, dscale, dc = backward.backward(
        dy,
        q,
        k,
        v,
        y,
        factor,
        scale.float().contiguous(),
        coefficients.float().contiguous(),
        key_mask,
        cu_seqlens,
        decode(spec),
        learned,
        (True, True, True, scaled, learned > 0),
    )
    assert dq is not None
    assert dk is not None
    assert dv is not None
    return dq, dk, dv, *_parameters(scale, coefficients, dscale, dc)


@tile_backward.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, rest: Tensor, scale: Tensor, coefficients: Tensor,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, spec: str, learned: int, scaled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), scale.new_empty(scale.shape if scaled else (0,)),
        coefficients.new_empty((coefficients.shape[0], learned)),
    )  # fmt: skip


NO_SECOND_DERIVATIVE = "attention: path 'tiled' recomputes its tiles in backward and has no second derivative. Use path='dense' where you need create_graph=True."


def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """What ``gradients`` will need."""
    q, k, v, scale, coefficients, key_mask, cu_seqlens, ctx.spec, ctx.learned = inputs
    ctx.save_for_backward(q, k, v, scale, coefficients, key_mask, cu_seqlens, *output)
    ctx.set_materialize_grads(False)  # factor and rest get none, and need no zeros in its place


def _backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise PathError(NO_SECOND_DERIVATIVE)
    return gradients(ctx, dy, tile_backward)


def gradients(ctx: Any, dy: Tensor | None, backward: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor | None, ...]:
    """The gradients of the arguments of ``tile``, where ``backward`` is ``tile_backward`` in some form."""
    q, k, v, scale, coefficients, key_mask, cu_seqlens, y, factor, rest = ctx.saved_tensors
    dy = torch.zeros_like(y) if dy is None else dy
    learned = ctx.learned if ctx.needs_input_grad[4] else 0
    dq, dk, dv, dscale, dc = backward(
        dy,
        q,
        k,
        v,
        y,
        factor,
        rest,
        scale,
        coefficients,
        key_mask,
        cu_seqlens,
        ctx.spec,
        learned,
        ctx.needs_input_grad[3],
    )
    if learned:
        dc = torch.nn.functional.pad(dc, (0, coefficients.shape[1] - learned))  # constants have none
    return dq, dk, dv, dscale if ctx.needs_input_grad[3] else None, dc if learned else None, None, None, None, None


tile.register_autograd(_backward, setup_context=setup)

__all__ = ["decode", "encode", "tile", "tile_backward"]
