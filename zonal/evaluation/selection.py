"""Which learning rate an operator is shown with, when several were tried.

Every operator gets the same grid. The choice is by the mean over seeds of the final headline metric on the evaluation
set, which is also the set that is reported: the chosen number is therefore slightly optimistic, in the same way for
every operator. Where that matters, train once more with the chosen rate on fresh seeds.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Final(NamedTuple):
    """The headline value of a finished run, and after how many steps it ended."""

    value: float
    steps: int


def capped(value: float, stop: float | None) -> float:
    """A headline value as it is compared: a run stops at the accuracy ``stop``, and by how much it goes beyond says
    nothing.
    """
    return value if stop is None else min(value, stop)


def best_learning_rate(
    ended: Mapping[float, Mapping[int, Final]],
    screening: Sequence[int],
    *,
    higher_is_better: bool,
    stop: float | None = None,
) -> float | None:
    """The learning rate with the best mean final value over the seeds that try all rates, of values ``capped`` at
    ``stop``.

    ended: by rate and seed, the runs that are done. screening: the seeds that try all rates. A rate with more missing
    values than another is never preferred to it: a rate at which a seed diverges is not best because its other seeds
    did well. Ties go to the rate that was run with more seeds, others included, then to the one with fewer steps, then
    to the smaller one. None when nothing has finished.
    """
    keys = []
    for rate, by_seed in ended.items():
        tried = [by_seed[seed] for seed in screening if seed in by_seed and math.isfinite(by_seed[seed].value)]
        if tried:
            mean = math.fsum(capped(final.value, stop) for final in tried) / len(tried)
            steps = sum(final.steps for final in tried) / len(tried)
            keys.append((-len(tried), -mean if higher_is_better else mean, -len(by_seed), steps, rate))
    return min(keys)[-1] if keys else None
