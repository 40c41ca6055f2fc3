"""Writes the tables of docs/slay_measured.md, docs/slay_maps.md and docs/slay_models.md from the records of
``zonal bench fidelity``.

A table of a page is found by its first line. tools/pages.py writes the pages, and a test compares them with it.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

RECORDS = Path(__file__).resolve().parents[1] / "results" / "benchmarks"
Row = dict[str, Any]

AVERAGE = "reference"
"""The family of the mean of all values, of which a record has the error alone."""


class Map(NamedTuple):
    """A row of a table: its title, and the family and label of the map in the record."""

    title: str
    family: str
    label: str | None = None


class Panel(NamedTuple):
    """A column: its title, and the inputs, head dimension and epsilon in the record."""

    title: str
    inputs: str
    dim: int
    eps: float


MAPS = (
    Map("mean of all values", AVERAGE),
    Map("SLAY, anchors, large", "SLAY: anchors", "large"),
    Map("SLAY, Laplace only, large", "SLAY: Laplace only", "large"),
    Map("SLAY, minimax nodes, large", "SLAY: minimax nodes", "large"),
    Map("SLAY, one node, orthogonal and antithetic, large", "SLAY: orthogonal", "large"),
    Map("SLAY, trained, medium", "SLAY: learned", "medium"),
    Map("learned exponentials", "learned exponentials", "256"),
    Map("Nyström of Yat, k-means (signed)", "Nystrom of Yat, k-means", "256"),
    Map("$x^2$ alone", "x² alone", "exact"),
    Map("projected square, PCA, largest rank", "projected square, PCA"),
    Map("fitted square, degree 2", "p(x)² + c, random angles", "degree 2"),
    Map("fitted square, degree 2, own rows", "p(x)² + c, own rows", "degree 2"),
    Map("fitted square, degree 4", "p(x)² + c, random angles", "degree 4"),
    Map("fitted square, degree 4, own angles", "p(x)² + c, own angles", "degree 4"),
    Map("fitted square, degree 4, own rows", "p(x)² + c, own rows", "degree 4"),
    Map("fitted square, degree 6, own rows", "p(x)² + c, own rows", "degree 6"),
)
DRAWN = (
    Panel("$d$ = 8, $\\varepsilon$ = 1, iid", "iid", 8, 1.0),
    Panel("$d$ = 8, $\\varepsilon$ = 1, anisotropic", "anisotropic", 8, 1.0),
    Panel("$d$ = 8, $\\varepsilon$ = 1, peaked", "peaked", 8, 1.0),
    Panel("$d$ = 16, $\\varepsilon$ = 1, iid", "iid", 16, 1.0),
    Panel("$d$ = 32, $\\varepsilon$ = 0.01, iid", "iid", 32, 0.01),
    Panel("$d$ = 32, $\\varepsilon$ = 1, iid", "iid", 32, 1.0),
    Panel("$d$ = 64, $\\varepsilon$ = 1, iid", "iid", 64, 1.0),
)
TABLE_10 = (
    (Map("anchors (the paper's default)", "SLAY: anchors", "large"), "0.49", "0.66"),
    (Map("Laplace only", "SLAY: Laplace only", "large"), "0.48", "0.59"),
    (Map("Hadamard, shared projections", "SLAY: Hadamard, shared", "large"), "0.68", "0.82"),
    (Map("Nyström", "SLAY: Nystrom", "large"), "28", "23"),
    (Map("TensorSketch", "SLAY: TensorSketch", "large"), "$4.6 \\cdot 10^5$", "$4.7 \\cdot 10^5$"),
    (Map("random Maclaurin", "SLAY: random Maclaurin", "large"), "$1.8 \\cdot 10^6$", "$2.2 \\cdot 10^6$"),
    (Map("mean of all values", AVERAGE), "", ""),
    (Map("$x^2$, exact", "x² alone", "exact"), "", ""),
    (Map("fitted square, degree 2", "p(x)² + c, random angles", "degree 2"), "", ""),
)
"""Maps of the paper's table 10, with the errors that it prints at 512 tokens and at 128."""


