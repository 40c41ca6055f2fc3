"""The fast tier: its cover, and that what is left out is named as it is called."""

import re
from pathlib import Path

from cover import cover
from tiers import CHOSEN, SLOW

TESTS = Path(__file__).parent


def test_every_value_is_met() -> None:
    """And in far fewer rows than there are."""
    rows = [
        frozenset((("operator", a), ("input", b), ("type", c))) for a in range(40) for b in range(20) for c in range(2)
    ]
    rows.append(frozenset((("operator", "alone"), ("input", 0), ("type", 0))))
    found = cover(rows)
    assert {value for index in found for value in rows[index]} == {value for row in rows for value in row}
    assert len(found) < len(rows) / 10
    assert cover(rows) == found


def test_what_is_named_is_there() -> None:
    for name in (*CHOSEN, *SLOW):
        file, _, test = name.partition("::")
        assert re.search(rf"^def {test}\(", (TESTS / file).read_text(encoding="utf-8"), re.MULTILINE), name
