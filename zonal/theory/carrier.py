"""Carriers: what can be addressed.

Records fall into buckets, coarser carriers follow from finer ones by factor maps, and kernels are pushed along.

A carrier is a labelling pi: records -> buckets; tokens are the one in which each record is a bucket of its own.
``fine`` refines ``coarse`` where a map f with coarse.labels = f(fine.labels) exists. It is then onto and the only one,
so carriers up to renaming are partitions, ordered by refinement.

A kernel is given by its logarithm, log K (..., T, S), -inf where a pair is forbidden. Its pushforward along f (queries)
and g (keys) gathers all fine pairs of a coarse one; with K > 0 on allowed pairs, what is allowed is pushed along with
it. What holds, and where a condition is needed:

* along composed maps every pushforward is the composition of pushforwards: (f' . f, g' . g)_* = (f', g')_* (f, g)_*,
  and identities change nothing. It holds because sums of p-th powers and maxima are associative; a mean of means is no
  mean, unless each is weighed by its mass;
* merging keys by ``Sum`` commutes with the row-conditional; merging queries does so up to weights: rows are averaged by
  their row sums;
* anchoring again after each step is anchoring once after all of them for the row anchor and maps of keys alone; not for
  maps of queries.

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

    to (..., n): for each fine bucket its coarse one, 0 … size - 1, each of which occurs.

    Leading axes are rows, each with a map of its own onto as many buckets.

    Raises: ArgumentError for entries that are no whole numbers in range, and for a coarse bucket without a fine one.
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
                f"Factor: a map onto all {self.size} buckets is required, and none is sent to bucket "
                f"{int(empty[0, -1])}: the map is not surjective. "
                "Number the buckets that occur without gaps, torch.unique(labels, return_inverse=True)[1], and give "
                "their number as the size."
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
        """The composed map, this one first.

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
        """The largest (..., size, P) of values (..., n, P). Its gradient is shared by those that are equally large."""
        index = self._index(values)
        start = values.new_zeros(*index.shape[:-2], self.size, index.shape[-1])
        return start.scatter_reduce(-2, index, values.expand(index.shape), "amax", include_self=False)

    def masses(self, mass: Tensor | None = None) -> Tensor:
        """The mass (..., size) of coarse buckets from that of fine ones (..., n); None = 1 each: how many there are."""
        mass = torch.ones(self.to.shape, device=self.to.device, dtype=torch.float32) if mass is None else mass
        return self.total(mass[..., None])[..., 0]

    def merged(self, values: Tensor, mass: Tensor) -> Tensor:
        """The mean of values (..., n, P) by mass (..., n): (..., size, P).

        Where all of a bucket's mass is 0 its members count alike.
        """
        mass = mass[..., None]
        mass = torch.where(self.pulled(self.total(mass)) > 0, mass, 1)
        return (self.total(values * mass) / self.total(mass)).to(values.dtype)

    def pulled(self, values: Tensor) -> Tensor:
        """Values (..., size, P) of coarse buckets at each of their fine ones, (..., n, P): un-merged."""
        index = self._index(values)
        return values.expand(*index.shape[:-2], *values.shape[-2:]).gather(-2, index)

    def _index(self, values: Tensor) -> Tensor:
        """The map beside values (..., any, P): (..., n, P)."""
        leading = torch.broadcast_shapes(self.to.shape[:-1], values.shape[:-2])
        return self.to[..., None].expand(*leading, self.fine, values.shape[-1])


class Buckets:
    """Records by labels (..., N), whole numbers 0 … size - 1 each of which occurs.

    Leading axes are rows, each with labels of its own.

    Raises: ArgumentError for labels that leave one out, or are no whole numbers.
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
        """Whether what is together here is together there: the order of refinement, in which this one is the finer or
        the same.
        """
        return self.records == coarser.records and self._met(coarser)[1] is None

    def same(self, other: "Buckets") -> bool:
        """Whether both put the same records together: equal up to the names of buckets."""
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
    """Each of ``count`` records by itself: the carrier of a standard transformer, finer than every other."""

    def __init__(self, count: int) -> None:
        require_whole("Tokens: count", count)
        super().__init__(torch.arange(count))


class Aggregation:
    """How the evidence of all fine pairs becomes that of a coarse one."""

    def along(self, log_kernel: Tensor, factor: Factor) -> Tensor:
        """log K (..., T, S) with its columns gathered: (..., T, size)."""
        raise NotImplementedError(f"{type(self).__name__}.along")


@dataclass(frozen=True)
class LogSumExp(Aggregation):
    """log K~ = tau log sum exp(log K / tau) over allowed pairs: the p-norm of evidence, p = 1 / tau.

    tau = 1 is the sum; tau -> 0 the largest.
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
    """log K~ (..., T~, S~) of log K (..., T, S) along the maps of queries (T to T~) and keys (S to S~).

    Rows of batched maps broadcast to leading axes.

    Raises: ArgumentError for maps of other numbers of queries or keys.
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
    """W~ = A(K~): weights (..., T~, S~) of the pushforward, by an anchor that looks at rows of K (``Row``, ``TopK``,
    ``Count``, ``Raw``).

    log K here is (B, H, T, S).

    Raises: ArgumentError for anchors that need more than K, and what ``pushforward`` raises.
    """
    require(
        log_kernel.ndim == 4,
        f"reanchored: log K (batch, heads, T, S) is required, received shape {tuple(log_kernel.shape)}.",
    )
    require(
        isinstance(anchor, SumAnchor | TopK),
        f"reanchored: anchor {type(anchor).__name__} needs more than the kernel of queries and keys, which is all "
        "that is pushed along. Use Row, TopK, Count or Raw.",
    )
    pushed = pushforward(log_kernel, queries, keys, by)
    seen = visibility(pushed.shape[2], pushed.shape[3], (), causal=False, include_self=True)
    return anchor.weights(Blocks(pushed, True, None, ~pushed.isneginf(), seen, {}))


__all__ = ["Aggregation", "Buckets", "Factor", "LogSumExp", "Max", "Sum", "Tokens", "pushforward", "reanchored"]
