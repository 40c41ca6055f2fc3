"""The fast tier: of a test with many cases, those in which each value of each parameter occurs."""

import random
from collections.abc import Hashable, Mapping, Sequence

WHOLE = 8
"""A test with at most this many cases is run whole."""


def features(case: Mapping[str, object]) -> frozenset[tuple[str, Hashable]]:
    """The values of a case: (parameter, value). A string with slashes stands for several values."""
    found: set[tuple[str, Hashable]] = set()
    for name, value in case.items():
        if isinstance(value, str):
            found.update((f"{name}{place}", part) for place, part in enumerate(value.split("/")))
        else:
            found.add((name, value if isinstance(value, Hashable) else id(value)))
    return frozenset(found)


def cover(rows: Sequence[frozenset[tuple[str, Hashable]]]) -> set[int]:
    """Indices of rows in which each value of all rows occurs. The same rows give the same indices."""
    met: set[tuple[str, Hashable]] = set()
    found = set()
    for index in random.Random(0).sample(range(len(rows)), len(rows)):
        if not rows[index] <= met:
            met |= rows[index]
            found.add(index)
    return found
