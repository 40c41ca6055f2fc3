"""The fast tier: of a test with many cases, those in which each value of each parameter occurs twice."""

import random
from collections import Counter
from collections.abc import Hashable, Sequence

import pytest

WHOLE = 8
"""A test with at most this many cases is run whole."""

TIMES = 2
"""How often each value of each parameter occurs in the cover of a larger test."""


def features(item: pytest.Item) -> frozenset[tuple[str, Hashable]]:
    """The values of a case: (parameter, value). A string with slashes stands for several values."""
    found: set[tuple[str, Hashable]] = set()
    callspec = item.callspec  # type: ignore[attr-defined]
    for name, value in callspec.params.items():
        if isinstance(value, str):
            found.update((f"{name}{place}", part) for place, part in enumerate(value.split("/")))
        else:
            found.add((name, value if isinstance(value, Hashable) else id(value)))
    return frozenset(found)


def cover(rows: Sequence[frozenset[tuple[str, Hashable]]], times: int = TIMES) -> set[int]:
    """Indices of rows in which each value of all rows occurs at least ``times`` times, or in all rows that have it.

    The same rows give the same indices. A row whose value occurs in few rows is always among them.
    """
    met: Counter[tuple[str, Hashable]] = Counter()
    found = set()
    for index in random.Random(0).sample(range(len(rows)), len(rows)):
        if any(met[feature] < times for feature in rows[index]):
            met.update(rows[index])
            found.add(index)
    return found
