"""What ridge and Koopman read-outs in blocks cost, counted call by call as ``ridge_block`` makes them."""

import math

from zonal.execution import chunked as chunked_path
from zonal.execution.problem import Problem
from zonal.execution.ridge_fading import usual_block
from zonal.execution.tally import Tally
from zonal.memory.ridge import REMAKE


def ridge(p: Problem, tally: Tally) -> float:
    """Ridge and Koopman read-outs; returns the most numbers alive at once."""
    tied = p.span.causal or p.span.chunk is not None
    return _ridge_tied(p, tally) if tied else _ridge_free(p, tally)


def inverse(tally: Tally, batch: float, order: int, times: float = 1) -> None:
    """P = A^-1 in float64: a factor and its inverse."""
    tally.cholesky(2 * batch, order, times)
    tally.solve(2 * batch, order, order, times)
    tally.passes("simple", batch * order * order, 6 * times)
    tally.views(8 * times)


def _ridge_free(p: Problem, tally: Tally) -> float:
    heads, kv, r, rows = p.B * p.H, p.B * p.Hkv, p.D, p.T * p.groups
    directions = 3 if p.gradients else 1
    tally.product(kv, r, r, p.S, (1 + (p.shifts > 0)) * directions)
    tally.product(kv, p.P, r, p.S, directions)
    inverse(tally, kv, r)
    tally.product(kv, rows, r, r, (1 + 2 * p.shifts) * directions)
    tally.product(kv, rows, p.P, r, directions)
    tally.views(30)
    if p.gradients:
        tally.recorded(30)
        tally.product(kv, r, r, r, 2)
        tally.views(50)
    return (
        heads * p.T * (r * (2 + p.shifts) * directions + p.P)
        + kv * r * (8 * r + 2 * p.P) * directions
        + kv * p.S * r * (p.shifts > 0)
    )


