"""What the compiled kernel for ridge and Koopman read-outs costs: operations over a measured rate, as ridge.cpp shares them out."""

import math
from dataclasses import replace

from zonal.execution.cost_features import document_groups
from zonal.execution.problem import Problem
from zonal.execution.tally import Estimate, Tally

# of ridge.cpp: keys of a block, keys without a query that are only summed up, and tokens from one inverse to the next
_BLOCK = 16
_FAR = 8 * _BLOCK
_REMAKE = 1024


def operations(p: Problem) -> tuple[float, float]:
    """Multiplications and additions of a call without documents, (forward, backward)."""
    r, width, kv, shifts = p.D, p.P, p.B * p.Hkv, p.shifts
    rows = p.groups * min(p.T, p.S)
    # keys without a query between them, and how often; they are summed up where they are many
    gap, times = (p.S - min(p.T, p.S), 1.0) if p.span.chunk is None else (p.span.chunk, p.S / p.span.chunk)
    summed = gap * times if gap >= _FAR else 0.0
    factored = p.S - summed
    half = min(_BLOCK, factored) / 2  # of a block's keys a query sees so many
    inverses = (times if summed else 0.0) + factored / _REMAKE + (p.past > 0)
    solve = r * r + 2 * half * r  # a row times its inverse, or its M
    keys = p.S * (r * r / 2 + r * width + (shifts > 0) * r * r) + factored * (1.5 * r * r + half * (2 * r + half))
    states = keys + 2 * inverses * r**3
    read = (2 * shifts + 1) * solve
    forward = states + rows * (read + r * width + half * (r + width))
    if not p.gradients:
        return 2 * kv * forward, 0.0
    back = rows * (
        2 * read
        + 4 * (shifts + 1) * half * r
        + 4 * shifts * half * r
        + 2 * r * width
        + half * (3 * r + 2 * width)
        + (2 * shifts + 1) * r * r
    )
    return 2 * kv * forward, 2 * kv * (states + back + p.S * (r * r + 2 * r * width + 2 * (shifts > 0) * r * r))


def kernel(p: Problem, tally: Tally) -> Estimate:
    """One call of the kernel, and one more backward."""
    constants = tally.constants
    groups = [(1, p.S, True)] if p.span.edges is None else document_groups(p.span.edges)
    parts = (
        [p]
        if p.span.edges is None
        else [replace(p, B=count, T=length, S=length, span=replace(p.span, edges=None)) for count, length, _ in groups]
    )
    forward, backward = (sum(column) for column in zip(*(operations(part) for part in parts), strict=True))
    rate = constants.sums or 1.6 * constants.matmul.at(2.0**25) / 2.0**25
    call = constants.sums_call or 50 * constants.call
    tasks = p.B * p.Hkv * sum(count for count, _, _ in groups)
    # whole rounds of tasks: three heads on two threads take as long as four
    rate *= constants.threads / tasks * math.ceil(tasks / constants.threads) if tasks else 1.0
    numbers = p.B * (p.H * p.T * (p.D + p.P) + p.Hkv * p.S * (p.D + p.P))
    tally.add(call, calls=8)
    tally.add(forward * rate, flops=forward, moved=p.itemsize * numbers)
    r, kv = p.D, p.B * p.Hkv
    if p.keeps:  # the memory takes in the tokens by products of torch in float64
        tally.product(2 * kv, r, r, p.S, 1 + (p.shifts > 0))
        tally.product(2 * kv, p.P, r, p.S)
        tally.passes("simple", 2 * kv * p.S * (r + p.P), 2)
        tally.views(40)
    state = r * (3.0 * r + p.P + (p.shifts > 0) * r)
    peak = (
        p.B * p.H * p.T * p.P + min(tasks, constants.threads) * state + p.keeps * kv * (3 * state + 2 * p.S * (r + p.P))
    )
    if p.gradients:
        tally.recorded(4)
        tally.add(2 * call, calls=10)
        tally.add(backward * rate, flops=backward, moved=2 * p.itemsize * numbers)
        longest = max((length for _, length, _ in groups), default=0)
        peak += (
            p.B * p.H * p.T * r
            + kv * p.S * (r + p.P)
            + min(tasks, constants.threads) * 2.0 * (p.shifts + 1) * p.groups * longest * r
        )
    return tally.estimate("chunked", peak)


__all__ = ["kernel", "operations"]
