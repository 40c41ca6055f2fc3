"""Checks of plain values, read from text or files, against type annotations."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from zonal.errors import ArgumentError

_LARGEST = 2**63


def fits(value: Any, hint: Any) -> bool:
    """Whether a literal is of an annotated type, with finite numbers of at most 64 bits.

    Types that no literal can have are not checked.
    """
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
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            fits(key, parts[0]) and fits(inner, parts[1]) for key, inner in value.items()
        )
    if origin is list:
        return isinstance(value, list) and all(fits(inner, parts[0]) for inner in value)
    if hint in (int, float):
        whole = isinstance(value, int) and not isinstance(value, bool) and -_LARGEST <= value < _LARGEST
        return whole or (hint is float and isinstance(value, float) and math.isfinite(value))
    if hint in (str, bool, type(None)):
        return isinstance(value, hint)
    return True


def described(hint: Any) -> str:
    """An annotation in words: "a whole number or None"."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return described(parts[0])
    if origin in (typing.Union, types.UnionType):
        return " or ".join(described(part) for part in parts)
    if origin is typing.Literal:
        return " or ".join(map(repr, parts))
    if origin is tuple:
        return f"a tuple ({', '.join('…' if part is Ellipsis else described(part) for part in parts)})"
    return {
        int: "a whole number of at most 64 bits",
        float: "a finite number",
        str: "text",
        bool: "True or False",
        type(None): "None",
    }.get(hint, str(hint))


def check_fields(call: str, kind: type, values: object) -> None:
    """Raise ArgumentError unless ``values`` is a mapping whose entries fit the fields of a dataclass.

    Entries that are no fields are not checked.
    """
    if not isinstance(values, Mapping):
        raise ArgumentError(f"{call}: the fields of {kind.__name__} by name were required, received {values!r}.")
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        if field.name in values and not fits(values[field.name], hints[field.name]):
            raise ArgumentError(
                f"{call}: {field.name} must be {described(hints[field.name])}, received {values[field.name]!r}."
            )


__all__ = ["check_fields", "described", "fits"]
