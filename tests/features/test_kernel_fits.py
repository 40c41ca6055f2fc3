"""Quadratures of 1/y and nonnegative polynomials fitted to a kernel."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from zonal import link
from zonal.errors import ArgumentError
from zonal.features import Polynomial, fidelity, fit_square, quadrature, row_weights, sample
from zonal.features.fit import histogram, uniform_angles


def relative_error(rule: str, count: int, eps: float, points: int = 30001) -> Tensor:
    """Of sum_r w_r e^(2 s_r x) as 1/(2 + eps - 2x), on x in [-1, 1], finer near x = 1."""
    found = quadrature(rule, count, eps)  # type: ignore[arg-type]
    y = torch.logspace(math.log10(eps), math.log10(4 + eps), points, dtype=torch.float64)
    x = (2 + eps - y) / 2
    terms = [
        math.exp(log_w) * (2 * s * x).exp() if s < 50 else (log_w + 2 * s * x).exp()
        for s, log_w in zip(found.nodes, found.log_weights, strict=True)
    ]
    return y * torch.stack(terms).sum(0) - 1


@pytest.mark.parametrize(
    ("count", "eps", "error"),
    [(1, 1.0, 0.351), (2, 1.0, 0.104), (4, 0.1, 0.534), (2, 0.01, 0.971), (8, 0.01, 0.871), (64, 0.1, 8e-6)],
)
def test_laguerre(count: int, eps: float, error: float) -> None:
    """The largest error stands at x = 1 and falls like (1 + eps)^(-2R), so slowly that 8 nodes miss 87% at eps =
    0.01.
    """
    found = quadrature("laguerre", count, eps)
    assert found.error == pytest.approx(error, rel=0.06)
    assert found.error == pytest.approx(float(relative_error("laguerre", count, eps).abs().max()), rel=1e-6, abs=1e-12)
    assert float(relative_error("laguerre", count, eps)[0].abs()) == pytest.approx(found.error, rel=1e-3)
    rate = quadrature("laguerre", count + 1, eps).error / found.error
    assert rate == pytest.approx((1 + eps) ** -2, rel=0.2)


@pytest.mark.parametrize(
    ("count", "eps", "error"),
    [
        (5, 1e-3, 0.058),
        (8, 1e-3, 0.003),
        (3, 1e-2, 0.15),
        (5, 1e-2, 0.013),
        (2, 0.1, 0.15),
        (3, 0.1, 0.026),
        (1, 1.0, 0.18),
        (2, 1.0, 0.0096),
    ],
)
def test_minimax(count: int, eps: float, error: float) -> None:
    """Nonnegative nodes; no worse than a search by hand found; 2R + 1 equal peaks, which only the best has."""
    found = quadrature("minimax", count, eps)
    assert found.error <= error
    assert all(s > 0 for s in found.nodes)
    got = relative_error("minimax", count, eps)
    assert float(got.abs().max()) == pytest.approx(found.error, rel=1e-4)
    edges = [0, *((got[1:].sign() != got[:-1].sign()).nonzero()[:, 0] + 1).tolist(), len(got)]
    peaks = [float(got[a:b].abs().max()) for a, b in itertools.pairwise(edges)]
    assert len(peaks) == 2 * count + 1
    assert min(peaks) == pytest.approx(max(peaks), rel=1e-4)


def test_quadrature_that_misses_says_by_how_much() -> None:
    with pytest.raises(ArgumentError, match=r"largest relative error of 0\.971, 0\.05 is required"):
        quadrature("laguerre", 2, 0.01, tolerance=0.05)
    assert quadrature("minimax", 5, 0.01, tolerance=0.05).error < 0.05
    # so near to exact that rounding hides the peaks
    with pytest.raises(ArgumentError, match="did not converge: its largest relative error is"):
        quadrature("minimax", 8, 4.0)
    for eps in (0.0, -0.1, math.inf, math.nan):
        with pytest.raises(ArgumentError, match="eps must be > 0"):
            quadrature("laguerre", 2, eps)
    with pytest.raises(ArgumentError, match="from 1 to 8 nodes, received 9"):
        quadrature("minimax", 9, 0.01)


@pytest.mark.parametrize("dim", [2, 3, 8, 32])
def test_angles_of_random_vectors(dim: int) -> None:
    """Moments of u . v: E x^2 = 1/d, E x^4 = 3/(d (d + 2))."""
    x, weight = uniform_angles(dim)
    assert float(weight.sum()) == pytest.approx(1)
    assert float((weight * x.square()).sum()) == pytest.approx(1 / dim, rel=1e-6)
    assert float((weight * x**4).sum()) == pytest.approx(3 / (dim * (dim + 2)), rel=1e-6)


def test_histogram_keeps_the_mean() -> None:
    sample = torch.rand(5000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    x, weight = histogram(sample)
    assert float((weight * x).sum()) == pytest.approx(float(sample.mean()), abs=1e-12)
    assert float((weight * x.square()).sum()) == pytest.approx(float(sample.square().mean()), rel=1e-5)


def missed(kernel: link.Link, fitted: link.Link, x: Tensor, weight: Tensor) -> float:
    wanted, got = (of.value(x.view(1, 1, 1, -1), of.coefficients({}))[0, 0, 0] for of in (kernel, fitted))
    return float(((weight * (got - wanted).square()).sum() / (weight * wanted.square()).sum()).sqrt())


@pytest.mark.parametrize(
    ("eps", "dim", "degree", "error"),
    [(0.01, 32, 2, 0.266), (0.01, 8, 4, 0.346), (1.0, 8, 4, 0.0751), (1.0, 16, 2, 0.216), (1.0, 8, 6, 0.0206)],
)
def test_fit(eps: float, dim: int, degree: int, error: float) -> None:
    """The error is what it says, no nearby polynomial does better, and the result is positive."""
    kernel = link.Yat(eps)
    found = fit_square(kernel, degree, dim=dim)
    x, weight = uniform_angles(dim)
    assert found.error == pytest.approx(missed(kernel, found.link, x, weight), rel=1e-9)
    assert found.error == pytest.approx(error, rel=0.01)
    for j in range(degree // 2 + 1):
        for step in (-0.003, 0.003):
            moved = list(found.link.polynomial)
            moved[j] += step
            assert missed(kernel, link.PolynomialSquare(tuple(moved), found.link.floor), x, weight) > found.error
    assert (
        missed(kernel, link.PolynomialSquare(found.link.polynomial, found.link.floor + 1e-3), x, weight) > found.error
    )
    assert Polynomial.of(found.link).positive


def test_bias_of_the_squared_affine_kernel() -> None:
    """b = 0.04 is the fit at d = 32, eps = 0.01; the scale falls out of a row."""
    p = fit_square(link.Yat(0.01), 2, dim=32).link.polynomial
    assert p[0] / p[1] == pytest.approx(0.042, abs=0.001)


def test_fit_to_data() -> None:
    """Angles crowded near one are served better by a fit to them than by a fit to random vectors."""
    crowded = torch.rand(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 0.5 + 0.4
    x, weight = histogram(crowded)
    kernel = link.Yat(1.0)
    own, random = fit_square(kernel, 4, angles=crowded), fit_square(kernel, 4, dim=8)
    assert own.error == pytest.approx(missed(kernel, own.link, x, weight), rel=1e-9)
    assert own.error < 0.1 * missed(kernel, random.link, x, weight)


@pytest.mark.parametrize("degree", [4, 6])
def test_fit_to_rows(degree: int) -> None:
    """Rows are divided by their sums: a fit that knows it is nearer than one to all pairs alike, on data of the same
    kind that it did not see.
    """
    kernel = link.Yat(0.01)
    seen, data = sample("anisotropic", 4, 200, 8, 1), sample("anisotropic", 4, 200, 8, 0)
    x = seen.q @ seen.k.mT
    weights = row_weights(kernel, x)
    value = kernel.value(x, kernel.coefficients({}))
    assert torch.allclose((weights.sqrt() * value).sum(-1), torch.ones(4, 200, dtype=torch.float64))
    assert bool((weights.triu(1) == 0).all())
    by_rows, by_pairs = (
        fit_square(kernel, degree, angles=x, weights=w).link for w in (weights, torch.ones_like(x).tril())
    )
    errors = [fidelity(Polynomial.of(found), {}, data, kernel).error for found in (by_rows, by_pairs)]
    assert errors[0] < 0.85 * errors[1]


def test_weights_are_counts() -> None:
    """An angle of weight 2 stands for two angles, one of weight 0 for none."""
    x = torch.tensor([0.1, 0.1, 0.5, -0.3, 0.9], dtype=torch.float64)
    twice = fit_square(
        link.Yat(1.0), 2, angles=torch.tensor([0.1, 0.5, -0.3, 0.9, 0.7]), weights=torch.tensor([2.0, 1, 1, 1, 0])
    )
    assert twice.link.polynomial == pytest.approx(fit_square(link.Yat(1.0), 2, angles=x).link.polynomial, rel=1e-5)


def test_other_kernels_can_be_fitted() -> None:
    """exp is positive everywhere and needs no floor; a square is found exactly."""
    assert fit_square(link.Exp(), 4, dim=8).error < 0.02
    found = fit_square(link.SquaredAffine(0.3), 2, dim=8)
    assert found.error < 1e-6
    assert found.link.polynomial == pytest.approx((0.3, 1.0), abs=1e-5)


def test_bad_fits() -> None:
    for wrong, message in (
        (lambda: fit_square(link.Yat(), 3, dim=8), "degree must be 2, 4 or 6"),
        (lambda: fit_square(link.Yat(), 2), "not both"),
        (lambda: fit_square(link.Yat(), 2, dim=8, angles=torch.zeros(3)), "not both"),
        (lambda: fit_square(link.Yat(), 2, dim=1), "dim must be >= 2"),
        (lambda: fit_square(link.Identity(), 2, dim=8), "positive kernel"),
        (lambda: fit_square(link.SquaredAffine(learn_bias=True), 2, dim=8), "nothing learned"),
        (lambda: fit_square(link.Yat(), 2, angles=torch.tensor([math.nan])), "must be finite"),
        (lambda: fit_square(link.Yat(), 2, angles=torch.zeros(5)), "is zero or not finite"),
        (lambda: fit_square(link.Yat(), 2, dim=8, weights=torch.ones(5)), "pass both"),
        (lambda: fit_square(link.Yat(), 2, angles=torch.ones(4), weights=torch.ones(5)), "as many as angles"),
        (
            lambda: fit_square(link.Yat(), 2, angles=torch.ones(2), weights=torch.tensor([1.0, -1.0])),
            "weights must be finite",
        ),
    ):
        with pytest.raises(ArgumentError, match=message):
            wrong()


def test_a_fit_needs_no_numbers_of_the_default_device() -> None:
    """Models are counted on the meta device, whose tensors hold no numbers."""
    with torch.device("meta"):
        found = fit_square(link.Yat(0.37), 4, dim=12)
    assert found == fit_square(link.Yat(0.37), 4, dim=12)
