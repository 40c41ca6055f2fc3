"""The Wasserstein distance between persistence diagrams of dimension 0."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.algebra.metric.base import Smooth


@dataclass(frozen=True)
class Topological(Smooth):
    """d(a, b) = sqrt(W_2(A, B)^2 + eps^2) - eps for persistence diagrams A = {(0, |a_i|)}, B = {(0, |b_j|)}.

    The numbers of a point are death times, and all births are 0.

    W_2^2 = min over matchings of sum over matched (i, j) of (|a_i| - |b_j|)^2 + sum over unmatched of |a_i|^2 / 2 and
    |b_j|^2 / 2,

    where unmatched points go to the diagonal. A death of 0 lies on the diagonal, so zeros pad smaller diagrams. Matched
    deaths are in order because the square is convex. The best matching is thus a path through a table of n^2 cells,
    with three sums and two minima each. Only deaths within a factor of 2 + sqrt(3) of each other are matched.

    Points with the same deaths in another order have distance 0. The gradient is that of the best matching, and jumps
    where another matching becomes best. Layers compute the deaths of a token's neighbourhood (``zonal.nn.deaths``).

    Raises: ArgumentError for an eps out of range. Source: REWA (004).
    """

    def typical(self, dim: int) -> float:
        return 0.5 * dim**0.5

    def passes(self, dim: int) -> int:
        return 5 + 5 * dim**2 // 2  # measured: most of a row's minima stay in the cache

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        a, b = (x.abs().sort(-1, descending=True)[0] for x in (q, k))
        a, b = a.unsqueeze(-2), b.unsqueeze(-3)  # (…, T, 1, D), (…, 1, S, D)
        # the cheapest way to deal with the first i deaths of one and the first j of the other
        row = [a.new_zeros(()), *(b.square() / 2).cumsum(-1).unbind(-1)]
        for i in range(a.shape[-1]):
            death = a[..., i]
            left = death.square() / 2
            new = [row[0] + left]
            for j in range(b.shape[-1]):
                matched = row[j] + (death - b[..., j]).square()
                new.append(torch.minimum(matched, torch.minimum(row[j + 1] + left, new[j] + b[..., j].square() / 2)))
            row = new
        return (row[-1] + self.eps**2).sqrt() - self.eps


__all__ = ["Topological"]
