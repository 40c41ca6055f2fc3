"""Spherical Yat attention: K = x^2 / (2 + eps - 2x), x = cos(q, k), row-normalised; and the positive polynomials that stand in for it.

Yat is run exactly (tiled). ``squared_affine`` ((x + b)^2) and ``polynomial_square`` (p(x)^2 + c) have finitely many exact features,
so they also run chunked and from a constant-size memory. Paper: SLAY; the squared-affine form and its b from measurements on it.
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import PolynomialSquare, SquaredAffine, Yat
from zonal.algebra.score import Cosine
from zonal.features import fit_square


def yat(eps: float = 0.01) -> Operator:
    """x^2 / (2 + eps - 2x): alignment over squared distance on the sphere."""
    return Operator(Cosine(), Yat(eps=eps), Row(), name="yat")


def squared_affine(bias: float = 0.04, learn_bias: bool = False) -> Operator:
    """(x + b)^2: nonnegative, exact with (d + 1)(d + 2)/2 features."""
    return Operator(Cosine(), SquaredAffine(bias=bias, learn_bias=learn_bias), Row(), name="squared_affine")


def polynomial_square(coefficients: tuple[float, ...] = (0.1, 0.3, 1.0), floor: float = 0.0, learn: bool = False) -> Operator:
    """p(x)^2 + floor with p(x) = sum_k coefficients[k] x^k."""
    return Operator(Cosine(), PolynomialSquare(polynomial=coefficients, floor=floor, learn=learn), Row(), name="polynomial_square")


def yat_polynomial(eps: float = 1.0, dim: int = 8, degree: int = 4) -> Operator:
    """The ``polynomial_square`` nearest to ``yat(eps)`` for random unit vectors in R^dim: 2, 4 or 6 is its degree in x.

    The spec of the result holds the coefficients, so that a run can be repeated from it. How near it comes: docs/slay.md.
    """
    link = fit_square(Yat(eps), degree, dim=dim).link
    operator = polynomial_square(coefficients=link.polynomial, floor=link.floor)
    operator.spec = f"polynomial_square(coefficients={link.polynomial!r}, floor={link.floor!r})"
    return operator
