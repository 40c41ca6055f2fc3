"""What the compiled kernels of tiles and of distances cost: operations over a measured rate, nothing else."""

from zonal.execution.problem import Problem
from zonal.execution.tally import Estimate, Tally
from zonal.kernels.cpp import distance_library

# on the CPU queries go in columns of sixteen, whatever their number; sixteen columns are a task, which reads its keys and values once
_COLUMN = _TASK = 16
# on CUDA a block of 64 float32 queries is a program; keys of sixteen queries or fewer are split over up to 32 programs of 256 or more
_CUDA_COLUMN, _FEW, _SPLIT, _SPLITS = 64, 16, 256, 32
# an exponential in registers, counted in multiplications
_EXPONENTIAL = 14.0
# the roots, logarithms and arcs of a pair's distance of each kind, and its part of a wave, counted likewise: measured, on parts of 5 to 96 numbers
_DISTANCES = {"euclidean": 6.0, "squared": 2.0, "sphere": 12.0, "hyperbolic": 26.0, "product": 0.0}
_WAVE = 3.0


def kernel(p: Problem, tally: Tally) -> Estimate:
    """Forward two products a tile, backward five, each with the link in registers."""
    constants = tally.constants
    heads = p.B * p.H
    column, task, splits = _COLUMN, _TASK, 1
    if p.device.type == "cuda":
        column, task = _CUDA_COLUMN, 1
        if p.T <= _FEW:
            column, splits = _FEW, min(max(p.S // _SPLIT, 1), _SPLITS)
    blocks = p.span.blocks(p.T, p.S, column)
    pairs = heads * float(sum(column * (block.hi - block.lo) for block in blocks))
    each, width = _EXPONENTIAL if p.tags.log_space else p.operations + 2, p.D
    again = 2  # how often backward makes a pair again
    if p.terms:
        each += sum(_DISTANCES[term.kind] for term in p.terms) + _WAVE * p.operations * (p.operations > 1)
        if p.device.type == "cuda":
            again = 5
        else:  # a difference for each product, which the units for vectors of sixteen have to spare
            width = sum(term.size for term in p.terms) * (1 if distance_library.source() == "distance_wide" else 2)
    forward = pairs * (2 * (width + p.P) + 2 * each)
    backward = (
        pairs
        * (4 * width + 2 * p.P + 2 * (width + p.P) + 2 * (again * each + 2 * p.coefficients * p.coefficient_gradients))
        if p.gradients
        else 0.0
    )
    rate = constants.tile or 1.3 * constants.matmul.at(2.0**25) / 2.0**25
    # a task is a head and some queries; backward goes by key heads, split where they are few
    busy = min(constants.threads, max(1, heads * len(blocks) * splits))
    moved = p.itemsize * (heads * p.T * (p.D + p.P) + len(blocks) / task * p.B * p.Hkv * p.S * (p.D + p.P))
    tally.add(constants.tile_call or 50 * constants.call, calls=8)
    tally.add(max(forward * rate * constants.threads / busy, moved * constants.traffic), flops=forward, moved=moved)
    peak = heads * p.T * (p.P + 1.0)
    if p.gradients:
        tally.recorded(2)
        tally.add(2 * (constants.tile_call or 50 * constants.call), calls=10)
        tally.add(backward * rate * constants.threads / busy, flops=backward, moved=2 * moved)
        peak += heads * p.T * p.D + p.B * p.Hkv * p.S * (p.D + p.P)
    return tally.estimate("tiled", peak)


__all__ = ["kernel"]
