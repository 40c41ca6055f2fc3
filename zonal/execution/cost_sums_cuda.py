"""What the Triton kernels for sums over features cost: operations over a measured rate, as sums_layout and sums_forward share them out."""

from zonal.execution.problem import Problem
from zonal.execution.tally import Estimate, Tally
from zonal.kernels.triton import sizes

# launches of a call forward, and of one backward
_LAUNCHES = 6, 12


def _form(p: Problem) -> tuple[int, int]:
    """(numbers of a key head's sums, keys from one known sum to the next)."""
    assert p.features is not None
    rows = sizes.rows_of(p.features.degree, p.D, sizes.block_of(p.D))
    return rows * (p.P + p.tags.normalises), sizes.chunk_of(rows, p.D, p.P, p.itemsize)


def work(p: Problem) -> tuple[float, float, float]:
    """(keys taken into sums, queries that read one, pairs of a query and a key that meet directly) of one key head."""
    chunk = _form(p)[1]
    absorbed = reads = pairs = 0.0
    for block in p.span.blocks(p.T, p.S, sizes.SHARED):
        rows = block.stop - block.start
        first = block.hi if block.whole else max(block.lo, block.hi - rows)
        border = p.S if first >= p.S else first // chunk * chunk
        known = border if border > block.lo else block.lo
        absorbed = max(absorbed, border)
        reads += rows * p.groups * (border > block.lo or p.past > 0)
        # of the keys that came with the block each query sees half
        pairs += (
            rows * p.groups * (max(first - known, 0) + (block.hi - max(first, known)) * (1.0 if block.whole else 0.5))
        )
    return float(p.S) if p.keeps else absorbed, reads, pairs


def operations(p: Problem) -> tuple[float, float]:
    """Multiplications and additions of a call, (forward, backward)."""
    state, (absorbed, reads, pairs) = _form(p)[0], work(p)
    kv = p.B * p.Hkv
    each = p.operations + 2.0  # of the link
    forward = 2 * kv * ((absorbed + reads) * state + pairs * (p.D + p.P + each))
    if not p.gradients:
        return forward, 0.0
    # sums once more, what queries get from them and bring to them, what keys and values get; tiles twice
    return forward, 2 * kv * ((3 * absorbed + 2 * reads) * state + pairs * (4 * p.D + 3 * p.P + 2 * each))


def kernel(p: Problem, tally: Tally) -> Estimate:
    """The kernels of a call, and of one backward."""
    constants = tally.constants
    state, chunk = _form(p)
    forward, backward = operations(p)
    rate = constants.sums or 1.6 * constants.matmul.at(2.0**25) / 2.0**25
    call = constants.sums_call or 80 * constants.call
    # written as parts, read and written as sums, read by each block of queries
    borders = int(work(p)[0] // chunk) + 1
    sums = float(p.B * p.Hkv * borders * state)
    moved = 4 * sums * (3 + p.groups * chunk / sizes.SHARED) + p.itemsize * p.B * (
        p.H * p.T * (p.D + p.P) + p.Hkv * p.S * (p.D + p.P)
    )
    tally.add(call, calls=_LAUNCHES[0])
    tally.add(max(forward * rate, moved * constants.traffic), flops=forward, moved=moved)
    # sums are float32, and so is y until it is given its type
    wide = 4 / p.itemsize
    peak = wide * (p.B * p.H * p.T * (p.P + 1.0) + sums)
    if p.gradients:
        tally.recorded(2)
        tally.add(2 * call, calls=_LAUNCHES[1])
        tally.add(max(backward * rate, 3 * moved * constants.traffic), flops=backward, moved=3 * moved)
        peak += p.B * (p.H * p.T * (p.D + p.P) + p.Hkv * p.S * (p.D + p.P))
    return tally.estimate("chunked", peak)


__all__ = ["kernel", "operations", "work"]
