"""What the streaming path costs: the verbs of a memory, token by token."""

from dataclasses import replace

from zonal.execution.constants import Constants
from zonal.execution.cost_features import document_groups, lifted, write, write_backward
from zonal.execution.cost_ridge import inverse
from zonal.execution.problem import Problem
from zonal.execution.tally import Estimate, Tally
from zonal.features.moments import rows_at_once


def streaming(p: Problem, constants: Constants) -> Estimate:
    """Token by token through a memory."""
    # statistics are float64, whatever comes in
    in_double = p.kind == "features" and p.tags.cancels and not p.past and not p.keeps
    tally = Tally(constants, 8 if in_double or p.kind in ("ridge", "fading") else p.itemsize)
    if in_double:
        p = replace(p, without_decode="its sums are float64")
    p = lifted(p, tally, max(min(p.T, p.S), 1))
    if p.span.edges is not None:
        peak = 0.0
        for count, length, even in document_groups(p.span.edges):
            inner = replace(
                p, B=count, T=length, S=length, span=replace(p.span, edges=None), padded=p.padded or not even
            )
            tally.views(60)
            peak = max(peak, _stream(inner, tally))
        return tally.estimate("streaming", peak)
    return tally.estimate("streaming", _stream(p, tally))


def _stream(p: Problem, tally: Tally) -> float:
    heads, kv, r = p.B * p.H, p.B * p.Hkv, p.D
    tokens = min(p.T, p.S)
    prefix = p.S - tokens
    tally.views(6 if p.without_decode is None else 6 + 6 * tokens)
    out = heads * p.T * p.P * 2.0
    if p.kind == "keys":
        # on average half of the sequence is there
        held = p.past + prefix + (tokens + 1) / 2
        if prefix:
            # a buffer with twice the room; where gradients flow the copies are recorded
            tally.passes("simple", 2 * kv * prefix * (r + p.P), 2 + 2 * p.gradients)
        window = held if p.span.left is None else min(held, p.span.left + 1)
        _stream_keys(p, tally, tokens, window)
        keys = kv * (p.past + p.S) * (r + p.P) * (2.0 if p.gradients else 4.0)
        return out + keys + (tokens * (keys / 2 + 6 * heads * window) if p.gradients else 4 * heads * window)
    if p.kind in ("ridge", "fading"):
        return out + (
            _stream_ridge(p, tally, tokens, prefix) if p.without_decode is not None else _ridge_steps(p, tally, tokens)
        )
    assert p.features is not None
    width = p.P + p.tags.normalises
    state = kv * p.features.dimension(r) * width
    if p.without_decode is None:  # a compiled kernel: the state read once and written once, and each token in the cache
        flops = 2.0 * tokens * (kv + heads) * p.features.dimension(r) * width
        rate = tally.constants.sums or 1.6 * tally.constants.matmul.at(2.0**25) / 2.0**25
        moved = 2.0 * state * p.itemsize
        tally.add(flops * rate + moved * tally.constants.traffic, flops=flops, moved=moved, calls=8)
        return out + 2.0 * state
    directions = 1 + 2 * p.gradients
    trivial = p.features.trivial
    if prefix:
        size = p.features.dimension(r)
        pieces = max(1, prefix / rows_at_once(kv, size))
        write(p, tally, kv * prefix / pieces, pieces * (1 + p.gradients))
        tally.product(kv, size, width, prefix / pieces, pieces)
        if p.gradients:
            write_backward(p, tally, kv * prefix / pieces, pieces)
            tally.product(kv, prefix / pieces, width, size, 2 * pieces)
    write(p, tally, kv + heads, tokens * directions)
    tally.passes("simple", state, tokens * (2 + p.decays) * directions)
    tally.product(kv, p.features.dimension(r), width, 1, tokens * directions)
    tally.product(kv, p.groups, width, p.features.dimension(r), tokens * directions)
    tally.views(tokens * (28 if trivial else 50))
    if p.gradients:
        write_backward(p, tally, kv + heads, tokens)
        tally.recorded(tokens * (30 if trivial else 60))
        tally.views(tokens * (20 if trivial else 60))
    return (
        out
        + state * (3.0 + (2.0 if trivial else 0.5) * tokens * p.gradients)
        + heads * p.features.dimension(r) * 3
        + kv * p.features.dimension(r) * min(prefix, 4096)
    )


