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
        spec.anchor, spec.normalise, spec.eps, spec.keeps,
    )  # fmt: skip
    return f"{parts!r}"


@functools.lru_cache(maxsize=256)
def decode(text: str) -> SumsSpec:
    """What ``encode`` wrote."""
    parts = ast.literal_eval(text)
    return SumsSpec(Formula(*parts[:8]), *parts[8:])


@torch.library.custom_op("zonal::feature_sums", mutates_args=(), device_types="cpu")
def feature_sums(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, monomials: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor,
    segment_start: Tensor | None, initial: Tensor | None, before: Tensor | None, spec: str, learned: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, factor, state after the last key) of ``SumsSpec``'s equation; arguments as in ``sums_library.forward``. Gradients flow to q, k, v,
    scale, the first ``learned`` coefficients, monomials and initial, from y and the last state."""
    return sums_library.forward(q, k, v, scale, coefficients, monomials, key_mask, lo, hi, segment_start, initial, before, decode(spec))


@feature_sums.register_kernel("cuda")
def on_cuda(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, monomials: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor,
    segment_start: Tensor | None, initial: Tensor | None, before: Tensor | None, spec: str, learned: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The same by Triton kernels."""
    from zonal.kernels.triton import sums_forward

    return sums_forward.forward(q, k, v, scale, coefficients, monomials, key_mask, lo, hi, segment_start, initial, before, decode(spec))


@feature_sums.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, monomials: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor,
    segment_start: Tensor | None, initial: Tensor | None, before: Tensor | None, spec: str, learned: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    rules = decode(spec)
    shape = (q.shape[0], q.shape[1], q.shape[2])
    state = sums_library.state_shape(k.shape[0], k.shape[1], k.shape[3], v.shape[3], rules) if rules.keeps else (0,)
    return (
        q.new_empty((*shape, v.shape[3]), dtype=torch.float32), q.new_empty(shape, dtype=torch.float32), q.new_empty(state, dtype=torch.float32),
    )  # fmt: skip


@torch.library.custom_op("zonal::feature_sums_backward", mutates_args=(), device_types="cpu")
def feature_sums_backward(
    dy: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, scale: Tensor, coefficients: Tensor,
    monomials: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor, segment_start: Tensor | None, initial: Tensor | None, before: Tensor | None, spec: str,
    learned: int, scaled: bool, polynomial: bool, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v, scale, coefficients (H, learned), monomials and initial; the last four empty where they are not asked for."""
    found = sums_library.backward(
        dy, dfinal, q, k, v, y, factor, scale, coefficients, monomials, key_mask, lo, hi, segment_start, initial, before, decode(spec), learned, scaled,
        polynomial, started,
    )  # fmt: skip
    return (
        found.q.to(q.dtype), found.k.to(k.dtype), found.v.to(v.dtype), _as(scale, found.scale), _as(coefficients, found.coefficients),
        _as(monomials, found.monomials), q.new_empty(0) if initial is None else _as(initial, found.initial),
    )  # fmt: skip


@feature_sums_backward.register_kernel("cuda")
def backward_on_cuda(
    dy: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, scale: Tensor, coefficients: Tensor,
    monomials: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor, segment_start: Tensor | None, initial: Tensor | None, before: Tensor | None, spec: str,
    learned: int, scaled: bool, polynomial: bool, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The same by Triton kernels."""
    from zonal.kernels.triton import sums_backward

    found = sums_backward.backward(
        dy, dfinal, q, k, v, y, factor, scale, coefficients, monomials, key_mask, lo, hi, segment_start, initial, decode(spec), learned
    )
    return (
        found.q, found.k, found.v, _as(scale, found.scale if scaled else None), _as(coefficients, found.coefficients if learned else None),
        _as(monomials, found.monomials if polynomial else None), q.new_empty(0) if initial is None else _as(initial, found.initial if started else None),
    )  # fmt: skip


def _as(like: Tensor, gradient: Tensor | None) -> Tensor:
    """A gradient in the type of its tensor; an operator has no None to return."""
    return like.new_empty(0) if gradient is None else gradient.to(like.dtype)


@feature_sums_backward.register_fake
def _(
    dy: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, scale: Tensor, coefficients: Tensor,
    monomials: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor, segment_start: Tensor | None, initial: Tensor | None, before: Tensor | None, spec: str,
    learned: int, scaled: bool, polynomial: bool, started: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), scale.new_empty(scale.shape if scaled else (0,)),
        coefficients.new_empty((coefficients.shape[0], learned) if learned else (0,)), monomials.new_empty(monomials.shape if polynomial else (0,)),
        q.new_empty(0) if initial is None else initial.new_empty(initial.shape if started else (0,)),
    )  # fmt: skip


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, scale, coefficients, monomials, key_mask, lo, hi, segment_start, initial, before, ctx.spec, ctx.learned = inputs
    y, factor, _ = output
    ctx.save_for_backward(q, k, v, scale, coefficients, monomials, key_mask, lo, hi, segment_start, initial, before, y, factor)


def _backward(ctx: Any, dy: Tensor, _: Tensor, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise PathError(
            "attention: path 'chunked' makes its features again in backward and has no second derivative. Use path='dense' where you need create_graph=True."
        )
    q, k, v, scale, coefficients, monomials, key_mask, lo, hi, segment_start, initial, before, y, factor = ctx.saved_tensors
    needs = ctx.needs_input_grad
    learned = ctx.learned if needs[4] else 0
    found = feature_sums_backward(
        dy, dfinal if decode(ctx.spec).keeps else None, q, k, v, y, factor, scale, coefficients, monomials, key_mask, lo, hi, segment_start, initial, before,
        ctx.spec, learned, needs[3], needs[5], needs[10],
    )  # fmt: skip
    dq, dk, dv, dscale, dcoefficients, dmonomials, dinitial = found
    if learned:
        dcoefficients = torch.nn.functional.pad(dcoefficients, (0, coefficients.shape[1] - learned))  # constants have none
    return (
        dq, dk, dv, dscale if needs[3] else None, dcoefficients if learned else None, dmonomials if needs[5] else None, None, None, None, None,
        dinitial if needs[10] else None, None, None, None,
    )  # fmt: skip


feature_sums.register_autograd(_backward, setup_context=_setup)

__all__ = ["backward_on_cuda", "decode", "encode", "feature_sums", "feature_sums_backward", "on_cuda"]
