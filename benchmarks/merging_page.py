"""The page of `zonal bench merging`: accuracy against the share of tokens merged away, and against speed."""

from collections.abc import Mapping
from typing import Any

from benchmarks import charts as page
from benchmarks.charts import Row
from zonal.report import formats, style

_BUSY = 1.1
_LOOKS = {
    f"trained on {model}, {schedule}": style.LOOKS[place]
    for place, (model, schedule) in enumerate(
        [("all tokens", "even"), ("merged tokens", "even"), ("all tokens", "early"), ("merged tokens", "early")]
    )
}


def charts(rows: list[Row]) -> list[dict[str, Any]]:
    """What the page draws, in its order."""
    speed = {(row["schedule"], row["share"]): row for row in rows if row["part"] == "speed"}
    right = [
        {**row, "gone": f"{row['share']:.0%}", "speedup": round(speed[row["schedule"], row["share"]]["speedup"], 2)}
        for row in rows
        if row["part"] == "accuracy"
    ]
    times = [{**row, "gone": f"{row['share']:.0%}"} for row in speed.values()]
    lowest = min(row["accuracy"] for row in right)
    span = (max(0.0, lowest - 0.02), min(1.0, max(row["accuracy"] for row in right) + 0.02))

    def model(row: Row) -> str:
        return f"trained on {row['model']}, {row['schedule']}"

    def points(value: float) -> str:
        return f"{value:.2%}"

    return [
        page.chart(
            "What it costs",
            "Accuracy on the 10,000 test images by the share of tokens that is gone in the last layer: spread "
            "over the layers (even), or at once before the second (early). "
            "One model is trained on all tokens and merges at the test alone; the other meets a share drawn anew "
            "for every update.",
            "merged away",
            "accuracy",
            page.series(right, model, "gone", lambda row: row["accuracy"], points, _LOOKS),
            axis="category",
            span=span,
            shown=True,
        ),
        page.chart(
            "What it gains",
            "Images a second, the best of several rounds. Merging itself takes part of what fewer tokens save.",
            "merged away",
            "images a second",
            page.series(
                times, lambda row: row["schedule"], "gone", lambda row: row["images_per_second"], formats.number, {}
            ),
            axis="category",
            span=(0.0, 1.1 * max(row["images_per_second"] for row in times)),
            shown=True,
        ),
        page.chart(
            "Accuracy against speed",
            "The same, one against the other: times faster than without merging.",
            "times faster",
            "accuracy",
            page.series(right, model, "speedup", lambda row: row["accuracy"], points, _LOOKS),
            axis="linear",
            span=span,
        ),
    ]


def findings(summary: Mapping[str, Any]) -> list[str]:
    """The headline, from the numbers."""
    lines = []
    for name, found in summary.items():
        if name.startswith("trained on"):
            what = (
                f"{found['share_within_a_point']:.0%} of the tokens can go, {found['speedup']:.2f} times as fast"
                if found["share_within_a_point"]
                else "nothing can go"
            )
            lines.append(
                f"{name.capitalize()}: {found['accuracy']:.2%} right with all tokens; within a point of that {what}."
            )
    return lines


def html(value: Mapping[str, Any]) -> str:
    """The page as one string, from what the benchmark writes."""
    sizes, summary = value["settings"], value["summary"]
    about = (
        f"A vision transformer of {summary['parameters']:,} parameters on Fashion-MNIST: patches of "
        f"{sizes['patch']}, {sizes['layers']} layers of width {sizes['dim']}, {sizes['steps']} updates "
        f"of {sizes['batch']} images, one seed. A difference below about half a point is within what another "
        "seed or another set of test images would change."
    )
    if (load := value["load_per_core"] or 0) > _BUSY:
        about += (
            f" Other work shared the cores (a load of {load:g} a core when it began): a machine of its own "
            "does more images a second. What is compared was timed in turns."
        )
    heading = "Fewer tokens: what it costs, what it gains"
    return page.html("Merging tokens", heading, about, findings(summary), charts(list(value["rows"])), value)


__all__ = ["charts", "html"]
