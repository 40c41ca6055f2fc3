"""Persistence diagrams of dimension 0 around a token: the deaths of components in the cloud of its nearest earlier
tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zonal.nn.positions import document_index

_QUERIES = 128
# lengths are smooth at coincident points: sqrt(x^2 + eps^2) - eps, exactly 0 there
_EPS = 1e-4


class Earlier(NamedTuple):
    """Keys before the first token: k (B, Hkv, P, D), and which of them are real, bool (B, P); None: all."""

    k: Tensor
    mask: Tensor | None


def deaths(
    q: Tensor,
    k: Tensor,
    neighbours: int,
    *,
    earlier: Earlier | None = None,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The persistence diagrams of dimension 0 around queries and keys: (B, H, T, neighbours) and (B, Hkv, T,
    neighbours), in falling order.

    The cloud of query t consists of q_t and the ``neighbours`` nearest keys k_s with s < t. The cloud of key t consists
    of k_t and its nearest earlier keys. If queries and keys share one projection, both have the same cloud. In the
    Vietoris-Rips complex each point is a component that is born at 0 and dies at the length of an edge of the minimal
    spanning tree; the last component never dies. An edge of length x counts as sqrt(x² + ε²) − ε with ε = 1e-4, so that
    its gradient is finite. Padding and other documents are not neighbours. With fewer than ``neighbours`` earlier
    tokens the remaining entries are zero.

    Args:
        q: (B, H, T, D).
        k: (B, Hkv, T, D), with H a multiple of Hkv.
        neighbours: number of neighbours in a cloud.
        earlier: keys of tokens before the first.
        key_padding_mask: bool (B, T), True for a real token.
        cu_seqlens: (N + 1,) offsets of documents packed into one row.

    Gradients are those of the edge lengths; the choice of neighbours and edges is a constant for gradients.

    Cost per head: T S D to find neighbours, and neighbours² D per token.

    Source: Phadke, *The Universal REWA Attention Framework*, 2025, section 10.4.2.
    """
    past = 0 if earlier is None else earlier.k.shape[2]
    keys = k if earlier is None else torch.cat([earlier.k.to(k), k], 2)
    real = torch.ones(keys.shape[0], keys.shape[2], dtype=torch.bool, device=k.device)
    if key_padding_mask is not None:
        real[:, past:] = key_padding_mask
    if earlier is not None and earlier.mask is not None:
        real[:, :past] = earlier.mask
    document = None if cu_seqlens is None else document_index(cu_seqlens, k.shape[2])
    found = []
    for points in (q, k):
        own = keys.repeat_interleave(points.shape[1] // keys.shape[1], 1)
        blocks = []
        for start in range(0, points.shape[2], _QUERIES):
            some = points[:, :, start : start + _QUERIES]
            place = torch.arange(start, start + some.shape[2], device=k.device)
            seen = torch.arange(keys.shape[2], device=k.device) < place[:, None] + past
            if document is not None:
                seen = seen & (document == document[place][:, None])
            blocks.append(_around(some, own, seen & real[:, None, None], neighbours))
        found.append(torch.cat(blocks, 2).to(points.dtype))
    return found[0], found[1]


def _around(points: Tensor, keys: Tensor, seen: Tensor, neighbours: int) -> Tensor:
    """Deaths (B, H, t, n) around points (B, H, t, D) among keys (B, H, S, D) that ``seen`` (B, 1, t, S) allows."""
    compute = torch.promote_types(points.dtype, torch.float32)
    points, keys = points.to(compute), keys.to(compute)
    count = min(neighbours, keys.shape[2])
    with torch.no_grad():
        gap = torch.cdist(points.double(), keys.double())
        gap = gap.masked_fill(~(seen & gap.isfinite()), float("inf"))
        nearest, index = gap.topk(count, -1, largest=False)
    batch, heads = (
        torch.arange(n, device=keys.device).view(shape)
        for n, shape in ((keys.shape[0], (-1, 1, 1, 1)), (keys.shape[1], (1, -1, 1, 1)))
    )
    # an absent neighbour is the token again: it joins at length 0, and changes no other edge
    own = points.unsqueeze(3)
    cloud = torch.cat([own, torch.where(nearest.isfinite().unsqueeze(-1), keys[batch, heads, index], own)], 3)
    one, other = _tree(cloud.detach())
    start, end = (cloud.gather(3, at.unsqueeze(-1).expand(*at.shape, cloud.shape[-1])) for at in (one, other))
    squared = (start - end).square().sum(-1)
    length = squared / ((squared + _EPS**2).sqrt() + _EPS)  # the difference of the roots, without cancellation
    return torch.nn.functional.pad(length.sort(-1, descending=True)[0], (0, neighbours - count))


def _tree(cloud: Tensor) -> tuple[Tensor, Tensor]:
    """Prim's minimal spanning tree of clouds (…, m, D), by the ends of its edges, each (…, m - 1)."""
    gap = torch.cdist(cloud.double(), cloud.double(), compute_mode="donot_use_mm_for_euclid_dist")
    best, parent = gap[..., 0, :], torch.zeros(gap.shape[:-1], dtype=torch.int64, device=gap.device)
    inside = torch.zeros_like(parent, dtype=torch.bool)
    inside[..., 0] = True
    edges = []
    for _ in range(gap.shape[-1] - 1):
        child = best.masked_fill(inside, float("inf")).argmin(-1, keepdim=True)
        edges.append((parent.gather(-1, child), child))
        inside = inside.scatter(-1, child, True)
        row = gap.gather(-2, child.unsqueeze(-1).expand(*child.shape, gap.shape[-1])).squeeze(-2)
        closer = row < best
        parent, best = torch.where(closer, child, parent), torch.where(closer, row, best)
    empty = parent[..., :0]
    return torch.cat([empty, *(edge[0] for edge in edges)], -1), torch.cat([empty, *(edge[1] for edge in edges)], -1)


__all__ = ["Earlier", "deaths"]
