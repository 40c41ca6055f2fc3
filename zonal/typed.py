"""Checks of plain values, read from text or files, against type annotations, and of what calls are given."""

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

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
    if origin in (tuple, Sequence):
        return f"a list or tuple ({', '.join('…' if part is Ellipsis else described(part) for part in parts)})"
    if origin in (dict, Mapping):
        return "an object"
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


def check_tensors(
    call: str, given: Mapping[str, object], device: torch.device | None = None, *, optional: bool = False
) -> None:
    """Raise ArgumentError, beginning with ``call``, for what is given by name and is no dense tensor.

    device: where the tensors must be; None = anywhere. optional: whether each of them may be None.
    """
    for name, x in given.items():
        if x is None and optional:
            continue
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{call}: {name} must be a torch.Tensor, received {type(x).__name__}. Convert it.")
        if x.is_nested:
            raise ArgumentError(
                f"{call}: {name} must be dense, received a nested tensor. Pass {name}.to_padded_tensor(0.0) and a "
                "key_padding_mask, or all sequences in one row and cu_seqlens."
            )
        if x.layout != torch.strided:
            raise ArgumentError(f"{call}: {name} must be dense, received layout {x.layout}. Pass {name}.to_dense().")
        if device is not None and x.device != device:
            raise ArgumentError(f"{call}: {name} must be on {device}, received {x.device}.")


def check_switch(call: str, name: str, given: object) -> None:
    """Raise ArgumentError, beginning with ``call``, unless an argument is True or False."""
    if not isinstance(given, bool):
        raise ArgumentError(f"{call}: {name} must be True or False, received {given!r}.")


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    """Name, annotation and whether there is a default, of each field of a dataclass."""
    hints, missing = typing.get_type_hints(kind), dataclasses.MISSING
    return tuple(
        (each.name, hints[each.name], each.default is not missing or each.default_factory is not missing)
        for each in dataclasses.fields(kind)
    )


def made(hint: Any, value: Any, name: str) -> Any:
    """``value``, read from JSON or TOML, as the annotated type: objects as dataclasses, lists as tuples, and keys of
    objects as the mapping has them. A dataclass stays as it is.

    Keys that are no fields are passed over. A field that is missing or null has its default. NaN and infinity count as
    null, and null entries of a mapping are left out, unless its type has None.

    Raises: ArgumentError that begins with ``name`` and the place in the value.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        others = [part for part in parts if part is not type(None)]
        absent = value is None or (isinstance(value, float) and not math.isfinite(value))
        if absent and len(others) < len(parts):
            return None
        if len(others) == 1:
            return made(others[0], value, name)
        if fits(value, hint):
            return value
    elif dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return value if isinstance(value, hint) else _made_fields(hint, value, name)
    elif origin in (tuple, Sequence) and isinstance(value, list | tuple):
        inner = parts[:1] * len(value) if origin is Sequence or parts[1:] == (Ellipsis,) else parts
        if len(inner) != len(value):
            raise ArgumentError(f"{name} must have {len(inner)} entries, received {value!r}.")
        return tuple(made(part, value[at], f"{name}[{at}]") for at, part in enumerate(inner))
    elif origin in (dict, Mapping) and isinstance(value, Mapping):
        nullable = parts[1] is Any or type(None) in typing.get_args(parts[1])
        inner = parts[1] if nullable else parts[1] | None
        entries = {parts[0](key): made(inner, each, f"{name}.{key}") for key, each in value.items()}
        return {key: each for key, each in entries.items() if nullable or each is not None}
    elif hint in (int, float) and fits(value, float):
        return hint(value)
    elif origin not in (tuple, Sequence, dict, Mapping) and fits(value, hint):
        return value
    raise ArgumentError(f"{name} must be {described(hint)}, received {value!r}.")


def _made_fields(kind: type, value: Any, name: str) -> Any:
    """``made`` for a dataclass."""
    if not isinstance(value, Mapping):
        raise ArgumentError(f"{name} must be an object, received {value!r}.")
    given = {}
    for field, hint, optional in _fields(kind):
        if field not in value and not optional:
            raise ArgumentError(f"{name} lacks the key {field!r}.")
        if not optional or value.get(field) is not None:
            given[field] = made(hint, value[field], f"{name}.{field}")
    return kind(**given)


__all__ = ["check_fields", "check_switch", "check_tensors", "described", "fits", "made"]
