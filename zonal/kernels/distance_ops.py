"""The distance kernel as torch operators, with shapes for tracing and gradients: ``zonal::distance`` and ``zonal::distance_backward``."""

import ast
import functools
from typing import Any

import torch
from torch import Tensor

from zonal.errors import PathError
from zonal.formula import Term
from zonal.kernels import ops
from zonal.kernels.cpp import distance_library
from zonal.kernels.distance_spec import DistanceSpec


def encode(spec: DistanceSpec) -> str:
    """The spec as a string of plain values, as ``ops.encode``."""
    terms = tuple(tuple(term) for term in spec.terms)
    return f"{(ops.encode(spec.rules), terms, spec.waves)!r}"


@functools.lru_cache(maxsize=256)
def decode(text: str) -> DistanceSpec:
    """What ``encode`` wrote."""
    rules, terms, waves = ast.literal_eval(text)
    return DistanceSpec(ops.decode(rules), tuple(Term(*term) for term in terms), waves)


@torch.library.custom_op("zonal::distance", mutates_args=(), device_types="cpu")
def distance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    coefficients: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: str,
    learned: bool,
) -> tuple[Tensor, Tensor]:
    """(y, factor), float32, of ``DistanceSpec``'s equation; gradients flow to q, k, v, weights and, where ``learned``, to coefficients (H, 3 waves)."""
    return distance_library.forward(q, k, v, weights, coefficients, key_mask, cu_seqlens, decode(spec))


@distance.register_kernel("cuda")
def on_cuda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    coefficients: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: str,
    learned: bool,
) -> tuple[Tensor, Tensor]:
    """The same by Triton kernels, in the type of keys: queries that came in it are in float32 for the sake of their weights alone."""
    from zonal.kernels.triton import distance_forward

    return distance_forward.forward(
        q.to(k.dtype), k, v, weights, coefficients.float().contiguous(), key_mask, cu_seqlens, decode(spec)
    )


@distance.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    coefficients: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: str,
    learned: bool,
) -> tuple[Tensor, Tensor]:
    return q.new_empty((*q.shape[:3], v.shape[3]), dtype=torch.float32), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("zonal::distance_backward", mutates_args=(), device_types="cpu")
def distance_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, weights: Tensor, coefficients: Tensor, key_mask: Tensor | None,
    cu_seqlens: Tensor | None, spec: str, learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, weights and coefficients; the last empty unless ``learned``."""
    return _typed(
        distance_library.backward(
            dy, q, k, v, y, factor, weights, coefficients, key_mask, cu_seqlens, decode(spec), learned
        ),
        q,
        k,
        v,
        weights,
        coefficients,
    )


def _typed(
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    coefficients: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients in the types of what they are of; an operator has no None to return."""
    dq, dk, dv, dweights, dc = found
    return (
        dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dweights.to(weights.dtype),
        coefficients.new_empty(coefficients.shape[0], 0) if dc is None else dc.to(coefficients.dtype),
    )  # fmt: skip


@distance_backward.register_kernel("cuda")
def backward_on_cuda(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, weights: Tensor, coefficients: Tensor, key_mask: Tensor | None,
    cu_seqlens: Tensor | None, spec: str, learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same by Triton kernels."""
    from zonal.kernels.triton import distance_backward

    found = distance_backward.backward(
        dy,
        q.to(k.dtype),
        k,
        v,
        y,
        factor,
        weights,
        coefficients.float().contiguous(),
        key_mask,
        cu_seqlens,
        decode(spec),
        learned,
    )
    return _typed(found, q, k, v, weights, coefficients)


@distance_backward.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, weights: Tensor, coefficients: Tensor, key_mask: Tensor | None,
    cu_seqlens: Tensor | None, spec: str, learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), weights.new_empty(weights.shape),
        coefficients.new_empty((coefficients.shape[0], coefficients.shape[1] if learned else 0)),
    )  # fmt: skip


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, weights, coefficients, key_mask, cu_seqlens, ctx.spec, ctx.learned = inputs
    ctx.save_for_backward(q, k, v, *output, weights, coefficients, key_mask, cu_seqlens)
    ctx.set_materialize_grads(False)  # factor gets none, and needs no zeros in its place


def _backward(ctx: Any, dy: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise PathError(ops.NO_SECOND_DERIVATIVE)
    dy = torch.zeros_like(ctx.saved_tensors[3]) if dy is None else dy
    learned = ctx.learned and ctx.needs_input_grad[4]
    dq, dk, dv, dweights, dc = distance_backward(dy, *ctx.saved_tensors, ctx.spec, learned)
    return dq, dk, dv, dweights, dc if learned else None, None, None, None, None


distance.register_autograd(_backward, setup_context=_setup)

__all__ = ["decode", "distance", "distance_backward", "encode"]
