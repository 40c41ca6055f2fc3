"""Which learning rate an operator is shown with, when several were tried.

Every operator gets the same grid. The choice is by the mean over seeds of the final headline metric on the validation
set, which is not reported. Where a task has none, or a run ended before there were any, it is by that on the evaluation
set: the reported number is then slightly optimistic, in the same way for every operator.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Final(NamedTuple):
    """The headline value of a finished run on the evaluation set, after how many steps it ended, and the value on the
    validation set, if it was measured.
    """

    value: float
    steps: int
    validation: float | None = None


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
    ``stop``; of values on the validation set, if all runs have one.

    ended: by rate and seed, the runs that are done. screening: the seeds that try all rates. A rate with more missing
    values than another is never preferred to it: a rate at which a seed diverges is not best because its other seeds
    did well. Ties go to the rate that was run with more seeds, others included, then to the one with fewer steps, then
    to the smaller one. None when nothing has finished.
    """
    validated = all(final.validation is not None for by_seed in ended.values() for final in by_seed.values())

    def judged(final: Final) -> float:
        return capped(final.validation if validated and final.validation is not None else final.value, stop)

    keys = []
    for rate, by_seed in ended.items():
        tried = [by_seed[seed] for seed in screening if seed in by_seed and math.isfinite(by_seed[seed].value)]
        if tried:
            mean = math.fsum(map(judged, tried)) / len(tried)
            steps = sum(final.steps for final in tried) / len(tried)
            keys.append((-len(tried), -mean if higher_is_better else mean, -len(by_seed), steps, rate))
    return min(keys)[-1] if keys else None
