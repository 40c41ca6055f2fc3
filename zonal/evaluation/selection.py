"""Which learning rate an operator is shown with, when several were tried.

Every operator gets the same grid. The choice is by the mean over seeds of the final headline metric on the evaluation
set, which is also the set that is reported: the chosen number is therefore slightly optimistic, in the same way for
every operator. Where that matters, train once more with the chosen rate on fresh seeds.
"""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
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
    finals: Mapping[float, Sequence[Final | None]],
    *,
    higher_is_better: bool,
    stop: float | None = None,
    seeds: Mapping[float, int] = MappingProxyType({}),
) -> float | None:
    """The learning rate with the best mean final value, of values ``capped`` at ``stop``.

    ``finals`` maps each learning rate to the outcome of each seed that tries all rates, None where that run failed or
    is not finished. A rate with more missing values than another is never preferred to it: a rate at which a seed
    diverges is not best because its other seeds did well. Ties go to the rate that more ``seeds`` took, others
    included, then to the one with fewer steps, then to the smaller one. None when nothing has finished.
    """
    keys = []
    for rate, outcomes in finals.items():
        finished = [final for final in outcomes if final is not None and math.isfinite(final.value)]
        if finished:
            mean = math.fsum(capped(final.value, stop) for final in finished) / len(finished)
            steps = sum(final.steps for final in finished) / len(finished)
            better = -mean if higher_is_better else mean
            keys.append((len(outcomes) - len(finished), better, -seeds.get(rate, 0), steps, rate))
    return min(keys)[-1] if keys else None
