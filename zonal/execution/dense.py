"""The definition, run as it is written: y = A(K_qk, K_kk, visible) V with every block in memory.

Cost: T S numbers a head (and S^2 with a solve, S^3/3 work). In float64 this is what all other paths are tested against.
"""

import torch
from torch import Tensor

from zonal.algebra.anchor import Blocks
from zonal.execution.call import Call


class _Clamp(torch.autograd.Function):
    """Clamp whose gradient passes: a cosine leaves [-1, 1] by rounding only, and rounding has no derivative."""

    @staticmethod
    def forward(ctx, x: Tensor, low: float, high: float) -> Tensor:  # type: ignore[override]
        return x.clamp(low, high)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad, None, None


def kernel(call: Call, q: Tensor, k: Tensor) -> Tensor:
    """log K for a link in log space, else K, without prior: prepared q (B, H, T, D), k (B, H, S, D) -> (B, H, T, S)."""
    score = call.bound.score.pair(q, k)
    if call.bound.link.domain is not None:
        score = _Clamp.apply(score, *call.bound.link.domain)
    return score if call.tags.log_space else call.bound.link.value(score, call.coefficients)


def weights(call: Call) -> Tensor:
    """W (B, H, T, S)."""
    queries, keys = call.q.shape[2], call.k.shape[2]
    k = call.expand(call.k)
    block = kernel(call, call.q, k)
    mask = call.visibility.tile(0, queries, 0, keys, block.device)
    visible = mask if mask is not None else torch.ones(1, 1, queries, keys, dtype=torch.bool, device=block.device)
    bias = call.bias.tile(0, queries, 0, keys, call.visibility.position, block.dtype)
    if bias is not None:
        # the mask first: a decay towards forbidden later keys may overflow
        bias = bias.masked_fill(~visible, 0)
        block = block + bias if call.tags.log_space else block * bias.exp()
    block = block.masked_fill(~visible, float("-inf") if call.tags.log_space else 0.0)
    among = None
    if call.tags.solves:
        among = kernel(call, call.bound.score.as_query(k, call.bound.score_params), k)
        among = among.exp() if call.tags.log_space else among
    params = {
        name: value.repeat_interleave(call.bound.groups, 0) if name in call.bound.anchor.kv_rows else value
        for name, value in call.bound.anchor_params.items()
    }
    return call.bound.anchor.weights(Blocks(block, call.tags.log_space, among, visible, call.visibility, params))


def dense(call: Call) -> Tensor:
    """y (B, H, T, P)."""
    return call.scaled(weights(call) @ call.expand(call.v))
