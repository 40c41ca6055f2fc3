"""The tile kernels under torch.func: what vmap makes of them, and gradients that grad, vjp and vmap can pass through.

vmap folds its axis into the batch, or into the heads where each element has parameters (or gradients of parameters) of its own: both
are axes that a kernel has anyway. What neither can hold runs one element after another.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from zonal.errors import PathError
from zonal.kernels import ops

Way = Literal["batch", "heads", "each"]


def active() -> bool:
    """Whether a transform of torch.func is at work."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def mapped(x: Tensor | None) -> bool:
    """Whether vmap runs over a tensor, so that its numbers cannot be asked for."""
    return x is not None and active() and torch._C._functorch.is_batchedtensor(x)  # type: ignore[attr-defined]


def _front(x: Tensor, dim: int | None, size: int) -> Tensor:
    """The mapped axis first; a tensor that has none is the same for all."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _folded(x: Tensor, dim: int | None, size: int, axis: int) -> Tensor:
    """The mapped axis in front of ``axis`` and one with it."""
    return _front(x, dim, size).movedim(0, axis).flatten(axis, axis + 1)


def _way(parameters: Sequence[int | None], mask: int | None, edges: int | None, packed: bool, wanted: bool) -> Way:
    """Where the mapped axis goes. edges: of cu_seqlens, which all heads and sequences share. Packed documents have a batch of one."""
    if edges is not None:
        return "each"
    if not wanted and not packed and all(dim is None for dim in parameters):
        return "batch"
    return "heads" if mask is None else "each"


def _each(
    operator: Callable[..., tuple[Tensor, ...]], size: int, dims: Sequence[int | None], arguments: Sequence[Any]
) -> tuple[Tensor, ...]:
    """One element after another, stacked."""
    rows = [
        operator(*(x if dim is None else x.select(dim, i) for x, dim in zip(arguments, dims, strict=True)))
        for i in range(size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))


def _tile_mapped(
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    size = info.batch_size
    way = _way(in_dims[3:5], in_dims[5], in_dims[6], arguments[6] is not None, wanted=False)
    if way == "each":
        return _each(ops.tile, size, in_dims, arguments), (0, 0, 0)
    tokens, parameters, mask = _all_folded(way, size, in_dims, arguments, 3)
    y, factor, rest = ops.tile(*tokens, *parameters, mask, *arguments[6:])
    axis = 0 if way == "batch" else 1
    y, factor = (x.unflatten(axis, (size, -1)) for x in (y, factor))
    return (y, factor, rest.unflatten(axis, (size, -1)) if rest.numel() else rest), (
        axis,
        axis,
        axis if rest.numel() else None,
    )


def _all_folded(
    way: Way, size: int, dims: tuple[int | None, ...], arguments: tuple[Any, ...], tokens: int
) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """The first ``tokens`` arguments (B, H, …), scale and coefficients, and the mask with the mapped axis folded in."""
    axis, mask = 0 if way == "batch" else 1, arguments[tokens + 2]
    # what is left out, having no numbers, stays so
    folded = [
        _folded(x, dim, size, axis) if x.ndim > 2 else x.new_empty(0)
        for x, dim in zip(arguments[:tokens], dims[:tokens], strict=True)
    ]
    parameters = list(arguments[tokens : tokens + 2])
    if way == "heads":
        parameters = [_folded(x, dim, size, 0) for x, dim in zip(parameters, dims[tokens : tokens + 2], strict=True)]
    elif mask is not None:
        mask = _folded(mask, dims[tokens + 2], size, 0)
    return folded, parameters, mask


def _backward_mapped(
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    size, (learned, scaled) = info.batch_size, arguments[12:]
    way = _way(in_dims[7:9], in_dims[9], in_dims[10], arguments[10] is not None, wanted=scaled or learned > 0)
    if way == "each":
        return _each(ops.tile_backward, size, in_dims, arguments), (0,) * 5
    tokens, parameters, mask = _all_folded(way, size, in_dims, arguments, 7)
    *found, dscale, dc = ops.tile_backward(*tokens, *parameters, mask, *arguments[10:])
    axis = 0 if way == "batch" else 1
    dtokens = [x.unflatten(axis, (size, -1)) for x in found]
    if way == "batch":  # then nobody asked for those of parameters
        return (*dtokens, dscale, dc), (0, 0, 0, None, None)
    return (*dtokens, dscale.unflatten(0, (size, -1)) if scaled else dscale, dc.unflatten(0, (size, -1))), (
        1,
        1,
        1,
        0 if scaled else None,
        0,
    )


torch.library.register_vmap(ops.tile, _tile_mapped)
torch.library.register_vmap(ops.tile_backward, _backward_mapped)


class _Backward(torch.autograd.Function):
    """``zonal::tile_backward``, whose own derivative is refused."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
        return ops.tile_backward(*arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
        raise PathError(ops.NO_SECOND_DERIVATIVE)


class _Tile(torch.autograd.Function):
    """``zonal::tile`` with its gradients in the form that torch.func takes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        return ops.tile(*arguments)

    setup_context = staticmethod(ops.setup)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return ops.gradients(ctx, dy, _Backward.apply)


def tile(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """``ops.tile`` for calls under a transform of torch.func."""
    return _Tile.apply(*arguments)


__all__ = ["active", "mapped", "tile"]
