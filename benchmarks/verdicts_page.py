"""The page of `zonal bench verdicts`: what a memory knows of what it does not know."""

from collections.abc import Mapping
from typing import Any

from benchmarks import charts as drawing
from benchmarks.charts import Row, chart, series
from zonal.report import formats, style

_KNOWN = (
    "the best there could be",
    "ridge: support",
    "ridge: length of the answer",
    "cosine, a cache: support",
    "softmax, a cache: largest weight",
    "squared affine, sums: support",
)
_LOOKS = dict(zip(_KNOWN, style.LOOKS, strict=False))


def charts(rows: list[Row]) -> list[dict[str, Any]]:
    """What the page draws, in its order."""

    def of(part: str) -> list[Row]:
        return [row for row in rows if row["part"] == part]

    def evidence(row: Row) -> str:
        return row["evidence"]

    share = formats.number
    found = [
        chart(
            f"Stored or not: r = {rank}",
            "The probability that a stored query has more evidence than one that was never stored (AUROC), by "
            "pairs for each number of a key. "
            "The length of an answer is no evidence: a memory that is more than half full answers strangers the "
            "louder.",
            "pairs / r",
            "AUROC",
            series(
                [row for row in of("separation") if row["rank"] == rank],
                evidence,
                "load",
                lambda row: row["auroc"],
                share,
                _LOOKS,
            ),
            shown=rank == 64,
        )
        for rank in sorted({row["rank"] for row in of("separation")})
    ]
    found += [
        chart(
            f"What answering risks: {pairs} pairs, r = 64",
            "Half of the queries were never stored. The share of them that is answered, those with the most "
            "evidence first, and the part of these answers that is wrong.",
            "share of queries that is answered",
            "wrong among the answered",
            series(
                [row for row in of("curves") if row["pairs"] == pairs],
                evidence,
                "share",
                lambda row: row["risk"],
                share,
                _LOOKS,
            ),
            axis="linear",
            shown=index == 0,
        )
        for index, pairs in enumerate(sorted({row["pairs"] for row in of("curves")}))
    ]
    found.append(
        chart(
            "In a trained model",
            "A decoder of two layers (K = 1, r = 64), trained on recall of 4 pairs: words that the context holds "
            "against words that it does not. A pair takes two tokens, so that 16 pairs are half as many keys as "
            "a key has numbers. The first layer keeps what words there were; the second is asked something else "
            "by every query. Beside them, the largest probability that the model gives to a word.",
            "pairs",
            "AUROC",
            series(of("trained"), evidence, "pairs", lambda row: row["auroc"], share, _LOOKS),
            shown=True,
        )
    )
    filling = of("filling")
    lines = series(filling, lambda row: f"stored, {row['criterion']}", "pairs", lambda row: row["stored"], share, {})
    lines += series(
        filling,
        lambda row: f"never stored, {row['criterion']}",
        "pairs",
        lambda row: row["strangers"],
        share,
        {line["name"]: look for line, look in zip(lines, style.LOOKS, strict=False)},
    )
    found.append(
        chart(
            "As the memory fills",
            "r = 64. One criterion for good, calibrated at 32 pairs to accept 1 in 100 strangers, never takes an "
            "acceptance back, and lets more and more strangers in past "
            "that. One that is calibrated anew holds its rate, and takes acceptances back. No criterion does both.",
            "pairs",
            "share accepted",
            lines,
            shown=True,
        )
    )
    found.append(
        chart(
            "Acceptances taken back",
            "On the way to so many pairs from the number before, of all stored and strange queries of all sequences.",
            "pairs",
            "taken back",
            series(
                filling,
                lambda row: row["criterion"],
                "pairs",
                lambda row: row["taken_back"],
                lambda value: f"{value:.0f}",
                {},
            ),
            kind="bar",
            share=False,
        )
    )
    found.append(
        chart(
            "Claims and contradictions",
            "32 pairs, r = 64. A claim is a value held against what the memory answers; without one, named spans "
            "are held against each other.",
            "asked",
            "share",
            series(of("claims"), lambda row: row["verdict"], "asked", lambda row: row["share"], share, {}),
            kind="bar",
            shown=True,
        )
    )
    return found


def findings(summary: Mapping[str, Any]) -> list[str]:
    """The headline, from the numbers."""
    worst, risk = summary["least_auroc_to_half_load"], summary["risk_of_half_the_answers_at_half_load"]
    lines = [
        "Of queries half of which were never stored, at up to half as many pairs as a key has numbers, "
        "evidence tells the stored ones with an AUROC of at least: "
        + "; ".join(f"{formats.number(value)} ({name})" for name, value in worst.items())
        + "."
    ]
    if risk:
        best, support = formats.number(risk["the best there could be"]), formats.number(risk["ridge: support"])
        lines.append(
            "With 32 pairs in 64 numbers, answering the half of queries with the most support is wrong in "
            f"{support} of cases (the least possible: {best})."
        )
    if summary["least_auroc_trained"]:
        own = "; ".join(f"{formats.number(value)} ({name})" for name, value in summary["least_auroc_trained"].items())
        lines.append(f"In a trained model, at up to 16 pairs, at least: {own}.")
    taken = summary["taken_back"]
    return [
        *lines,
        f"Acceptances taken back while 128 pairs came: {taken['one criterion for good']} under one criterion, "
        f"{taken['calibrated anew']} under one that was calibrated anew to hold its rate.",
    ]


def html(value: Mapping[str, Any]) -> str:
    """The page as one string, from what the benchmark writes."""
    about = (
        "Pairs and queries of multi-query associative recall; keys are random directions of length 1, "
        "nothing is trained but the model of one chart."
    )
    return drawing.html(
        "What a memory does not know",
        "What a memory knows of what it does not know",
        about,
        findings(value["summary"]),
        charts(list(value["rows"])),
        value,
    )


__all__ = ["charts", "html"]
