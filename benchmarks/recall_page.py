"""The page of `zonal bench recall`: what SKA remembers, how much, for how long, at what cost; one HTML file with plotly
inside and every number in a table.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from benchmarks import charts as page
from benchmarks.charts import Row
from zonal.report import formats, style

_KNOWN = (
    "softmax, a cache",
    "SKA K=0",
    "SKA K=2",
    "SKA K=1",
    "SKA K=3",
    "linear attention",
    "sums of v k, as Mamba-2 without fading",
)
_LOOKS = {name: style.LOOKS[place] for place, name in enumerate(_KNOWN)} | {"softmax": style.LOOKS[0]}


def _curves(
    rows: Iterable[Row], name: Callable[[Row], str], x: str, y: Callable[[Row], float], text: Callable[[float], str]
) -> list[dict[str, Any]]:
    return page.series(rows, name, x, y, text, _LOOKS)


def charts(rows: list[Row]) -> list[dict[str, Any]]:
    """What the page draws, in its order."""

    def of(part: str) -> list[Row]:
        return [row for row in rows if row["part"] == part]

    def operator(row: Row) -> str:
        return row["operator"]

    share = formats.number
    found = [
        page.chart(
            "K shifts the read-out",
            "A memory of 24 pairs is asked with a key. Which value comes back: the key's own (offset 0), or one "
            "stored later? K = 0 recalls, "
            "K = 1 is an induction head, K = 2 reads one further: no filter, a shift.",
            "offset of the value that is returned",
            "share of questions",
            _curves(of("which"), operator, "offset", lambda row: row["share"], share),
            kind="bar",
            shown=True,
        ),
        page.chart(
            "The same, trained",
            "Decoders of one layer (two where two are named) without a convolution, trained to name the word j "
            "after the one asked for; a model for each bar and seed.",
            "offset j that was trained",
            "accuracy",
            _curves(of("trained"), operator, "offset", lambda row: row["accuracy"], share),
            kind="bar",
            shown=True,
        ),
    ]
    ranks = sorted({row["rank"] for row in of("capacity")})
    for rank in ranks:
        own = [row for row in of("capacity") if row["rank"] == rank]
        found.append(
            page.chart(
                f"How much: r = {rank}",
                "Recall of the value K after the key's own by the number of pairs, with keys that are equally "
                "long. What is held grows with r; each further K asks for more room.",
                "pairs",
                "recall",
                _curves(own, operator, "pairs", lambda row: row["recall"], share),
            )
        )
    found.append(
        page.chart(
            "Keys that are alike",
            "Recall of 32 pairs (r = 64) by the mean cosine of their keys, each of which has a part of one "
            "direction that all share. A fit takes that part out; a sum "
            "returns what keys have in common. On keys of random directions the two hold about as many pairs.",
            "cosine",
            "recall",
            _curves(of("alike"), operator, "cosine", lambda row: row["recall"], share),
            shown=True,
        )
    )
    found += [
        page.chart(
            f"For how long: distractors of length {length:g}",
            "Recall of 16 pairs (r = 64) after so many further keys and values that nobody asks for. Short keys "
            "hardly enter the fit: "
            "a layer that shortens what need not be kept keeps the rest.",
            "distractors",
            "recall",
            _curves(
                [row for row in of("distractors") if row["length"] == length],
                operator,
                "distractors",
                lambda row: row["recall"],
                share,
            ),
        )
        for length in sorted({row["length"] for row in of("distractors")}, reverse=True)
    ]
    found.append(
        page.chart(
            "What exactness buys",
            "Recall of the key that stood so many tokens ago (K = 0, r = 128, 128 tokens). In chunks, a query "
            "sees only whole chunks before its own, so the nearest past is missing.",
            "tokens ago",
            "recall",
            _curves(of("exactness"), operator, "distance", lambda row: row["recall"], share),
            shown=True,
        )
    )
    found.append(
        page.chart(
            "What exactness costs",
            "Forward and backward of four heads of r = 32, one sequence.",
            "tokens",
            "seconds",
            _curves(
                of("times"),
                lambda row: f"{row['operator']}, K={row['power']}" if row["operator"] != "softmax" else "softmax",
                "tokens",
                lambda row: row["seconds"]["median"],
                lambda value: f"{value * 1e3:.3g} ms",
            ),
            share=False,
            shown=True,
        )
    )
    own = [row for row in of("capacity") if row["operator"] == "SKA K=1"]
    bytes_ = _curves(own, lambda row: f"SKA K=1, r={row['rank']}", "pairs", lambda row: row["bytes"], formats.bytes_)
    bytes_ += _curves(
        own, lambda row: f"keys and values, r={row['rank']}", "pairs", lambda row: row["cache_bytes"], formats.bytes_
    )
    found.append(
        page.chart(
            "At what cost: bytes a head",
            "A memory of SKA is as large after one pair as after a million; a cache of keys and values grows. "
            "Values of 64 numbers, float32.",
            "pairs",
            "bytes",
            bytes_,
            share=False,
        )
    )
    return found


def findings(summary: Mapping[str, Any], rows: list[Row]) -> list[str]:
    """The headline, from the numbers."""
    words = {
        name: "the key's own value" if offset == 0 else f"the value {offset} after it"
        for name, offset in summary["offset_returned"].items()
        if name.startswith("SKA")
    }
    returned = ", ".join(f"{name.removeprefix('SKA ')} returns {what}" for name, what in words.items())
    held = ", ".join(
        f"{count} at r = {name.partition('r=')[2]}"
        for name, count in summary["most_pairs_at_0.95"].items()
        if name.startswith("K=0,") and count
    )
    lines = [f"Asked with a key, {returned}.", f"Most pairs that are recalled at 0.95 or better with K = 0: {held}."]
    sums = ", ".join(
        str(count) for name, count in summary["most_pairs_at_0.95"].items() if name.startswith("sums,") and count
    )
    if sums:
        sizes = [
            {
                row["rank"]: row["bytes"]
                for row in rows
                if row["part"] == "capacity" and row["operator"].startswith(start)
            }
            for start in ("SKA K=0", "sums")
        ]
        shares = sorted(sizes[1][rank] / sizes[0][rank] for rank in sizes[0])
        lines.append(
            f"Plain sums of v k, in {shares[0]:.0%} to {shares[-1]:.0%} of its bytes, hold while keys are "
            f"random: {sums}."
        )
    if summary["alike_at_0.5"]:
        fit, plain = (
            formats.number(next(value for name, value in summary["alike_at_0.5"].items() if name.startswith(start)))
            for start in ("SKA", "sums")
        )
        lines.append(
            "What the fit is for are keys that are alike: of 32 pairs at a mean cosine of 0.5, K = 0 recalls "
            f"{fit}, the sums {plain}."
        )
    return lines


def html(value: Mapping[str, Any]) -> str:
    """The page as one string, from what the benchmark writes."""
    about = "Memories are not trained: random keys of length 1, an answer is the stored value nearest to what was read."
    rows = list(value["rows"])
    heading = "What SKA remembers, how much, for how long, at what cost"
    return page.html("What SKA remembers", heading, about, findings(value["summary"], rows), charts(rows), value)


__all__ = ["charts", "html"]
