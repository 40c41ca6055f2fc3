"""The kernel for ridge and Koopman read-outs as torch operators: ``zonal::ridge`` and ``zonal::ridge_backward``."""

from typing import Any

import torch
from torch import Tensor

from zonal.errors import PathError
from zonal.kernels.cpp import ridge_library
from zonal.kernels.cpp.ridge_library import Before, Gradients
from zonal.kernels.cpp.sums_library import places


@torch.library.custom_op("zonal::ridge", mutates_args=(), device_types="cpu")
def ridge(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, rho: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor, segment_start: Tensor | None,
    gram: Tensor | None, cross: Tensor | None, shift: Tensor | None, last: Tensor | None, powers: list[int], limit: float, documents: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, which documents of which key heads ran in float64); arguments as in ``ridge_library.forward``, who sees whom as ``places`` takes it, rho the ridge, gram to last the
    memory before the first key. Gradients flow from y to q, k, v, scale, rho and the memory. documents: how many ``segment_start`` has."""
    seen = places(key_mask, lo, hi, segment_start, k.shape[2])
    y, outcome = ridge_library.forward(q, k, v, scale, rho, seen, Before(gram, cross, shift, last), powers, limit)
    return y, (outcome == ridge_library.DOUBLE).view(*k.shape[:2], -1)


@ridge.register_kernel("cuda")
def on_cuda(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, rho: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor, segment_start: Tensor | None,
    gram: Tensor | None, cross: Tensor | None, shift: Tensor | None, last: Tensor | None, powers: list[int], limit: float, documents: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same by Triton kernels, of calls whose heads have one power; no head runs in float64."""
    from zonal.kernels.triton import ridge_forward

    y = ridge_forward.forward(
        q,
        k,
        v,
        scale,
        rho,
        key_mask,
        lo,
        hi,
        segment_start,
        Before(gram, cross, shift, last),
        powers[0],
        limit,
        documents,
    )
    return y, torch.zeros(*k.shape[:2], documents, dtype=torch.bool, device=q.device)


@ridge.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, rho: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor, segment_start: Tensor | None,
    gram: Tensor | None, cross: Tensor | None, shift: Tensor | None, last: Tensor | None, powers: list[int], limit: float, documents: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    y = q.new_empty((*q.shape[:3], v.shape[3]), dtype=torch.float32)
    return y, q.new_empty((*k.shape[:2], documents), dtype=torch.bool)


@torch.library.custom_op("zonal::ridge_backward", mutates_args=(), device_types="cpu")
def ridge_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, rho: Tensor, doubled: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor,
    segment_start: Tensor | None, gram: Tensor | None, cross: Tensor | None, shift: Tensor | None, last: Tensor | None, powers: list[int], limit: float, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, scale, rho, gram, cross, shift and last; the last four empty where they are not asked for."""
    seen = places(key_mask, lo, hi, segment_start, k.shape[2])
    found = ridge_library.backward(
        dy, q, k, v, scale, rho, doubled, seen, Before(gram, cross, shift, last), powers, limit, started
    )
    return _typed(found, q, k, v, scale, rho, Before(gram, cross, shift, last))


def _typed(
    found: Gradients, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, rho: Tensor, memory: Before
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients in the types of what they are of."""
    of = found.before
    return (
        found.q.to(q.dtype), found.k.to(k.dtype), found.v.to(v.dtype), found.scale.to(scale.dtype), found.ridge.to(rho.dtype),
        _as(memory.gram, of.gram, q), _as(memory.cross, of.cross, q), _as(memory.shift, of.shift, q), _as(memory.last, of.last, q),
    )  # fmt: skip


def _as(like: Tensor | None, gradient: Tensor | None, other: Tensor) -> Tensor:
    """A gradient in the type of its tensor; an operator has no None to return."""
    return other.new_empty(0) if like is None or gradient is None else gradient.to(like.dtype)


@ridge_backward.register_kernel("cuda")
def backward_on_cuda(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, rho: Tensor, doubled: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor,
    segment_start: Tensor | None, gram: Tensor | None, cross: Tensor | None, shift: Tensor | None, last: Tensor | None, powers: list[int], limit: float, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same by Triton kernels."""
    from zonal.kernels.triton import ridge_backward as kernels

    memory = Before(gram, cross, shift, last)
    found = kernels.backward(
        dy, q, k, v, scale, rho, key_mask, lo, hi, segment_start, memory, powers[0], limit, doubled.shape[2], started
    )
    return _typed(found, q, k, v, scale, rho, memory)


@ridge_backward.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, rho: Tensor, doubled: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor,
    segment_start: Tensor | None, gram: Tensor | None, cross: Tensor | None, shift: Tensor | None, last: Tensor | None, powers: list[int], limit: float, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def memory(x: Tensor | None) -> Tensor:
        return q.new_empty(0) if x is None or not started else x.new_empty(x.shape)

    return (
        q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), scale.new_empty(scale.shape), rho.new_empty(rho.shape), memory(gram), memory(cross),
        memory(shift), memory(last),
    )  # fmt: skip


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, scale, rho, key_mask, lo, hi, segment_start, gram, cross, shift, last, ctx.powers, ctx.limit, _ = inputs
    doubled = output[1]
    ctx.mark_non_differentiable(doubled)
    ctx.save_for_backward(q, k, v, scale, rho, doubled, key_mask, lo, hi, segment_start, gram, cross, shift, last)


def _backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise PathError(
            "attention: path 'chunked' makes its factors again in backward and has no second derivative. Use path='dense' where you need create_graph=True."
        )
    needs = ctx.needs_input_grad
    started = any(needs[9:13])
    dq, dk, dv, dscale, drho, *memory = ridge_backward(dy, *ctx.saved_tensors, ctx.powers, ctx.limit, started)
    given = (dx if needed else None for dx, needed in zip(memory, needs[9:13], strict=True))
    return (
        dq,
        dk,
        dv,
        dscale if needs[3] else None,
        drho if needs[4] else None,
        None,
        None,
        None,
        None,
        *given,
        None,
        None,
        None,
    )


ridge.register_autograd(_backward, setup_context=_setup)

__all__ = ["backward_on_cuda", "on_cuda", "ridge", "ridge_backward"]
