"""Operators by their specs, for modules that mechanisms import and that therefore cannot import them."""

from collections.abc import Callable
from typing import Any

from zonal.algebra.operator import Operator
from zonal.errors import ArgumentError

Reader = Callable[[str], Operator]
_readers: list[Reader] = []


def reads_specs(reader: Reader) -> Reader:
    """Register the function that reads specs; ``zonal.mechanisms`` calls this when it is imported."""
    _readers[:] = [reader]
    return reader


def operator_of(call: str, given: object) -> Operator:
    """The given operator, or the operator of the given spec.

    Raises: ArgumentError that starts with ``call``, for anything else.
    """
    if isinstance(given, str):
        return _readers[0](given)
    given = in_use(given)
    if not isinstance(given, Operator):
        kind = type(given).__name__
        article = "an" if kind[:1] in "AEIOUaeiou" else "a"
        raise ArgumentError(
            f"{call}: an Operator or a spec such as 'sko' is required, received {article} {kind}. "
            "Make one with zonal.mechanisms, e.g. mechanisms.softmax()."
        )
    return given


def in_use(given: Any) -> Any:
    """The module itself, or the copy of it that is in use where ``modules_to_save`` of peft has wrapped it."""
    if isinstance(given, Operator) or not hasattr(given, "modules_to_save"):
        return given
    active = [] if given.disable_adapters else given.active_adapters
    return given.modules_to_save[active[0]] if active else given.original_module


__all__ = ["in_use", "operator_of", "reads_specs"]
