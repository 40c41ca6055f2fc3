"""Fidelity of outputs: the measure, the bound, and what the page on SLAY says about maps."""

import math

import numpy as np
import pytest
import torch

from zonal import link
from zonal.algebra import gegenbauer
from zonal.errors import ArgumentError
from zonal.features import (
    Anchors,
    FeatureMap,
    LowRankSquare,
    Nystrom,
    Polynomial,
    PositiveRandom,
    Slay,
    TensorSketch,
    average_error,
    fidelity,
    fit_square,
    mercer_bound,
    sample,
    square,
)
from zonal.features.fidelity import INPUTS, Sample, kernel_value

YAT = link.Yat(0.01)


def measured(features: FeatureMap, data: Sample, eps: float = 0.01, causal: bool = True) -> float:
    buffers = features.prepare(data.q.shape[-1], data.q.shape[0], seed=1, dtype=torch.float64)
    return fidelity(features, buffers, data, link.Yat(eps), causal=causal).error


@pytest.mark.parametrize("causal", [True, False])
def test_the_measure(causal: bool) -> None:
    """By hand, on a map that is signed: the error, the share of negative values and of rows that cannot be divided."""
    data = sample("iid", 2, 9, 3, 0)
    features = TensorSketch(5)
    buffers = features.prepare(3, 2, seed=3, dtype=torch.float64)
    found = fidelity(features, buffers, data, YAT, causal=causal)
    wanted, got, negative, unsafe, visible = [], [], 0, 0, 0
    for h in range(2):
        for t in range(9):
            past = t + 1 if causal else 9
            x = data.k[h, :past] @ data.q[h, t]
            exact = x**2 / (2.01 - 2 * x)
            own = {name: value[h : h + 1] for name, value in buffers.items()}
            values = (
                features.key(data.k[h : h + 1, :past], own) @ features.query(data.q[h : h + 1, t : t + 1], own).mT
            )[0, :, 0]
            wanted.append(exact @ data.v[h, :past] / exact.sum())
            got.append(values @ data.v[h, :past] / values.sum())
            negative += int((values < 0).sum())
            unsafe += int(values.sum() <= 0)
            visible += past
    y, y0 = torch.stack(got), torch.stack(wanted)
    assert found.error == pytest.approx(float((y - y0).norm() / y0.norm()), rel=1e-9)
    assert found.negative == pytest.approx(negative / visible)
    assert found.unsafe == pytest.approx(unsafe / 18)
    assert negative > 0


def test_exact_maps_have_no_error() -> None:
    data = sample("iid", 2, 40, 4, 0)
    for kernel in (link.SquaredAffine(0.1), link.PolynomialSquare((0.1, 0.4, 0.5), floor=0.01)):
        found = fidelity(Polynomial.of(kernel), {}, data, kernel)
        assert found.error < 1e-12
        assert (found.negative, found.unsafe) == (0, 0)
    assert average_error(data, link.PolynomialSquare((1.0, 0.0))) < 1e-12


@pytest.mark.parametrize("kind", INPUTS)
def test_samples(kind: str) -> None:
    data = sample(kind, 2, 200, 8, 0)  # type: ignore[arg-type]
    for x in (data.q, data.k):
        assert torch.allclose(x.norm(dim=-1), torch.ones(2, 200, dtype=torch.float64))
    again, other = sample(kind, 2, 200, 8, 0), sample(kind, 2, 200, 8, 1)  # type: ignore[arg-type]
    assert torch.equal(data.q, again.q)
    assert not torch.equal(data.q, other.q)
    spectrum = torch.linalg.eigvalsh(data.k.mT @ data.k / 200)[0]
    top = (data.q @ data.k.mT).tril().amax(-1)
    assert (float(spectrum[-1]) > 0.4) == (kind == "anisotropic")
    assert bool((top > 0.9 - 1e-9).all()) == (kind == "peaked")


@pytest.mark.parametrize(
    ("dim", "eps", "size", "bound"),
    [
        (8, 0.01, 64, 0.57),
        (8, 0.01, 512, 0.34),
        (8, 1.0, 512, 0.03),
        (16, 0.01, 256, 0.36),
        (32, 0.01, 512, 0.35),
        (32, 0.01, 1024, 0.25),
        (64, 0.01, 2048, 0.25),
        (64, 1.0, 64, 0.81),
    ],
)
def test_mercer_bound(dim: int, eps: float, size: int, bound: float) -> None:
    assert mercer_bound(link.Yat(eps), dim, size) == pytest.approx(bound, abs=0.006)


def test_mercer_bound_of_what_is_known() -> None:
    """x^2 has 1 + N_2 eigenfunctions; with all of them nothing is left, without the constant exactly its share is
    missing.
    """
    bare = link.SquaredAffine(0.0)
    assert mercer_bound(bare, 5, 15) == pytest.approx(0, abs=1e-6)
    assert mercer_bound(bare, 5, 0) == 1
    # E x^2 = 1/5 and E x^4 = 3/35: the constant holds (1/25)/(3/35) = 7/15 of the square; its eigenvalue is the largest
    assert mercer_bound(bare, 5, 1) == pytest.approx(math.sqrt(8 / 15), rel=1e-5)


@pytest.mark.parametrize(("eps", "size"), [(0.001, 101), (0.001, 301), (0.001, 601), (1e-6, 5000), (1e-6, 8000)])
def test_mercer_bound_of_a_circle(eps: float, size: int) -> None:
    """On a circle the eigenfunctions are sines and cosines, two of each degree, and a map may keep thousands."""
    angle = torch.arange(2**17, dtype=torch.float64) * (2 * math.pi / 2**17)
    share = torch.fft.fft(kernel_value(link.Yat(eps), angle.cos())).abs().square()
    left = share.sort(descending=True).values[size:].sum() / share.sum()
    assert mercer_bound(link.Yat(eps), 2, size) == pytest.approx(float(left.sqrt()), rel=1e-3)


