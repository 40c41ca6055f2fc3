"""The picture of docs/recall_based.md, docs/recall_based.svg: pairs recalled against bytes that a model keeps.

Both charts are of models that learned several sizes of recall at once, on the data of the Based paper. An operator that
was trained with two kinds of initial weights stands with the better.
``python -m benchmarks.recall_picture`` draws it again from the records.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.drawing import LINE, SOFT, Axis, head, text
from zonal import store
from zonal.report import style

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ("mqar-based", "mqar-based-wide")
PICTURE = ROOT / "docs" / "recall_based.svg"
# pairs, tokens, and what training had of such texts
CHARTS = ((64, 256, "the largest that was trained"), (128, 512, "longer than anything trained"))

_WIDTH, _TOP, _PANEL = 900, 62, (360, 230)  # in pixels; the last of the axes
_TICKS = {1e4: "10 kB", 1e5: "100 kB", 1e6: "1 MB"}
_ACROSS = Axis(8e3, 2e6, _PANEL[0])
_COLUMNS, _ROW = 3, 24  # of the names


class Point(NamedTuple):
    """One operator: its label in the records, what it keeps, and its accuracy by number of pairs."""

    operator: str
    label: str
    size: float
    recalled: dict[str, float]


def points(folder: Path) -> list[Point]:
    """The operators that have learned, each once, with the initial weights that recall more.

    folder: the records.
    """
    best: dict[str, Point] = {}
    for name in RECORDS:
        found = json.loads((folder / name / "summary.json").read_text(encoding="utf-8"))
        for row in found["comparisons"][0]["operators"]:
            if row["learned"]:
                pairs = {count: value["mean"] for count, value in row["slices"]["pairs"].items()}
                point = Point(row["operator"], row["label"], row["memory_bytes"]["1024"], pairs)
                kept = best.setdefault(point.label, point)
                if sum(pairs.values()) > sum(kept.recalled.values()):
                    best[point.label] = point
    return list(best.values())


def svg(found: Sequence[Point]) -> str:
    """The picture as one SVG: points are numbered, from the operator that recalls the most of all."""
    found = sorted(found, key=lambda point: -sum(point.recalled.values()))
    looks = style.looks([point.operator for point in found])
    colours = [looks[point.operator].light for point in found]
    names = _TOP + _PANEL[1] + 76
    height = names + math.ceil(len(found) / _COLUMNS) * _ROW
    parts = head(_WIDTH, height, "Pairs recalled against the memory that a model keeps")
    for index, (pairs, tokens, about) in enumerate(CHARTS):
        shares = [point.recalled[str(pairs)] for point in found]
        parts.append(f'<g transform="translate({58 + index * 440} {_TOP})">')
        parts += [
            text(-40, -38, f"Recalled of {pairs} pairs in {tokens} tokens", weight="600"),
            text(-40, -20, about, SOFT),
            *_axes(),
        ]
        for number, (point, share, colour) in enumerate(zip(found, shares, colours, strict=True), 1):
            parts += _disk(number, _ACROSS.at(point.size), _PANEL[1] * (1 - share), colour)
        parts.append("</g>")
    for number, (point, colour) in enumerate(zip(found, colours, strict=True), 1):
        x, y = 27 + (number - 1) % _COLUMNS * 300, names + (number - 1) // _COLUMNS * _ROW
        parts += [*_disk(number, x, y - 4, colour), text(x + 16, y, point.label)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _axes() -> list[str]:
    wide, high = _PANEL
    parts: list[str] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = high * (1 - share)
        parts.append(f'<line x1="0" x2="{wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINE}"/>')
        parts.append(text(-12, y + 4, f"{share:g}", SOFT, anchor="end"))
    for size, words in _TICKS.items():
        parts.append(text(_ACROSS.at(size), high + 26, words, SOFT, anchor="middle"))
    return [*parts, text(wide / 2, high + 46, "memory of a sequence of 1,024 tokens", SOFT, anchor="middle")]


def _disk(number: int, x: float, y: float, colour: str) -> list[str]:
    return [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="8.5" fill="{colour}" stroke="#ffffff"/>',
        text(x, y + 4, str(number), "#ffffff", anchor="middle", weight="600", size=11),
    ]


def from_records() -> str:
    """The picture of the records that are in the tree."""
    return svg(points(ROOT / "results"))


if __name__ == "__main__":
    store.write_bytes(PICTURE, from_records().encode())
