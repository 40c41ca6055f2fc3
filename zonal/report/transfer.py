"""What finished runs reached on other tasks and at other lengths, beside what a paper prints."""

import math
from collections.abc import Sequence
from typing import Any

from zonal.evaluation.statistics import Spread
from zonal.report import formats, glossary
from zonal.report.published import PublishedRow, PublishedTable
from zonal.report.records import Run, Transfer
from zonal.report.row import Row, spread_if_any
from zonal.report.summary import Summary, slice_order
from zonal.report.table import Cell, Table, spread_cell


def _cells(run: Run) -> tuple[Transfer, ...]:
    return () if run.final is None else run.final.transfer


def over_seeds(row: Row, line: PublishedRow) -> Spread | None:
    """Accuracy of an operator over its seeds, in the mean over the cells that belong to a line."""
    found = [[cell.accuracy for cell in _cells(run) if line.has(cell.slices)] for run in row.runs]
    return spread_if_any([math.fsum(values) / len(values) for values in found if values])


def _line(select: dict[str, int | str | list[int]]) -> PublishedRow:
    return PublishedRow("", select, ())


def slices(summary: Summary, name: str) -> tuple[int | str, ...]:
    """The values of a slice that some run was measured on."""
    found = dict.fromkeys(
        cell.slices[name] for row in summary.rows for run in row.runs for cell in _cells(run) if name in cell.slices
    )
    return (
        tuple(found)
        if any(isinstance(value, str) for value in found)
        else tuple(sorted(found, key=lambda value: slice_order(str(value))))
    )


def beside(summary: Summary, table: PublishedTable) -> Table:
    """Our operators, best mean marked, then the paper's columns."""
    shown = [row for row in summary.rows if any(_cells(run) for run in row.runs)]
    rows = []
    for line in table.rows:
        ours = [over_seeds(row, line) for row in shown]
        rows.append(("", (Cell(line.label), *_ours(ours), *(Cell(formats.number(value)) for value in line.values))))
    return Table(("", *(row.label for row in shown), *table.columns), tuple(rows))


def by_slice(summary: Summary, row: Row) -> dict[str, dict[str, Spread]]:
    """Accuracy of an operator by each slice of what it was measured on once more: {slice: {value: over seeds}}."""
    names = dict.fromkeys(name for run in row.runs for cell in _cells(run) for name in cell.slices)
    return {
        name: {str(value): total for value in slices(summary, name) if (total := over_seeds(row, _line({name: value})))}
        for name in names
    }


def by_published_line(summary: Summary, row: Row) -> dict[str, dict[str, Spread]]:
    """Accuracy of an operator in each line of the paper's tables: {table: {line: over seeds}}."""
    published = summary.data.published
    return {
        table.title: {line.label: total for line in table.rows if (total := over_seeds(row, line))}
        for table in (() if published is None else published.tables)
    }


def _ours(values: Sequence[Spread | None]) -> list[Cell]:
    top = max((value.mean for value in values if value is not None), default=None)
    several = sum(value is not None for value in values) > 1
    return [spread_cell(value, value is not None and several and value.mean == top) for value in values]


def tables(summary: Summary) -> list[tuple[str, Table]]:
    """(title, table): the paper's tables with ours beside them, or the means by task; nothing where nothing was
    measured.
    """
    tasks = slices(summary, "task")
    if not tasks:
        return []
    published = summary.data.published
    if published is None:
        lines = tuple(PublishedRow(str(task), {"task": task}, ()) for task in tasks)
        return [("Mean accuracy by task", beside(summary, PublishedTable("", (), lines)))]
    return [(table.title, beside(summary, table)) for table in published.tables]


def trained_length(summary: Summary) -> int | None:
    """The longest sequences of training, where the task says so."""
    lengths = [shape["length"] for stage in summary.data.task.get("stages") or () for shape in stage["shapes"]]
    return max(lengths, default=None)


def lines(row: Row) -> list[dict[str, Any]]:
    """For the charts: one entry a task and number of pairs, with accuracy at each length."""
    found: dict[tuple[str, int], set[int]] = {}
    for run in row.runs:
        for cell in _cells(run):
            if {"task", "pairs", "length"} <= set(cell.slices):
                found.setdefault((str(cell.slices["task"]), int(cell.slices["pairs"])), set()).add(
                    int(cell.slices["length"])
                )
    entries = []
    for (task, pairs), lengths in found.items():
        totals = [
            (length, over_seeds(row, _line({"task": task, "pairs": pairs, "length": length})))
            for length in sorted(lengths)
        ]
        known = [(length, total) for length, total in totals if total is not None]
        entries.append(
            {
                "task": task,
                "pairs": pairs,
                "x": [length for length, _ in known],
                "mean": [round(total.mean, 5) for _, total in known],
                "sd": [None if total.deviation is None else round(total.deviation, 5) for _, total in known],
            }
        )
    return entries


def panels(summary: Summary) -> list[tuple[str, str]]:
    """(task, its name for people) of each chart."""
    return [(str(task), glossary.slice_name(str(task))) for task in slices(summary, "task")]
