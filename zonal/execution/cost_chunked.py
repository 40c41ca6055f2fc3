"""What the chunked path costs: sums over features block by block, counted call by call as ``scan`` makes them (or the kernels', ``cost_sums`` and ``cost_ridge_kernel``)."""

import math
from collections import Counter
from dataclasses import replace

from zonal.execution import cost_ridge_cuda, cost_ridge_kernel, cost_sums, cost_sums_cuda
from zonal.execution.constants import Constants
from zonal.execution.cost_features import document_groups, lifted, write, write_backward
from zonal.execution.cost_ridge import fading, ridge
from zonal.execution.problem import Problem
from zonal.execution.scan import Rule, block_size
from zonal.execution.tally import Estimate, Tally


def chunked(p: Problem, constants: Constants) -> Estimate:
    """Blocks over a carried state; packed documents as batches of documents of like length."""
    tally = Tally(constants, 8 if p.tags.solves and p.decays else p.itemsize)
    p = lifted(p, tally)
    if p.without_sums is None and not p.tags.solves:
        return (cost_sums_cuda if p.device.type == "cuda" else cost_sums).kernel(p, tally)
    if p.without_ridge is None and p.tags.solves:
        return (cost_ridge_cuda if p.device.type == "cuda" else cost_ridge_kernel).kernel(p, tally)
    if p.span.edges is None:
        return tally.estimate("chunked", _one(p, tally))
    peak = 0.0
    for count, length, even in document_groups(p.span.edges):
        inner = replace(p, B=count, T=length, S=length, span=replace(p.span, edges=None), padded=p.padded or not even)
        numbers = count * length * (p.H * (p.D + p.P) + p.Hkv * (p.D + p.P))
        tally.passes("simple", numbers, 2 + 2 * p.gradients)
        tally.views(60)
        peak = max(peak, _one(inner, tally) + numbers)
    return tally.estimate("chunked", peak + p.T * p.H * p.P)


def _one(p: Problem, tally: Tally) -> float:
    if p.tags.solves:
        return fading(p, tally) if p.decays else ridge(p, tally)
    return _sums(p, tally)


def _sums(p: Problem, tally: Tally) -> float:
    """The scan over blocks; returns the most numbers alive at once."""
    features = p.features
    assert features is not None
    heads, kv, width = p.B * p.H, p.B * p.Hkv, p.P + p.tags.normalises
    size = features.dimension(p.D)
    tied = p.span.causal or p.span.chunk is not None
    block = block_size(features, (p.B, p.H, p.S, p.D, p.P), tied and p.past == 0 and not p.keeps)
    queries = min(p.T, p.S) if tied else p.T
    steps = Rule(tied, p.span.include_self, p.span.chunk, p.S - queries if tied else 0).steps(queries, p.S, block)
    state = kv * size * width
    inputs = heads * p.T * p.D + kv * p.S * (p.D + width)
    stride = 1 if state * len(steps) <= 2 * inputs else math.isqrt(max(len(steps) - 1, 0)) + 1
    tally.views(50 if features.trivial else 66)
    tally.passes("simple", kv * p.S * width, p.tags.normalises + p.padded)
    # the state after the last step that reads it is made only for whoever wants it
    last = max((index for index, step in enumerate(steps) if step.t1 > step.t0), default=0)
    shapes: Counter[tuple[int, int, bool, bool, bool]] = Counter()
    begun = p.past > 0
    for index, step in enumerate(steps):
        carried = step.s1 > step.s0 and (p.keeps or index < last)
        shapes[step.t1 - step.t0, step.s1 - step.s0, step.within, begun and step.t1 > step.t0, carried] += 1
        begun = begun or carried
    for (rows, keys, within, reading, carried), times in shapes.items():
        if rows and within:
            _near(p, tally, rows, keys, times)
        if reading:
            _read(p, tally, rows, times)
        if rows:
            tally.passes("simple", heads * rows * width, times, fresh=False)
            tally.views(8 * times)
        if carried:
            _advance(p, tally, keys, times)
        if p.gradients:
            if stride > 1 and carried:
                _advance(p, tally, keys, times)
            _back(p, tally, rows, keys, times * bool(rows and within), times * reading, times * carried)
    _anchor(p, tally, heads)
    tall = max((shape[0] for shape in shapes), default=0)
    wide = max((shape[1] for shape in shapes), default=0)
    # one block over everything carries no state and makes no features
    state *= any(shape[3] or shape[4] for shape in shapes)
    written = 0 if features.trivial or not state else size * max(heads * tall, kv * wide)
    near = heads * tall * wide * (2.0 if tied else 0.0)
    peak = heads * p.T * (width + p.P) + kv * p.S * width * p.tags.normalises + 3 * state + written + near
    if p.gradients:
        kept = len(steps) if stride == 1 else len(steps) / stride + stride
        peak += inputs + heads * p.T * width + state * (kept + 3) + 3 * written + near
    return peak


