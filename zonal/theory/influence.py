"""Influence sets: which inputs of a stack of layers can reach which outputs, and after how many layers at least.

A layer is a relation R, bool (T, T): R[t, s] where output t reads input s. Each layer also keeps what it had, so that
after n of them

    influence = (I | R_n) ... (I | R_1)

with the boolean product. It is an upper set: what lies outside cannot matter, whatever the weights; what lies inside
need not. The source composes the R alone, which leaves out pairs as soon as a mask does not let a token see itself:
what a token had then comes from nowhere.

A layer is given as its relation, with leading axes or without, as a prior, or as a tuple of priors that hold together.
Tokenwise parts of a model (norms, feed-forwards, read-outs of its history) change nothing; what a layer of attention
reads, its convolution and other charts included, is ``nn.TokenMixer.reads``, and of all layers of a model ``reads`` of
the model.

Source: Geometric Attention, definitions 5.8 and 5.9, proposition 5.1 and corollary 5.1, with I | R for R.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zonal.algebra.declaration import require, require_whole
from zonal.algebra.prior import Prior, intervals_of

Layer = Tensor | Prior | tuple[Prior, ...]

NEVER = -1


def visible(
    priors: Prior | tuple[Prior, ...], tokens: int, *, causal: bool = False, include_self: bool = True
) -> Tensor:
    """The relation of priors among ``tokens`` tokens, bool (T, T): what each query may see.

    causal, include_self: unless the priors say so themselves.
    """
    require_whole("influence: tokens", tokens)
    found = intervals_of(tokens, tokens, priors if isinstance(priors, tuple) else (priors,), causal, include_self)
    place = torch.arange(tokens)
    return (place >= found.lo[:, None]) & (place < found.hi[:, None])


def reach(layers: Layer | Sequence[Layer], tokens: int | None = None) -> Tensor:
    """Which inputs can reach which outputs through the layers, the first one first: bool (..., T, T), [t, s] where
    input s can reach output t.

    Args:
        layers: one layer, or a list of them.
        tokens: T, where every layer is given by priors.

    Raises: ArgumentError for relations that are not square, not of one size or not bool.
    """
    found, relations = None, _relations(layers, tokens)
    for relation in relations:
        found = relation if found is None else _after(relation, found)
    assert found is not None
    return found


def depth(layers: Layer | Sequence[Layer], tokens: int | None = None) -> Tensor:
    """The fewest layers through which input s can reach output t, int64 (..., T, T): 0 for a token and itself,
    ``NEVER`` = -1 where no number does.

    One layer is repeated as often as anything new is reached; a list is what it is, from its first layer on. So
    ``depth(...).max()`` is the number of layers from which on more bring nothing. Arguments and errors as in ``reach``.
    Work: T^3 a layer.
    """
    relations = _relations(layers, tokens)
    repeated = not _is_list(layers)
    seen = torch.eye(relations[0].shape[-1], dtype=torch.bool, device=relations[0].device).expand_as(relations[0])
    found = torch.where(seen, 0, NEVER)
    count = 0
    while repeated or count < len(relations):
        seen, before = _after(relations[0 if repeated else count], seen), seen
        count += 1
        fresh = seen & ~before
        if repeated and not bool(fresh.any()):
            break
        found = torch.where(fresh, count, found)
    return found


def support(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Which inputs the outputs of a function do depend on at x, by its derivative: x (..., T, D) -> bool (..., T', T).

    Row t is where the gradient of a random combination of the numbers of y_t is not 0. Of a model it lies within
    ``reach``. T' backward passes.

    Raises: ArgumentError when the function gives no tokens with the leading axes of x.
    """
    require(
        x.ndim >= 2 and x.is_floating_point(),
        f"influence.support: x must be floating numbers (..., tokens, D), received {x.dtype} of shape "
        f"{tuple(x.shape)}.",
    )
    x = x.detach().requires_grad_()
    y = function(x)
    fits = isinstance(y, Tensor) and y.ndim == x.ndim and y.shape[:-2] == x.shape[:-2]
    require(
        fits,
        f"influence.support: a function to (..., tokens, P) with the leading axes of x {tuple(x.shape)} is required, "
        f"received {tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__}.",
    )
    if not y.requires_grad:  # it does not depend on x at all
        return torch.zeros(*y.shape[:-1], x.shape[-2], dtype=torch.bool, device=x.device)
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(y)
    rows = []
    for each in (y * direction).sum(-1).unbind(-1):
        (gradient,) = torch.autograd.grad(each.sum(), x, retain_graph=True, materialize_grads=True)
        rows.append((gradient != 0).any(-1))
    return torch.stack(rows, -2)


def _is_list(layers: Layer | Sequence[Layer]) -> bool:
    """Whether several layers are meant: a tuple of priors is one layer."""
    return not isinstance(layers, Tensor | Prior) and not (
        isinstance(layers, tuple) and all(isinstance(part, Prior) for part in layers)
    )


def _relations(layers: Layer | Sequence[Layer], tokens: int | None) -> list[Tensor]:
    """I | R of each layer, on equal leading axes."""
    each: list[Layer] = [*layers] if _is_list(layers) else [layers]  # type: ignore[list-item, misc]
    require(len(each) > 0, "influence: at least one layer is required, received none.")
    sizes = {layer.shape[-1] for layer in each if isinstance(layer, Tensor) and layer.ndim >= 2} | (
        {tokens} if tokens is not None else set()
    )
    require(len(sizes) > 0, "influence: priors alone do not say how many tokens there are. Pass tokens=.")
    require(len(sizes) == 1, f"influence: layers of one number of tokens are required, received {sorted(sizes)}.")
    size = sizes.pop()
    found = [layer if isinstance(layer, Tensor) else visible(layer, size) for layer in each]
    for layer in found:
        square = layer.dtype == torch.bool and layer.ndim >= 2 and layer.shape[-2] == layer.shape[-1]
        require(
            square,
            "influence: a relation must be bool (..., tokens, tokens), True where the row reads the column, received "
            f"{layer.dtype} of shape {tuple(layer.shape)}.",
        )
    return [
        *torch.broadcast_tensors(*(layer | torch.eye(size, dtype=torch.bool, device=layer.device) for layer in found))
    ]


def _after(relation: Tensor, before: Tensor) -> Tensor:
    """The boolean product: counts of ways are below 2^24, and so exact."""
    return (relation.float() @ before.float()) > 0


__all__ = ["NEVER", "depth", "reach", "support", "visible"]