def _ridge_tied(p: Problem, tally: Tally) -> float:
    heads, kv, r, groups = p.B * p.H, p.B * p.Hkv, p.D, p.groups
    queries = min(p.T, p.S)
    chunk = p.span.chunk
    limit = chunked_path._ridge_block(r)
    base = p.S - queries if chunk is None else (p.S - queries) // chunk * chunk
    length = p.S - base
    if length == 0:
        return heads * p.T * p.P
    outright = p.by_query or (chunk is not None and chunk > limit)
    if chunk is None:
        size = min(limit, length)
        size = math.ceil(length / math.ceil(length / size))
    else:
        size = chunk if outright else chunk * max(1, limit // chunk)
    blocks = math.ceil(length / size)
    begun = base > 0 or p.past > 0
    if base:
        directions = 1 + 2 * p.gradients
        tally.product(kv, r, r, base, (1 + (p.shifts > 0)) * directions)
        tally.product(kv, p.P, r, base, directions)
        tally.passes("simple", kv * base * (r + p.P), 2 * p.gradients)
    padded = kv * blocks * size
    tally.views(34)
    tally.passes("simple", kv * p.S * (r + p.P), p.padded)
    tally.passes("simple", padded * (r * (2 + (p.shifts > 0)) + p.P), 1)
    _factor(p, tally, blocks, size, outright, begun)
    batch, rows = kv * blocks, groups * size
    seen = not outright
    for _ in range(1 + p.shifts):
        _solve(p, tally, batch, rows, size, seen, blocks > 1 or begun)
        _linear(p, tally, batch, rows, size, blocks, seen, begun)
    tally.passes("simple", heads * p.T * p.P, 2)
    if p.gradients:
        tally.recorded(24 + 10 * p.shifts)
        tally.views(30)
        tally.passes("simple", padded * (2 * r + p.P), 2)
        for _ in range(1 + p.shifts):
            _solve_backward(p, tally, batch, rows, size, seen, blocks > 1 or begun)
            _linear_backward(p, tally, batch, rows, size, blocks, seen, begun)
    # inverses and running sums at the start of each block, what is kept a row, masked products
    held = batch * (2.0 * r * r + r * p.P + size * r + rows * r) + 1.0 * batch * rows * size * seen
    if p.gradients:
        held += (1 + p.shifts) * batch * (1.5 * rows * size * seen + 2 * rows * r + r * p.P) + batch * r * r
    return held + padded * r + heads * p.T * p.P + kv * base * r * (p.shifts > 0)


def _factor(p: Problem, tally: Tally, blocks: int, size: int, outright: bool, begun: bool) -> None:
    kv, r = p.B * p.Hkv, p.D
    if outright:
        tally.product(kv * blocks, r, r, size)
        tally.passes("simple", kv * blocks * r * r, 3)
        inverse(tally, kv * blocks, r)
        return
    if begun:
        inverse(tally, kv, r)
    remade = (blocks - 1) // max(1, REMAKE // size)
    tally.product(kv, size, r, r, blocks)
    tally.product(kv, size, size, r, blocks)
    tally.cholesky(kv, size, blocks)
    tally.solve(kv, size, r, blocks)
    tally.product(kv, r, r, size, blocks - 1 - remade)
    if remade > 0:
        tally.product(kv, r, r, REMAKE, remade)
        tally.passes("simple", kv * REMAKE * r, remade)
        inverse(tally, kv, r, remade)
    tally.passes("simple", kv * blocks * r * (r + size), 1)
    tally.views(18 * blocks)


def _solve(p: Problem, tally: Tally, batch: float, rows: int, size: int, seen: bool, inverted: bool) -> None:
    """Each row times the inverse that has seen its keys."""
    if inverted:
        tally.product(batch, rows, p.D, p.D)
    else:
        tally.passes("simple", batch * rows * p.D)
    tally.views(8)
    if seen:
        tally.product(batch, rows, size, p.D)
        tally.passes("simple", batch * rows * size, fresh=False)
        tally.product(batch, rows, p.D, size)


def _solve_backward(p: Problem, tally: Tally, batch: float, rows: int, size: int, seen: bool, inverted: bool) -> None:
    r = p.D
    _solve(p, tally, batch, rows, size, seen, inverted)
    if inverted:
        tally.product(batch, r, r, rows)
        tally.passes("simple", batch * r * r, 4)
        tally.product(batch, size, r, r)
    if seen:
        tally.product(batch, size, rows, r, 2)
        tally.passes("simple", batch * rows * size, 2, fresh=False)
        tally.product(batch, size, r, rows, 2)
    tally.passes("simple", batch * size * r, 3)
    tally.passes("simple", batch * rows * r)
    tally.views(30)


def _linear(p: Problem, tally: Tally, batch: float, rows: int, size: int, blocks: int, seen: bool, begun: bool) -> None:
    """Visible keys' products with values: those of the block, and a running sum of those before."""
    if seen:
        tally.product(batch, rows, size, p.D)
        tally.passes("simple", batch * rows * size)
        tally.product(batch, rows, p.P, size)
    if blocks > 1 or begun or not seen:
        tally.product(batch, p.D, p.P, size)
        tally.passes("simple", batch * p.D * p.P, 3)
        tally.product(batch, rows, p.P, p.D)
        tally.passes("simple", batch * rows * p.P)
    tally.views(18)


def _linear_backward(
    p: Problem, tally: Tally, batch: float, rows: int, size: int, blocks: int, seen: bool, begun: bool
) -> None:
    if seen:
        tally.product(batch, rows, size, p.P)
        tally.product(batch, size, p.P, rows)
        tally.passes("simple", batch * rows * size)
        tally.product(batch, rows, p.D, size)
        tally.product(batch, size, p.D, rows)
    if blocks > 1 or begun or not seen:
        tally.product(batch, rows, p.D, p.P)
        tally.product(batch, p.D, p.P, rows)
        tally.passes("simple", batch * p.D * p.P, 5)
        tally.product(batch, size, p.D, p.P)
        tally.product(batch, size, p.P, p.D)
        tally.passes("simple", batch * size * (p.D + p.P))
    tally.views(36)


def fading(p: Problem, tally: Tally) -> float:
    """Read-outs whose past fades, as ``ridge_fading`` makes them in blocks that no strong decay has cut short."""
    kv, r, keys = 2 * p.B * p.Hkv, p.D, p.S  # float64: products of twice as many
    if not keys or not p.T:
        return p.B * p.H * p.T * p.P
    size = min(usual_block(r), keys)
    blocks = math.ceil(keys / size)
    batch, rows = kv * blocks, p.groups * size
    directions = 1 + 2 * p.gradients
    tally.passes("simple", kv / 2 * keys * (r + p.P), 8 * directions)
    tally.product(batch, r, r, size, (1 + (p.shifts > 0)) * directions)
    tally.product(batch, p.P, r, size, directions)
    tally.passes("simple", batch / 2 * r * (2 * r + p.P), 2 * directions)
    inverse(tally, batch / 2, r)
    tally.product(batch, 2 * size, r, r)
    tally.product(batch, 2 * size, 2 * size, r)
    tally.cholesky(batch, 2 * size)
    tally.solve(batch, 2 * size, r)
    for _ in range(1 + p.shifts):
        # a solve, and a sum over visible keys
        tally.product(batch, rows, r, r, 1 + p.gradients)
        tally.product(batch, rows, 2 * size, r, 1 + p.gradients)
        tally.product(batch, rows, r, 2 * size, 1 + p.gradients)
        tally.product(batch, rows, size, r, directions)
        tally.product(batch, rows, p.P, size, directions)
        tally.product(batch, rows, p.P, r, directions)
        tally.passes("simple", batch / 2 * rows * size, 3 * directions)
        if p.gradients:
            tally.product(batch, r, r, rows)
            tally.product(batch, size, r, rows, 4)
    tally.views(140 + 8 * blocks + 40 * p.shifts)
    if p.gradients:
        tally.recorded(60 + 20 * p.shifts)
        tally.views(120 + 8 * blocks)
    held = batch / 2 * (4.0 * r * r + 2 * r * p.P + 6 * size * r + 2 * rows * r + 3 * rows * size)
    return held * (1 + 1.5 * p.gradients * (1 + p.shifts)) + p.B * p.H * p.T * p.P


__all__ = ["fading", "inverse", "ridge"]
