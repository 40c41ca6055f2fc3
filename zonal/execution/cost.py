"""What the paths that look at every pair of query and key cost, and the table of all paths.

Each path is counted call by call, as its code makes them: a path that changes its loops changes its function here.
"""

from collections.abc import Callable
from dataclasses import replace

from zonal.execution import tiled as tiled_path
from zonal.execution.constants import Constants
from zonal.execution.cost_chunked import chunked
from zonal.execution.cost_coupled import dense_plan, dense_tree, repeated, tree
from zonal.execution.cost_kernel import kernel
from zonal.execution.cost_sparse import candidates
from zonal.execution.cost_streaming import streaming
from zonal.execution.problem import Problem
from zonal.execution.tally import Estimate, Tally

# -- dense -------------------------------------------------------------------------------------------------------------------


def _kernel(p: Problem, tally: Tally, rows: float, keys: float) -> None:
    """Scores and evidence of B H blocks (rows, keys)."""
    elements = p.B * p.H * rows * keys
    tally.product(p.B * p.H, rows, keys, p.D)
    tally.passes("simple", elements, p.score_passes)
    if p.clamped:
        tally.passes("simple", elements)
        tally.views(8)
    if not p.tags.log_space:
        tally.passes("simple", elements, p.operations)
        tally.views(p.operations)


def _kernel_backward(p: Problem, tally: Tally, rows: float, keys: float) -> None:
    elements = p.B * p.H * rows * keys
    if not p.tags.log_space:
        # each step of the link: the gradient times the other factor, for both factors, and their sum
        tally.passes("simple", elements, 3 * p.operations)
        if p.coefficient_gradients:
            tally.passes("reduce", elements, p.coefficients)
    if p.score_passes:  # of a plain distance 8; what is more is done again, with two derivatives
        tally.passes("simple", elements, 8 + 3 * (p.score_passes - 5))
    tally.product(p.B * p.H, rows, p.D, keys)
    tally.product(p.B * p.H, keys, p.D, rows)


def dense(p: Problem, constants: Constants) -> Estimate:
    """Every block in memory, each step a call over all of it."""
    tally = Tally(constants, p.itemsize, 4.0 * p.B * p.H * p.T * (p.S + p.past) * p.itemsize if p.gradients else 0.0)
    p = with_past(p, tally)
    heads, n, masks = p.B * p.H, p.B * p.H * p.T * p.S, (p.B if p.padded else 1) * p.T * p.S
    # scores, evidence and what the step at hand makes of them; steps with coefficients write over their own buffer
    live = 2.0 + (1 if p.tags.log_space else p.operations > 2 and p.coefficients == 0)
    if p.groups > 1:
        tally.passes("simple", heads * p.S * p.D)
        tally.passes("simple", heads * p.S * p.P)
    _kernel(p, tally, p.T, p.S)
    tally.views(26)
    tally.passes("simple", masks, 1 if p.span.free and not p.padded else 4)
    if p.biased:
        own = p.bias_batch * p.H * p.T * p.S
        tally.passes("simple", own, 1 + 2 * p.slopes)
        tally.passes("select", own)
        tally.passes("simple", n)
        tally.passes("exp", own, 0 if p.tags.log_space else 1)
        tally.views(6)
        live += 2
    tally.passes("select", n)
    if p.top:
        _top(p, tally, n)
        live += 2
    if p.tags.couples:
        live += dense_tree(p, tally) if p.spans else dense_plan(p, tally)
    elif p.tags.solves:
        live += _dense_solve(p, tally)
    elif p.tags.normalises:
        if p.tags.log_space:
            tally.passes("reduce", n)
            tally.passes("simple", n)
            tally.passes("exp", n)
        tally.passes("reduce", n)
        tally.passes("simple", n)
        tally.passes("select", n, 0.5)
        tally.views(4)
        live += 1
    else:
        if p.tags.log_space:
            tally.passes("exp", n)
        tally.passes("simple", n)
        tally.views(3)
    tally.product(heads, p.T, p.P, p.S)
    tally.views(2)
    if p.gradients:
        tally.recorded(tally.calls)
        live += _dense_backward(p, tally)
    small = heads * p.T * (p.P + p.D) + (heads * p.S * (p.D + p.P) if p.groups > 1 else 0)
    return tally.estimate("dense", live * n + small, 2 * masks)


