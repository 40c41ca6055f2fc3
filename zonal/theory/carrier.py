"""Carriers: the units that attention works on, tokens or groups of tokens.

A carrier is a labelling pi: records -> buckets. Tokens are the carrier with one record per bucket. The carrier ``fine``
refines ``coarse`` if a factor map f gives coarse.labels = f(fine.labels). This f is unique and onto, so carriers up to
renaming are partitions, ordered by refinement.

A kernel is given by its logarithm, log K (..., T, S), with -inf for forbidden pairs. Its pushforward along f (queries)
and g (keys) aggregates all fine pairs of each coarse pair. With K > 0 on allowed pairs, a coarse pair is allowed if one
of its fine pairs is. The following holds:

* Pushforwards compose: (f' . f, g' . g)_* = (f', g')_* (f, g)_*, and identity maps change nothing. The reason is that
  sums of p-th powers and maxima are associative. A mean of means is not the mean, unless each is weighted by its mass.
* Merging keys by ``Sum`` commutes with the row-conditional. Merging queries does so up to weights: rows are averaged by
  their row sums.
* Anchoring after each step equals anchoring once at the end for the row anchor and maps of keys. For maps of queries it
  does not.

Source: Geometric Attention, definitions 2.2 to 2.5 and 5.2, remark 5.5.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.algebra.anchor import Anchor, Blocks, SumAnchor, TopK
from zonal.algebra.carrier import Buckets, Factor
from zonal.algebra.declaration import require, require_positive, require_whole
from zonal.algebra.prior import visibility


class Tokens(Buckets):
    """The carrier with one bucket per record: that of a standard transformer, and the finest of all."""

    def __init__(self, count: int) -> None:
        require_whole("Tokens: count", count)
        super().__init__(torch.arange(count))


class Aggregation:
    """How the evidence of fine pairs is aggregated to that of a coarse pair."""

    def along(self, log_kernel: Tensor, factor: Factor) -> Tensor:
        """log K (..., T, S) with its columns gathered: (..., T, size)."""
        raise NotImplementedError(f"{type(self).__name__}.along")


@dataclass(frozen=True)
class LogSumExp(Aggregation):
    """log K~ = tau log sum exp(log K / tau) over allowed pairs: the p-norm of evidence with p = 1 / tau.

    tau = 1 gives the sum, and tau -> 0 the maximum.
    """

    temperature: float = 1.0

    def __post_init__(self) -> None:
        require_positive("LogSumExp: temperature", self.temperature, "For the limit 0 use Max()")

    def along(self, log_kernel: Tensor, factor: Factor) -> Tensor:
        top = factor.largest(log_kernel.detach().mT).mT
        top = torch.where(top.isneginf(), 0, top)
        part = ((log_kernel - factor.pulled(top.mT).mT) / self.temperature).exp()
        total = factor.total(part.mT).mT
        # the inner where keeps the infinite slope of log at 0 out of the backward pass, where it would be 0 * inf
        empty = total == 0
        return torch.where(empty, float("-inf"), top + self.temperature * torch.where(empty, 1, total).log())


@dataclass(frozen=True)
class Sum(Aggregation):
    """K~ = sum of K over allowed pairs, the paper's definition 5.2; with the exponential link log-sum-exp of scores."""

    def along(self, log_kernel: Tensor, factor: Factor) -> Tensor:
        return LogSumExp().along(log_kernel, factor)


@dataclass(frozen=True)
class Max(Aggregation):
    """K~ = the largest K of the pairs."""

    def along(self, log_kernel: Tensor, factor: Factor) -> Tensor:
        return factor.largest(log_kernel.mT).mT


def pushforward(log_kernel: Tensor, queries: Factor, keys: Factor, by: Aggregation = Sum()) -> Tensor:
    """The pushforward log K~ (..., T~, S~) of log K (..., T, S) along maps of queries (T to T~) and keys (S to S~).

    Rows of batched maps broadcast to leading axes.

    Raises: ArgumentError for maps of another number of queries or keys.
    """
    shape = tuple(log_kernel.shape)
    fits = log_kernel.ndim >= 2 and log_kernel.is_floating_point() and shape[-2:] == (queries.fine, keys.fine)
    require(
        fits,
        f"pushforward: log K (..., {queries.fine}, {keys.fine}) is required for these maps, received "
        f"{log_kernel.dtype} of shape {shape}.",
    )
    return by.along(by.along(log_kernel, keys).mT, queries).mT


def reanchored(log_kernel: Tensor, queries: Factor, keys: Factor, anchor: Anchor, by: Aggregation = Sum()) -> Tensor:
    """W~ = A(K~): the weights (..., T~, S~) of the pushforward of log K (B, H, T, S).

    anchor: one that needs only rows of K (``Row``, ``TopK``, ``Count``, ``Raw``).

    Raises: ArgumentError for other anchors, and as ``pushforward`` does.
    """
    require(
        log_kernel.ndim == 4,
        f"reanchored: log K (batch, heads, T, S) is required, received shape {tuple(log_kernel.shape)}.",
    )
    require(
        isinstance(anchor, SumAnchor | TopK),
        f"reanchored: anchor {type(anchor).__name__} needs more than the kernel of queries and keys, and only the "
        "kernel has a pushforward. Use Row, TopK, Count or Raw.",
    )
    pushed = pushforward(log_kernel, queries, keys, by)
    seen = visibility(pushed.shape[2], pushed.shape[3], (), causal=False, include_self=True)
    return anchor.weights(Blocks(pushed, True, None, ~pushed.isneginf(), seen, {}))


__all__ = ["Aggregation", "Buckets", "Factor", "LogSumExp", "Max", "Sum", "Tokens", "pushforward", "reanchored"]
