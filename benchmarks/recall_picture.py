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

from benchmarks.drawing import LINE, SOFT, head, text
from zonal import store
from zonal.report import style

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ("mqar-based", "mqar-based-wide")
PICTURE = ROOT / "docs" / "recall_based.svg"
# pairs, tokens, and what training had of such texts
CHARTS = ((64, 256, "the largest that was trained"), (128, 512, "longer than anything trained"))

_WIDTH, _HEIGHT = 900, 350
_PANEL = (360, 230)  # of the axes, in pixels
_TICKS = {1e4: "10 kB", 1e5: "100 kB", 1e6: "1 MB"}
_LOW, _HIGH = 3e3, 2e6
_ROW, _NAME = 15, 130  # height and length of a name, in pixels


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
    """The picture as one SVG."""
    looks = style.looks([point.operator for point in found])
    parts = head(_WIDTH, _HEIGHT, "Pairs recalled against the memory that a model keeps")
    for index, (pairs, tokens, about) in enumerate(CHARTS):
        parts.append(f'<g transform="translate({58 + index * 440} 62)">')
        parts += [
            text(-40, -38, f"Recalled of {pairs} pairs in {tokens} tokens", weight="600"),
            text(-40, -20, about, SOFT),
            *_chart([(point, point.recalled[str(pairs)], looks[point.operator].light) for point in found]),
            "</g>",
        ]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _chart(found: Sequence[tuple[Point, float, str]]) -> list[str]:
    """One chart of operators, what they recalled, and their colours."""
    wide, high = _PANEL
    parts: list[str] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = high * (1 - share)
        parts.append(f'<line x1="0" x2="{wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINE}"/>')
        parts.append(text(-8, y + 4, f"{share:g}", SOFT, anchor="end"))
    for size, words in _TICKS.items():
        parts.append(text(_across(size), high + 20, words, SOFT, anchor="middle"))
    parts.append(text(wide / 2, high + 42, "memory of a sequence of 1,024 tokens", SOFT, anchor="middle"))
    places = [(_across(point.size), high * (1 - share)) for point, share, _ in found]
    free = {True: -math.inf, False: -math.inf}  # the first height at which a name on this side hides no other
    for (point, _, colour), (x, y) in sorted(zip(found, places, strict=True), key=lambda each: each[1][1]):
        crowded = any(x < other <= x + _NAME and abs(y - at) < _ROW for other, at in places)
        left = x > wide - _NAME or (crowded and x > 0.85 * _NAME)
        row = max(y, free[left])
        free[left] = row + _ROW
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>')
        parts.append(text(x + (-9 if left else 9), row + 4, point.label, colour, anchor="end" if left else "start"))
    return parts


def _across(size: float) -> float:
    return _PANEL[0] * math.log(size / _LOW) / math.log(_HIGH / _LOW)


def from_records() -> str:
    """The picture of the records that are in the tree."""
    return svg(points(ROOT / "results"))


if __name__ == "__main__":
    store.write_bytes(PICTURE, from_records().encode())