def test_mercer_bound_of_what_little_is_left() -> None:
    """In three dimensions, with the eigenvalues of another quadrature (Gauss-Legendre)."""
    x, weight = (torch.from_numpy(each) for each in np.polynomial.legendre.leggauss(600))
    value = kernel_value(YAT, x)
    squares = [
        float((weight * value * r).sum() / 2) ** 2 * (2 * k + 1) for k, r in enumerate(gegenbauer.basis(x, 200, 2))
    ]
    left = sum(squares[70:]) - 100 / 141 * squares[70]  # 70^2 harmonics, and 100 of the 141 of degree 70
    assert mercer_bound(YAT, 3, 5000) == pytest.approx(math.sqrt(left / sum(squares)), rel=1e-4)
    assert 0.001 < math.sqrt(left / sum(squares)) < 0.0012


def test_no_map_beats_the_bound() -> None:
    """The kernel's own error, on random vectors, for maps of several kinds."""
    data = sample("iid", 8, 256, 8, 0)
    x = data.q @ data.k.mT
    wanted = kernel_value(link.Yat(1.0), x)
    for features in (
        Polynomial.of(fit_square(link.Yat(1.0), 2, dim=8).link),
        Polynomial.of(fit_square(link.Yat(1.0), 4, dim=8).link),
        Nystrom(64, link.Yat(1.0)),
    ):
        buffers = features.prepare(8, 8, seed=1, dtype=torch.float64)
        error = float(
            (features.query(data.q, buffers) @ features.key(data.k, buffers).mT - wanted).norm() / wanted.norm()
        )
        assert error > 0.97 * mercer_bound(link.Yat(1.0), 8, features.dimension(8))


def test_claims_at_32() -> None:
    """d = 32, eps = 0.01, causal, iid: the squared affine kernel with 561 features, the paper's map with 2048, the mean
    with one.
    """
    data = sample("iid", 4, 512, 32, 0)
    affine = Polynomial.of(fit_square(YAT, 2, dim=32).link)
    assert affine.dimension(32) == 561
    assert affine.positive
    assert measured(affine, data) <= 0.25
    assert measured(square(0.04), data) <= 0.25
    large = Slay.preset("large")
    assert large.dimension(32) == 2048
    assert 0.72 < measured(large, data) < 0.88
    assert abs(measured(large, data) - average_error(data, YAT)) < 0.06
    assert measured(square(), data) < 0.33
    assert measured(large, data, causal=False) > 0.8


def test_recommended_setting() -> None:
    """d = 8 and eps = 1: a positive polynomial of degree 4 with 495 exact features is within 10%, causal or not."""
    features = Polynomial.of(fit_square(link.Yat(1.0), 4, dim=8).link)
    assert features.dimension(8) == 495
    assert features.positive
    data = sample("iid", 4, 512, 8, 0)
    assert measured(features, data, eps=1.0) <= 0.1
    assert measured(features, data, eps=1.0, causal=False) <= 0.1


def test_signed_maps_spoil_rows() -> None:
    data = sample("iid", 2, 256, 32, 0)
    assert measured(Slay(polynomial=TensorSketch(16), draws=16), data) > 3
    features = Slay(polynomial=TensorSketch(16), draws=16)
    assert fidelity(features, features.prepare(32, 2, dtype=torch.float64), data, YAT).unsafe > 0.01


def test_what_delta_does() -> None:
    """It shrinks rows with small sums, and hides nothing."""
    data = sample("iid", 2, 64, 8, 0)
    exact = Polynomial.of(link.SquaredAffine(0.1))
    assert fidelity(exact, {}, data, link.SquaredAffine(0.1), delta=1e-9).error < 1e-6
    assert fidelity(exact, {}, data, link.SquaredAffine(0.1), delta=1.0).error > 0.1


def test_more_nodes_cannot_mend_the_variance() -> None:
    """Ten times the accuracy of the quadrature leaves the error of positive features where it was."""
    data = sample("iid", 2, 256, 16, 0)
    coarse, fine = (
        Slay(polynomial=square(), draws=8, nodes=2),
        Slay(polynomial=square(), draws=8, nodes=5, rule="minimax"),
    )
    assert fine.claim.error is not None
    assert coarse.claim.error is not None
    assert fine.claim.error < 0.1 * coarse.claim.error
    assert measured(fine, data) > 0.9 * measured(coarse, data)
    assert measured(square(), data) < measured(coarse, data)


def test_bad_input() -> None:
    with pytest.raises(ArgumentError, match="kind must be 'iid'"):
        sample("flat", 1, 4, 3, 0)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="dim must be >= 2"):
        sample("iid", 1, 4, 1, 0)
    with pytest.raises(ArgumentError, match="nothing learned"):
        average_error(sample("iid", 1, 4, 3, 0), link.SquaredAffine(learn_bias=True))
    with pytest.raises(ArgumentError, match="size >= 0"):
        mercer_bound(YAT, 8, -1)
    with pytest.raises(ArgumentError, match="in 2 dimensions size must be at most 16383, received 16384"):
        mercer_bound(YAT, 2, 16384)


def test_projection_between() -> None:
    """Rank 21 of 32 stands between anchors and the whole square."""
    data = sample("iid", 4, 256, 32, 0)
    found = measured(LowRankSquare(21), data)
    assert measured(square(0.04), data) < found < measured(Slay(polynomial=Anchors(16), draws=16), data)
    assert measured(PositiveRandom(64, 0.3), data) > found
