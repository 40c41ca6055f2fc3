"""A few rows in which any two values of two features meet."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence

Value = tuple[str, str]  # feature, value
Possible = Callable[[Value, Value], bool]
_TRIES = 40


def pairs(features: Mapping[str, Sequence[str]], possible: Possible) -> set[frozenset[Value]]:
    """All that have to meet."""
    values = [(name, value) for name, each in features.items() for value in each]
    return {frozenset((a, b)) for a, b in itertools.combinations(values, 2) if a[0] != b[0] and possible(a, b)}


def pairwise(features: Mapping[str, Sequence[str]], possible: Possible) -> list[dict[str, str]]:
    """Rows, one value a feature, that hold all ``pairs``: each row is the best of some that begin with a pair which has
    not met yet.

    The same features give the same rows. possible: whether two values may meet; a row never holds two that may not.
    """
    draw, left, rows = random.Random(0), pairs(features, possible), []
    while left:
        first = sorted(sorted(pair) for pair in left)[0]
        tries = [_row(features, possible, dict(first), left, draw) for _ in range(_TRIES)]
        best = max((row for row in tries if row is not None), key=lambda row: len(_met(row) & left))
        left -= _met(best)
        rows.append(best)
    return rows


def _met(row: Mapping[str, str]) -> set[frozenset[Value]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}


def _row(
    features: Mapping[str, Sequence[str]],
    possible: Possible,
    row: dict[str, str],
    left: set[frozenset[Value]],
    draw: random.Random,
) -> dict[str, str] | None:
    """A row that begins with some values; each other feature, in any order, takes the value that meets most of what is
    left.

    None: there is no such value.
    """
    for name in draw.sample(list(features), len(features)):
        if name in row:
            continue
        fits = [value for value in features[name] if all(possible((name, value), other) for other in row.items())]
        if not fits:
            return None
        draw.shuffle(fits)
        row[name] = max(fits, key=lambda value: sum(frozenset(((name, value), other)) in left for other in row.items()))
    return {name: row[name] for name in features}
