"""Parts of the pictures in the documentation, as SVG."""

import math
from collections.abc import Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

INK, SOFT, LINE = "#1d1c1a", "#65615a", "#dfdbd1"


class Axis(NamedTuple):
    """A logarithmic axis from ``low`` to ``high`` along ``length`` pixels."""

    low: float
    high: float
    length: float

    def at(self, value: float) -> float:
        return self.length * (math.log(value / self.low) / math.log(self.high / self.low))

    def ticks(self, steps: Sequence[int]) -> list[float]:
        decades = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        return [
            tick
            for decade in decades
            for step in steps
            if self.low <= (tick := step * 10.0**decade) * (1 + 1e-9) and tick <= self.high * (1 + 1e-9)
        ]


def head(width: int, height: int, title: str, size: int = 13) -> list[str]:
    """The beginning of a picture on white, which ``</svg>`` ends.

    title: for readers who do not see it. size: of its words, in pixels.
    """
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" '
        f'font-size="{size}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]


def text(
    x: float,
    y: float,
    words: str,
    colour: str = INK,
    *,
    anchor: str = "start",
    weight: str = "400",
    size: int | None = None,
) -> str:
    """Words at a point, in pixels. anchor: start, middle or end. size: by default the picture's."""
    own = "" if size is None else f' font-size="{size}"'
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" text-anchor="{anchor}" font-weight="{weight}"{own}>'
        f"{escape(words)}</text>"
    )
