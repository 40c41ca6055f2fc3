"""Searches: how the sparse path finds candidate keys for a query without visiting all keys.

The result is an approximation, and the ledger states it.
"""

import math
from dataclasses import dataclass, replace

from zonal.algebra.declaration import Declaration, Move, require, require_positive, require_whole

MOST_BITS, MOST_PROJECTIONS = 16, 4


class Search(Declaration, abstract=True):
    """Base of searches for candidates of a query's nearest keys."""

    slot = "search"


@dataclass(frozen=True)
class LSH(Search):
    """Locality-sensitive hashing: a query's candidates share its bucket in one of ``tables`` tables, or its ``window``.

    A table hashes each space of the score by a family of its own, and joins the cells:
    dot products, cosines, angles: ``bits`` signs of random projections (SimHash); each agrees with probability 1 -
    angle / pi.
    plane: ``projections`` cells floor((p.w + u)/r), w ~ N(0, I / D), u uniform on [0, r); given w, all agree with
    probability prod_k (1 - |D_k.w| / r)_+ over u.
    hyperbolic space: the cell floor((radius + u)/r) and ``bits`` signs of the direction.

    bits: None = log2 of the number of keys less 5 (about 32 keys per bucket if evenly spread), divided among the spaces
    of a product, with at least 1 each.
    width: r, in units of a point's numbers in the plane, and of the radius. reach: the most keys per bucket that a
    query visits, the nearest in position (causal: the latest). window: the number of nearest positions that it always
    visits, itself first. Each query visits at most tables * reach + window keys for any input, and its candidates do
    not depend on later tokens. Cells are identified by 16-bit numbers, so that among many thousand keys a few
    candidates may come from other cells.

    Raises: ArgumentError for numbers out of range.
    """

    tables: int = 16
    bits: int | None = None
    projections: int = 2
    width: float = 1.5
    reach: int = 128
    window: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("tables", "bits", "projections", "reach", "window", "seed"):
            if (value := getattr(self, name)) is not None or name != "bits":
                require_whole(f"hashing.LSH: {name}", value, 0 if name == "seed" else 1)
        require(
            self.bits is None or self.bits <= MOST_BITS,
            f"hashing.LSH: bits must be at most {MOST_BITS}, received {self.bits}. "
            "For many similar keys, raise tables instead.",
        )
        require(
            self.projections <= MOST_PROJECTIONS,
            f"hashing.LSH: projections must be at most {MOST_PROJECTIONS}, received {self.projections}.",
        )
        require_positive("hashing.LSH: width (of a cell)", self.width)

    def sized(self, keys: int, spaces: int = 1) -> "LSH":
        """This search with open ``bits`` set for a number of keys and spaces."""
        if self.bits is not None:
            return self
        return replace(self, bits=max(1, min(MOST_BITS, round(math.log2(max(keys, 1))) - 5) // spaces))

    @property
    def most(self) -> int:
        """The most keys that a query visits."""
        return self.tables * self.reach + self.window

    def moves(self) -> tuple[Move, ...]:
        text = (
            f"on the sparse path a row keeps its largest of at most {self.most} keys, found by {self.tables} hash "
            f"tables and a window of {self.window}; how many of the exact ones they include depends on the input: "
            "zonal.explain(…, sample=(q, k)) measures it"
        )
        return (self.move("approximation", "hash tables", text),)


__all__ = ["LSH", "MOST_BITS", "Search"]
