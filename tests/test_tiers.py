"""The fast tier: its cover, and that what is left out is named as it is called."""

import re
from pathlib import Path

import pytest
from cover import TIMES, cover
from tiers import CHOSEN, SLOW

TESTS = Path(__file__).parent


def test_every_value_is_met() -> None:
    """A few times each, or as often as there is; and in far fewer rows than there are."""
    rows = [
        frozenset((("operator", a), ("input", b), ("type", c))) for a in range(40) for b in range(20) for c in range(2)
    ]
    rows.append(frozenset((("operator", "alone"), ("input", 0), ("type", 0))))
    found = cover(rows)
    assert len(rows) - 1 in found
    for value in {value for row in rows for value in row}:
        assert sum(value in rows[index] for index in found) >= min(TIMES, sum(value in row for row in rows))
    assert len(found) < len(rows) / 5
    assert cover(rows) == found


@pytest.mark.parametrize("name", sorted({*CHOSEN, *SLOW}))
def test_what_is_named_is_there(name: str) -> None:
    file, _, test = name.partition("::")
    assert re.search(rf"^def {test}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE)
