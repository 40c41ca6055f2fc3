"""The page of `zonal bench sparse`: what the number of tables and of keys kept buys, and what it costs."""

from collections.abc import Mapping
from typing import Any

from benchmarks import charts as drawing
from benchmarks.charts import Row
from zonal.report import formats, style

_LOOKS = {f"K = {top}": style.LOOKS[place] for place, top in enumerate((16, 64, 256))}


def charts(rows: list[Row]) -> list[dict[str, Any]]:
    """What the page draws, in its order."""
    found = []
    for operator in dict.fromkeys(row["operator"] for row in rows):
        own = [
            {**row, "tables": row["search"]["tables"]}
            for row in rows
            if row["part"] == "tables" and row["operator"] == operator
        ]
        for title, about, y, number, share in (
            (
                "attention mass",
                "The part of a row's attention that the keys kept have, looked at against all keys.",
                "share of the mass",
                lambda row: row["mass"],
                True,
            ),
            (
                "recall",
                "The part of the exact largest K keys that are among those kept.",
                "share of keys",
                lambda row: row["recall"],
                True,
            ),
            (
                "speed",
                "Exact attention by tiles takes so many times as long.",
                "times as fast",
                lambda row: 1 / row["sparse_to_tiled"],
                False,
            ),
        ):
            series = drawing.series(own, lambda row: f"K = {row['top']}", "tables", number, formats.number, _LOOKS)
            found.append(drawing.chart(f"{operator}: {title}", about, "tables", y, series, share=share, shown=True))
    return found


def findings(summary: Mapping[str, Any]) -> list[str]:
    """The headline, from the numbers."""
    return [
        f"{name}: {faster:.1f} times as fast as exact tiles with {summary['mass'][name]:.2f} of the attention mass."
        for name, faster in summary["faster_than_tiled"].items()
    ]


def html(value: Mapping[str, Any]) -> str:
    """The page as one string, from what the benchmark writes."""
    rows = list(value["rows"])
    one = next(row for row in rows if row["part"] == "tables")
    about = f"Hash tables and keys kept, varied on {one['inputs']}: {one['tokens']} tokens, {one['heads']} heads."
    return drawing.html(
        "The sparse path",
        "What hash tables find, and what they cost",
        about,
        findings(value["summary"]),
        charts(rows),
        value,
    )


__all__ = ["charts", "html"]
