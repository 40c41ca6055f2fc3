"""A link as source text, a metric as distances of parts: what algebra declares and the kernels take.

It stands below both.
"""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Formula:
    """A link for the tile kernels, elementwise in the score x.

    cpp_value, cpp_derivative, cpp_base: C++ expressions in ``x`` (a vector of floats), ``c`` (the head's coefficients,
    then the constants), ``n`` (how many of both) and ``horner(x, c, n)``. triton: "module:prefix", where the module has
    the jit functions prefix_value, prefix_derivative and prefix_base of (x, c, n), c a pointer to the same numbers, n
    not counting the constants.
    base: the derivative with respect to c_0; that with respect to c_k is base x^k. log: the link is exp, kept in log
    space. It needs no expression; those it has are of a map h of the score before it, K = exp(h(x)). constants: numbers
    that follow the coefficients in c. domain: scores are clamped to it first (the link's own, filled in where the
    kernel is called).
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
    """A distance for the distance kernel, of the numbers [start, start + size) of two points; ``product`` is their dot
    product.

    eps: where it is smooth. scale: what the points of a hyperbolic one are multiplied by.
    """

    kind: Literal["euclidean", "squared", "sphere", "hyperbolic", "product"]
    start: int
    size: int
    eps: float = 0.0
    scale: float = 1.0


def _declared() -> dict[str, Formula]:
    """The formulas of the library's own links and metrics, read from their source text.

    A wheel carries them compiled and is built without torch, which these modules import.
    """
    found = {}
    for folder in ("link", "metric"):
        for path in sorted((Path(__file__).parent / "algebra" / folder).glob("*.py")):
            text = path.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(text)) if "Formula(" in text else ():
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Formula":
                    named = {each.arg: ast.literal_eval(each.value) for each in node.keywords if each.arg}
                    formula = Formula(*map(ast.literal_eval, node.args), **named)
                    found[formula.name] = formula
    return found


FORMULAS = _declared()
"""By name: each link's, with its domain, and those that a metric puts before exp."""

__all__ = ["FORMULAS", "Formula", "Term"]
