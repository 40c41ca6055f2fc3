"""Links as source text and metrics as distances of parts, shared by the algebra and the kernels."""

import ast
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple


@dataclass(frozen=True)
class Formula:
    """A link for the tile kernels, elementwise in the score x.

    cpp_value, cpp_derivative, cpp_base: C++ expressions in ``x`` (a vector of floats), ``c`` (coefficients of the head,
    then the constants), ``n`` (the number of both) and ``horner(x, c, n)``.
    triton: "module:prefix". The module has the jit functions prefix_value, prefix_derivative and prefix_base of (x, c,
    n). There c points to the same numbers, and n does not count the constants.
    base: the derivative with respect to c_0; the derivative with respect to c_k is base x^k.
    Without cpp_value and cpp_derivative, and for a link that learns without cpp_base, torch runs on the CPU.
    log: the link is exp, kept in log space, and needs no expressions. Expressions, if given, are of a map h applied to
    the score first: K = exp(h(x)).
    constants: numbers that follow the coefficients in c. domain: scores are clamped to it first. It is the link's own
    domain, filled in by the call.
    """

    name: str
    cpp_value: str = ""
    cpp_derivative: str = ""
    cpp_base: str = ""
    triton: str = ""
    log: bool = False
    constants: tuple[float, ...] = ()
    domain: tuple[float, float] | None = None


class Term(NamedTuple):
    """A distance for the distance kernel, between the numbers [start, start + size) of two points.

    ``product`` is their dot product. eps: the distance is smoothed below this size. scale: factor of the points of a
    hyperbolic distance.
    """

    kind: Literal["euclidean", "squared", "sphere", "hyperbolic", "product"]
    start: int
    size: int
    eps: float = 0.0
    scale: float = 1.0


class Activation(NamedTuple):
    """Features gain g(z_i) of a vector u, z_i = factor w_i . u + offset - norm |u|^2: ``count`` of them.

    function: g. start: w_i are the rows of a matrix from this one on; without a matrix w_i . u is u_i.
    """

    function: Literal["exp", "square", "elu1", "relu", "silu"]
    start: int
    count: int
    factor: float = 1.0
    norm: float = 0.0
    offset: float = 0.0
    gain: float = 1.0


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

__all__ = ["FORMULAS", "Activation", "Formula", "Term"]
