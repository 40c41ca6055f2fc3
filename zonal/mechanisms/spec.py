"""Specs: a name, or a name with keyword arguments that are Python literals, such as ``ska(power=1)``."""

import ast
import inspect
import math
import types
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from zonal.errors import ArgumentError, ZonalError, unknown_name

T = TypeVar("T")
_LARGEST = 2**63
# what Python's own parser reads without running out of its stack
_LONGEST = 4000


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
    maker = makers[name]
    hints = typing.get_type_hints(maker.__init__ if isinstance(maker, type) else maker)
    arguments: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg not in known:
            raise unknown_name(f"operator spec {spec!r}", "argument", str(keyword.arg), known)
        try:
            value = ast.literal_eval(keyword.value)
        except (ValueError, TypeError) as error:  # the second for what cannot be a key of a dictionary
            raise ArgumentError(f"operator spec {spec!r}: the value of {keyword.arg} must be a literal (number, text, tuple, True, False, None).") from error
        value = value if read is None else read(value)
        hint = hints.get(str(keyword.arg), Any)
        if not fits(value, hint):
            raise ArgumentError(f"operator spec {spec!r}: {keyword.arg} must be {_words(hint)}, received {value!r}.")
        arguments[str(keyword.arg)] = value
    try:
        return maker(**given, **arguments)
    except ZonalError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"operator spec {spec!r}: an argument has the wrong type ({error}).") from error


def fits(value: Any, hint: Any) -> bool:
    """Whether a literal is of an annotated type, and every number in it finite and of at most 64 bits; what no literal can be is not looked at."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return fits(value, parts[0])
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part) for part in parts)
    if origin is typing.Literal:
        return any(type(value) is type(part) and value == part for part in parts)
    if origin is tuple:
        several = len(parts) == 2 and parts[1] is Ellipsis
        inner = parts[:1] * len(value) if several and isinstance(value, tuple | list) else parts
        return isinstance(value, tuple | list) and len(value) == len(inner) and all(map(fits, value, inner))
    if hint in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value < _LARGEST
        return whole or (hint is float and isinstance(value, float) and math.isfinite(value))
    if hint in (str, bool, type(None)):
        return isinstance(value, hint)
    return True


def _words(hint: Any) -> str:
    """An annotation as people read it: "a whole number or None"."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _words(parts[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_words(part) for part in parts)
    if origin is typing.Literal:
        return " or ".join(map(repr, parts))
    if origin is tuple:
        return f"a tuple ({', '.join('…' if part is Ellipsis else _words(part) for part in parts)})"
    return {int: "a whole number of at most 64 bits", float: "a finite number", str: "text", bool: "True or False", type(None): "None"}.get(hint, str(hint))


def _read(spec: str) -> tuple[str, list[ast.keyword]]:
    if len(spec) > _LONGEST:
        raise ArgumentError(f"operator spec {spec[:40]!r}… cannot be read: it has {len(spec):,} characters, at most {_LONGEST:,} are possible.")
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two for deep brackets
        raise ArgumentError(f"operator spec {spec!r} cannot be read ({error}). Write a name or name(argument=value, …), e.g. ska(power=1).") from error
    call = node if isinstance(node, ast.Call) else None
    name = node.id if isinstance(node, ast.Name) else call.func.id if call is not None and isinstance(call.func, ast.Name) else None
    if name is None or (call is not None and (call.args or any(k.arg is None for k in call.keywords))):
        raise ArgumentError(f"operator spec {spec!r} cannot be read. Write a name or name(argument=value, …) with keyword arguments only.")
    return name, call.keywords if call is not None else []


__all__ = ["fits", "made", "name_of"]
