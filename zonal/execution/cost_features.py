"""What feature maps, and the splitting of packed documents, cost: shared by the paths that carry a state."""

import itertools
from dataclasses import replace

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


def lifted(p: Problem, tally: Tally, calls: float = 1) -> Problem:
    """The problem of an anchor that solves with features of keys, once queries and keys are those, in so many calls."""
    if p.harmonics is None:
        return p
    sizes = p.harmonics.sizes(p.D)
    for vectors in (p.B * p.H * p.T, p.B * p.Hkv * p.S):
        for degree, size in enumerate(sizes[2:], 2):
            tally.product(1, vectors / calls, 2 * size, p.D, calls * (1 + p.gradients))
            tally.passes("simple", vectors / calls * size, calls * (2 * degree + 1) * (1 + 2 * p.gradients))
            tally.product(1, vectors / calls, size, 2 * size, calls * (1 + p.gradients))
            tally.views(calls * (8 + 6 * degree) * (1 + 2 * p.gradients))
        tally.passes("simple", vectors / calls * sum(sizes), 2 * calls * (1 + p.gradients))
    return replace(p, D=sum(sizes), harmonics=None)


__all__ = ["document_groups", "lifted", "write", "write_backward"]
