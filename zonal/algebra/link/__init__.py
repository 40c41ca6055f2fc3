"""Links: how a score becomes evidence, K = l(S)."""

from zonal.algebra.declaration import Declaration
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
from zonal.algebra.link.zonal import Gegenbauer

LINKS: dict[str, type[Declaration]] = {
    kind.__name__: kind for kind in (Exp, Identity, Gegenbauer, Yat, SquaredAffine, PolynomialSquare, Oscillatory)
}

__all__ = [
    "LINKS",
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
