"""Which learning rate an operator is shown with, when several were tried.

Every operator gets the same grid. The choice is by the mean over seeds of the final headline metric on the evaluation
set, which is also the set that is reported: the chosen number is therefore slightly optimistic, in the same way for
every operator. Where that matters, train once more with the chosen rate on fresh seeds.
"""

import math
from collections.abc import Mapping, Sequence


def best_learning_rate(finals: Mapping[float, Sequence[float | None]], *, higher_is_better: bool) -> float | None:
    """The learning rate with the best mean final value.

    ``finals`` maps each learning rate to the final headline value of each seed, None where that run failed or is not
    finished. A rate with more missing values than another is never preferred to it: a rate at which a seed diverges is
    not best because its other seeds did well. Ties go to the smaller rate. None when nothing has finished.
    """
    best: tuple[int, float, float] | None = None
    for rate, values in finals.items():
        finished = [value for value in values if value is not None and math.isfinite(value)]
        if not finished:
            continue
        mean = sum(finished) / len(finished)
        key = (len(values) - len(finished), -mean if higher_is_better else mean, rate)
        if best is None or key < best:
            best = key
    return None if best is None else best[2]
