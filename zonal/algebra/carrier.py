"""Carriers: labellings of records by buckets, and the maps from finer onto coarser ones (see ``zonal.carrier``)."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.algebra.declaration import require, require_whole
from zonal.errors import ArgumentError


def _require_labels(name: str, labels: Tensor) -> None:
    whole = labels.dtype in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    require(
        whole and labels.ndim >= 1 and labels.numel() > 0,
        f"{name}: whole numbers (..., n) with n >= 1 are required, received {labels.dtype} of shape "
        f"{tuple(labels.shape)}.",
    )


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
        require_whole("Factor: size", self.size)
        _require_labels("Factor", self.to)
        object.__setattr__(self, "to", self.to.long())
        low, high = (int(x) for x in self.to.aminmax())
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

        A bucket whose mass is all 0 gets the plain mean of its members. Sums are in float32 or better.
        """
        mass = mass[..., None].to(torch.promote_types(mass.dtype, torch.float32))
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
        _require_labels("Buckets", labels)
        self.map = Factor(labels, int(labels.max()) + 1)

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
                "leads from this one to the other. Ask the finer of two carriers for its map onto the coarser."
            )
        return Factor(to, coarser.size)

    def _met(self, coarser: "Buckets") -> tuple[Tensor, int | None]:
        """A coarse label for each bucket, and the first bucket that meets two."""
        mine, theirs = torch.broadcast_tensors(self.labels, coarser.labels)
        start = mine.new_zeros(*mine.shape[:-1], self.size)
        least, most = (start.scatter_reduce(-1, mine, theirs, how, include_self=False) for how in ("amin", "amax"))
        split = (least != most).nonzero()
        return least, int(split[0, -1]) if len(split) else None


__all__ = ["Buckets", "Factor"]