def _near(p: Problem, tally: Tally, rows: int, keys: int, times: float) -> None:
    """Scores within a block, their link and mask, and their share of the sum."""
    heads, kv, width = p.B * p.H, p.B * p.Hkv, p.P + p.tags.normalises
    n = heads * rows * keys
    _kernel(p, tally, rows, keys, times)
    tally.product(kv, p.groups * rows, width, keys, times)
    if p.decays:
        _decay(p, tally, rows, keys, times)
    tally.views((12 + 6 * p.decays) * times)
    tally.passes("simple", n * width / max(keys, 1), times, fresh=False)


def _kernel(p: Problem, tally: Tally, rows: int, keys: int, times: float) -> None:
    n = p.B * p.H * rows * keys
    assert p.features is not None
    tally.product(p.B * p.Hkv, p.groups * rows, keys, p.D, times)
    tally.passes("simple", n, times * p.clamped, fresh=False)
    if not p.features.trivial:
        tally.passes("simple", n, times * p.operations)
    tally.passes("simple", n, times * p.decays)
    _cut(p, tally, n, times)
    tally.views(4 * times)


def _cut(p: Problem, tally: Tally, elements: float, times: float) -> None:
    """Zeros where nothing is seen: a triangle in place, or a mask for whole chunks."""
    tally.passes("simple" if p.span.chunk is None else "select", elements, times, fresh=p.span.chunk is not None)


def _decay(p: Problem, tally: Tally, rows: int, keys: int, times: float) -> None:
    pairs = p.B * p.Hkv * rows * keys
    tally.passes("simple", pairs, 5 * times)
    tally.passes("exp", pairs, times, fresh=False)
    tally.views(24 * times)


def _read(p: Problem, tally: Tally, rows: int, times: float) -> None:
    """What queries get from the carried state."""
    heads, kv, width = p.B * p.H, p.B * p.Hkv, p.P + p.tags.normalises
    assert p.features is not None
    size = p.features.dimension(p.D)
    write(p, tally, heads * rows, times)
    if not p.features.trivial:
        tally.passes("simple", kv * size * width, times)
    tally.product(kv, p.groups * rows, width, size, times)
    tally.passes("simple", heads * rows * width, times * (1 + p.decays), fresh=False)
    tally.views(6 * times)


def _advance(p: Problem, tally: Tally, keys: int, times: float) -> None:
    """The state after a block's keys."""
    kv, width = p.B * p.Hkv, p.P + p.tags.normalises
    assert p.features is not None
    size = p.features.dimension(p.D)
    write(p, tally, kv * keys, times)
    tally.product(kv, size, width, keys, times)
    tally.passes("simple", kv * size * width, times * (1 + p.decays))
    tally.passes("simple", kv * keys * width, times * p.decays)
    tally.views((8 + 10 * p.decays) * times)


def _back(p: Problem, tally: Tally, rows: int, keys: int, near: float, reading: float, carried: float) -> None:
    """Backward of one shape of block."""
    heads, kv, width = p.B * p.H, p.B * p.Hkv, p.P + p.tags.normalises
    assert p.features is not None
    size, n = p.features.dimension(p.D), heads * rows * keys
    tally.views((16 + 20 * p.decays) * max(near, reading, carried))
    if carried:
        tally.product(kv, keys, size, width, carried)
        write_backward(p, tally, kv * keys, carried)
        write(p, tally, kv * keys, carried)
        tally.product(kv, keys, width, size, carried)
        tally.passes("simple", kv * keys * (p.D + width), carried * (1 + p.decays), fresh=False)
        tally.passes("simple", kv * size * width, carried * p.decays)
        tally.views(12 * carried)
    if reading:
        if not p.features.trivial:
            tally.passes("simple", kv * size * width, 3 * reading)
            tally.passes("reduce", kv * size * width, reading * (1 + p.coefficient_gradients))
        tally.product(kv, p.groups * rows, size, width, reading)
        write_backward(p, tally, heads * rows, reading)
        write(p, tally, heads * rows, reading)
        tally.product(kv, size, width, p.groups * rows, reading)
        tally.passes("simple", kv * size * width, reading)
        tally.views((14 + 6 * (not p.features.trivial)) * reading)
    if near:
        _kernel(p, tally, rows, keys, near)
        if p.decays:
            _decay(p, tally, rows, keys, near)
        tally.product(kv, keys, width, p.groups * rows, near)
        tally.product(kv, p.groups * rows, keys, width, near)
        tally.passes("simple", n, near * p.decays)
        _cut(p, tally, n, near)
        if not p.features.trivial:
            if p.coefficient_gradients:
                tally.passes("reduce", n, p.coefficients * near)
                tally.passes("simple", n, p.coefficients * near)
            tally.passes("simple", n, (p.operations + 1) * near)
        tally.product(kv, p.groups * rows, p.D, keys, near)
        tally.product(kv, keys, p.D, p.groups * rows, near)
        tally.passes("simple", heads * rows * p.D + kv * keys * (p.D + width), near, fresh=False)
        tally.views(16 * near)


def _anchor(p: Problem, tally: Tally, heads: float) -> None:
    """The read-out of the whole sum."""
    out = heads * p.T * p.P
    tally.views(28)
    tally.passes("simple", out, 2)
    tally.passes("select", out, 0.5 * p.tags.normalises)
    if p.gradients:
        tally.recorded(14)
        tally.views(20)
        tally.passes("simple", out, 4)


__all__ = ["chunked"]
