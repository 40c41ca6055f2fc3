"""The numbers behind the charts, as compact JSON that the page's script draws.

Curves of several seeds are averaged here, step by step, so that what is drawn is computed once and can be tested; the
script only chooses axes and colours. Training curves of more than ``MAX_POINTS`` steps are averaged in bins of steps.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from zonal.evaluation.statistics import Spread, spread
from zonal.report import diagnostics, formats, key_embeddings, style, transfer
from zonal.report.records import Point, Run
from zonal.report.row import Row
from zonal.report.summary import Summary

MAX_POINTS = 200


def training_curves(curves: Sequence[tuple[int, Sequence[Point]]]) -> list[tuple[int, Sequence[Point]]]:
    """Curves by seed, as means in at most ``MAX_POINTS`` bins of steps that all of them share: logs of seeds that ended
    at other steps, or were thinned when a comparison was packed, need have no step in common.
    """
    curves = [(seed, points) for seed, points in curves if points and points[-1].step > 0]
    last = max((points[-1].step for _, points in curves), default=0)
    # so many that each holds a point of each curve
    bins = min((MAX_POINTS, *(len(points) * last // points[-1].step for _, points in curves)))
    return [(seed, _binned(points, last, bins)) for seed, points in curves]


def _binned(points: Sequence[Point], last: int, bins: int) -> tuple[Point, ...]:
    """Each point is the mean of its bin and sits at the bin's last step."""
    merged = []
    for number, group in itertools.groupby(points, lambda point: -(-point.step * bins // last)):
        part = list(group)
        scores = [point.accuracy for point in part if point.accuracy is not None]
        merged.append(
            Point(
                number * last // bins,
                part[-1].tokens,
                part[-1].seconds,
                math.fsum(p.loss for p in part) / len(part),
                math.fsum(scores) / len(scores) if scores else None,
            )
        )
    return tuple(merged)


def drawn_runs(summary: Summary, row: Row) -> tuple[Run, ...]:
    """The runs behind a row; for an operator without a finished run, those of its furthest learning rate."""
    if row.runs:
        return row.runs
    started = [run for run in summary.data.runs if run.operator == row.operator and (run.training or run.evaluations)]
    if not started:
        return ()
    rate = max(started, key=lambda run: run.steps_done).learning_rate
    return tuple(run for run in started if run.learning_rate == rate)


def _held(run: Run, runs: Sequence[Run]) -> list[Point]:
    """The evaluations of a run. One that ended sooner than the others, since it was good enough, keeps its last value
    at their later steps.
    """
    points = list(run.evaluations)
    if run.status == "done" and points:
        last = points[-1]
        later = {point.step for other in runs for point in other.evaluations if point.step > last.step}
        points += [replace(last, step=step) for step in sorted(later)]
    return points


def _curve(curves: Sequence[tuple[int, Sequence[Point]]]) -> dict[str, Any] | None:
    """Mean and deviation over seeds at each step that every one of the longest-lived seeds has reached."""
    by_step: dict[int, dict[int, Point]] = {}
    for seed, points in curves:
        for point in points:
            by_step.setdefault(point.step, {})[seed] = point
    if not by_step:
        return None
    most = max(len(found) for found in by_step.values())
    steps = sorted(step for step, found in by_step.items() if len(found) == most)
    rows = [by_step[step] for step in steps]

    def column(read: Callable[[Point], float | None]) -> dict[str, Any] | None:
        if any(read(point) is None for row in rows for point in row.values()):
            return None
        totals = [spread([float(read(point) or 0.0) for point in row.values()]) for row in rows]
        return {
            "mean": [formats.short(total.mean, 5) for total in totals],
            "sd": [formats.short(total.deviation, 5) for total in totals],
        }

    each = []
    for seed in sorted(set().union(*rows)):
        points = [row.get(seed) for row in rows]
        columns = {
            "seconds": [point and formats.short(point.seconds) for point in points],
            "loss": [point and formats.short(point.loss) for point in points],
            "accuracy": [point and formats.short(point.accuracy) for point in points],
        }
        known = {name: values for name, values in columns.items() if any(value is not None for value in values)}
        each.append({"seed": seed, **known})
    return {
        "steps": steps,
        "seconds": [formats.short(math.fsum(point.seconds for point in row.values()) / len(row)) for row in rows],
        "loss": column(lambda point: point.loss),
        "accuracy": column(lambda point: point.accuracy),
        "seeds": each,
    }


def _pairs(totals: Mapping[Any, Spread]) -> dict[str, Any]:
    return {
        "x": [str(key) for key in totals],
        "mean": [formats.short(total.mean, 5) for total in totals.values()],
        "sd": [formats.short(total.deviation, 5) for total in totals.values()],
    }


def _kernel_panels(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Φ(x) by layer and head of the first seed, with the curve before training where the run kept it."""
    first = _first(runs, lambda run: bool(run.learned))
    if first is None:
        return []
    panels = []
    for layer, after in enumerate(first.learned):
        curve = after.get("kernel_curve")
        if not curve:
            continue
        before = first.learned_before[layer].get("kernel_curve") if layer < len(first.learned_before) else None
        panels.append(
            {
                "layer": layer + 1,
                "x": [formats.short(value) for value in curve["x"]],
                "heads": [[formats.short(value) for value in head] for head in curve["heads"]],
                "before": [[formats.short(value) for value in head] for head in before["heads"]] if before else None,
            }
        )
    return panels


def run_of_memories(summary: Summary, row: Row) -> Run | None:
    """The run whose memories are drawn: that of the first seed which has diagnostics."""
    return _first(drawn_runs(summary, row), lambda run: run.diagnostics is not None)


def run_of_keys(summary: Summary, row: Row) -> Run | None:
    """The run whose keys are drawn: that of the first seed which has them."""
    return _first(drawn_runs(summary, row), lambda run: run.key_embeddings is not None)


def _first(runs: Sequence[Run], has: Callable[[Run], bool]) -> Run | None:
    return next((run for run in sorted(runs, key=lambda run: run.seed) if has(run)), None)


def _geometry(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Weights of distances over the training of the first seed that has them, from before it on."""
    run = _first(runs, lambda run: any(point.geometry for point in run.evaluations))
    if run is None:
        return None
    before = [layer for layer in run.learned_before if "weights" in layer]
    return key_embeddings.over_training(
        [(0, before), *((point.step, point.geometry) for point in run.evaluations if point.step)]
    )


def operator_payload(summary: Summary, row: Row, key: str, look: style.Look) -> dict[str, Any]:
    """Everything the script draws for one operator."""
    runs = drawn_runs(summary, row)
    value = row.value(summary.data.metric)
    seen, placed = run_of_memories(summary, row), run_of_keys(summary, row)
    return {
        "key": key,
        "label": row.label,
        "symbol": look.symbol,
        "dash": look.dash,
        "validation": _curve([(run.seed, _held(run, runs)) for run in runs]),
        "training": _curve(training_curves([(run.seed, run.training) for run in runs])),
        "slices": {name: _pairs(values) for name, values in row.slices.items()},
        "memory": {
            "x": sorted(row.memory_bytes),
            "y": [row.memory_bytes[length] for length in sorted(row.memory_bytes)],
        },
        "metric": value and {"mean": formats.short(value.mean, 5), "sd": formats.short(value.deviation, 5)},
        "speed": row.tokens_per_second and formats.short(row.tokens_per_second.mean, 5),
        "sweep": {**_pairs(row.sweep), "chosen": row.learning_rate} if len(summary.data.learning_rates) > 1 else None,
        "kernels": _kernel_panels(runs),
        "diagnostics": None if seen is None or seen.diagnostics is None else diagnostics.payload(seen.diagnostics),
        "geometry": _geometry(runs),
        "embeddings": key_embeddings.payload(placed.key_embeddings) if placed and placed.key_embeddings else None,
        "transfer": transfer.lines(row),
    }


def payload(
    summary: Summary, identifier: str, keys: Mapping[str, str], looks: Mapping[str, style.Look]
) -> dict[str, Any]:
    """Everything the script draws for one comparison."""
    return {
        "id": identifier,
        "higher": summary.data.higher_is_better,
        "trained": transfer.trained_length(summary),
        "operators": [operator_payload(summary, row, keys[row.operator], looks[row.operator]) for row in summary.rows],
    }


def strip(row: Row, metric: str, low: float, high: float) -> str:
    """A small inline drawing: one dot a seed and a bar at the mean, on a scale shared by the whole column."""
    values = [value for run in row.runs if (value := run.value(metric)) is not None]
    if not values:
        return ""
    width, height, margin = 132, 22, 6.0
    middle = height / 2

    def place(value: float) -> float:
        return width / 2 if high == low else margin + (value - low) / (high - low) * (width - 2 * margin)

    dots = "".join(f'<circle cx="{place(value):.1f}" cy="{middle:.1f}" r="3.4"/>' for value in values)
    mean = place(math.fsum(values) / len(values))
    words = (
        f"Values of {len(values)} seed{'s' if len(values) > 1 else ''}: "
        f"{', '.join(formats.number(value) for value in values)}"
    )
    return (
        f'<svg class="strip" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="{words}"><title>{words}</title>'
        f'<line x1="{margin}" x2="{width - margin}" y1="{middle}" y2="{middle}"/>{dots}<path d="M{mean:.1f} '
        f'3V{height - 3}"/></svg>'
    )
