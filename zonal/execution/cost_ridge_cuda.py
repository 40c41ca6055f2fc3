"""What the Triton kernels for ridge and Koopman read-outs cost: operations over a measured rate, as ridge_state shares them out."""

from zonal.execution.problem import Problem
from zonal.execution.tally import Estimate, Tally
from zonal.kernels.triton import sizes

# launches of a call forward, and of one backward; operations of torch around each
_LAUNCHES = 5, 9
_AROUND = 40, 25
# operations of float32 that one of float64 takes the time of
_WIDE = 2.0


def _blocks(p: Problem) -> tuple[int, int, int]:
    """(keys of a block, blocks of keys, blocks from which a query starts) of one key head."""
    block, documents = sizes.ridge_block(p.D), 1 if p.span.edges is None else len(p.span.edges) - 1
    blocks = sizes.ceil_div(p.S, block) + documents - 1
    return block, max(blocks, 1), max(min(blocks, sizes.ceil_div(min(p.T, p.S), block) + documents), 1)


def operations(p: Problem) -> tuple[float, float]:
    """Multiplications and additions of a call, (forward, backward); those of float64 count ``_WIDE`` times."""
    r, width, kv, shifts = p.D, p.P, p.B * p.Hkv, p.shifts
    block, _, read = _blocks(p)
    shifted = float(shifts > 0)
    state = r * (r + width + shifted * r)
    wide = _WIDE * (p.S * state + read * r * state)
    # L^-1 takes whole tiles a row
    factor = read * block * (r * (r + width + 2 * shifted * r) + block * (2 * block + 2 * r + width + 6 * shifted * r))
    rows = float(p.groups * min(p.T, p.S))
    step = r * r + 4 * block * r
    forward = wide + factor + rows * (shifts * step + r * width + block * (r + width))
    if not p.gradients:
        return 2 * kv * forward, 0.0
    solves = (shifts + 1) * (r * r + 2 * block * r)
    back = solves + 2 * shifts * step + r * width + block * (r + width)
    sums = (2 * shifts + 1) * r * r + r * width
    near = block * (4 * (shifts + 1) * r + 3 * shifts * r + r + 2 * width)
    return 2 * kv * forward, 2 * kv * (
        wide + factor + rows * (back + sums + near) + p.S * r * (r + 2 * width + 2 * shifted * r)
    )


def kernel(p: Problem, tally: Tally) -> Estimate:
    """The kernels of a call, and of one backward."""
    constants = tally.constants
    r, width, kv, shifted = p.D, p.P, p.B * p.Hkv, p.shifts > 0
    _, blocks, read = _blocks(p)
    forward, backward = operations(p)
    rate = constants.sums or 1.6 * constants.matmul.at(2.0**25) / 2.0**25
    call = constants.sums_call or 80 * constants.call
    # written as parts, read and written as sums, read where a block is read from, and written and read as what is read
    states = float(kv * r * (r + width + shifted * r))
    keys = float(kv * p.S * (r * (2 + 3 * shifted) + width))
    moved = (
        states * (8 * (3 * blocks + read) + 8 * read)
        + 8 * keys
        + p.itemsize * p.B * (p.H * p.T * (r + width) + p.Hkv * p.S * (r + width))
    )
    tally.add(call, calls=_LAUNCHES[0])
    tally.views(_AROUND[0])
    tally.add(max(forward * rate, moved * constants.traffic), flops=forward, moved=moved)
    if p.keeps:  # the memory takes in the tokens by products of torch in float64
        tally.product(2 * kv, r, r, p.S, 1 + shifted)
        tally.product(2 * kv, width, r, p.S)
        tally.views(40)
    # sums are float64, what is read from them float32, and so is y until it is given its type
    wide = 4 / p.itemsize
    peak = wide * (p.B * p.H * p.T * width + 3 * states * blocks + keys)
    if p.gradients:
        rows = float(p.B * p.H * p.T * r * 2 * (p.shifts + 1))
        again = moved + 4 * (2.5 * rows + 3 * states * blocks + 2 * keys)
        tally.recorded(2)
        tally.add(2 * call, calls=_LAUNCHES[1])
        tally.views(_AROUND[1])
        tally.add(max(backward * rate, again * constants.traffic), flops=backward, moved=again)
        peak += wide * (rows + states * blocks + kv * p.S * (2 * r + width))
    return tally.estimate("chunked", peak)


__all__ = ["kernel", "operations"]
