"""Links: how a score becomes evidence, K = l(S)."""

from zonal.algebra.link.base import (
    NO_COEFFICIENTS,
    Exp,
    Formula,
    Identity,
    Link,
    Oscillatory,
    PolynomialSquare,
    SquaredAffine,
    Yat,
    horner,
)
from zonal.algebra.link.gegenbauer import Gegenbauer

__all__ = [
    "NO_COEFFICIENTS",
    "Exp",
    "Formula",
    "Gegenbauer",
    "Identity",
    "Link",
    "Oscillatory",
    "PolynomialSquare",
    "SquaredAffine",
    "Yat",
    "horner",
]
