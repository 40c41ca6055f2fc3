"""The picture of `zonal bench fidelity` for the documentation: small charts on shared axes as one SVG, made from the
rows alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.drawing import INK, LINE, SOFT, Axis, head, text
from zonal import store
from zonal.algebra.declaration import require
from zonal.features.fidelity import INPUTS
from zonal.report import style

_CELL, _CHART = (246, 204), (190, 138)
_LEFT, _TOP, _COLUMNS = 52, 104, 4


class Curve(NamedTuple):
    """A family of the benchmark, what the picture calls it, and its place in ``style.LOOKS``."""

    family: str
    label: str
    look: int


CURVES = (
    Curve("p(x)² + c, random angles", "fitted square, degree 2, 4, 6", 1),
    Curve("p(x)² + c, own rows", "the same, fitted to own rows", 3),
    Curve("projected square, PCA", "projected square", 5),
    Curve("SLAY: anchors", "SLAY, the paper's default", 2),
    Curve("SLAY: orthogonal", "SLAY, orthogonal, one node", 4),
    Curve("learned exponentials", "learned exponentials", 6),
    Curve("Nystrom of Yat, k-means", "Nyström, k-means (signed)", 0),
)
# half the height of a marker is about 4
_MARKERS = {
    "circle": "M4 0A4 4 0 1 1 -4 0A4 4 0 1 1 4 0Z", "square": "M-3.5 -3.5H3.5V3.5H-3.5Z",
    "diamond": "M0 -5L5 0L0 5L-5 0Z", "triangle-up": "M0 -4.6L4.6 3.6H-4.6Z",
    "triangle-down": "M0 4.6L4.6 -3.6H-4.6Z", "cross": "M-1.5 -4.5H1.5V-1.5H4.5V1.5H1.5V4.5H-1.5V1.5H-4.5V-1.5H-1.5Z",
    "star": "M0 -5.4L1.5 -1.7L5.4 -1.6L2.3 .9L3.3 4.7L0 2.5L-3.3 4.7L-2.3 .9L-5.4 -1.6L-1.5 -1.7Z",
}  # fmt: skip
# lines differ without colour, too
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "", "5 2", "1 2")


def chosen(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[tuple[str, Mapping[str, Any]]]]]:
    """(title of a line of charts, [(title of a chart, its row of reference)]): what of the sweep is shown."""
    panels = {
        (row["input"], row["dim"], row["eps"]): row
        for row in rows
        if row["family"] == "reference" and "causal" in row["average"]
    }

    def there(*wanted: tuple[str, int, float]) -> list[tuple[str, Mapping[str, Any]]]:
        return [(f"d = {dim}", panels[kind, dim, eps]) for kind, dim, eps in wanted if (kind, dim, eps) in panels]

    lines = [
        (f"Independent directions, ε = {eps:g}", there(*(("iid", dim, eps) for dim in (8, 16, 32, 64))))
        for eps in (0.01, 1.0)
    ]
    lines += [
        (f"{kind.capitalize()}, ε = 1", there(*((kind, dim, 1.0) for dim in (8, 16, 32, 64))))
        for kind in ("anisotropic", "peaked")
    ]
    models: dict[str, list[tuple[str, Mapping[str, Any]]]] = {}
    for (kind, dim, eps), row in panels.items():
        if kind not in INPUTS and eps == 1:
            model, _, layer = kind.rpartition(", ")  # as captured.samples calls them; tensors of a file have no layer
            models.setdefault(model or kind, []).append((f"{layer}, d = {dim}" if model else f"d = {dim}", row))
    for model, found in models.items():
        lines += [
            (f"Queries and keys of {model}, ε = 1", found[start : start + _COLUMNS])
            for start in range(0, len(found), _COLUMNS)
        ]
    return [(title, found) for title, found in lines if found]


def svg(rows: Sequence[Mapping[str, Any]]) -> str:
    """The picture. rows: as the benchmark writes them, causal.

    Raises: ArgumentError when they hold nothing that it shows.
    """
    lines = chosen(rows)
    require(
        bool(lines), "bench fidelity: no panel of these rows is one that the picture shows: causal, eps = 0.01 or 1."
    )
    shown = {_panel(reference) for _, found in lines for _, reference in found}
    points = [row for row in rows if _panel(row) in shown and any(row["family"] == curve.family for curve in CURVES)]
    errors = [row["causal"]["error"] for row in points] + [
        reference["average"]["causal"] for _, found in lines for _, reference in found
    ]
    x = Axis(min(row["m"] for row in points) / 1.4, max(row["m"] for row in points) * 1.4, _CHART[0])
    y = Axis(max(errors) * 1.25, min(errors) / 1.25, _CHART[1])  # downwards
    width, height = _LEFT + _COLUMNS * _CELL[0], _TOP + len(lines) * (_CELL[1] + 22)
    parts = head(width, height, "Error of the outputs against features a token", size=12) + _legend()
    top = _TOP
    for title, found in lines:
        parts.append(text(_LEFT - 40, top + 4, title, weight="600", size=14))
        for column, (name, reference) in enumerate(found):
            own = [row for row in points if _panel(row) == _panel(reference)]
            parts += [
                f'<g transform="translate({_LEFT + column * _CELL[0]} {top + 36})">',
                *_chart(name, reference, own, x, y),
                "</g>",
            ]
        top += _CELL[1] + 22
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _panel(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["input"], row["dim"], row["eps"], row["length"]


def _marker(curve: Curve, x: float, y: float, filled: bool) -> str:
    look = style.LOOKS[curve.look]
    fill = look.light if filled else "#ffffff"
    return (
        f'<path transform="translate({x:.1f} {y:.1f})" d="{_MARKERS[look.symbol]}" fill="{fill}" '
        f'stroke="{look.light}" stroke-width="1.4"/>'
    )


def _stroke(curve: Curve) -> str:
    dash = _DASHES[CURVES.index(curve)]
    return f'stroke="{style.LOOKS[curve.look].light}" stroke-width="1.6" fill="none"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )


def _legend() -> list[str]:
    parts: list[str] = []
    entries: list[Curve | str] = [*CURVES, "mean of all values", "bound of the kernel's error"]
    for place, entry in enumerate(entries):
        x, y = 16 + place % 4 * 254, 20 + place // 4 * 22
        if isinstance(entry, Curve):
            parts += [
                f'<path d="M{x} {y}h30" {_stroke(entry)}/>',
                _marker(entry, x + 15, y, "signed" not in entry.label),
                text(x + 38, y + 4, entry.label),
            ]
        else:
            parts += [
                f'<path d="M{x} {y}h30" {_REFERENCES["average" if entry.startswith("mean") else "bound"]}/>',
                text(x + 38, y + 4, entry),
            ]
    parts.append(
        text(
            270,
            68,
            "Across: features a token. Upwards: relative error of the outputs. Both axes are logarithmic.",
            SOFT,
        )
    )
    return parts


_REFERENCES = {
    "average": f'stroke="{INK}" stroke-width="1.3" stroke-dasharray="1.5 2.5" fill="none"',
    "bound": f'stroke="{SOFT}" stroke-width="1.3" stroke-dasharray="6 4" fill="none"',
}


def _chart(name: str, reference: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], x: Axis, y: Axis) -> list[str]:
    wide, high = _CHART
    parts = [text(0, -8, name)]
    for tick in x.ticks((1,)):
        parts += [
            f'<path d="M{x.at(tick):.1f} 0V{high}" stroke="{LINE}"/>',
            text(x.at(tick), high + 14, f"{tick:g}", SOFT, anchor="middle", size=11),
        ]
    for tick in Axis(y.high, y.low, 1).ticks((1, 3)):
        parts += [
            f'<path d="M0 {y.at(tick):.1f}H{wide}" stroke="{LINE}"/>',
            text(-5, y.at(tick) + 4, f"{tick:g}", SOFT, anchor="end", size=11),
        ]
    parts.append(f'<rect width="{wide}" height="{high}" fill="none" stroke="{SOFT}" stroke-width=".8"/>')
    level = y.at(reference["average"]["causal"])
    parts.append(f'<path d="M0 {level:.1f}H{wide}" {_REFERENCES["average"]}/>')
    bound = [
        (x.at(m), y.at(error))
        for m, error in zip(reference["bound"]["m"], reference["bound"]["error"], strict=True)
        if x.low <= m <= x.high and y.high <= error <= y.low
    ]
    if reference["input"] == "iid" and bound:  # it holds for vectors without a preferred direction
        parts.append(f'<path d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in bound)}" {_REFERENCES["bound"]}/>')
    for curve in CURVES:
        own = sorted((row for row in rows if row["family"] == curve.family), key=lambda row: row["m"])
        places = [(x.at(row["m"]), y.at(row["causal"]["error"])) for row in own]
        if len(places) > 1:
            parts.append(f'<path d="M{"L".join(f"{a:.1f} {b:.1f}" for a, b in places)}" {_stroke(curve)}/>')
        parts += [_marker(curve, a, b, row["positive"]) for (a, b), row in zip(places, own, strict=True)]
    return parts


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the picture, whole or not at all."""
    store.write_bytes(path, svg(rows).encode())


__all__ = ["CURVES", "chosen", "svg", "write"]
