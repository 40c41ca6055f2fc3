"""Specs: a name, or a name with keyword arguments that are Python literals, such as ``ska(power=1)``."""

import ast
import inspect
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from zonal.errors import ArgumentError, ZonalError, unknown_name
from zonal.typed import described, fits

T = TypeVar("T")
# what Python's own parser reads without running out of its stack
_LONGEST = 4000


def name_of(spec: str) -> str:
    """The name in a spec. Raises: ArgumentError when it cannot be read."""
    return _read(spec)[0]


def written(spec: str) -> str:
    """The spec with Python's own spaces and quotation marks. Raises: ArgumentError when it cannot be read."""
    name, keywords = _read(spec)
    return f"{name}({', '.join(map(ast.unparse, keywords))})" if keywords else name


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
        read: the value of a literal, where it is not the literal itself.

    Raises: ArgumentError naming the valid names or arguments, and the nearest.
    """
    name, keywords = _read(spec)
    if name not in makers:
        raise unknown_name("operator spec", "operator", name, [*makers])
    given, maker = given or {}, makers[name]
    known = [p for p in inspect.signature(maker).parameters if p not in hidden and p not in given]
    hints = typing.get_type_hints(maker.__init__ if isinstance(maker, type) else maker)
    arguments: dict[str, Any] = {}
    for keyword in keywords:
        if keyword.arg not in known:
            raise unknown_name(f"operator spec {spec!r}", "argument", str(keyword.arg), known)
        try:
            value = ast.literal_eval(keyword.value)
        except (ValueError, TypeError) as error:  # the second for what cannot be a key of a dictionary
            raise ArgumentError(
                f"operator spec {spec!r}: the value of {keyword.arg} must be a literal (number, text, tuple, True, "
                "False, None)."
            ) from error
        value = value if read is None else read(value)
        hint = hints.get(str(keyword.arg), Any)
        if not fits(value, hint):
            raise ArgumentError(f"operator spec {spec!r}: {keyword.arg} must be {described(hint)}, received {value!r}.")
        arguments[str(keyword.arg)] = value
    try:
        return maker(**given, **arguments)
    except ZonalError:
        raise
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(
            f"operator spec {spec!r}: an argument is missing or has the wrong type ({error})."
        ) from error


def _read(spec: str) -> tuple[str, list[ast.keyword]]:
    if len(spec) > _LONGEST:
        raise ArgumentError(
            f"operator spec {spec[:40]!r}… cannot be read: it has {len(spec):,} characters, at most {_LONGEST:,} are "
            "possible."
        )
    try:
        node = ast.parse(spec.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two for deep brackets
        raise ArgumentError(
            f"operator spec {spec!r} cannot be read ({getattr(error, 'msg', error)}). Write a name or "
            "name(argument=value, …), e.g. ska(power=1)."
        ) from error
    call = node if isinstance(node, ast.Call) else None
    named = node if call is None else call.func
    name = named.id if isinstance(named, ast.Name) else None
    if name is None or (call is not None and (call.args or any(k.arg is None for k in call.keywords))):
        raise ArgumentError(
            f"operator spec {spec!r} cannot be read. Write a name or name(argument=value, …), keyword arguments only."
        )
    return name, call.keywords if call is not None else []


__all__ = ["made", "name_of", "written"]