def _top(p: Problem, tally: Tally, elements: float, count: float = 1) -> None:
    """The largest entries of rows, ``elements`` in all, and what is below them put out."""
    tally.passes(
        "reduce", elements, 70 * count
    )  # torch's search for the k-th largest, as measured on rows of 512 to 2048
    tally.passes("simple", elements, count)
    tally.passes("select", elements, count)


def _dense_backward(p: Problem, tally: Tally) -> float:
    heads, n = p.B * p.H, p.B * p.H * p.T * p.S
    before = tally.calls
    tally.product(heads, p.T, p.S, p.P)
    tally.product(heads, p.S, p.P, p.T)
    kept = 2.0
    if p.tags.solves:
        kept += _dense_solve_backward(p, tally)
    elif p.tags.normalises:
        tally.passes("select", n, 0.5)
        tally.passes("simple", n, 4)
        tally.passes("reduce", n)
        tally.passes("simple", n, 1 + p.tags.log_space)
        kept += 2
    else:
        tally.passes("simple", n, 1 + p.tags.log_space)
    if p.biased:
        tally.passes("select", n)
        tally.passes("simple", n, 2)
        tally.passes("reduce", n, p.bias_gradients)
    tally.passes("select", n)
    _kernel_backward(p, tally, p.T, p.S)
    tally.views(tally.calls - before)
    return kept + (0 if p.tags.log_space else p.operations)


def _dense_solve(p: Problem, tally: Tally) -> float:
    """The anchor's solve with the kernel among keys; returns how many more score blocks are alive."""
    heads, n, square = p.B * p.H, p.B * p.H * p.T * p.S, p.B * p.H * p.S * p.S
    ratio = square / n if n else 0.0
    _kernel(p, tally, p.S, p.S)
    if p.decays:  # sums of every token's own, one after another
        square = p.B * p.H * p.D * p.D
        tally.passes("simple", square, 10 * p.S)
        tally.cholesky(heads * p.T, p.D)
        tally.solve(heads * p.T, p.D, 1, 2 * (1 + p.shifts))
        tally.product(heads * p.T, 1, p.D, p.D, p.shifts)
        tally.views(14 * p.S + 40)
        return 2 * ratio + 4 + 5 * square * p.S / max(n, 1)
    if not p.by_query and p.span.left is None:
        tally.passes("simple", square, 2)
        tally.cholesky(heads, p.S)
        tally.views(10)
        for _ in range(1 + p.shifts):
            tally.solve(heads, p.S, p.T, 2)
            tally.passes("simple", n, 2)
            tally.passes("select", n)
        for _ in range(p.shifts):
            tally.passes("simple", n)
            tally.passes("select", n)
            tally.product(heads, p.T, p.S, p.S)
        tally.passes("select", n)
        tally.views(20)
        return 3 * ratio + 2 * (p.shifts > 0)
    # any other visible set: one factorisation a query
    tally.passes("simple", square, 3 * p.T)
    tally.cholesky(heads, p.S, p.T)
    tally.solve(heads, p.S, 1, 2 * p.T * (1 + p.shifts))
    tally.product(heads, p.S, 1, p.S, p.T * p.shifts)
    tally.views(12 * p.T)
    return 4 * ratio + 1


def _dense_solve_backward(p: Problem, tally: Tally) -> float:
    heads, n, square = p.B * p.H, p.B * p.H * p.T * p.S, p.B * p.H * p.S * p.S
    ratio = square / n if n else 0.0
    _kernel_backward(p, tally, p.S, p.S)
    if p.decays:
        square = p.B * p.H * p.D * p.D
        tally.passes("simple", square, 20 * p.S)
        tally.solve(heads * p.T, p.D, p.D, 2)
        tally.views(20 * p.S)
        return 2 * ratio + 10 * square * p.S / max(n, 1)
    if not p.by_query and p.span.left is None:
        for _ in range(1 + p.shifts):
            tally.solve(heads, p.S, p.T, 2)
            tally.product(heads, p.S, p.S, p.T, 2)
            tally.passes("simple", n, 2)
            tally.passes("select", n, 2)
            tally.passes("simple", square, 2)
        tally.product(heads, p.T, p.S, p.S, p.shifts)
        tally.product(heads, p.S, p.S, p.T, p.shifts)
        # the factor's own backward: two solves and a product of the whole matrix
        tally.solve(heads, p.S, p.S, 2)
        tally.product(heads, p.S, p.S, p.S)
        tally.passes("simple", square, 3)
        tally.views(30)
        return 2 * p.shifts * ratio
    tally.solve(heads, p.S, p.S, 4 * p.T)
    tally.product(heads, p.S, p.S, p.S, 2 * p.T)
    tally.passes("simple", square, 4 * p.T)
    return (3.0 * p.T + 2) * ratio + 1


