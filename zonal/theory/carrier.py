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
from zonal.algebra.declaration import require, require_whole
from zonal.algebra.prior import visibility
from zonal.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Factor:
    """A map from a finer carrier onto a coarser one.

    to (..., n): the coarse bucket of each fine one, from 0 to size - 1, each of which occurs. Leading axes are rows,
    each with its own map onto the same number of buckets.

    Raises: ArgumentError for entries that are not whole numbers in range, and for a coarse bucket without a fine one.
    """

    to: Tensor
    size: int

    def __post_init__(self) -> None:
        to = self.to
        require_whole("Factor: size", self.size)
        whole = (
            to.ndim >= 1
            and to.numel() > 0
            and to.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        )
        require(
            whole,
            f"Factor: whole numbers (..., n) with n >= 1 are required, received {to.dtype} of shape {tuple(to.shape)}.",
        )
        object.__setattr__(self, "to", to.long())
        low, high = (int(x) for x in to.aminmax())
        require(
            low >= 0 and high < self.size, f"Factor: entries must lie in 0 … {self.size - 1}, received {low} … {high}."
        )
        empty = (self.masses() == 0).nonzero()
        if len(empty):
            raise ArgumentError(
                f"Factor: the map must reach all {self.size} buckets (it is not surjective), but none is sent to "
                f"bucket {int(empty[0, -1])}. Number the buckets that occur without gaps, "
                "torch.unique(labels, return_inverse=True)[1], and give their number as the size."
            )

    @staticmethod
    def identity(size: int) -> "Factor":
        """The map that changes nothing."""
        require_whole("Factor.identity: size", size)
        return Factor(torch.arange(size), size)

    @property
    def fine(self) -> int:
        """How many buckets the finer carrier has."""
        return self.to.shape[-1]

    def then(self, coarser: "Factor") -> "Factor":
        """The composed map: this one first, then ``coarser``.

        Raises: ArgumentError when ``coarser`` starts from another number of buckets.
        """
        require(
            coarser.fine == self.size,
            f"Factor.then: a map of {self.size} buckets is required, received one of {coarser.fine}.",
        )
        return Factor(self.pulled(coarser.to[..., None])[..., 0], coarser.size)

    def total(self, values: Tensor) -> Tensor:
        """Sums (..., size, P) of values (..., n, P)."""
        index = self._index(values)
        shape = (*index.shape[:-2], self.size, index.shape[-1])
        return values.new_zeros(shape).scatter_add(-2, index, values.expand(index.shape))

    def largest(self, values: Tensor) -> Tensor:
        """The maxima (..., size, P) of values (..., n, P). Equal maxima share the gradient."""
        index = self._index(values)
        start = values.new_zeros(*index.shape[:-2], self.size, index.shape[-1])
        return start.scatter_reduce(-2, index, values.expand(index.shape), "amax", include_self=False)

    def masses(self, mass: Tensor | None = None) -> Tensor:
        """The mass (..., size) of coarse buckets from that of fine ones (..., n). None = 1 each, which counts them."""
        mass = torch.ones(self.to.shape, device=self.to.device, dtype=torch.float32) if mass is None else mass
        return self.total(mass[..., None])[..., 0]

    def merged(self, values: Tensor, mass: Tensor) -> Tensor:
        """The mean of values (..., n, P) per bucket, weighted by mass (..., n): (..., size, P).

        A bucket whose mass is all 0 gets the plain mean of its members.
        """
        mass = mass[..., None]
        mass = torch.where(self.pulled(self.total(mass)) > 0, mass, 1)
        return (self.total(values * mass) / self.total(mass)).to(values.dtype)

    def pulled(self, values: Tensor) -> Tensor:
        """Values (..., size, P) of coarse buckets copied to their fine buckets, (..., n, P)."""
        index = self._index(values)
        return values.expand(*index.shape[:-2], *values.shape[-2:]).gather(-2, index)

    def _index(self, values: Tensor) -> Tensor:
        """The map beside values (..., any, P): (..., n, P)."""
        leading = torch.broadcast_shapes(self.to.shape[:-1], values.shape[:-2])
        return self.to[..., None].expand(*leading, self.fine, values.shape[-1])


class Buckets:
    """Records by labels (..., N): whole numbers from 0 to size - 1, each of which occurs.

    Leading axes are rows, each with its own labels.

    Raises: ArgumentError for labels that skip a number or are not whole numbers.
    """

    def __init__(self, labels: Tensor) -> None:
        self.map = Factor(labels, int(labels.max()) + 1 if labels.numel() else 1)

    @property
    def labels(self) -> Tensor:
        """(..., N)."""
        return self.map.to

    @property
    def records(self) -> int:
        return self.map.fine

    @property
    def size(self) -> int:
        """How many buckets there are."""
        return self.map.size

    def coarsened(self, factor: Factor) -> "Buckets":
        """The carrier that a factor map makes of this one."""
        return Buckets(self.map.then(factor).to)

    def refines(self, coarser: "Buckets") -> bool:
        """Whether records that share a bucket here share one there, so that this carrier is the finer or the same."""
        return self.records == coarser.records and self._met(coarser)[1] is None

    def same(self, other: "Buckets") -> bool:
        """Whether both group the same records, so that they are equal up to the names of buckets."""
        return self.refines(other) and other.refines(self)

    def factor(self, coarser: "Buckets") -> Factor:
        """The map f with ``coarser.labels = f(labels)``.

        Raises: ArgumentError when this carrier does not refine the other.
        """
        require(
            self.records == coarser.records,
            f"factor: carriers of the same records are required, received {self.records} and {coarser.records}.",
        )
        to, split = self._met(coarser)
        if split is not None:
            raise ArgumentError(
                f"factor: bucket {split} of this carrier has records that the other one keeps apart, so that no map "
                "leads from this one to the other. "
                "Ask the finer of two carriers for its map onto the coarser."
            )
        return Factor(to, coarser.size)

    def _met(self, coarser: "Buckets") -> tuple[Tensor, int | None]:
        """A coarse label for each bucket, and the first bucket that meets two."""
        mine, theirs = torch.broadcast_tensors(self.labels, coarser.labels)
        start = mine.new_zeros(*mine.shape[:-1], self.size)
        least, most = (start.scatter_reduce(-1, mine, theirs, how, include_self=False) for how in ("amin", "amax"))
        split = (least != most).nonzero()
        return least, int(split[0, -1]) if len(split) else None


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
        require(
            self.temperature > 0,
            f"LogSumExp: temperature must be > 0, received {self.temperature}. For the limit 0 use Max().",
        )

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
