"""The report of a comparison: one self-contained HTML page, its Markdown twin and ``summary.json``, from files alone.

``load(directory)`` reads, ``summarise(data)`` computes, ``write(directory)`` does both and writes the three files into
the same folder; ``write_many(directories, out)`` puts several comparisons on one page.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from zonal import store
from zonal.errors import ArgumentError
from zonal.evaluation.statistics import Spread
from zonal.report import commands, page, table, transfer
from zonal.report.fairness import Flag
from zonal.report.records import ComparisonData, Metrics, Point, Run, load
from zonal.report.row import Row
from zonal.report.summary import Summary, Verdict, summarise
from zonal.report.table import Cell, Table, results


@dataclass(frozen=True)
class Paths:
    """The files of a report."""

    html: Path
    markdown: Path
    summary: Path


def _spread(total: Spread | None) -> dict[str, Any] | None:
    return None if total is None else {"mean": total.mean, "deviation": total.deviation, "seeds": total.n}


def _spreads(totals: Mapping[str, Mapping[str, Spread]]) -> dict[str, dict[str, Any]]:
    return {name: {key: _spread(total) for key, total in values.items()} for name, values in totals.items()}


def _row_json(summary: Summary, row: Row, target: float | None) -> dict[str, Any]:
    """One operator of ``as_json``."""
    data = summary.data
    verdict = next((verdict for verdict in summary.verdicts if verdict.other == row.operator), None)
    behind = verdict and {
        "difference": verdict.behind,
        "margin": verdict.margin,
        "seeds": verdict.seeds,
        "within_spread": verdict.within,
    }
    return {
        "operator": row.operator,
        "label": row.label,
        "rank": summary.ranking.index(row.operator) + 1 if row.operator in summary.ranking else None,
        "learned": row.learned,
        "learning_rate": row.learning_rate,
        "seeds_done": [run.seed for run in row.runs],
        "failed": row.failed,
        **{name: _spread(row.value(name)) for name in ("loss", "accuracy", "bits_per_byte")},
        "tokens_to_loss": None if target is None else _spread(table.tokens_to_loss(row, target)),
        "seconds": _spread(row.seconds),
        "tokens_per_second": _spread(row.tokens_per_second),
        "speed_ratio": row.speed_ratio,
        "peak_memory_bytes": _spread(row.peak_memory_bytes),
        "parameters": row.parameters,
        "memory_bytes": {str(length): size for length, size in sorted(row.memory_bytes.items())},
        "slices": _spreads(row.slices),
        "transfer": _spreads(transfer.by_slice(summary, row)),
        "published": _spreads(transfer.by_published_line(summary, row)),
        "sweep": {repr(rate): _spread(total) for rate, total in row.sweep.items()},
        "behind": behind,
        "command": commands.row_command(data.command, row.operator, row.learning_rate, data.steps),
    }


def as_json(summary: Summary) -> dict[str, Any]:
    """The summary as JSON: full precision, one object an operator in the order of the ranking."""
    data, target = summary.data, table.target_loss(summary)
    rows = [_row_json(summary, row, target) for row in summary.rows]
    rows.sort(key=lambda item: (item["rank"] is None, item["rank"] or 0, item["operator"] not in summary.unlearned))
    return {
        "title": data.title,
        "command": data.command,
        "created": data.created,
        "metric": data.metric,
        "guess": None if data.guess is None else data.guess.value,
        "target_loss": target,
        "headline": summary.headline,
        "flags": [asdict(flag) for flag in summary.flags],
        "sentences": list(summary.sentences),
        "steps": data.steps,
        "seeds": list(data.seeds),
        "learning_rates": list(data.learning_rates),
        "operators": rows,
        "versions": dict(data.versions),
        "commit": data.commit,
        "device": dict(data.device),
    }


def write_many(directories: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Paths:
    """Write one report on several comparisons into the folder ``out``.

    Raises: FileFormatError when a folder is missing or damaged; ArgumentError without folders; InsufficientSpaceError.
    """
    if not directories:
        raise ArgumentError("report.write_many: at least one comparison folder is required, got none.")
    summaries = [summarise(load(directory)) for directory in directories]
    paths = Paths(Path(out) / "report.html", Path(out) / "report.md", Path(out) / "summary.json")
    values = page.context(summaries)
    store.write_bytes(paths.markdown, page.rendered_markdown("page", values))
    store.write_bytes(paths.html, page.rendered_html("page", values))
    store.write_json(paths.summary, {"schema": 1, "comparisons": [as_json(summary) for summary in summaries]})
    return paths


def write(directory: str | os.PathLike[str]) -> Paths:
    """Write report.html, report.md and summary.json into a comparison folder, from the files in it.

    Raises: FileFormatError when the folder is missing, has no runs, or a file is damaged; InsufficientSpaceError.
    """
    return write_many([directory], directory)


__all__ = [
    "Cell",
    "ComparisonData",
    "Flag",
    "Metrics",
    "Paths",
    "Point",
    "Row",
    "Run",
    "Summary",
    "Table",
    "Verdict",
    "as_json",
    "load",
    "results",
    "summarise",
    "write",
    "write_many",
]
