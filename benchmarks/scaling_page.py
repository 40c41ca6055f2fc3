"""The page of `zonal bench scaling`: time, tokens a second and memory against the number of tokens."""

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks import charts as drawing
from benchmarks.charts import Row


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


_CHARTS: tuple[tuple[str, str, str, Callable[[Row], float], Callable[[float], str]], ...] = (
    ("Time of a call", "Median of the runs.", "milliseconds",
     lambda row: row["seconds"]["median"] * 1e3, _number),
    ("Tokens a second", "Tokens of the call, divided by its time.", "tokens a second",
     lambda row: row["tokens_per_second"], _number),
    ("Peak memory of a call", "Beyond its inputs.", "MB", lambda row: row["peak_bytes"] / 1e6, _number),
    ("Memory of a decoder", "What is kept to go on from after so many tokens.", "MB",
     lambda row: row["decoder_bytes"] / 1e6, _number),
)  # fmt: skip


def charts(rows: list[Row]) -> list[dict[str, Any]]:
    """What the page draws, in its order."""
    ran = [row for row in rows if "refused" not in row]
    return [
        drawing.chart(
            title, about, "tokens", y,
            drawing.series(ran, lambda row: row["operator"], "tokens", number, text, {}), share=False, shown=True,
        )
        for title, about, y, number, text in _CHARTS
    ]  # fmt: skip


def finding(rows: list[Row]) -> str:
    """The headline: how all stand to fused softmax attention at the longest length, the fastest first."""
    most = max(row["tokens"] for row in rows)
    last = sorted(
        (row["against_fused"], row["operator"]) for row in rows if row["tokens"] == most and "refused" not in row
    )
    told = ", ".join(f"{name} {ratio:.3g}" for ratio, name in last)
    return f"Time of a call of {most:,} tokens, where that of fused softmax attention is 1: {told}."


def html(value: Mapping[str, Any]) -> str:
    """The page as one string, from what the benchmark writes."""
    settings, rows = value["settings"], list(value["rows"])
    lengths = [row["tokens"] for row in rows]
    about = (
        f"One causal call, forward, {settings['heads']} heads of {settings['dim']} numbers, {settings['dtype']}. "
        "“Fused” is PyTorch's own attention, “matrix” the whole matrix of weights in PyTorch, which has no point where "
        "it did not fit into memory; the others are this library's."
    )
    heading = f"Attention from {min(lengths):,} to {max(lengths):,} tokens"
    return drawing.html("Scaling", heading, about, [finding(rows)], charts(rows), value)


__all__ = ["charts", "finding", "html"]
