"""The exact feature maps of links."""

from zonal.algebra.link import Link
from zonal.features.harmonic import Harmonics
from zonal.features.symmetric import SymmetricPowers

MAX_DEGREE = 6


def feature_map(link: Link) -> SymmetricPowers | None:
    """The exact feature map of a link over a bilinear score, or None if no finite one is known.

    A link has one if it gives a ``degree`` up to ``MAX_DEGREE`` and ``monomials``. It is then sum_k c_k x^k with c =
    ``link.monomials(coefficients)``, and l(q.k) = sum_k c_k Sym_k(q) . Sym_k(k).
    """
    if link.degree is None or link.degree > MAX_DEGREE or type(link).monomials is Link.monomials:
        return None
    return SymmetricPowers(max(link.degree, 1), min(link.lowest_degree, 1))


def powers_of(link: Link) -> SymmetricPowers:
    """The ``feature_map`` of a link that has one."""
    found = feature_map(link)
    assert found is not None
    return found


def harmonics(link: Link) -> Harmonics | None:
    """The exact map of a polynomial link over cosines with a symmetric dot product, or None.

    The kernel among keys must be symmetric. Links with learned degrees have no such map: at a whole number the weight
    of the next harmonic is 0, and its square root has no gradient.
    """
    found = feature_map(link)
    if found is None or link.linear or not link.fixed_degree:
        return None
    assert link.degree is not None
    return Harmonics(link.degree)


__all__ = ["MAX_DEGREE", "feature_map", "harmonics", "powers_of"]
