"""What a handful of seeds can and cannot say.

An interval is mean ± t(0.975, n-1) · s / √n with the sample standard deviation s (divisor n-1). It takes the seeds as
independent draws from about a normal distribution; with two or three seeds it is wide, and that is the honest answer.

Two operators are compared **paired by seed**: a seed fixes the data order and the initial values of shared parameters,
so the differences of pairs vary less than the runs themselves. No correction for many comparisons is made: among
twenty pairs of equal operators, about one is expected to leave the spread by chance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy.special import stdtrit

from zonal.errors import ArgumentError

_ROUNDING = 1e-9  # values nearer to each other, relative to their size, are equal

Verdict = Literal["within the spread", "beyond the spread", "not decidable"]


@dataclass(frozen=True)
class Spread:
    """n values of one quantity. ``deviation`` and the interval are None for n = 1: one seed has no spread to show."""

    n: int
    mean: float
    deviation: float | None
    minimum: float
    maximum: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Difference:
    """The paired difference a - b over the n seeds both have, its interval, and what may be said of it."""

    n: int
    mean: float | None
    low: float | None
    high: float | None
    verdict: Verdict


def _finite(call: str, values: Sequence[float]) -> list[float]:
    numbers = [float(value) for value in values]
    for number in numbers:
        if not math.isfinite(number):
            raise ArgumentError(f"{call}: values must be finite, got {number}. Leave failed runs out.")
    return numbers


def spread(values: Sequence[float], *, level: float = 0.95) -> Spread:
    """Mean, sample standard deviation, extremes and the two-sided t interval of ``values`` (at least one, finite).

    Raises: ArgumentError for no values, values that are not finite, or a level outside (0, 1).
    """
    if not 0 < level < 1:
        raise ArgumentError(f"spread: level must lie between 0 and 1, such as 0.95, received {level}.")
    numbers = _finite("spread", values)
    n = len(numbers)
    if not n:
        raise ArgumentError("spread: at least one value is required, got none.")
    mean = math.fsum(numbers) / n
    if n == 1:
        return Spread(1, mean, None, mean, mean, None, None)
    deviation = math.hypot(*(number - mean for number in numbers)) / math.sqrt(n - 1)
    half = float(stdtrit(n - 1, 0.5 + level / 2)) * deviation / math.sqrt(n)
    return Spread(n, mean, deviation, min(numbers), max(numbers), mean - half, mean + half)


def difference_within_spread(a: Mapping[int, float], b: Mapping[int, float], *, level: float = 0.95) -> Difference:
    """Is the difference between two operators larger than the spread over seeds? ``a`` and ``b`` map seed → final
    value.

    The rule, on the differences a - b of the seeds that both have:

    * fewer than two such seeds: "not decidable";
    * the two-sided ``level`` t interval of the mean difference excludes 0, and the values of some seed differ by more
      than rounding: "beyond the spread";
    * otherwise: "within the spread".

    Raises: ArgumentError for values that are not finite, or a level outside (0, 1).
    """
    seeds = sorted(set(a) & set(b))
    if not seeds:
        return Difference(0, None, None, None, "not decidable")
    first, second = (_finite("difference_within_spread", [values[seed] for seed in seeds]) for values in (a, b))
    equal = all(math.isclose(one, other, rel_tol=_ROUNDING) for one, other in zip(first, second, strict=True))
    pairs = spread([one - other for one, other in zip(first, second, strict=True)], level=level)
    if pairs.low is None or pairs.high is None:
        return Difference(pairs.n, pairs.mean, None, None, "not decidable")
    beyond = (pairs.low > 0.0 or pairs.high < 0.0) and not equal
    return Difference(
        pairs.n, pairs.mean, pairs.low, pairs.high, "beyond the spread" if beyond else "within the spread"
    )
