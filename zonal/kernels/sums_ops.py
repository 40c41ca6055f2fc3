"""The kernel for sums over features as torch operators: ``zonal::feature_sums`` and ``zonal::feature_sums_backward``.

As with the tile kernels (``ops``), the rules of a call travel as one string.
"""

import ast
import functools
from typing import Any

import torch
from torch import Tensor

from zonal.errors import PathError
from zonal.formula import Formula
from zonal.kernels.cpp import sums_library
from zonal.kernels.sums_spec import SumsSpec


def encode(spec: SumsSpec) -> str:
    """The spec as a string of plain values."""
    link = spec.link
    parts = (
        link.name, link.cpp_value, link.cpp_derivative, link.cpp_base, link.triton, link.log, link.constants, link.domain, spec.degree, spec.lowest,
        spec.anchor, spec.normalise, spec.eps, spec.keeps, spec.positive,
    )  # fmt: skip
    return f"{parts!r}"


@functools.lru_cache(maxsize=256)
def decode(text: str) -> SumsSpec:
    """What ``encode`` wrote."""
    parts = ast.literal_eval(text)
    return SumsSpec(Formula(*parts[:8]), *parts[8:])


@torch.library.custom_op("zonal::feature_sums", mutates_args=(), device_types="cpu")
def feature_sums(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, monomials: Tensor, initial: Tensor | None, log_decay: Tensor | None,
    key_bias: Tensor | None, key_mask: Tensor | None, lo: Tensor, hi: Tensor, segment_start: Tensor | None, before: Tensor | None, spec: str, learned: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, factor, state after the last key, rows without the state) of ``SumsSpec``'s equation; arguments as in ``sums_library.forward``, one
    head of queries and keys that all heads share where the scale needs no gradient.
    Gradients flow to q, k, v, scale, the first ``learned`` coefficients, monomials, initial, log_decay and key_bias, from y and the last state."""
    seen = sums_library.places(key_mask, lo, hi, segment_start, k.shape[2])
    return sums_library.forward(
        q, k, v, scale, coefficients, monomials, seen, initial, before, log_decay, key_bias, decode(spec)
    )


@feature_sums.register_kernel("cuda")
def on_cuda(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, monomials: Tensor, initial: Tensor | None, log_decay: Tensor | None,
    key_bias: Tensor | None, key_mask: Tensor | None, lo: Tensor, hi: Tensor, segment_start: Tensor | None, before: Tensor | None, spec: str, learned: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same by Triton kernels, which sum no row apart."""
    from zonal.kernels.triton import sums_forward

    rules, q, k = decode(spec), q.expand(-1, scale.shape[0], -1, -1), k.expand(-1, v.shape[1], -1, -1)
    made = sums_forward.forward(
        q,
        k,
        v,
        scale,
        coefficients,
        monomials,
        key_mask,
        lo,
        hi,
        segment_start,
        initial,
        before,
        log_decay,
        key_bias,
        rules,
    )
    return *made, q.new_zeros(q.shape[:3] if rules.guards else (0,), dtype=torch.uint8)


@feature_sums.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, monomials: Tensor, initial: Tensor | None, log_decay: Tensor | None,
    key_bias: Tensor | None, key_mask: Tensor | None, lo: Tensor, hi: Tensor, segment_start: Tensor | None, before: Tensor | None, spec: str, learned: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rules = decode(spec)
    shape = (q.shape[0], scale.shape[0], q.shape[2])
    state = sums_library.state_shape(k.shape[0], v.shape[1], k.shape[3], v.shape[3], rules) if rules.keeps else (0,)
    return (
        q.new_empty((*shape, v.shape[3]), dtype=torch.float32), q.new_empty(shape, dtype=torch.float32), q.new_empty(state, dtype=torch.float32),
        q.new_empty(shape if rules.guards else (0,), dtype=torch.uint8),
    )  # fmt: skip


