"""The picture of the README, docs/speed.svg, from the record of the Koopman benchmark.

Left: time of one causal call against the number of tokens. Right: bytes that a decoder keeps. Both are for softmax
attention and for Koopman attention (SKA, K = 2, r = 56), with 8 heads and values of 64 numbers, in float32 on a CPU.
``python -m benchmarks.koopman_picture`` draws it again.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.drawing import INK, LINE, SOFT, Axis, head, text
from zonal import store

ROOT = Path(__file__).resolve().parents[1]
RECORD = ROOT / "results" / "benchmarks" / "intel-xeon-avx512-bf16" / "koopman.json"
PICTURE = ROOT / "docs" / "speed.svg"
DIM, POWER = 56, 2

_WIDTH, _HEIGHT = 900, 330
_PANEL = (330, 190)  # of the axes, in pixels
_SOFTMAX, _SKA = "#4d4d4d", "#0067b1"


class Panel(NamedTuple):
    """A chart on logarithmic axes: its title, points (tokens, value) of both curves, and how values are written."""

    title: str
    softmax: list[tuple[float, float]]
    ska: list[tuple[float, float]]
    ticks: dict[float, str]


def panels(rows: Sequence[Mapping[str, Any]]) -> tuple[Panel, Panel]:
    """The two charts. rows: as the benchmark writes them. Raises: StopIteration where a row is missing."""
    own = [row for row in rows if row["dim"] == DIM and row["power"] == POWER]
    times = [row for row in own if row["peer"] == "sdpa" and not row["gradients"]]
    held = [row for row in own if row["peer"] == "flat"]
    one = next(iter(held))["keys_and_values_bytes"] / next(iter(held))["tokens"]
    return (
        Panel(
            "Time of one causal call",
            [(row["tokens"], row["against_peer"]["peer"]["median"]) for row in times],
            [(row["tokens"], row["against_peer"]["subject"]["median"]) for row in times],
            {1e-3: "1 ms", 1e-2: "10 ms", 1e-1: "0.1 s", 1.0: "1 s"},
        ),
        Panel(
            "What a decoder keeps of the past",
            [(tokens, one * tokens) for tokens in sorted(row["tokens"] for row in held)],
            [(row["tokens"], row["memory_bytes"]) for row in sorted(held, key=lambda row: row["tokens"])],
            {1e5: "100 kB", 1e6: "1 MB", 1e7: "10 MB", 1e8: "100 MB", 1e9: "1 GB", 1e10: "10 GB"},
        ),
    )


def svg(rows: Sequence[Mapping[str, Any]]) -> str:
    """The picture as one SVG. rows: as the benchmark writes them."""
    parts = head(_WIDTH, _HEIGHT, "Time and memory of softmax attention and of SKA against the number of tokens")
    for index, panel in enumerate(panels(rows)):
        parts += [f'<g transform="translate({76 + index * 450} 56)">', *_chart(panel), "</g>"]
    parts += [
        f'<g transform="translate(76 {_HEIGHT - 18})">',
        *_key(0, _SOFTMAX, "", "softmax (PyTorch's fused attention)"),
        *_key(300, _SKA, "6 4", f"SKA (K = {POWER}, keys of {DIM} numbers; zonal's compiled kernel)"),
        "</g>",
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _chart(panel: Panel) -> list[str]:
    points = panel.softmax + panel.ska
    across = Axis(min(x for x, _ in points) / 1.3, max(x for x, _ in points) * 1.3, _PANEL[0])
    up = Axis(min(panel.ticks), max(panel.ticks) * (2 if max(panel.ticks) < 10 else 1), _PANEL[1])
    parts = [text(-50, -24, panel.title, INK, weight="600")]
    for value, words in panel.ticks.items():
        y = _PANEL[1] - up.at(value)
        parts.append(f'<line x1="0" x2="{_PANEL[0]}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINE}"/>')
        parts.append(text(-8, y + 4, words, SOFT, anchor="end"))
    for tokens in sorted({x for x, _ in points}):
        words = f"{tokens // 1024}k tokens" if tokens < 1 << 20 else "1M tokens"
        parts.append(text(across.at(tokens), _PANEL[1] + 20, words, SOFT, anchor="middle"))
    for curve, colour, dash in ((panel.softmax, _SOFTMAX, ""), (panel.ska, _SKA, "6 4")):
        places = [(across.at(x), _PANEL[1] - up.at(y)) for x, y in curve]
        path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{colour}"/>' for x, y in places]
    return parts


def _key(x: float, colour: str, dash: str, words: str) -> list[str]:
    return [
        f'<path d="M{x} -4h30" stroke="{colour}" stroke-width="2.5" stroke-dasharray="{dash}"/>',
        text(x + 38, 0, words, INK),
    ]


def from_record() -> str:
    """The picture of the record that is in the tree."""
    return svg(json.loads(RECORD.read_text(encoding="utf-8"))["rows"])


if __name__ == "__main__":
    store.write_bytes(PICTURE, from_record().encode())
