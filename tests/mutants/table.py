"""The table of seeded faults, and one of them put into a tree."""

import hashlib
import tomllib
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("mutants.toml")


@dataclass(frozen=True)
class Mutant:
    """One fault: ``old``, which stands exactly once in ``file``, becomes ``new``. tests: arguments of pytest that
    should see it.
    """

    name: str
    says: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The test files and folders among ``tests``."""
        return tuple(each.partition("::")[0] for each in self.tests if each.startswith("tests/"))

    @property
    def digest(self) -> str:
        """Of the fault and its tests."""
        return hashlib.sha256(repr((self.file, self.old, self.new, self.tests)).encode()).hexdigest()[:12]

    def applied(self, tree: Path) -> str:
        """The text of the file with the fault.

        Raises: ValueError when the text has changed so that the fault has no place any more.
        """
        text = (tree / self.file).read_text(encoding="utf-8")
        count = text.count(self.old)
        if count != 1:
            raise ValueError(
                f"mutant {self.name!r} does not apply: its old text stands {count} times in {self.file}, once is "
                f"required. Write it anew in {TABLE.name}."
            )
        return text.replace(self.old, self.new)


def mutants() -> tuple[Mutant, ...]:
    """All of them, in the order of the table."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["mutant"]
    return tuple(Mutant(**{**row, "tests": tuple(row["tests"])}) for row in rows)
