"""A link as source text, a metric as distances of parts: what algebra declares and the kernels take. It stands below both."""

from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Formula:
    """A link for the tile kernels, elementwise in the score x.

    cpp_value, cpp_derivative, cpp_base: C++ expressions in ``x`` (a vector of floats), ``c`` (the head's coefficients, then the
    constants), ``n`` (how many of both) and ``horner(x, c, n)``. triton: "module:prefix", where the module has the jit functions
    prefix_value, prefix_derivative and prefix_base of (x, c, n), c a pointer to the same numbers, n not counting the constants.
    base: the derivative with respect to c_0; that with respect to c_k is base x^k. log: the link is exp, kept in log space; it
    needs no expression, and those it has are of a map h of the score before it, K = exp(h(x)). constants: numbers that follow the coefficients in c. domain: scores are clamped to it first (the link's own,
    filled in where the kernel is called).
    """

    name: str
    cpp_value: str = ""
    cpp_derivative: str = ""
    cpp_base: str = "1.f"
    triton: str = ""
    log: bool = False
    constants: tuple[float, ...] = ()
    domain: tuple[float, float] | None = None


class Term(NamedTuple):
    """A distance for the distance kernel, of the numbers [start, start + size) of two points; ``product`` is their dot product.

    eps: where it is smooth. scale: what the points of a hyperbolic one are multiplied by.
    """

    kind: Literal["euclidean", "squared", "sphere", "hyperbolic", "product"]
    start: int
    size: int
    eps: float = 0.0
    scale: float = 1.0


_TRITON = "zonal.kernels.triton.links:"
_GAP = "(2.f + c[0] - 2.f * x)"  # yat's, c_0 = eps
_P = "horner(x, c, n - 1)"  # polynomial_square's, whose floor is the last number
_FAR = "root(most(x, V{}) + c[0] * c[0])"  # euclidean's, of a squared distance x; c_0 = eps
# the library's own links, each with its domain, and exp after the map of a metric: here, below torch, since a wheel carries them compiled and is built without torch
FORMULAS = {
    formula.name: formula
    for formula in (
        Formula("exp", log=True),
        Formula("identity", "x", "spread(1.f)", triton=_TRITON + "identity"),
        Formula(
            "polynomial", "horner(x, c, n)", "horner_derivative(x, c, n)", "1.f", _TRITON + "horner", domain=(-1.0, 1.0)
        ),
        Formula(
            "yat",
            f"x * x / {_GAP}",
            f"2.f * x * (2.f + c[0] - x) / ({_GAP} * {_GAP})",
            triton=_TRITON + "yat",
            domain=(-1.0, 1.0),
        ),
        Formula(
            "squared_affine",
            "(x + c[0]) * (x + c[0])",
            "2.f * (x + c[0])",
            "2.f * (x + c[0])",
            _TRITON + "squared_affine",
        ),
        Formula(
            "polynomial_square",
            f"{_P} * {_P} + c[n - 1]",
            f"2.f * {_P} * horner_derivative(x, c, n - 1)",
            f"2.f * {_P}",
            _TRITON + "polynomial_square",
        ),
        Formula(
            "euclidean",
            f"c[0] - {_FAR}",
            f"(x > V{{}} ? -0.5f / {_FAR} : V{{}})",
            triton=_TRITON + "euclidean",
            log=True,
        ),
    )
}

__all__ = ["FORMULAS", "Formula", "Term"]
