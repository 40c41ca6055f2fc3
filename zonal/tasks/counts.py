"""How often the most frequent of some random values occurs."""

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

_ENOUGH = 1e-9


def largest(most: int, kinds: int) -> NDArray[np.float64]:
    """E[the largest count] of n values, each any of ``kinds``, for n = 0 to ``most``.

    It is the sum of P(largest > m) over m. The counts of values are independent Poisson numbers given that their sum is
    n, so P(all <= m) is a coefficient of a power of the Poisson series that is cut off behind m.
    """
    mean = most / 3  # of the sum: neither end underflows for ``most`` below 1,500
    one, whole = _poisson(mean / kinds, most), _poisson(mean, most)
    found = np.zeros(most + 1)
    for m in range(most):
        above = 1 - _power(np.where(np.arange(most + 1) <= m, one, 0), kinds) / whole
        found += above
        if above[-1] < _ENOUGH:
            break
    return found


def _poisson(mean: float, most: int) -> NDArray[np.float64]:
    numbers = np.arange(most + 1)
    return np.exp(numbers * np.log(mean) - mean - gammaln(numbers + 1))


def _power(series: NDArray[np.float64], exponent: int) -> NDArray[np.float64]:
    """The first coefficients of a power of a series, as many as it has itself."""
    size, found = len(series), np.zeros(len(series))
    found[0] = 1
    while exponent:
        if exponent & 1:
            found = np.convolve(found, series)[:size]
        series, exponent = np.convolve(series, series)[:size], exponent >> 1
    return found


__all__ = ["largest"]
