"""Mechanisms: an Operator value each, with its defaults and its paper. ``resolve`` reads specs such as ``ska(power=1)``."""

import ast
import inspect
from collections.abc import Callable
from typing import Any

from zonal.algebra import Operator
from zonal.errors import ArgumentError, ZonalError, unknown_name
from zonal.mechanisms.echo import ridge, ska
from zonal.mechanisms.linear import linear, retention
from zonal.mechanisms.sko import sko
from zonal.mechanisms.slay import hedgehog, of_features, performer, slay
from zonal.mechanisms.softmax import cosine, softmax
from zonal.mechanisms.yat import polynomial_square, squared_affine, yat

_MECHANISMS: dict[str, Callable[..., Operator]] = {
    f.__name__: f
    for f in (softmax, cosine, linear, retention, sko, yat, squared_affine, polynomial_square, slay, performer, hedgehog, ridge, ska)
}
_SHORT = {"sq": "squared_affine"}


def names() -> tuple[str, ...]:
    """The names that ``resolve`` knows."""
    return tuple(_MECHANISMS)


def resolve(spec: str) -> Operator:
    """The operator of a spec: a name, or a name with keyword arguments, ``sko(degrees=(2, 3), manifold_dim=32)``.

    Only Python literals are read. ``sq`` is short for ``squared_affine``.

    Raises: ArgumentError naming the valid names, arguments, and the nearest.
    """
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ArgumentError(f"operator spec {spec!r} cannot be read ({error}). Write a name or name(argument=value, …), e.g. ska(power=1).") from error
    call = node if isinstance(node, ast.Call) else None
    name = node.id if isinstance(node, ast.Name) else call.func.id if call is not None and isinstance(call.func, ast.Name) else None
    if name is None or (call is not None and (call.args or any(k.arg is None for k in call.keywords))):
        raise ArgumentError(f"operator spec {spec!r} cannot be read. Write a name or name(argument=value, …) with keyword arguments only.")
    if _SHORT.get(name, name) not in _MECHANISMS:
        raise unknown_name("operator spec", "operator", name, [*_MECHANISMS, *_SHORT])
    make = _MECHANISMS[_SHORT.get(name, name)]
    arguments: dict[str, Any] = {}
    for keyword in call.keywords if call is not None else ():
        known = [p for p in inspect.signature(make).parameters if p != "prior"]
        if keyword.arg not in known:
            raise unknown_name(f"operator spec {spec!r}", "argument", str(keyword.arg), known)
        try:
            arguments[keyword.arg] = ast.literal_eval(keyword.value)
        except ValueError as error:
            raise ArgumentError(f"operator spec {spec!r}: the value of {keyword.arg} must be a literal (number, text, tuple, True, False, None).") from error
    try:
        operator = make(**arguments)
    except ZonalError:
        raise
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"operator spec {spec!r}: an argument has the wrong type ({error}).") from error
    operator.spec = " ".join(spec.split())
    return operator


__all__ = ["cosine", "hedgehog", "linear", "names", "of_features", "performer", "polynomial_square", "resolve", "retention", "ridge", "ska", "sko", "slay", "softmax", "squared_affine", "yat"]
