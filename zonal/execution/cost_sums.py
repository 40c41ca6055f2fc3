"""What the compiled kernel for sums over features costs: operations over a measured rate, as ``plan`` of sums.cpp shares them out."""

import math
from dataclasses import replace
from typing import NamedTuple

from zonal.execution.cost_features import document_groups
from zonal.execution.problem import Problem
from zonal.execution.tally import Estimate, Tally

# of sums.cpp: queries of a block and of a column, and what a feature costs, in multiplications with the state
_BLOCK = 64
_COLUMN = 16
_FEATURE = 8.0


class Work(NamedTuple):
    """Of one key head: keys taken into the state, queries that read it, and pairs of a query and a key that meet directly."""

    absorbed: float
    reads: float
    pairs: float


def _sizes(p: Problem) -> tuple[float, float]:
    """(multiplications of a token with the state, of a pair of tokens)."""
    assert p.features is not None
    width = p.P + p.tags.normalises
    return p.features.dimension(p.D) * (width + _FEATURE), float(p.D + width)


def work(p: Problem) -> Work:
    """What the kernel does for each key head of a call without documents."""
    each, pair = _sizes(p)
    near = max(_BLOCK, int(each / pair))
    absorbed = reads = pairs = direct = 0.0
    begun, done = p.past > 0, 0
    for block in p.span.blocks(p.T, p.S, _BLOCK):
        rows = math.ceil((block.stop - block.start) / _COLUMN) * _COLUMN * p.groups
        to = block.hi if block.whole else max(done, min(block.hi, block.hi - (block.stop - block.start)))
        if not begun and block.hi <= near:
            to = done
        begun = begun or to > done
        absorbed += to - done
        reads += rows * begun
        # of the keys that came with the block each query sees half
        pairs += rows * (block.hi - to) * (1.0 if begun and block.whole else 0.5 if begun else 1.0)
        direct += rows * block.hi
        done = to
    if p.keeps:
        return Work(p.S, reads, pairs)
    if p.past == 0 and direct * pair <= absorbed * each + reads * each + pairs * pair:
        return Work(0.0, 0.0, direct)
    return Work(absorbed, reads, pairs)


def operations(p: Problem) -> tuple[float, float]:
    """Multiplications and additions of a call without documents, (forward, backward)."""
    each, pair = _sizes(p)
    done, kv = work(p), p.B * p.Hkv
    width = p.P + p.tags.normalises
    forward = 2 * kv * ((done.absorbed + done.reads) * each + done.pairs * pair)
    if not p.gradients:
        return forward, 0.0
    return forward, 2 * kv * ((3 * done.absorbed + 2 * done.reads) * each + done.pairs * (3 * p.D + 2 * width))


def kernel(p: Problem, tally: Tally) -> Estimate:
    """One call of the kernel, and one more backward."""
    assert p.features is not None
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
    # a task is a key head's document, or a part of its values where there are few
    tasks = p.B * p.Hkv * sum(count for count, _, _ in groups)
    if 0 < tasks < constants.threads:
        tasks *= max(1, min(constants.threads // tasks, p.P // 8))
    # whole rounds of tasks: three heads on two threads take as long as four
    rate *= constants.threads / tasks * math.ceil(tasks / constants.threads) if tasks else 1.0
    numbers = p.B * (p.H * p.T * (p.D + p.P) + p.Hkv * p.S * (p.D + p.P))
    tally.add(call, calls=8)
    tally.add(forward * rate, flops=forward, moved=p.itemsize * numbers)
    state = p.features.dimension(p.D) * (p.P + p.tags.normalises)
    if p.past or p.keeps:  # read from one buffer and written to another, in another order
        tally.add(
            4 * p.B * p.Hkv * state * p.itemsize * constants.traffic * (1 + p.gradients),
            moved=4 * p.B * p.Hkv * state * p.itemsize,
        )
    peak = p.B * p.H * p.T * (p.P + 1.0) + min(tasks, constants.threads) * state + p.keeps * p.B * p.Hkv * state
    if p.gradients:
        tally.recorded(2)
        tally.add(2 * call, calls=10)
        tally.add(backward * rate, flops=backward, moved=2 * p.itemsize * numbers)
        peak += p.B * (p.H * p.T * p.D + p.Hkv * p.S * (p.D + p.P))
    return tally.estimate("chunked", peak)


__all__ = ["Work", "kernel", "operations", "work"]
