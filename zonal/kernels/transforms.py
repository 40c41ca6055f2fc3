"""Kernels under torch.func: what vmap makes of an operator, and gradients that grad, vjp and vmap can pass through.

vmap folds its axis into the batch. Where each element has its own parameters (or their gradients), it folds the axis
into the heads instead. If neither is possible, the elements run one after another.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from zonal.errors import PathError

Way = Literal["batch", "heads", "each"]
Rule = Callable[..., tuple[tuple[Tensor, ...], tuple[int | None, ...]]]


def rule(operator: Callable[..., tuple[Tensor, ...]], arguments: str, results: str) -> Rule:
    """The rule of vmap for an operator, by a letter for each argument and result.

    t: (B, H, …), or empty where it is left out. p: parameters (H, …), or empty. m: a mask (B, …) or None. e: borders of
    packed documents or None, shared by all heads and sequences (the batch is then one). a: which results are asked for.
    -: anything else.
    """

    def map_(info: Any, dims: tuple[int | None, ...], *given: Any) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
        size = info.batch_size
        way = _way(arguments, results, dims, given)
        if way == "each":
            return _each(operator, size, dims, given), (0,) * len(results)
        axis = 0 if way == "batch" else 1
        axes = {"t": axis, "p": 0, "m": 0}
        folded = [
            _folded(x, dim, size, axes[kind]) if _folds(kind, way, x) else x
            for kind, x, dim in zip(arguments, given, dims, strict=True)
        ]
        made, places = [], []
        for kind, x in zip(results, operator(*folded), strict=True):
            whole = _folds(kind, way, x) and x.numel() + x.ndim > 1
            made.append(x.unflatten(axes[kind], (size, -1)) if whole else x)
            places.append(axes[kind] if whole else None)
        return tuple(made), tuple(places)

    return map_


def _way(arguments: str, results: str, dims: Sequence[int | None], given: Sequence[Any]) -> Way:
    """Where the mapped axis goes."""
    own = mask = packed = False
    for kind, dim, x in zip(arguments, dims, given, strict=True):
        if kind == "e" and dim is not None:
            return "each"
        own |= kind == "p" and dim is not None
        own |= kind == "a" and any(wanted and result == "p" for wanted, result in zip(x, results, strict=True))
        mask |= kind == "m" and dim is not None
        packed |= kind == "e" and x is not None
    if not own and not packed:
        return "batch"
    return "each" if mask else "heads"


def _folds(kind: str, way: Way, x: Any) -> bool:
    """Whether the mapped axis is folded into this tensor."""
    if kind == "t":
        return x.ndim > 2
    return x is not None and kind == ("m" if way == "batch" else "p")


def _folded(x: Tensor, dim: int | None, size: int, axis: int) -> Tensor:
    """The mapped axis in front of ``axis`` and one with it; a tensor that has none is the same for all."""
    front = x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)
    return front.movedim(0, axis).flatten(axis, axis + 1)


def _each(
    operator: Callable[..., tuple[Tensor, ...]], size: int, dims: Sequence[int | None], given: Sequence[Any]
) -> tuple[Tensor, ...]:
    """One element after another, stacked."""
    rows = [
        operator(*(x.select(dim, i) if isinstance(dim, int) else x for x, dim in zip(given, dims, strict=True)))
        for i in range(size)
    ]
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))


def differentiable(
    operator: Callable[..., Any],
    setup: Callable[..., None],
    gradients: Callable[..., tuple[Tensor | None, ...]],
    backward: Callable[..., tuple[Tensor, ...]],
    refusal: str,
) -> Callable[..., Any]:
    """An operator with its gradients in the form of torch.func.

    gradients(ctx, grads, backward) is called with ``backward``, whose own derivative is refused with ``refusal``.
    """

    class Backward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> tuple[Tensor, ...]:  # type: ignore[override]
            return backward(*arguments)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            """Nothing is kept."""

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Any:  # type: ignore[override]
            raise PathError(refusal)

    class Forward(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*arguments: Any) -> Any:  # type: ignore[override]
            return operator(*arguments)

        setup_context = staticmethod(setup)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
            return gradients(ctx, grads, Backward.apply)

    return Forward.apply


__all__ = ["differentiable", "rule"]
