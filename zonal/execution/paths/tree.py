"""Hierarchical attention without stored weights.

Tokens of the smallest blocks attend within their block. Above them each block is one token, with the means of its
queries, keys and values. Cost: T (n_1 + n_2 / n_1 + …) pairs for sizes (n_1, n_2, …), and the square of the number of
blocks below the root.
"""

import itertools
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.anchor import Hierarchical
from zonal.algebra.anchor.plan import ABSENT, present
from zonal.execution.call import Call


def hierarchy_refusal(call: Call) -> str | None:
    """Why blocks cannot stand for their tokens here, or None."""
    if not call.bound.score.bilinear:
        return (
            f"score {type(call.bound.score).__name__} of mean vectors is not the mean score, "
            "as that of a dot product is"
        )
    if call.bound.slopes is not None:
        return "a bias that depends on pairs of positions (ALiBi) is no sum of one for each"
    return None


def hierarchical(call: Call) -> Tensor:
    """y (B, H, T, P) of a call that is not refused."""
    anchor, marginals = cast(Hierarchical, call.bound.anchor), call.marginals
    assert marginals is not None
    tokens = call.shape.queries
    spans = anchor.spans(tokens)
    # whole smallest blocks; what is added is in none
    size = spans[0]
    fill = -tokens % size if size else 0
    real = F.pad(present(marginals.key), (0, fill))
    q, k, v = (
        torch.where(real[..., None], F.pad(x, (0, 0, 0, fill)), 0)
        for x in (call.q, call.expand(call.k), call.expand(call.v))
    )
    col = call.bias.col
    bias = torch.zeros_like(marginals.key) if col is None else col.to(marginals.key)
    bias = torch.where(real, F.pad(bias.expand_as(marginals.key), (0, fill)), 0)
    q, k, v, bias, real = (x.unflatten(2, (-1, size)) if size else x.unsqueeze(2) for x in (q, k, v, bias, real))
    scores = torch.where(real[..., None, :], q @ k.mT + bias[..., None, :], ABSENT)
    y, total = scores.softmax(-1) @ v, scores.logsumexp(-1)
    count = real.sum(-1).to(y)  # (B, H, nodes)
    mean = real.to(y) / count.clamp_min(1)[..., None]
    q, k, v = ((mean[..., None, :] @ x).squeeze(-2) for x in (q, k, v))
    bias, total = ((mean * x).sum(-1) for x in (bias, total))
    # of each smallest block: what its own is multiplied by, and what comes from others
    factor, added = torch.ones_like(total), torch.zeros_like(v)
    below = 1
    for child, parent in itertools.pairwise(spans):
        nodes = q.shape[2]
        children = parent // child if parent < tokens else nodes
        q, k, v, bias, total, count = (_grouped(x, children) for x in (q, k, v, bias, total, count))
        tied = torch.where(
            (count > 0)[..., None, :], q @ k.mT + (bias + count.clamp_min(1).log())[..., None, :], ABSENT
        )
        own = torch.eye(children, dtype=torch.bool, device=q.device)
        logits = torch.where(own, total[..., None], tied)
        share, total = logits.softmax(-1), logits.logsumexp(-1)
        kept = share.diagonal(dim1=-2, dim2=-1)
        others = torch.where(own, 0, share) @ v
        kept, others = kept.flatten(2)[:, :, :nodes], others.flatten(2, 3)[:, :, :nodes]
        kept, others = (x.repeat_interleave(below, 2)[:, :, : factor.shape[2]] for x in (kept, others))
        factor, added = factor * kept, added * kept[..., None] + others
        whole = count.sum(-1)
        part = count / whole.clamp_min(1)[..., None]
        q, k, v = ((part[..., None, :] @ x).squeeze(-2) for x in (q, k, v))
        bias, total, count = (part * bias).sum(-1), (part * total).sum(-1), whole
        below *= children
    y = torch.where(real[..., None], y * factor[..., None, None] + added[..., None, :], 0)
    return call.scaled(y.flatten(2, 3)[:, :, :tokens])


def _grouped(x: Tensor, children: int) -> Tensor:
    """(B, H, nodes, …) -> (B, H, parents, children, …), zeros in the last parent where it has fewer."""
    fill = -x.shape[2] % children
    padding = (0, 0) * (x.ndim - 3) + (0, fill)
    return F.pad(x, padding).unflatten(2, (-1, children))


__all__ = ["hierarchical", "hierarchy_refusal"]
