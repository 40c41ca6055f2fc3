"""What the sparse path costs: hashing, places, and the candidates of every query. How many these are depends on the input; here it is a guess."""

from zonal.execution.problem import Problem
from zonal.execution.tally import Estimate, Tally

# a candidate is fetched from far away: so many times the operations that it takes in a tile, measured at 64 numbers a key
_FETCH = 2.0
# the same of a distance of a candidate, whose weights, radii and roots are made for eight candidates at once; in operations
_DISTANCE = 40.0
# a sort, or a look-up, of one key or query in one table, in elementwise calls
_PLACES = 4.0
# seconds that tables take however short they are: their many small calls
_START = 5e-3


def met(p: Problem) -> float:
    """About how many candidates a query has: of each table twice the keys that a bucket had were they spread evenly, 16 at least."""
    assert p.search is not None
    assert p.search.bits is not None
    seen = p.S / 2 if p.span.causal else p.S
    bucket = min(p.search.reach, max(16.0, 2 * seen / 2**p.search.bits))
    return min(p.search.window + p.search.tables * bucket, float(max(p.S, 1)))


def candidates(p: Problem, tally: Tally) -> Estimate:
    """Each query against its candidates; backward meets them again."""
    constants = tally.constants
    assert p.search is not None
    assert p.search.bits is not None
    heads, tables = p.B * p.H, p.search.tables + 1
    tokens = p.B * (p.H * p.T + p.Hkv * p.S)
    tally.add(_START)
    tally.product(1, tokens, p.search.tables * p.search.bits, p.D, 1)
    tally.passes("simple", tokens * tables, _PLACES)
    codes = tokens * tables + heads * p.T * tables * 2 + p.B * p.Hkv * p.S * tables
    peak = 1.0 * heads * p.T * p.P + codes + tokens * p.search.tables * p.search.bits
    passes = 1 + 2 * p.gradients
    if p.without_sparse is None:
        pairs = heads * p.T * met(p)
        flops = pairs * 2 * (p.D + p.P + _DISTANCE * len(p.terms)) * passes
        rate = constants.tile or 1.3 * constants.matmul.at(2.0**25) / 2.0**25
        tally.add(_FETCH * flops * rate, calls=6, flops=flops, moved=pairs * (p.D + p.P) * p.itemsize * passes)
    else:
        most = float(min(p.search.most, tables * max(p.S, 1)))
        pairs = heads * p.T * most
        tally.passes("select", pairs * (p.D + p.P), passes)
        tally.passes("simple", pairs, 24.0 * passes)
        tally.product(heads * p.T, 1, most, p.D + p.P, passes)
        tally.views(60 * passes)
        peak += 4.0 * (1 << 23)
    if p.gradients:
        tally.recorded(4)
        peak += heads * p.T * (p.D + 3.0) + p.B * p.Hkv * p.S * (p.D + p.P)
    return tally.estimate("sparse", peak)


__all__ = ["candidates", "met"]