@torch.library.custom_op("zonal::feature_sums_backward", mutates_args=(), device_types="cpu")
def feature_sums_backward(
    dy: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, final: Tensor, apart: Tensor, scale: Tensor,
    coefficients: Tensor, monomials: Tensor, initial: Tensor | None, log_decay: Tensor | None, key_bias: Tensor | None, key_mask: Tensor | None, lo: Tensor,
    hi: Tensor, segment_start: Tensor | None, before: Tensor | None, spec: str, learned: int, asked: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, scale, coefficients (H, learned), monomials, initial, log_decay and key_bias; empty where they are not asked for.

    asked: whether of scale, monomials, initial, log_decay, key_bias.
    """
    seen = sums_library.places(key_mask, lo, hi, segment_start, k.shape[2])
    found = sums_library.backward(
        dy, dfinal, q, k, v, y, factor, final, apart, scale, coefficients, monomials, seen, initial, before, log_decay, key_bias, decode(spec),
        sums_library.Asked(learned, *asked),
    )  # fmt: skip
    return (
        found.q.to(q.dtype), found.k.to(k.dtype), found.v.to(v.dtype), _as(scale, found.scale), _as(coefficients, found.coefficients),
        _as(monomials, found.monomials), q.new_empty(0) if initial is None else _as(initial, found.initial),
        # rates that are the operator's own are one row for the whole batch
        q.new_empty(0) if log_decay is None or found.log_decay is None else found.log_decay.sum_to_size(log_decay.shape).to(log_decay.dtype),
        q.new_empty(0) if key_bias is None else _as(key_bias, found.key_bias),
    )  # fmt: skip


@feature_sums_backward.register_kernel("cuda")
def backward_on_cuda(
    dy: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, final: Tensor, apart: Tensor, scale: Tensor,
    coefficients: Tensor, monomials: Tensor, initial: Tensor | None, log_decay: Tensor | None, key_bias: Tensor | None, key_mask: Tensor | None, lo: Tensor,
    hi: Tensor, segment_start: Tensor | None, before: Tensor | None, spec: str, learned: int, asked: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same by Triton kernels, of calls that ``on_cuda`` takes."""
    from zonal.kernels.triton import sums_backward

    rules, ddecay, dbias = decode(spec), q.new_empty(0), q.new_empty(0)
    found = sums_backward.backward(
        dy,
        dfinal,
        q.expand(-1, scale.shape[0], -1, -1),
        k.expand(-1, v.shape[1], -1, -1),
        v,
        y,
        factor,
        scale,
        coefficients,
        monomials,
        key_mask,
        lo,
        hi,
        segment_start,
        initial,
        log_decay,
        key_bias,
        rules,
        learned,
    )
    if found.counted is not None and log_decay is not None and asked[3]:
        # what rows lose by rounding dy, keys have lost too
        rows = None if rules.anchor == "row" else (dy.to(q.dtype).double() * y).sum(-1)
        ddecay = (
            sums_library.decay_gradient(found.counted, rows, q.shape[2], dfinal, final)
            .sum_to_size(log_decay.shape)
            .to(log_decay.dtype)
        )
    if found.counted is not None and key_bias is not None and asked[4]:
        dbias = found.counted.to(key_bias.dtype)
    return (
        found.q.sum_to_size(q.shape), found.k.sum_to_size(k.shape), found.v, _as(scale, found.scale if asked[0] else None), _as(coefficients, found.coefficients if learned else None),
        _as(monomials, found.monomials if asked[1] else None), q.new_empty(0) if initial is None else _as(initial, found.initial if asked[2] else None),
        ddecay, dbias,
    )  # fmt: skip


def _as(like: Tensor, gradient: Tensor | None) -> Tensor:
    """A gradient in the type of its tensor; an operator has no None to return."""
    return like.new_empty(0) if gradient is None else gradient.to(like.dtype)


@feature_sums_backward.register_fake
def _(
    dy: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, final: Tensor, apart: Tensor, scale: Tensor,
    coefficients: Tensor, monomials: Tensor, initial: Tensor | None, log_decay: Tensor | None, key_bias: Tensor | None, key_mask: Tensor | None, lo: Tensor,
    hi: Tensor, segment_start: Tensor | None, before: Tensor | None, spec: str, learned: int, asked: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    def empty(like: Tensor | None, wanted: bool) -> Tensor:
        return q.new_empty(0) if like is None else like.new_empty(like.shape if wanted else (0,))

    return (
        q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), empty(scale, asked[0]),
        coefficients.new_empty((coefficients.shape[0], learned) if learned else (0,)), empty(monomials, asked[1]), empty(initial, asked[2]),
        q.new_empty(0) if log_decay is None or not asked[3] else log_decay.new_empty(log_decay.shape), empty(key_bias, asked[4]),
    )  # fmt: skip


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    *tensors, ctx.spec, ctx.learned = inputs
    y, factor, final, apart = output
    ctx.mark_non_differentiable(apart)
    # the last state is needed for the gradient of decays only
    ctx.save_for_backward(*tensors, y, factor, final if tensors[7] is not None else final.new_empty(0), apart)


def _backward(ctx: Any, dy: Tensor, _: Tensor, dfinal: Tensor | None, __: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise PathError(
            "attention: path 'chunked' makes its features again in backward and has no second derivative. Use path='dense' where you need create_graph=True."
        )
    (
        q,
        k,
        v,
        scale,
        coefficients,
        monomials,
        initial,
        log_decay,
        key_bias,
        key_mask,
        lo,
        hi,
        segment_start,
        before,
        y,
        factor,
        final,
        apart,
    ) = ctx.saved_tensors
    needs = ctx.needs_input_grad
    learned = ctx.learned if needs[4] else 0
    asked = [needs[3], *needs[5:9]]
    found = feature_sums_backward(
        dy, dfinal if decode(ctx.spec).keeps else None, q, k, v, y, factor, final, apart, scale, coefficients, monomials, initial, log_decay, key_bias,
        key_mask, lo, hi, segment_start, before, ctx.spec, learned, asked,
    )  # fmt: skip
    dq, dk, dv, dscale, dcoefficients, *others = found
    if learned:
        dcoefficients = torch.nn.functional.pad(
            dcoefficients, (0, coefficients.shape[1] - learned)
        )  # constants have none
    others = [gradient if wanted else None for gradient, wanted in zip(others, needs[5:9], strict=True)]
    return (dq, dk, dv, dscale if needs[3] else None, dcoefficients if learned else None, *others, *(None,) * 7)


feature_sums.register_autograd(_backward, setup_context=_setup)

__all__ = ["backward_on_cuda", "decode", "encode", "feature_sums", "feature_sums_backward", "on_cuda"]
