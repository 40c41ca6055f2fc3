"""The shape of what lies around a token: deaths of components in the cloud of the token and its nearest earlier
neighbours.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from zonal.nn.positions import document_index

_QUERIES = 128
# lengths are smooth at coincident points: sqrt(x^2 + eps^2) - eps, exactly 0 there
_EPS = 1e-4


class Earlier(NamedTuple):
    """Keys that came before: k (B, Hkv, P, D), and which are real, (B, P), None = all."""

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
    neighbours), falling.

    The cloud of query t is q_t with the ``neighbours`` nearest of the keys k_s, s < t; that of key t is k_t with the
    nearest of the same keys. So what one map makes of a token, as query and as key, has one cloud. In a Vietoris-Rips
    complex each point is a component, born at 0, that dies at the length of an edge of the minimal spanning tree; the
    last component never dies. Padding and other documents are no neighbours. Fewer than ``neighbours`` earlier tokens
    leave zeros, which are no components at all: the first token's diagram is empty.

    Args:
        q: (B, H, T, D). k: (B, Hkv, T, D), H a multiple of Hkv. earlier: keys of tokens before the first.
        key_padding_mask: (B, T), True = real token. cu_seqlens: (N + 1,) offsets of documents packed in one row.

    Gradients are those of the edges; which tokens are neighbours, and which edges the tree has, is piecewise constant.
    Work: T S D a head to find neighbours, and neighbours^2 D a token.
    """
    past = 0 if earlier is None else earlier.k.shape[2]
    keys = k if earlier is None else torch.cat([earlier.k.to(k), k], 2)
    real = (
        torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device)
        if key_padding_mask is None
        else key_padding_mask
    )
    if earlier is not None:
        before = (
            torch.ones(k.shape[0], past, dtype=torch.bool, device=k.device) if earlier.mask is None else earlier.mask
        )
        real = torch.cat([before, real], 1)
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
    ends = (cloud.gather(3, end.unsqueeze(-1).expand(*end.shape, cloud.shape[-1])) for end in (one, other))
    squared = (next(ends) - next(ends)).square().sum(-1)
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
