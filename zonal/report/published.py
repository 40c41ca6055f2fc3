"""Numbers that a paper prints, for comparison with what was measured, and how its recipe differs from the one here.

They travel with a comparison (``published`` in comparison.json), so that the page is made from files alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from zonal.errors import ArgumentError


@dataclass(frozen=True)
class PublishedRow:
    """One row of a table.

    select: which of our cells it is compared with, by slice, one value or several, such as {"task": "needle", "length":
    [64, 128]}. values: what is printed, in [0, 1]; None, and NaN in a file, for what is not.
    """

    label: str
    select: Mapping[str, int | str | list[int] | list[str]]
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

    Raises: ArgumentError for a row with values of some columns only, or of more than there are.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[PublishedRow, ...]

    def __post_init__(self) -> None:
        for row in self.rows:
            if row.values and len(row.values) != len(self.columns):
                raise ArgumentError(
                    f"published: each row of {self.title!r} must have no values or {len(self.columns)}, one for each "
                    f"column, and {row.label!r} has {len(row.values)}. A number that is not printed is nan."
                )


@dataclass(frozen=True)
class Published:
    """What a paper says. recipe: (setting, in the paper, here); notes: what a reader must know before comparing."""

    source: str
    tables: tuple[PublishedTable, ...]
    recipe: tuple[tuple[str, str, str], ...]
    notes: tuple[str, ...] = ()