# -- tiled -------------------------------------------------------------------------------------------------------------------


def _tiles(p: Problem, query_block: int, key_block: int) -> dict[tuple[int, int, bool], int]:
    """How many tiles there are of each (queries, keys, masked)."""
    found: dict[tuple[int, int, bool], int] = {}
    for block in p.span.blocks(p.T, p.S, query_block):
        rows = block.stop - block.start
        # without documents and windows only the block's own diagonal is masked
        open_until = (
            block.hi
            if block.whole
            else max(block.lo, block.hi - rows)
            if p.span.left is None and p.span.edges is None
            else block.lo
        )
        whole, rest = divmod(max(block.hi - block.lo, 0), key_block)
        clear = 0 if p.padded else min(whole, max(0, (open_until - block.lo) // key_block))
        edge = p.padded or block.hi > open_until
        for shape, count in (
            ((rows, key_block, False), clear),
            ((rows, key_block, True), whole - clear),
            ((rows, rest, edge), int(rest > 0)),
        ):
            if count:
                found[shape] = found.get(shape, 0) + count
    return found


def tiled(p: Problem, constants: Constants) -> Estimate:
    """Tiles made, used and forgotten; backward makes each again."""
    tally = Tally(constants, p.itemsize)
    if p.spans:
        return tree(p, tally)
    if p.iterates:  # row attention, and much of it with one number a value
        row = replace(p, tags=p.tags._replace(couples=False, normalises=True), Hkv=p.H)
        return repeated(p, tiled(row, constants), tiled(replace(row, P=1, gradients=False), constants))
    p = with_past(p, tally)
    if p.without_kernel is None:
        return kernel(p, tally)
    sequences, query_block, key_block = tiled_path.blocks(p.H, p.T, p.S, p.top > 0)
    groups = -(-p.B // sequences) if p.B else 0
    batch = min(sequences, p.B)
    loops = p.B / batch if batch else 0
    tiles = _tiles(p, query_block, key_block)
    query_blocks = -(-p.T // query_block)
    for rows, keys, masked in tiles:
        count = tiles[rows, keys, masked] * loops
        _tile_forward(p, tally, batch, rows, keys, masked, count)
        if p.top:  # whole rows first
            _tile_forward_again(p, tally, batch, rows, keys, masked, count)
            _top(p, tally, batch * p.H * rows * keys, count)
        if p.gradients:
            _tile_forward_again(p, tally, batch, rows, keys, masked, count)
            _tile_backward(p, tally, batch, rows, keys, masked, count)
    rows = min(query_block, p.T)
    online = p.tags.log_space and p.tags.normalises
    out = batch * p.H * rows * p.P
    tally.passes("simple", out, query_blocks * groups * (5 if online else 4))
    tally.views(query_blocks * groups * 36 + 28)
    heads = p.B * p.H
    tile = batch * p.H * query_block * key_block
    buffers = 1.5 if p.tags.log_space else 2.0  # scores and kernel in one or two, and now and then a mask
    whole = batch * p.H * query_block * p.S * 1.5 if p.top else 0.0
    peak = heads * p.T * (1.0 + (p.top > 0)) + whole + (buffers + 3.5 * p.biased) * tile + 3.0 * out
    if p.gradients:
        tally.views(query_blocks * groups * 24 + 40)
        tally.recorded(2)
        tally.passes("simple", heads * p.T * p.P, 2)
        peak += heads * p.T * (p.P + p.D) + p.B * p.Hkv * p.S * (p.D + p.P) + 1.0 * tile
    return tally.estimate("tiled", peak + heads * p.T * p.P)


def _triangular(p: Problem) -> bool:
    """Whether masked tiles are cut by ``tril_``, with no mask made."""
    return (
        not (p.padded or p.biased or p.tags.log_space)
        and p.span.left is None
        and p.span.edges is None
        and p.span.chunk is None
    )


def _tile_forward_again(p: Problem, tally: Tally, batch: int, rows: int, keys: int, masked: bool, count: float) -> None:
    """The tile itself, in both directions."""
    n = batch * p.H * rows * keys
    if p.groups > 1:
        tally.passes("simple", batch * p.H * keys * p.D, count)
        tally.passes("simple", batch * p.H * keys * p.P, count)
    tally.views((24 + 2 * p.operations * (not p.tags.log_space)) * count)
    tally.product(batch * p.H, rows, keys, p.D, count)
    tally.passes("simple", n, p.score_passes * count)
    if p.clamped:
        tally.passes("simple", n, count, fresh=False)
    if masked:
        tally.views(6 * count)
        if _triangular(p):
            tally.passes("simple", n, count, fresh=False)
        else:
            tally.passes("simple", rows * keys, 3 * count)
            tally.passes("select", n, count, fresh=False)
    if p.biased:
        own = min(p.bias_batch, batch) * p.H * rows * keys
        tally.passes("simple", n, count)
        tally.passes("simple", own, (1 + p.slopes) * count)
        tally.views(6 * count)
        tally.passes("select", own, count * masked)
        tally.passes("exp", own, 0 if p.tags.log_space else count)
    if not p.tags.log_space:
        tally.passes("simple", n, p.operations * count)


def _tile_forward(p: Problem, tally: Tally, batch: int, rows: int, keys: int, masked: bool, count: float) -> None:
    n, out = batch * p.H * rows * keys, batch * p.H * rows * p.P
    _tile_forward_again(p, tally, batch, rows, keys, masked, count)
    if p.tags.log_space:
        tally.passes("exp", n, count)
    if p.tags.log_space and p.tags.normalises:
        tally.passes("reduce", n, 2 * count)
        tally.passes("simple", n, count)
        tally.passes("simple", out, 2 * count)
        tally.views(7 * count)
    else:
        tally.passes("reduce", n, count * p.tags.normalises)
        tally.passes("simple", out, count)
        tally.views(count)
    tally.product(batch * p.H, rows, p.P, keys, count)


def _tile_backward(p: Problem, tally: Tally, batch: int, rows: int, keys: int, masked: bool, count: float) -> None:
    heads, n = batch * p.H, batch * p.H * rows * keys
    if p.tags.log_space:
        tally.passes("exp", n, count, fresh=False)
        tally.passes("simple", n, count * p.tags.normalises, fresh=False)
    tally.product(heads, keys, p.P, rows, count)
    tally.product(heads, rows, keys, p.P, count)
    tally.views(24 * count)
    tally.passes("simple", n, count * p.tags.normalises, fresh=False)
    tally.passes("simple", n, count, fresh=False)
    if not p.tags.log_space:
        tally.passes("simple", n, count * p.biased, fresh=False)
        if masked:
            tally.passes("simple" if _triangular(p) else "select", n, count, fresh=False)
        if p.coefficient_gradients:
            tally.passes("reduce", n, p.coefficients * count)
            tally.passes("simple", n, (p.coefficients - 1 + max(p.operations - p.coefficients + 1, 0)) * count)
        tally.passes("simple", n, (p.operations + 1) * count)
    if p.bias_gradients:
        tally.passes("reduce", n, (p.row_bias + p.col_bias) * count)
        tally.passes("simple", n, count)
    tally.product(heads, rows, p.D, keys, count)
    tally.product(heads, keys, p.D, rows, count)
    if p.score_passes:
        tally.passes("reduce", n, 2 * count)
        tally.passes("simple", n, (1 + 3 * (p.score_passes - 5)) * count)
    tally.passes("simple", heads * (rows * p.D + keys * (p.D + p.P)), count)
    tally.views(2 * count)


def with_past(p: Problem, tally: Tally) -> Problem:
    """The problem with the keys of a memory before its own, and the copies that joining them takes."""
    tokens = p.past + p.S
    numbers = p.B * p.Hkv * (p.D + p.P)
    if p.past:
        tally.passes("simple", numbers * tokens, 1)
        tally.views(12)
    if p.keeps:
        # the memory grows in place mostly, and doubles its room now and then; where gradients flow it is copied
        tally.passes("simple", numbers * (tokens if p.gradients else p.S))
        tally.views(25)
    return replace(p, S=tokens, past=0)


def sparse(p: Problem, constants: Constants) -> Estimate:
    """Candidates that hash tables have found, and no other keys."""
    tally = Tally(constants, p.itemsize)
    return candidates(with_past(p, tally), tally)


MODELS: dict[str, Callable[[Problem, Constants], Estimate]] = {
    "dense": dense,
    "tiled": tiled,
    "chunked": chunked,
    "streaming": streaming,
    "sparse": sparse,
}
