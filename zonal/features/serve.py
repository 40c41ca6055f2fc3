"""Which feature map serves which link."""

import functools

from zonal.algebra.link import Gegenbauer, Identity, Link, PolynomialSquare, SquaredAffine
from zonal.features.symmetric import SymmetricPowers

MAX_DEGREE = 6


@functools.singledispatch
def feature_map(link: Link) -> SymmetricPowers | None:
    """The exact feature map of a link over a bilinear score, or None where there is none of finite size.

    The link is then sum_k c_k x^k with c = ``link.monomials(coefficients)``, and l(q.k) = sum_k c_k Sym_k(q) . Sym_k(k).
    """
    return None


def _powers(link: Link, lowest: int = 0) -> SymmetricPowers | None:
    degree = link.degree
    return None if degree is None or degree > MAX_DEGREE else SymmetricPowers(max(degree, 1), lowest)


@feature_map.register
def _(link: Identity) -> SymmetricPowers | None:
    return _powers(link, lowest=1)


@feature_map.register
def _(link: SquaredAffine) -> SymmetricPowers | None:
    return _powers(link)


@feature_map.register
def _(link: PolynomialSquare) -> SymmetricPowers | None:
    return _powers(link)


@feature_map.register
def _(link: Gegenbauer) -> SymmetricPowers | None:
    return None if link.clenshaw else _powers(link)


__all__ = ["MAX_DEGREE", "feature_map"]