def _models(eps: float) -> tuple[Panel, ...]:
    """The layers of two models at one epsilon."""
    return (
        *(Panel(f"SmolLM2, layer {i}", f"SmolLM2-135M-Instruct.Q4_1, layer {i}", 64, eps) for i in (2, 15, 29)),
        *(Panel(f"novel, layer {i}", f"yat, layer {i}", 8, eps) for i in (1, 2)),
    )


def _rows(name: str) -> list[Row]:
    return json.loads((RECORDS / name).read_text(encoding="utf-8"))["rows"]


def _found(rows: list[Row], wanted: Map, panel: Panel) -> Row | None:
    """The row of a map in a panel, the one of most features where the label is open; None where it was not run."""
    fitting = [
        row
        for row in rows
        if (row["input"], row["dim"], row["eps"], row["family"]) == (panel.inputs, panel.dim, panel.eps, wanted.family)
        and wanted.label in (None, row.get("label"))
    ]
    return max(fitting, key=lambda row: row.get("m", 1), default=None)


def _error(row: Row, mode: str) -> float:
    return row["average"][mode] if row["family"] == AVERAGE else row[mode]["error"]


def _short(error: float) -> str:
    return f"{error:.2f}" if error < 10 else f"{error:.0f}"


def _table(page: str, first: str, rows: list[str]) -> str:
    """A page whose table with this first line has these rows.

    Raises:
        ValueError: the page has no such table.
    """
    body = "\n".join([first, "|---" * (first.count("|") - 1) + "|", *rows, ""])
    written, count = re.subn(rf"^{re.escape(first)}\n(\|.*\n)*", lambda _: body, page, flags=re.MULTILINE)
    if count != 1:
        raise ValueError(f"fidelity_tables: a page must have one table that begins {first!r}, found {count}")
    return written


def _panels(page: str, rows: list[Row], panels: tuple[Panel, ...], first: str) -> str:
    """A page whose table of that first line has the causal errors of all maps in these panels."""
    lines = []
    for wanted in MAPS:
        cells = [_found(rows, wanted, panel) for panel in panels]
        texts = ["" if row is None else f"{_short(_error(row, 'causal'))} ({row.get('m', 1)})" for row in cells]
        lines.append(f"| {wanted.title} | {' | '.join(texts)} |")
    return _table(page, first, lines)


def maps(page: str) -> str:
    """docs/slay_maps.md with the numbers of results/benchmarks/fidelity.json."""
    return _panels(page, _rows("fidelity.json"), DRAWN, f"| map | {' | '.join(panel.title for panel in DRAWN)} |")


def models(page: str) -> str:
    """docs/slay_models.md with the numbers of results/benchmarks/fidelity.json."""
    rows = _rows("fidelity.json")
    for eps, title in ((1.0, "1"), (0.1, "0.1"), (0.01, "0.01")):
        titles = " | ".join(panel.title for panel in _models(eps))
        page = _panels(page, rows, _models(eps), f"| map, $\\varepsilon$ = {title} | {titles} |")
    return page


def table_10(page: str) -> str:
    """docs/slay_measured.md with the numbers of results/benchmarks/fidelity-table10.json."""
    rows, lines = _rows("fidelity-table10.json"), []
    for wanted, long, short in TABLE_10:
        found = []
        for scale, biases in (("large", "no biases"), ("large", "biases"), ("small", "biases")):
            label = scale if wanted.label == "large" else wanted.label
            row = _found(rows, wanted._replace(label=label), Panel("", f"{scale}, {biases}", 32, 0.01))
            assert row is not None
            found.append(row)
        cells = [" / ".join(_short(_error(row, mode)) for mode in ("causal", "bidirectional")) for row in found]
        features = found[0].get("m", 1)
        lines.append(f"| {wanted.title} | {features} | {cells[0]} | {cells[1]} | {long} | {cells[2]} | {short} |")
    first = "| map | $m$ at $T = 512$ | $T = 512$, no biases | $T = 512$, biases | paper | $T = 128$, biases | paper |"
    return _table(page, first, lines)
