"""A link as source text: what algebra declares and the tile kernels compile. It stands below both."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Formula:
    """A link for the tile kernels, elementwise in the score x.

    cpp_value, cpp_derivative, cpp_base: C++ expressions in ``x`` (a vector of floats), ``c`` (the head's coefficients, then the
    constants), ``n`` (how many of both) and ``horner(x, c, n)``. triton: "module:prefix", where the module has the jit functions
    prefix_value, prefix_derivative and prefix_base of (x, c, n), c a pointer to the same numbers, n not counting the constants.
    base: the derivative with respect to c_0; that with respect to c_k is base x^k. log: the link is exp, kept in log space; no
    expression is used. constants: numbers that follow the coefficients in c. domain: scores are clamped to it first (the link's own,
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


__all__ = ["Formula"]
