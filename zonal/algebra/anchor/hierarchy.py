"""Hierarchical: of all conditionals that read distant tokens as blocks, the one closest to softmax attention.

Tokens are the leaves of a tree. For a query t in child a and a key s in another child b of the same node, the weight
depends on a and b only. Within the smallest blocks the weights are free. Minimising sum_t KL(W_t | softmax_t) under
these ties, with rows that sum to one, gives node by node upward

    Lambda_t = log sum_{s in block} K_ts                                               in the smallest blocks,
    lambda_a = mean_{t in a} Lambda_t,   J_ab = log |b| + mean_{t in a, s in b} L_ts,
    Lambda_t = log(e^lambda_a + sum_b e^J_ab)   for t in a,                             at every node above:

with shares e^(lambda_a - Lambda) of the query's own child and e^(J_ab - Lambda) of each sibling. All queries of a child
give the same mass to keys outside it, so the optimum inside a child does not depend on the optimum outside.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.algebra.anchor.base import Anchor, Blocks
from zonal.algebra.anchor.plan import ABSENT, present
from zonal.algebra.declaration import Derived, Move, require, require_whole


@dataclass(frozen=True)
class Hierarchical(Anchor):
    """Softmax attention with weights tied by a tree: all queries of a block give equal weight to keys of another block.

    Bidirectional self-attention only: queries and keys are the same tokens in the same order.

    sizes: tokens per smallest block, then children per node at each level above; what remains are children of the root.
    (16,): blocks of 16 under one root. (16, 8): groups of 8 such blocks in between. Padding belongs to no block.

    Raises: ArgumentError for sizes below 2. Source: Amizadeh et al. 2025, here derived from its variational principle.
    """

    family = "tree"
    couples = True
    normalises = True

    sizes: tuple[int, ...] = (16,)

    def __post_init__(self) -> None:
        require(
            isinstance(self.sizes, tuple) and len(self.sizes) > 0,
            f"Hierarchical: sizes must be a tuple of at least one number, received {self.sizes!r}.",
        )
        for size in self.sizes:
            require_whole("Hierarchical: each of sizes", size, 2)

    def spans(self, tokens: int) -> tuple[int, ...]:
        """Tokens of a node, level by level, the last being the root."""
        spans, span = [], 1
        for size in self.sizes:
            span *= size
            if span < tokens:
                spans.append(span)
        return (*spans, tokens)

    def weights(self, blocks: Blocks) -> Tensor:
        assert blocks.marginals is not None
        real = present(blocks.marginals.key)
        tokens = real.shape[-1]
        scores = torch.where(real[..., None, :] & real[..., :, None], blocks.qk, 0)
        place = torch.arange(tokens, device=real.device)
        spans = self.spans(tokens)
        inside = torch.where(_together(place // spans[0]) & real[..., None, :], scores, ABSENT)
        weights, total = inside.softmax(-1), inside.logsumexp(-1)
        for child, parent in itertools.pairwise(spans):
            node = place // child
            member = torch.nn.functional.one_hot(node).to(scores) * real[..., None]
            count = member.sum(-2)
            mean = member / count.clamp_min(1)[..., None, :]
            joint = mean.mT @ scores @ mean + count.clamp_min(1).log()[..., None, :]
            tied = torch.where((count > 0)[..., None, :], joint, ABSENT)
            sibling = torch.arange(tied.shape[-1], device=real.device)
            family = sibling // (parent // child if parent < tokens else tied.shape[-1])
            tied = torch.where(_together(family), tied, ABSENT)
            own = torch.eye(tied.shape[-1], dtype=torch.bool, device=real.device)
            logits = torch.where(own, (mean.mT @ total[..., None]), tied)
            share, total = logits.softmax(-1), logits.logsumexp(-1)[..., node]
            spread = (share / count.clamp_min(1)[..., None, :])[..., node, :][..., node]
            own_share = share.diagonal(dim1=-2, dim2=-1)[..., node, None]
            weights = torch.where(_together(node), weights * own_share, weights + spread)
        return torch.where(real[..., None, :] & real[..., :, None], weights, 0)

    def moves(self) -> tuple[Move, ...]:
        gauge = Derived(
            "row gauge of blocks",
            "hence K and a K are the same operator for any positive a that queries of one smallest block share",
        )
        tied = Derived(
            "tied blocks",
            "hence blocks meet through their mean scores, which for dot products are scores of mean queries and keys",
        )
        sizes = " x ".join(map(str, self.sizes))
        text = (
            f"distant tokens are read as blocks of {sizes}: all queries of a block give all keys of another block "
            "the same weight"
        )
        return (
            self.move("restriction", "tree", text, tied),
            self.move("quotient", "row probe", "only the row-conditional of K is observed", gauge),
            self.move("section", "nearest", "of conditionals with such blocks the nearest in relative entropy"),
        )


def _together(label: Tensor) -> Tensor:
    """Which pairs have the same label, (n, n)."""
    return label[:, None] == label


__all__ = ["Hierarchical"]
