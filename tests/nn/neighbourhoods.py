"""Deaths of neighbourhoods by Kruskal's algorithm, one token after another."""

import itertools

import torch
from torch import Tensor


def deaths_by_hand(points: Tensor, keys: Tensor, neighbours: int, eps: float = 1e-4) -> Tensor:
    """points (B, H, T, D), keys (B, Hkv, T, D) -> (B, H, T, neighbours)."""
    batch, heads, length, _ = points.shape
    groups = heads // keys.shape[1]
    rows = [
        of_cloud(cloud_of(points[b, h], keys[b, h // groups], t, neighbours), neighbours, eps)
        for b in range(batch)
        for h in range(heads)
        for t in range(length)
    ]
    return torch.stack(rows).unflatten(0, (batch, heads, length))


def cloud_of(points: Tensor, keys: Tensor, t: int, neighbours: int) -> Tensor:
    """The point of token t and its nearest earlier keys."""
    order = (keys[:t] - points[t]).norm(dim=-1).argsort()[:neighbours]
    return torch.cat([points[t : t + 1], keys[:t][order]])


def of_cloud(cloud: Tensor, neighbours: int, eps: float) -> Tensor:
    """Edges of the minimal spanning tree, longest first, then zeros."""
    fixed = cloud.detach()
    edges = sorted(
        itertools.combinations(range(len(cloud)), 2), key=lambda pair: float((fixed[pair[0]] - fixed[pair[1]]).norm())
    )
    component = [*range(len(cloud))]
    found = []
    for i, j in edges:
        if component[i] != component[j]:
            found.append(((cloud[i] - cloud[j]).square().sum() + eps**2).sqrt() - eps)
            component = [component[i] if c == component[j] else c for c in component]
    return torch.stack([*reversed(found), *(cloud.new_zeros(()) for _ in range(neighbours - len(found)))])
