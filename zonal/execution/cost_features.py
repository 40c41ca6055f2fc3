"""What feature maps, and the splitting of packed documents, cost: shared by the paths that carry a state."""

import itertools

from zonal.execution.problem import Problem
from zonal.execution.tally import Tally


def document_groups(edges: tuple[int, ...]) -> list[tuple[int, int, bool]]:
    """(documents, longest, all alike) of each group of documents whose lengths share their number of bits."""
    found: dict[int, list[int]] = {}
    for start, stop in itertools.pairwise(edges):
        found.setdefault((stop - start - 1).bit_length(), []).append(stop - start)
    return [(len(lengths), max(lengths), min(lengths) == max(lengths)) for lengths in found.values()]


def write(p: Problem, tally: Tally, vectors: float, count: float = 1) -> None:
    """phi of ``vectors`` vectors."""
    features = p.features
    assert features is not None
    if features.trivial or vectors <= 0:
        return
    size = features.dimension(p.D)
    if features.degree == 2:
        tally.passes("simple", vectors * size, 2.5 * count)
        tally.views(18 * count)
        return
    # one product for each coordinate and power, on pieces of rows
    pieces = p.D * (features.degree - 1)
    tally.passes("simple", vectors * size / pieces, 1.5 * pieces * count)
    tally.views(pieces * count)
    tally.passes("simple", vectors * size, count, fresh=False)


def write_backward(p: Problem, tally: Tally, vectors: float, count: float = 1) -> None:
    """The gradient of phi at ``vectors`` vectors."""
    features = p.features
    assert features is not None
    if features.trivial or vectors <= 0:
        return
    size = features.dimension(p.D)
    if features.degree == 2:
        tally.passes("simple", vectors * size, 4 * count)
        tally.passes("reduce", vectors * size, 2 * count)
        tally.views(36 * count)
        return
    pieces = p.D * (features.degree - 1)
    write(p, tally, vectors, count)
    tally.passes("simple", vectors * size, 3 * count)
    tally.passes("simple", vectors * size / pieces, 4 * pieces * count)
    tally.views(4 * pieces * count)


__all__ = ["document_groups", "write", "write_backward"]