def _stream_keys(p: Problem, tally: Tally, tokens: int, held: float) -> None:
    """The whole kernel row of one query for every token."""
    heads, kv, row = p.B * p.H, p.B * p.Hkv, p.B * p.H * held
    directions = 1 + 2 * p.gradients
    tally.product(heads, 1, held, p.D, tokens * directions)
    tally.product(heads, 1, p.P, held, tokens * directions)
    copies = 1 + (p.groups > 1) + p.padded
    tally.passes(
        "simple", kv * held * (p.D + p.P) * (p.groups if p.groups > 1 else 1), tokens * (copies - 1) * directions
    )
    tally.passes("simple", kv * (p.D + p.P) * (held if p.gradients else 2), tokens)
    passes = (2 if p.tags.log_space else p.operations) + max(p.score_passes - 5, 0)
    tally.passes("simple", row, tokens * directions * (passes + 2 + 2 * p.biased))
    tally.passes("exp", row, tokens * (p.tags.log_space + p.biased))
    tally.passes("select", row, tokens * directions)
    tally.passes("reduce", row, tokens * directions * 2 * p.tags.normalises)
    if p.tags.solves:
        square = heads * held * held
        tally.product(heads, held, held, p.D, tokens * directions)
        tally.passes("simple", square, tokens * (p.operations + 4) * directions)
        tally.cholesky(heads, max(round(held), 1), tokens)
        tally.solve(heads, max(round(held), 1), 1, 2 * tokens * (1 + p.shifts))
        if p.gradients:
            tally.product(heads, held, held, held, 4 * tokens)
    tally.views(tokens * (55 + 40 * p.gradients))
    if p.gradients:
        tally.recorded(45 * tokens)


def _ridge_steps(p: Problem, tally: Tally, tokens: int) -> float:
    """A compiled kernel: every sum read and written in float64, at one token in the cache."""
    kv, r = p.B * p.Hkv, p.D
    state = kv * r * (2.0 * r + p.P + r * (p.shifts > 0))
    flops = 2.0 * tokens * (state + kv * r * r + p.B * p.H * r * ((1 + 2 * p.shifts) * r + p.P))
    rate = tally.constants.sums or 1.6 * tally.constants.matmul.at(2.0**25) / 2.0**25
    tally.add(2 * flops * rate + 16 * state * tally.constants.traffic, flops=flops, moved=16 * state, calls=10)
    if not p.past:
        inverse(tally, kv, r)
    return 4.0 * state


def _stream_ridge(p: Problem, tally: Tally, tokens: int, prefix: int) -> float:
    kv, r = p.B * p.Hkv, p.D
    square = kv * r * r
    if prefix:
        directions = 1 + 2 * p.gradients
        tally.product(kv, r, r, prefix, (1 + (p.shifts > 0)) * directions)
        tally.product(kv, p.P, r, prefix, directions)
        tally.passes("simple", kv * prefix * (r + p.P), 1 + 2 * p.gradients)
    sums = 2 + (p.shifts > 0)
    directions = 1 + 2 * p.gradients
    tally.product(kv, r, r, 1, tokens * sums * directions)
    tally.passes("simple", square, tokens * sums * directions)
    if p.gradients or p.by_query or p.kind == "fading":
        inverse(tally, kv, r, tokens)
        tally.product(kv, r, r, r, 2 * tokens * p.gradients)
    else:
        # a decoder's memory brings an inverse along, made anew now and then
        inverse(tally, kv, r, 1 / 64 if p.past and not prefix else 1)
        tally.product(kv, 1, r, r, tokens)
        tally.product(kv, r, r, 1, tokens)
        tally.passes("simple", square, tokens)
    tally.product(kv, p.groups, r, r, tokens * (1 + 2 * p.shifts) * directions)
    tally.product(kv, p.groups, p.P, r, tokens * directions)
    tally.views(tokens * (45 + 12 * p.shifts + 40 * p.decays))
    if p.gradients:
        tally.recorded(tokens * (40 + 10 * p.shifts))
        tally.views(tokens * 30)
    shifted = kv * prefix * (r * (1 + (p.shifts > 0)) + p.P)
    return shifted + square * (8.0 + 2.5 * tokens * p.gradients) + kv * p.P * r * (2.0 + tokens * p.gradients)


__all__ = ["streaming"]
