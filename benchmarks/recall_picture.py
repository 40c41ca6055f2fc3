"""The picture of docs/recall_based.md, docs/recall_based.svg: pairs recalled against bytes that a model keeps.

The charts are of models that learned several sizes of recall at once, on the data of the Based paper: a row for each
width of the models. An operator that was trained with two kinds of initial weights stands with the better.
``python -m benchmarks.recall_picture`` draws it again from the records.
"""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.drawing import LINE, SOFT, Axis, head, text
from zonal import store
from zonal.report import style

ROOT = Path(__file__).resolve().parents[1]
RECORDS = {64: ("mqar-based", "mqar-based-wide"), 128: ("mqar-based-128",)}
"""By the channels of the models."""
PICTURE = ROOT / "docs" / "recall_based.svg"
# pairs, tokens, and what training had of such texts
CHARTS = ((64, 256, "the largest that was trained"), (128, 512, "longer than anything trained"))

_WIDTH, _TOP, _PANEL = 900, 62, (360, 230)  # in pixels; the last of the axes
_HIGH = _TOP + _PANEL[1] + 62  # a row of charts
_TICKS = {1e4: "10 kB", 1e5: "100 kB", 1e6: "1 MB"}
_ACROSS = Axis(8e3, 3e6, _PANEL[0])
_COLUMNS, _ROW = 3, 24  # of the names


class Point(NamedTuple):
    """One operator: its label in the records, what it keeps, and its accuracy by number of pairs."""

    operator: str
    label: str
    size: float
    recalled: dict[str, float]


def points(folder: Path, records: Sequence[str]) -> dict[str, Point]:
    """The operators that have learned, by their labels, with the initial weights that recall more.

    folder: where the records are.
    """
    best: dict[str, Point] = {}
    for name in records:
        found = json.loads((folder / name / "summary.json").read_text(encoding="utf-8"))
        for row in found["comparisons"][0]["operators"]:
            if row["learned"]:
                pairs = {count: value["mean"] for count, value in row["slices"]["pairs"].items()}
                point = Point(row["operator"], row["label"], row["memory_bytes"]["1024"], pairs)
                kept = best.setdefault(point.label, point)
                if sum(pairs.values()) > sum(kept.recalled.values()):
                    best[point.label] = point
    return best


def svg(found: Mapping[int, Mapping[str, Point]]) -> str:
    """The picture as one SVG, of points by width and label. Points are numbered, from the operator that recalls the
    most of all in the first row.
    """
    first, *others = found.values()
    ordered = sorted(first.values(), key=lambda point: -sum(point.recalled.values()))
    ordered += [point for row in others for point in row.values() if point.label not in first]
    numbers = {point.label: number for number, point in enumerate(ordered, 1)}
    looks = style.looks([point.operator for point in ordered])
    colours = {point.label: looks[point.operator].light for point in ordered}
    names = len(found) * _HIGH + 14
    height = names + math.ceil(len(ordered) / _COLUMNS) * _ROW
    parts = head(_WIDTH, height, "Pairs recalled against the memory that a model keeps")
    for place, (channels, row) in enumerate(found.items()):
        for index, (pairs, tokens, about) in enumerate(CHARTS):
            parts.append(f'<g transform="translate({58 + index * 440} {place * _HIGH + _TOP})">')
            parts += [
                text(-40, -38, f"{channels} channels: recalled of {pairs} pairs in {tokens} tokens", weight="600"),
                text(-40, -20, about, SOFT),
                *_axes(),
            ]
            for label, point in row.items():
                high = _PANEL[1] * (1 - point.recalled[str(pairs)])
                parts += _disk(numbers[label], _ACROSS.at(point.size), high, colours[label])
            parts.append("</g>")
    for label, number in numbers.items():
        x, y = 27 + (number - 1) % _COLUMNS * 300, names + (number - 1) // _COLUMNS * _ROW
        parts += [*_disk(number, x, y - 4, colours[label]), text(x + 16, y, label)]
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
    return svg({channels: points(ROOT / "results", records) for channels, records in RECORDS.items()})


if __name__ == "__main__":
    store.write_bytes(PICTURE, from_records().encode())
