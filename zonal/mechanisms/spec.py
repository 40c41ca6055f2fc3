"""Specs: a name, or a name with keyword arguments that are Python literals, such as ``ska(power=1)``."""

import ast
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from zonal.errors import ArgumentError, ZonalError, unknown_name

T = TypeVar("T")


def name_of(spec: str) -> str:
    """The name in a spec. Raises: ArgumentError when it cannot be read."""
    return _read(spec)[0]


def made(
    spec: str,
    makers: Mapping[str, Callable[..., T]],
    given: Mapping[str, Any] | None = None,
    hidden: Collection[str] = (),
    read: Callable[[Any], Any] | None = None,
) -> T:
    """What the maker of that name returns for the arguments of a spec.

    Args:
        given: parameters that the caller has chosen. hidden: those that a spec may not name either.
        read: what a literal stands for, where it is not itself.

    Raises: ArgumentError naming the valid names or arguments, and the nearest.
    """
    name, keywords = _read(spec)
    if name not in makers:
        raise unknown_name("operator spec", "operator", name, [*makers])
    given = given or {}
    known = [p for p in inspect.signature(makers[name]).parameters if p not in hidden and p not in given]
    arguments: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg not in known:
            raise unknown_name(f"operator spec {spec!r}", "argument", str(keyword.arg), known)
        try:
            value = ast.literal_eval(keyword.value)
        except ValueError as error:
            raise ArgumentError(f"operator spec {spec!r}: the value of {keyword.arg} must be a literal (number, text, tuple, True, False, None).") from error
        arguments[keyword.arg] = value if read is None else read(value)
    try:
        return makers[name](**given, **arguments)
    except ZonalError:
        raise
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"operator spec {spec!r}: an argument has the wrong type ({error}).") from error


def _read(spec: str) -> tuple[str, list[ast.keyword]]:
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise ArgumentError(f"operator spec {spec!r} cannot be read ({error}). Write a name or name(argument=value, …), e.g. ska(power=1).") from error
    call = node if isinstance(node, ast.Call) else None
    name = node.id if isinstance(node, ast.Name) else call.func.id if call is not None and isinstance(call.func, ast.Name) else None
    if name is None or (call is not None and (call.args or any(k.arg is None for k in call.keywords))):
        raise ArgumentError(f"operator spec {spec!r} cannot be read. Write a name or name(argument=value, …) with keyword arguments only.")
    return name, call.keywords if call is not None else []


__all__ = ["made", "name_of"]
