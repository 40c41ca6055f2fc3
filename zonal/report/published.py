"""Numbers that a paper prints, to stand beside what was measured, and how its recipe differs from the one that was run.

They travel with a comparison (``published`` in comparison.json), so that the page is made from files alone.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.resources.abc import Traversable
from typing import Any

from zonal.errors import FileFormatError


@dataclass(frozen=True)
class PublishedRow:
    """One row of a table. select: which of our cells stand beside it, by slice, one value or several, such as {"task":
    "needle", "length": [64, 128]};
    values: what is printed, in [0, 1].
    """

    label: str
    select: Mapping[str, int | str | list[int]]
    values: tuple[float | None, ...]

    def has(self, slices: Mapping[str, int | str]) -> bool:
        """Whether a cell with these slices belongs to this row."""
        return all(
            slices.get(name) in (value if isinstance(value, list) else [value]) for name, value in self.select.items()
        )


@dataclass(frozen=True)
class PublishedTable:
    """A table of accuracies with a column for each model of the paper. A row without values is one that the paper does
    not have.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[PublishedRow, ...]


@dataclass(frozen=True)
class Published:
    """What a paper says. recipe: (setting, in the paper, here); notes: what a reader must know before comparing."""

    source: str
    tables: tuple[PublishedTable, ...]
    recipe: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; ``from_dict`` reverses it."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], path: Traversable) -> "Published":
        """Raises: FileFormatError naming ``path`` when ``values`` is not what ``to_dict`` gives."""
        try:
            tables = tuple(
                PublishedTable(
                    str(table["title"]),
                    tuple(map(str, table["columns"])),
                    tuple(
                        PublishedRow(str(row["label"]), dict(row["select"]), tuple(map(_printed, row["values"])))
                        for row in table["rows"]
                    ),
                )
                for table in values["tables"]
            )
            recipe = tuple((str(setting), str(theirs), str(ours)) for setting, theirs, ours in values["recipe"])
            return cls(str(values["source"]), tables, recipe, tuple(map(str, values["notes"])))
        except (KeyError, TypeError, ValueError) as error:
            raise FileFormatError(
                f"report: {path}: 'published' is incomplete or damaged ({error!r}). "
                "Take it out of the file, or run the comparison again."
            ) from error


def _printed(value: float | None) -> float | None:
    """A value of a table. TOML has no null: there, NaN marks what a paper does not print."""
    return None if value is None or math.isnan(value) else value


__all__ = ["Published", "PublishedRow", "PublishedTable"]
