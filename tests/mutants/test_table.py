"""Seeded faults keep their place in the code: `make mutants` runs them."""

from pathlib import Path

import pytest
from mutants.run import EVERYTHING, Outcome, groups_of, kept, write
from mutants.table import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
TABLE = mutants()


def test_there_are_forty() -> None:
    assert len({mutant.name for mutant in TABLE}) == len(TABLE) >= 40


def test_every_fault_has_a_place() -> None:
    """A change of the code that moves one of them changes the table, too."""
    for mutant in TABLE:
        assert mutant.applied(ROOT) != (ROOT / mutant.file).read_text(encoding="utf-8"), mutant.name
        assert mutant.files, mutant.name
        assert all((ROOT / file).exists() for file in mutant.files), mutant.name


def test_a_fault_without_a_place_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\nx = 1\n", encoding="utf-8")
    for old in ("x = 1", "x = 2"):
        with pytest.raises(ValueError, match="mutant 'moved' does not apply"):
            Mutant("moved", "", "a.py", old, "", ()).applied(tmp_path)


def test_a_record_that_is_gone_on_with_keeps_what_was_killed(tmp_path: Path) -> None:
    """What survived, and a fault whose entry has changed since, are run again."""
    out, (first, second, third) = tmp_path / "mutants.json", TABLE[:3]
    assert kept(out, TABLE) == {}
    outcomes = [
        Outcome(first.name, "abc", first.digest, first.says, "killed", "tests/a.py::test", 1.0),
        Outcome(second.name, "abc", second.digest, second.says, "survived", None, 1.0),
        Outcome(third.name, "abc", "another", third.says, "killed", "tests/a.py::test", 1.0),
    ]
    write(out, outcomes)
    assert kept(out, TABLE) == {first.name: outcomes[0]}


def test_the_test_that_killed_a_fault_is_tried_first() -> None:
    fault = TABLE[0]
    before = Outcome(fault.name, "abc", fault.digest, fault.says, "killed", "tests/a.py::test", 1.0)
    assert groups_of(fault, before, named_only=True) == [("tests/a.py::test",), fault.tests]
    assert groups_of(fault, None, named_only=False) == [fault.tests, EVERYTHING]
