"""Links: how a score becomes evidence, K = l(S).

One module per link, with its value, formula, coefficients of powers, and definiteness.
"""

from typing import TYPE_CHECKING

from zonal.algebra.declaration import declared
from zonal.algebra.horner import horner
from zonal.algebra.link.base import NO_COEFFICIENTS, Link
from zonal.algebra.modules import modules_of
from zonal.formula import Formula

if TYPE_CHECKING:  # what editors show; at run time every module of this folder is found
    from zonal.algebra.link.exp import Exp
    from zonal.algebra.link.gegenbauer import Gegenbauer
    from zonal.algebra.link.identity import Identity
    from zonal.algebra.link.oscillatory import Oscillatory
    from zonal.algebra.link.polynomial_square import PolynomialSquare
    from zonal.algebra.link.squared_affine import SquaredAffine
    from zonal.algebra.link.yat import Yat

modules_of(__name__, __path__)
globals().update(declared("link"))

__all__ = [
    "NO_COEFFICIENTS", "Exp", "Formula", "Gegenbauer", "Identity", "Link", "Oscillatory", "PolynomialSquare",
    "SquaredAffine", "Yat", "horner",
]  # fmt: skip
