"""Influence sets: which inputs of a stack of layers can reach which outputs, and through how many layers.

A layer is a relation R, bool (T, T), with R[t, s] True where output t reads input s. Each layer also keeps its input
(the residual stream), so that after n layers

    influence = (I | R_n) ... (I | R_1)

with the boolean product. The result is an upper bound: an input outside the set has no effect for any weights, and an
input inside it may have none. The source composes the R alone. That loses pairs when a mask hides a token from itself.

A layer is given as its relation (with or without leading axes), as a prior, or as a tuple of priors that all apply.
Tokenwise parts of a model (norms, feed-forwards, read-outs of its history) add nothing. ``nn.TokenMixer.reads`` gives
the relation of an attention layer, with its convolution and other charts, and ``reads`` of a language model
(``CausalLM``, ``TextEncoder``) gives those of all its layers.

Source: Geometric Attention, definitions 5.8 and 5.9, proposition 5.1 and corollary 5.1, with I | R for R.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zonal.algebra.declaration import require, require_whole
from zonal.algebra.prior import Prior, composed, relation

Layer = Tensor | Prior | tuple[Prior, ...]

NEVER = -1


def visible(
    priors: Prior | tuple[Prior, ...], tokens: int, *, causal: bool = False, include_self: bool = True
) -> Tensor:
    """The relation of priors among ``tokens`` tokens, as ``prior.relation`` gives it."""
    require_whole("influence: tokens", tokens)
    require(
        all(isinstance(part, Prior) for part in (priors if isinstance(priors, tuple) else (priors,))),
        f"influence: a layer is a bool tensor, a prior or a tuple of priors, received {priors!r}. A model's reads() "
        "gives the relations of its layers.",
    )
    return relation(priors, tokens, causal=causal, include_self=include_self)


def reach(layers: Layer | Sequence[Layer], tokens: int | None = None) -> Tensor:
    """Which inputs can reach which outputs: bool (..., T, T), True at [t, s] where input s can reach output t.

    Args:
        layers: one layer, or a list of layers from first to last.
        tokens: T, required if every layer is given by priors.

    Raises: ArgumentError for relations that are not square, not of one size or not bool.
    """
    found, *later = _relations(layers, tokens)
    for each in later:
        found = composed(each, found)
    return found


def depth(layers: Layer | Sequence[Layer], tokens: int | None = None) -> Tensor:
    """The fewest layers through which input s can reach output t, int64 (..., T, T).

    The entry is 0 for a token and itself, and ``NEVER`` = -1 where s never reaches t. A single layer is repeated until
    nothing new is reached; a list is applied once, from its first layer. ``depth(...).max()`` is thus the number of
    layers after which more layers add nothing. Arguments and errors as in ``reach``. Cost: T^3 per layer.
    """
    relations = _relations(layers, tokens)
    repeated = not _is_list(layers)
    seen = torch.eye(relations[0].shape[-1], dtype=torch.bool, device=relations[0].device).expand_as(relations[0])
    found = torch.where(seen, 0, NEVER)
    count = 0
    while repeated or count < len(relations):
        seen, before = composed(relations[0 if repeated else count], seen), seen
        count += 1
        fresh = seen & ~before
        if repeated and not bool(fresh.any()):
            break
        found = torch.where(fresh, count, found)
    return found


@torch.inference_mode(False)
@torch.enable_grad()
def support(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Which inputs the outputs of a function depend on at x, by its derivative: x (..., T, D) -> bool (..., T', T).

    Row t is True where the gradient of a random combination of the numbers of y_t is not 0. For a model it lies within
    ``reach``. Cost: T' backward passes.

    Raises: ArgumentError when the output of the function lacks the leading axes of x.
    """
    require(
        x.ndim >= 2 and x.is_floating_point(),
        f"influence.support: x must be floating numbers (..., tokens, D), received {x.dtype} of shape "
        f"{tuple(x.shape)}.",
    )
    x = x.detach().clone().requires_grad_()  # a copy, because what inference mode has made takes no gradient
    y = function(x.clone())  # which it may change in place
    fits = isinstance(y, Tensor) and y.ndim == x.ndim and y.shape[:-2] == x.shape[:-2]
    require(
        fits,
        f"influence.support: a function to (..., tokens, P) with the leading axes of x {tuple(x.shape)} is required, "
        f"received {tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__}.",
    )
    if not y.requires_grad or not y.shape[-2]:  # it does not depend on x at all, or has no rows
        return torch.zeros(*y.shape[:-1], x.shape[-2], dtype=torch.bool, device=x.device)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(y)
    rows = []
    for each in (y * direction).sum(-1).unbind(-1):
        (gradient,) = torch.autograd.grad(each.sum(), x, retain_graph=True, materialize_grads=True)
        rows.append((gradient != 0).any(-1))
    return torch.stack(rows, -2)


def _is_list(layers: Layer | Sequence[Layer]) -> bool:
    """Whether ``layers`` is a list of layers. A tuple of priors is one layer."""
    return not isinstance(layers, Tensor | Prior) and not (
        isinstance(layers, tuple) and all(isinstance(part, Prior) for part in layers)
    )


def _relations(layers: Layer | Sequence[Layer], tokens: int | None) -> list[Tensor]:
    """I | R of each layer, on equal leading axes."""
    each: list[Layer] = [*layers] if _is_list(layers) else [layers]  # type: ignore[list-item, misc]
    require(len(each) > 0, "influence: at least one layer is required, received none.")
    given = [layer for layer in each if isinstance(layer, Tensor)]
    for layer in given:
        square = layer.dtype == torch.bool and layer.ndim >= 2 and layer.shape[-2] == layer.shape[-1]
        require(
            square,
            "influence: a relation must be bool (..., tokens, tokens), True where the row reads the column, received "
            f"{layer.dtype} of shape {tuple(layer.shape)}.",
        )
    sizes = {layer.shape[-1] for layer in given} | ({tokens} if tokens is not None else set())
    require(len(sizes) > 0, "influence: priors alone do not say how many tokens there are. Pass tokens=.")
    require(len(sizes) == 1, f"influence: layers of one number of tokens are required, received {sorted(sizes)}.")
    size = sizes.pop()
    found = [layer if isinstance(layer, Tensor) else visible(layer, size) for layer in each]
    return [
        *torch.broadcast_tensors(*(layer | torch.eye(size, dtype=torch.bool, device=layer.device) for layer in found))
    ]


__all__ = ["NEVER", "depth", "reach", "support", "visible"]
