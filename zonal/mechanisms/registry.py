"""The table of mechanisms: each module enters its own when it is imported."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

from zonal.algebra import Operator
from zonal.names import known_names

Make = TypeVar("Make", bound=Callable[..., Operator])


class Mechanism(NamedTuple):
    """A named operator: what makes it, and what the documentation and the report say of it.

    label: its name for people. line: what it does, in one line. weights, memory: their formulas per head, in TeX
    between dollars. paths: those beside the dense one that run it.
    """

    make: Callable[..., Operator]
    label: str
    line: str
    weights: str
    memory: str
    paths: str


MECHANISMS: dict[str, Mechanism] = {}


def mechanism(label: str, line: str, *, weights: str, memory: str, paths: str) -> Callable[[Make], Make]:
    """Enter the decorated function in ``MECHANISMS`` under its own name.

    It then refuses arguments of unknown names, and those of an operator that could not be run. The arguments are those
    of ``Mechanism``.
    """

    def entered(make: Make) -> Make:
        named = known_names(make)

        @functools.wraps(make)
        def checked(*args: Any, **given: Any) -> Operator:
            operator = named(*args, **given)
            operator.check(make.__name__)
            return operator

        MECHANISMS[make.__name__] = Mechanism(checked, label, line, weights, memory, paths)
        return cast(Make, checked)

    return entered


__all__ = ["MECHANISMS", "Mechanism", "mechanism"]
