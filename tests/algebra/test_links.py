"""Links against independent formulas; derivatives and coefficient gradients against autograd."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import eval_gegenbauer

from zonal.algebra import gegenbauer, link
from zonal.errors import ArgumentError

LINKS = {
    "exp": link.Exp(),
    "identity": link.Identity(),
    "gegenbauer": link.Gegenbauer(degrees=(3.0, 4.5), manifold_dim=7),
    "clenshaw": link.Gegenbauer(degrees=(17.0, 20.0), manifold_dim=2),
    "yat": link.Yat(eps=0.05),
    "squared_affine": link.SquaredAffine(bias=0.3, learn_bias=True),
    "polynomial_square": link.PolynomialSquare(polynomial=(0.2, -0.5, 1.0), floor=0.1, learn=True),
    "oscillatory": link.Oscillatory(amplitudes=(1.0, -0.7), decays=(0.5, 0.1), frequencies=(3.0, 8.0)),
    "oscillatory-fixed": link.Oscillatory(learn=False),
}


def coefficients(value: link.Link, heads: int = 2) -> torch.Tensor:
    params = {key: p.repeat(heads // p.shape[0], *[1] * (p.ndim - 1)).double() for key, p in value.initial().items()}
    return value.coefficients(params)


@pytest.mark.parametrize("q", [1, 2, 3, 8, 64])
def test_basis_is_normalised_gegenbauer(q: int) -> None:
    x = torch.linspace(-1, 1, 101, dtype=torch.float64)
    for k, values in enumerate(gegenbauer.basis(x, 17, q)):
        if q == 1:
            expected = np.cos(k * np.arccos(x.numpy()))
        else:
            expected = eval_gegenbauer(k, (q - 1) / 2, x.numpy()) / eval_gegenbauer(k, (q - 1) / 2, 1.0)
        assert np.abs(values.numpy() - expected).max() < 1e-12
        assert values.abs().max() <= 1 + 1e-12


@pytest.mark.parametrize("q", [1, 2, 5, 64])
def test_monomials_and_clenshaw_agree(q: int) -> None:
    c = torch.randn(9, 3, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x = torch.linspace(-1, 1, 41, dtype=torch.float64).expand(1, 3, 1, 41)
    mono = torch.einsum("khij,kn->nhij", c, gegenbauer.to_monomials(8, q))
    assert torch.allclose(link.horner(x, mono), gegenbauer.series(x, c, q), atol=1e-12)


@pytest.mark.parametrize("name", LINKS)
def test_derivative_and_coefficient_gradient(name: str) -> None:
    value = LINKS[name]
    c = coefficients(value).detach().requires_grad_()
    x = torch.linspace(-0.99, 0.97, 30, dtype=torch.float64).view(1, 2, 3, 5).requires_grad_()
    weight = torch.randn(1, 2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    out = (value.value(x, c) * weight).sum()
    dx, dc = torch.autograd.grad(out, (x, c), allow_unused=True)
    with torch.no_grad():
        assert torch.allclose(value.derivative(x, c) * weight, dx, atol=1e-9)
        if dc is not None:
            got = value.coefficient_vjp(x, weight, c).sum_to_size(c.shape)
            assert torch.allclose(got, dc, atol=1e-9 * (1 + dc.abs().max().item()))


@pytest.mark.parametrize("name", [n for n, v in LINKS.items() if v.degree is not None])
def test_monomials_give_the_value(name: str) -> None:
    value = LINKS[name]
    c = coefficients(value)
    x = torch.linspace(-1, 1, 20, dtype=torch.float64).expand(1, 2, 1, 20)
    # monomials of degree 20 lose digits: that is why Clenshaw exists
    tolerance = 1e-4 if name == "clenshaw" else 1e-12
    expected = value.value(x, c)
    assert torch.allclose(
        link.horner(x, value.monomials(c)).expand_as(expected),
        expected,
        atol=tolerance * (1 + expected.abs().max().item()),
    )
    assert value.monomials(c).shape[0] == value.degree + 1


@pytest.mark.parametrize("name", [n for n, v in LINKS.items() if v.positive])
def test_positive_links_are_not_negative(name: str) -> None:
    value = LINKS[name]
    x = torch.linspace(-1, 1, 201, dtype=torch.float64).expand(1, 2, 1, 201)
    assert (value.value(x, coefficients(value)) >= 0).all()


@pytest.mark.parametrize("value", [link.Oscillatory((50.0, -30.0), (1.0, 2.0), (3.0, 0.0)), link.Oscillatory((80.0,))])
def test_the_largest_waves_are_numbers(value: link.Oscillatory) -> None:
    x = -torch.linspace(0, 10, 101).view(1, 1, 1, -1)
    c = coefficients(value, 1).float()
    for found in (value.value(x, c), value.derivative(x, c), value.coefficient_vjp(x, torch.ones_like(x), c)):
        assert found.isfinite().all()


@given(eps=st.floats(1e-3, 10))
@settings(max_examples=30, deadline=None)
def test_yat_bound(eps: float) -> None:
    yat = link.Yat(eps=eps)
    x = torch.linspace(-1, 1, 301, dtype=torch.float64).view(1, 1, 1, -1)
    values = yat.value(x, link.NO_COEFFICIENTS)
    assert values.max() <= 1 / eps * (1 + 1e-9)
    assert abs(values.flatten()[0].item() - 1 / (4 + eps)) < 1e-12
    assert yat.derivative(x, link.NO_COEFFICIENTS).abs().max() <= 2 * (1 + eps) / eps**2 * (1 + 1e-9)


@pytest.mark.parametrize("eps", [1e-6, 3e-6, 1e-4, 0.01])
def test_yat_bound_in_single_precision(eps: float) -> None:
    """As the docstring says: 2 + eps is rounded to half of 2.4e-7."""
    assert 1 - 1.2e-7 / eps < float(link.Yat(eps).at(torch.ones(1))) * eps < 1 / (1 - 1.2e-7 / eps)


def test_reproducing_kernel_converges_and_ones_does_not() -> None:
    """On S^2, averaging Phi_n(x.y) f(y) over the sphere returns f for reproducing weights; w = 1 never converges."""
    nodes, weights = np.polynomial.legendre.leggauss(200)
    x = torch.tensor(nodes).view(1, 1, 1, -1)

    def eigenvalue(init: str, n: float, k: int) -> float:
        """Funk-Hecke: the factor on harmonics of degree k under the normalised measure of the sphere."""
        value = link.Gegenbauer(degrees=(n,), manifold_dim=2, init=init, learn_weights=False)  # type: ignore[arg-type]
        phi = value.value(x, value.coefficients({})).flatten().numpy()
        return float((phi * eval_gegenbauer(k, 0.5, nodes) * weights).sum() / 2)

    assert abs(eigenvalue("reproducing", 16, 4) - 1) < 1e-9
    assert abs(eigenvalue("reproducing", 16, 8) - 1) < 1e-9
    assert abs(eigenvalue("ones", 16, 4) - 1 / 9) < 1e-9


@pytest.mark.parametrize("q", [1, 2, 5, 9, 16, 31, 64, 127])
@pytest.mark.parametrize("n", [6, 9, 12, 15, 24, 32, 48, 64])
def test_single_precision_error_at_every_degree(n: int, q: int) -> None:
    """Phi_n(1) = n + 1, by monomials or by the recurrence, whichever the link takes. Both agree in double precision."""
    value = link.Gegenbauer(degrees=(float(n),), manifold_dim=q)
    c = coefficients(value, 1)
    x = torch.linspace(-1, 1, 1001).view(1, 1, 1, -1)
    exact = torch.stack(gegenbauer.basis(x.double(), n + 1, q)).sum(0)
    assert (value.value(x, c.float()) - exact).abs().max() < 1e-5 * (n + 1)
    assert (value.value(x.double(), c) - exact).abs().max() < 1e-13 * (n + 1)
    slope = value.derivative(x.double(), c)
    assert (value.derivative(x, c.float()) - slope).abs().max() < 1e-5 * slope.abs().max()


def test_single_precision_error_of_horner() -> None:
    value = link.Gegenbauer(degrees=(16.0,), manifold_dim=64)
    assert not value.clenshaw
    assert value.formula is not None
    c = coefficients(value, 1)
    x = torch.linspace(-1, 1, 5001, dtype=torch.float64).view(1, 1, 1, -1)
    exact = value.value(x, c)
    error = (
        value.value(x.float(), c.float()).double() - value.value(x.float().double(), c)
    ).abs().max() / exact.abs().max()
    assert error < 2e-6


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: link.Gegenbauer(manifold_dim=0), "manifold_dim must be .head. or a whole number >= 1"),
        (lambda: link.Gegenbauer(degrees=()), "one or more numbers"),
        (lambda: link.Gegenbauer(degrees=(-1.0,)), "numbers from 0 to 64"),
        (lambda: link.Gegenbauer(degrees=(math.nan,)), "numbers from 0 to 64"),
        (lambda: link.Yat(eps=0.0), "eps must be > 0"),
        (lambda: link.PolynomialSquare(floor=-1.0), "floor must be >= 0"),
        (lambda: link.PolynomialSquare(polynomial=(1.0,)), "2 to 9 coefficients"),
        (lambda: link.PolynomialSquare(polynomial=(1e25, 1.0)), "coefficients must lie in"),
        (lambda: link.PolynomialSquare(floor=math.inf), "at most 1e.18, received inf"),
        (lambda: link.Oscillatory(amplitudes=(89.0,)), "must be at most 80, because e.89 is infinite"),
        (lambda: link.Oscillatory((50.0, -31.0), (1.0, 1.0), (1.0, 1.0)), "must be at most 80"),
        (lambda: link.Oscillatory(amplitudes=(math.nan,)), "must be at most 80"),
    ],
)
def test_bad_declarations(make: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        make()  # type: ignore[operator]
