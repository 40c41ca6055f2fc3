"""What plans and hierarchies cost. How many iterations a plan takes depends on the scores; here it is a guess."""

from dataclasses import replace

from zonal.execution.problem import Problem
from zonal.execution.tally import Estimate, Tally

# of Sinkhorn's iteration, and of conjugate gradients backward
ITERATIONS, SOLVES = 10, 8


def repeated(p: Problem, once: Estimate, sums: Estimate) -> Estimate:
    """Tiles of a plan: a pass with values and one for gradients, as row attention has them (``once``), and passes that sum rows or columns (``sums``)."""
    passes = 2 * ITERATIONS + (2 * SOLVES + 2 if p.gradients else 0)
    return replace(
        once, seconds=once.seconds + passes * sums.seconds, flops=once.flops + passes * sums.flops, products=once.products + passes * sums.products,
        bytes_moved=once.bytes_moved + passes * sums.bytes_moved,
        calls=once.calls + passes * sums.calls, peak_bytes=once.peak_bytes + 2 * p.itemsize * p.B * p.H * (p.T + p.S) * (p.D + 3),
    )  # fmt: skip


def dense_plan(p: Problem, tally: Tally) -> float:
    """Iterations over a plan in memory, and what of them is alive at once, in plans."""
    n = p.B * p.H * p.T * p.S
    passes = 2 * ITERATIONS
    tally.passes("simple", n, 4 * passes)
    tally.passes("exp", n, passes)
    tally.passes("reduce", n, 2 * passes)
    tally.views(30 * passes)
    if p.gradients:  # the whole linear system, in float64
        tally.product(p.B * p.H, p.S, p.S, p.T, 4)
        tally.product(p.B * p.H, p.S, p.S, p.S, 20)
        tally.views(60)
        return 8.0 + 6.0 * p.S / max(p.T, 1)
    return 3.0


def dense_tree(p: Problem, tally: Tally) -> float:
    """Ties written into a matrix, level by level."""
    n = p.B * p.H * p.T * p.S
    tally.passes("select", n, 3 * len(p.spans))
    tally.passes("simple", n, 4 * len(p.spans))
    tally.passes("exp", n, 1)
    tally.views(40 * len(p.spans))
    return 3.0


def tree(p: Problem, tally: Tally) -> Estimate:
    """Smallest blocks by themselves, and their means above; backward by torch."""
    heads, size = p.B * p.H, p.spans[0] if p.spans and p.spans[0] else 1
    blocks = -(-p.T // size)
    back = 3 if p.gradients else 1
    tally.product(heads * blocks, size, size, p.D + p.P, back)
    pairs = float(heads * blocks * size * size)
    above = [
        -(-p.T // child) * (parent // child if parent < p.T else -(-p.T // child))
        for child, parent in zip(p.spans, p.spans[1:], strict=False)
        if child
    ]
    for each in above:
        tally.product(heads, 1, each, p.D + p.P, back)
    tally.passes("exp", pairs + heads * sum(above), back)
    tally.passes("simple", pairs + heads * sum(above), 6 * back)
    tally.passes("simple", heads * p.T * (2 * p.D + 2 * p.P), 3 * back)
    tally.views(60 * (1 + len(above)) * back)
    if p.gradients:
        tally.recorded(40 * (1 + len(above)))
    numbers = heads * p.T * (2 * p.D + 3 * p.P) + (4 if p.gradients else 2) * (pairs + heads * sum(above))
    return tally.estimate("tiled", numbers)


__all__ = ["dense_plan", "dense_tree", "repeated", "tree"]
