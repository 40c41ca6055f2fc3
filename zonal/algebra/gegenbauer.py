"""Normalised Gegenbauer (ultraspherical) polynomials R_k(x) = C_k^lam(x) / C_k^lam(1), lam = (q - 1) / 2.

R_0 = 1, R_1 = x, R_k = [2 (k + lam - 1) x R_{k-1} - (k - 1) R_{k-2}] / (k + 2 lam - 1); |R_k| <= 1 on [-1, 1].
"""

import math
from collections.abc import Iterator
from fractions import Fraction

import torch
from torch import Tensor

from zonal.tracing import constant_kept, kept


def _step(k: int, q: int) -> tuple[Fraction, Fraction]:
    """(a, b) with R_k = a x R_{k-1} - b R_{k-2}."""
    # 2 (k + lam - 1) = 2k + q - 3 and k + 2 lam - 1 = k + q - 2
    return Fraction(2 * k + q - 3, k + q - 2), Fraction(k - 1, k + q - 2)


@constant_kept(64)
def _monomials(degree: int, q: int) -> tuple[tuple[float, ...], ...]:
    rows: list[list[Fraction]] = []
    for k in range(degree + 1):
        line = [Fraction(0)] * (degree + 1)
        if k < 2:
            line[k] = Fraction(1)
        else:
            a, b = _step(k, q)
            for j in range(k):
                line[j + 1] += a * rows[k - 1][j]
                line[j] -= b * rows[k - 2][j]
        rows.append(line)
    return tuple(tuple(float(v) for v in line) for line in rows)


@constant_kept(64)
def amplification(degree: int, q: int) -> float:
    """By how much Horner's scheme on monomials multiplies rounding errors, relative to R_k(1) = 1.

    It is the largest sum of the |monomial coefficients| of R_0 … R_degree.
    """
    return max(sum(map(abs, line)) for line in _monomials(degree, q))


@kept
def to_monomials(degree: int, q: int) -> Tensor:
    """The matrix (degree + 1, degree + 1) whose row k holds the monomial coefficients of R_k.

    Made in exact rational arithmetic: float64 rounding happens once, at the end.
    """
    return torch.tensor(_monomials(degree, q), dtype=torch.float64)


def gates(degrees: Tensor, count: int) -> Tensor:
    """clamp(n - k + 1, 0, 1) for k < count, (rows, count), of degrees n (rows,)."""
    return (degrees[:, None] - torch.arange(count, dtype=degrees.dtype, device=degrees.device) + 1).clamp(0, 1)


@kept
def constant_gates(degrees: tuple[float, ...], count: int) -> Tensor:
    """``gates`` of degrees that are not learned, float64."""
    return gates(torch.tensor(degrees, dtype=torch.float64), count)


def basis(x: Tensor, count: int, q: int) -> list[Tensor]:
    """[R_0(x), …, R_{count-1}(x)]."""
    return list(each(x, count, q))


def each(x: Tensor, count: int, q: int) -> Iterator[Tensor]:
    """``basis``, one at a time."""
    before, value = torch.ones_like(x), x
    yield from (before, value)[:count]
    for k in range(2, count):
        a, b = _step(k, q)
        before, value = value, float(a) * x * value - float(b) * before
        yield value


def series(x: Tensor, c: Tensor, q: int) -> Tensor:
    """sum_k c[k] R_k(x) by Clenshaw's recurrence, c (n, H, 1, 1)."""
    first = torch.zeros_like(x)
    second = torch.zeros_like(x)
    for k in range(c.shape[0] - 1, 0, -1):
        a, b = _step(k + 1, q)[0], _step(k + 2, q)[1]
        first, second = c[k] + float(a) * x * first - float(b) * second, first
    # R_1 = x R_0, and R_2's tail: -b_2 R_0
    return c[0] + x * first - float(_step(2, q)[1]) * second


def series_derivative(x: Tensor, c: Tensor, q: int) -> Tensor:
    """sum_k c[k] R_k'(x), by the differentiated three-term recurrence."""
    value, before = x, torch.ones_like(x)
    slope, slope_before = torch.ones_like(x), torch.zeros_like(x)
    total = c[1] * slope if c.shape[0] > 1 else torch.zeros_like(x)
    for k in range(2, c.shape[0]):
        a, b = (float(v) for v in _step(k, q))
        slope, slope_before = a * (value + x * slope) - b * slope_before, slope
        value, before = a * x * value - b * before, value
        total = total + c[k] * slope
    return total


def harmonic_dimension(k: int, q: int) -> int:
    """N_k: the number of linearly independent harmonics of degree k on the sphere S^q in R^(q+1)."""
    d = q + 1
    return math.comb(k + d - 1, d - 1) - (math.comb(k + d - 3, d - 1) if k >= 2 else 0)


def low_pass(t: float) -> float:
    """A smooth cut-off h: 1 up to 1/2, 0 from 1 on."""
    if t <= 0.5:
        return 1.0
    if t >= 1:
        return 0.0
    s = 2 * t - 1
    up, down = math.exp(-1 / s), math.exp(-1 / (1 - s))
    return down / (up + down)


def low_passes(n: float, count: int) -> list[float]:
    """h(k / n) for k < count.

    With weights h(k / n) N_k the kernel reproduces polynomials of degree <= n/2 (the kernel of the theory).
    """
    return [low_pass(k / n if n > 0 else 2.0 * k) for k in range(count)]
