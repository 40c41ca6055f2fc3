"""The kernel for the largest of some candidates as torch operators: ``zonal::sparse`` and ``zonal::sparse_backward``."""

from typing import Any

import torch
from torch import Tensor

from zonal.errors import PathError
from zonal.kernels.cpp import sparse_library
from zonal.kernels.cpp.sparse_library import KINDS, Candidates, Factors


def _factors(kinds: list[int], sizes: list[int], eps: list[float]) -> Factors:
    return Factors(tuple(KINDS[kind] for kind in kinds), tuple(sizes), tuple(eps))


@torch.library.custom_op("zonal::sparse", mutates_args=(), device_types="cpu")
def sparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    start: Tensor,
    stop: Tensor,
    walk: Tensor,
    kinds: list[int],
    sizes: list[int],
    eps: list[float],
    top: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``sparse_library.forward``, y in the type of v. kinds: numbers of ``KINDS``. Gradients flow from y to q, k and v."""
    y, least, whole, met = sparse_library.forward(
        q, k, v, Candidates(order, start, stop, walk), _factors(kinds, sizes, eps), top
    )
    return y.to(v.dtype), least, whole, met


@sparse.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    order: Tensor,
    start: Tensor,
    stop: Tensor,
    walk: Tensor,
    kinds: list[int],
    sizes: list[int],
    eps: list[float],
    top: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rows = q.shape[:3]
    number = q.new_empty(rows, dtype=torch.float32)
    return v.new_empty((*rows, v.shape[3])), number, torch.empty_like(number), q.new_empty(rows, dtype=torch.int32)


@torch.library.custom_op("zonal::sparse_backward", mutates_args=(), device_types="cpu")
def sparse_backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, least: Tensor, whole: Tensor, order: Tensor, start: Tensor, stop: Tensor, walk: Tensor,
    kinds: list[int], sizes: list[int], eps: list[float], top: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v."""
    found = Candidates(order, start, stop, walk)
    dq, dk, dv = sparse_library.backward(dy, q, k, v, y.float(), least, whole, found, _factors(kinds, sizes, eps), top)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


@sparse_backward.register_fake
def _(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, least: Tensor, whole: Tensor, order: Tensor, start: Tensor, stop: Tensor, walk: Tensor,
    kinds: list[int], sizes: list[int], eps: list[float], top: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, order, start, stop, walk, ctx.kinds, ctx.sizes, ctx.eps, ctx.top = inputs
    y, least, whole, met = output
    ctx.mark_non_differentiable(least, whole, met)
    ctx.save_for_backward(q, k, v, y, least, whole, order, start, stop, walk)


def _backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    if torch.is_grad_enabled():
        raise PathError(
            "attention: path 'sparse' makes its scores again in backward and has no second derivative. Use path='dense' where you need create_graph=True."
        )
    return (*sparse_backward(dy, *ctx.saved_tensors, ctx.kinds, ctx.sizes, ctx.eps, ctx.top), *(None,) * 8)


sparse.register_autograd(_backward, setup_context=_setup)

__all__ = ["sparse", "sparse_backward"]
