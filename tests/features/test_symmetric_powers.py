"""Feature maps: (q . k)^k as a dot product of features, with gradients, and which link is served."""

import math
import sys

import pytest
import torch

from zonal import link
from zonal.errors import ArgumentError, PathError
from zonal.features import SymmetricPowers, feature_map, moments

DIMS = (1, 2, 3, 4, 5, 8)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("lowest", [0, 1])
@pytest.mark.parametrize("degree", range(1, 7))
@pytest.mark.parametrize("dim", DIMS)
def test_features_are_the_polynomial(dim: int, degree: int, lowest: int) -> None:
    """sum_k c_k (q . k)^k with signed coefficients, and every gradient."""
    features = SymmetricPowers(degree, lowest)
    q, k = draw(3, 2, dim), draw(3, 2, dim, seed=1)
    c = draw(degree + 1, 1, 1, 1, seed=2)
    product = (q * k).sum(-1)
    expected = sum(c[n].squeeze() * product**n for n in range(lowest, degree + 1))
    got = (features(q) * features.scale(c, dim) * features(k)).sum(-1)
    assert features(q).shape[-1] == features.dimension(dim) == sum(features.sizes(dim))
    assert torch.allclose(got, expected, rtol=1e-11)
    weight = draw(3, 2, seed=3).detach()
    for a, b in zip(
        torch.autograd.grad((got * weight).sum(), (q, k, c)),
        torch.autograd.grad((expected * weight).sum(), (q, k, c)),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize(("dim", "degree", "size"), [(16, 2, 153), (16, 3, 969), (64, 2, 2145), (8, 4, 495), (1, 6, 7)])
def test_number_of_features(dim: int, degree: int, size: int) -> None:
    assert SymmetricPowers(degree).dimension(dim) == size == math.comb(dim + degree, degree)
    assert SymmetricPowers(degree, lowest=1).dimension(dim) == size - 1


def test_scale_gradient() -> None:
    features, dim, heads = SymmetricPowers(3), 4, 2
    c, weight = draw(4, heads, 1, 1), draw(heads, features.dimension(dim), seed=1).detach()
    expected = torch.autograd.grad((features.scale(c, dim) * weight).sum(), c)[0]
    assert torch.allclose(features.scale_vjp(weight, dim, 4), expected)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_moments(degree: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum over keys, in pieces far smaller than the keys."""
    # the package exports a function of the module's own name
    monkeypatch.setattr(sys.modules["zonal.features.moments"], "FEATURE_ELEMENTS", 1)
    features = SymmetricPowers(degree)
    k, v = draw(2, 3, 37, 5), draw(2, 3, 37, 4, seed=1)
    expected = features(k).mT @ v
    got = moments(k, v, features)
    assert torch.allclose(got, expected, rtol=1e-11)
    weight = draw(*got.shape, seed=2).detach()
    for a, b in zip(
        torch.autograd.grad((got * weight).sum(), (k, v)),
        torch.autograd.grad((expected * weight).sum(), (k, v)),
        strict=True,
    ):
        assert torch.allclose(a, b, rtol=1e-10)


def test_second_derivative_is_refused() -> None:
    k, v = draw(1, 1, 3, 2), draw(1, 1, 3, 2)
    with pytest.raises(PathError, match="no second derivative"):
        torch.autograd.grad(moments(k, v, SymmetricPowers(2)).sum(), k, create_graph=True)


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (link.Identity(), SymmetricPowers(1, 1)),
        (link.SquaredAffine(), SymmetricPowers(2)),
        (link.PolynomialSquare((0.1, 0.2, 1.0)), SymmetricPowers(4)),
        (link.PolynomialSquare((0.1,) * 5), None),
        (link.Gegenbauer((1.5, 3.0)), SymmetricPowers(3)),
        (link.Gegenbauer((2.0,), learn_degrees=True), SymmetricPowers(3)),
        (link.Gegenbauer((0.0,)), SymmetricPowers(1)),
        (link.Gegenbauer((7.0,)), None),
        (link.Gegenbauer((16.0,), manifold_dim=1), None),
        (link.Exp(), None),
        (link.Yat(), None),
    ],
    ids=repr,
)
def test_which_link_is_served(of: link.Link, expected: SymmetricPowers | None) -> None:
    assert feature_map(of) == expected


@pytest.mark.parametrize(
    ("of", "params"),
    [
        (link.SquaredAffine(0.3), {}),
        (link.PolynomialSquare((0.2, -0.5, 1.0)), {}),
        (link.Gegenbauer((2.5,), 5), {"weight": torch.randn(2, 4)}),
    ],
)
def test_served_link_is_its_features(of: link.Link, params: dict[str, torch.Tensor]) -> None:
    c = of.coefficients(params)
    features = feature_map(of)
    assert features is not None
    q, k = (torch.nn.functional.normalize(draw(2, 1, 9, 6, seed=s), dim=-1) for s in (0, 1))
    scale = features.scale(of.monomials(c), 6)
    got = (features(q) * scale[:, None]) @ features(k).mT
    assert torch.allclose(
        got.expand(2, scale.shape[0], 9, 9), of.value((q @ k.mT).expand(2, scale.shape[0], 9, 9), c), atol=1e-12
    )


def test_bad_degree() -> None:
    with pytest.raises(ArgumentError, match="degree must be a whole number of at most 6"):
        SymmetricPowers(7)
    with pytest.raises(ArgumentError, match="lowest must be 0 or 1"):
        SymmetricPowers(2, 2)
