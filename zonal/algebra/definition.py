"""The definition of an operator: the weight matrix W = A(K_qk, K_kk, visible), with all blocks in memory."""

import torch
from torch import Tensor

from zonal.algebra.anchor import Blocks, Marginals
from zonal.algebra.bound import Bound, Far, expanded
from zonal.algebra.prior import Bias, Visibility
from zonal.algebra.score.base import paired_scores
from zonal.errors import ArgumentError


class _Clamp(torch.autograd.Function):
    """Clamp with an unchanged gradient, since a cosine leaves [-1, 1] by rounding only."""

    generate_vmap_rule = True  # torch.func may pass through

    @staticmethod
    def forward(x: Tensor, low: float, high: float) -> Tensor:  # type: ignore[override]
        return x.clamp(low, high)

    @staticmethod
    def setup_context(ctx, inputs: tuple[Tensor, float, float], output: Tensor) -> None:
        """Nothing is saved for backward."""

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad, None, None

    @staticmethod
    def jvp(ctx, tangent: Tensor, *_: None) -> Tensor:  # type: ignore[override]
        return tangent


def _clamped(x: Tensor, low: float, high: float) -> Tensor:
    if torch.compiler.is_compiling():  # one graph holds no function with a jvp of its own
        return x + (x.clamp(low, high) - x).detach()
    return _Clamp.apply(x, low, high)


def kernel(bound: Bound, coefficients: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """log K for a link in log space, else K, without prior: prepared q (B, H, T, D), k (B, H, S, D) -> (B, H, T, S)."""
    score = paired_scores(bound.score, q, k)
    if bound.link.domain is not None:
        score = _clamped(score, *bound.link.domain)
    if bound.link.log_space:
        return score
    value = bound.link.value(score, coefficients)
    if bound.anchor.solves and bound.score.bound is not None:
        # a zero vector has no direction, and with it a kernel of angles need not be positive definite: leave it out
        value = value.masked_fill(~((q != 0).any(-1).unsqueeze(-1) & (k != 0).any(-1).unsqueeze(-2)), 0)
    return value


def paired(bound: Bound, coefficients: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """``kernel`` of each query with the key at its own position only: q, k (B, H, T, D) -> (B, H, T)."""
    batch, heads, count, _ = q.shape
    alone = (x.transpose(1, 2).reshape(batch * count, heads, 1, x.shape[-1]) for x in (q, k))
    return kernel(bound, coefficients, *alone).view(batch, count, heads).transpose(1, 2)


def evidence(
    bound: Bound, coefficients: Tensor, q: Tensor, k: Tensor, visibility: Visibility, bias: Bias
) -> tuple[Tensor, Tensor]:
    """K with its prior, (B, H, T, S), and a mask of allowed pairs that broadcasts to it.

    For a link in log space it is log K. Forbidden pairs are 0, or -inf for log K. With an anchor that has a window, K
    is the far kernel but for the last real keys up to the query, as many as the window has, and the first ones.
    """
    log = bound.link.log_space
    queries, keys = q.shape[2], k.shape[2]
    block = kernel(bound, coefficients, q, k)
    if bound.far is not None:
        far = visibility.distance(block.device) >= bound.far.window
        if bound.far.first:
            far = far & (visibility.place(block.device) >= bound.far.first)
        block = torch.where(far, _log_far(bound.far, q, k), block)
    mask = visibility.tile(0, queries, 0, keys, block.device)
    visible = mask if mask is not None else torch.ones(1, 1, queries, keys, dtype=torch.bool, device=block.device)
    prior = bias.tile(0, queries, 0, keys, visibility.position, block.dtype)
    if prior is not None:
        # the mask first: a decay towards forbidden later keys may overflow
        prior = prior.masked_fill(~visible, 0)
        block = block + prior if log else block * prior.exp()
    return block.masked_fill(~visible, float("-inf") if log else 0.0), visible


def _log_far(far: Far, q: Tensor, k: Tensor) -> Tensor:
    """log of the far kernel of all pairs, (B, H, T, S), for prepared q and k with key heads repeated."""
    groups = far.bound.groups
    keys = far.keys(k[:, ::groups])  # what a far score has learned of keys has a row for each key head
    block = kernel(far.bound, far.bound.coefficients.to(q), far.queries(q), keys.repeat_interleave(groups, 1))
    block = block * far.weight.to(q).view(1, -1, 1, 1)
    # a second where keeps the gradient of the logarithm out of pairs without evidence; NaN is evidence and stays NaN
    some = ~(block <= 0)
    return torch.where(some, torch.where(some, block, 1).log(), float("-inf"))


def weights(
    bound: Bound,
    coefficients: Tensor,
    q: Tensor,
    k: Tensor,
    visibility: Visibility,
    bias: Bias,
    log_decay: Tensor | None = None,
    marginals: Marginals | None = None,
) -> Tensor:
    """W (B, H, T, S) for prepared q (B, H, T, D) and k (B, H, S, D), with key heads repeated to match the query heads.

    log_decay (B or 1, Hkv, S), 0 on padding: the decay of the past for anchors that solve. Other anchors find it in
    ``bias``. marginals: the masses of queries and keys, for anchors that couple queries.

    Raises: ArgumentError where an anchor gives weights of another shape.
    """
    log = bound.link.log_space
    block, visible = evidence(bound, coefficients, q, k, visibility, bias)
    among = None
    if bound.anchor.solves:
        among = kernel(bound, coefficients, bound.score.as_query(k, bound.score_params), k)
        among = among.exp() if log else among
    params = {
        name: value.repeat_interleave(bound.groups, 0) if name in bound.anchor.kv_rows else value
        for name, value in bound.anchor_params.items()
    }
    if log_decay is not None:
        log_decay = expanded(log_decay, bound.groups) if bound.anchor.solves else None
    found = bound.anchor.weights(Blocks(block, log, among, visible, visibility, params, q, k, log_decay, marginals))
    if found.shape != block.shape:
        raise ArgumentError(
            f"{type(bound.anchor).__name__}.weights: weights of all queries and keys, {tuple(block.shape)}, were "
            f"required, received {tuple(found.shape)}."
        )
    return found


__all__ = ["evidence", "kernel", "paired", "weights"]
