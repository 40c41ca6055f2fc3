"""What a reader must know before believing a ranking: each flag is a sentence beside the headline, and an entry of
``summary.json``.

A model whose number is not better than a guess on what it was trained on, beyond what chance alone gives, has not
learned its task: it is not ranked, whatever others reach.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zonal.evaluation.selection import capped
from zonal.report import formats
from zonal.report.records import ComparisonData, Metrics, Run
from zonal.report.row import Row

NOT_LEARNED = "not trained far enough to compare"
METRIC_NAMES = {"accuracy": "accuracy", "loss": "validation loss", "bits_per_byte": "bits per byte"}
_UNEQUAL = 1.01
_DIVERGED = re.compile(r"(loss|gradient norm) became")


@dataclass(frozen=True)
class Flag:
    """kind: "not learned", "some seeds not learned", "edge", "one rate", "one seed", "parameters", "steps" or "failed".
    operators: the specs of those concerned; empty where all are.
    """

    kind: str
    operators: tuple[str, ...]
    sentence: str


def on_what_was_trained(data: ComparisonData, final: Metrics) -> float | None:
    """The headline number on what was trained, None where that was not measured."""
    if data.guess is None or data.guess.trained is None:
        return final.value(data.metric)
    name, values = data.guess.trained
    found = [number for value, number in final.slices.get(name, {}).items() if value in values]
    found = found or [
        cell.values["accuracy"]
        for cell in final.examined
        if str(cell.slices.get(name)) in values and "accuracy" in cell.values
    ]
    return math.fsum(found) / len(found) if found else None


def trained_number(data: ComparisonData, runs: Sequence[Run]) -> float | None:
    """The mean of ``on_what_was_trained`` over the seeds of an operator."""
    found = [on_what_was_trained(data, run.final) for run in runs if run.final is not None]
    numbers = [number for number in found if number is not None]
    return math.fsum(numbers) / len(numbers) if numbers else None


def chance_margin(data: ComparisonData) -> float:
    """``guess_margin`` of the fewest answers of the runs. 0 for a loss, and where their number is not known."""
    counts = [run.final.positions for run in data.runs if run.final is not None and run.final.positions]
    if data.guess is None or not data.higher_is_better or not counts:
        return 0.0
    return guess_margin(data.guess.value, min(counts))


def guess_margin(guess: float, answers: int) -> float:
    """How far the accuracy of a guess may lie above its mean g by chance: two standard errors, 2 √(g (1 − g) / n).

    answers: n, all answers of an evaluation, as if each were guessed independently; where answers of one sequence
    depend on each other, or only a part of them was trained, chance gives more.
    """
    return 2 * math.sqrt(guess * (1 - guess) / answers)


def learned(data: ComparisonData, number: float | None) -> bool | None:
    """Whether a number on what was trained is better than a guess by more than ``chance_margin``. None where one of
    them is not known, and where a guess is always right: with one pair, naming the only value is the task.
    """
    if data.guess is None or number is None or (data.higher_is_better and data.guess.value >= 1):
        return None
    return number > data.guess.value + chance_margin(data) if data.higher_is_better else number < data.guess.value


def flags(data: ComparisonData, rows: Sequence[Row]) -> tuple[Flag, ...]:
    """All that is to be said of a comparison, the gravest first."""
    shown = [row for row in rows if row.runs]
    found = [
        _not_learned(data, shown),
        _some_seeds(data, shown),
        _failed(data, rows),
        _steps(data, shown),
        _edge(data, shown),
        _parameters(shown),
    ]
    if shown and len(data.learning_rates) == 1:
        found.append(
            Flag(
                "one rate",
                (),
                f"One learning rate was tried, {formats.rate(data.learning_rates[0])}: "
                "another may favour another operator.",
            )
        )
    if shown and len(data.seeds) == 1:
        found.append(Flag("one seed", (), "One seed: the spread over seeds is not known."))
    return tuple(flag for flag in found if flag is not None)


def _names(rows: Sequence[Row]) -> str:
    return formats.enumerate_names([formats.named(row.label) for row in rows])


def _specs(rows: Sequence[Row]) -> tuple[str, ...]:
    return tuple(row.operator for row in rows)


def _guess(data: ComparisonData) -> str:
    assert data.guess is not None
    margin = chance_margin(data)
    chance = f" ± {formats.number(margin)} by chance" if margin else ""
    return f"no better than a guess ({METRIC_NAMES[data.metric]} {formats.number(data.guess.value)}{chance})"


def _not_learned(data: ComparisonData, rows: Sequence[Row]) -> Flag | None:
    behind = [row for row in rows if row.learned is False]
    if not behind:
        return None
    verb = "is" if len(behind) == 1 else "are"
    sentence = (
        f"{_names(behind)} {verb} {NOT_LEARNED}: {_guess(data)} on what was trained, and so not ranked. More steps, "
        "other rates, or other initial weights (--init-std) may help."
    )
    return Flag("not learned", _specs(behind), sentence)


def _some_seeds(data: ComparisonData, rows: Sequence[Row]) -> Flag | None:
    parts: dict[str, str] = {}
    for row in rows:
        numbers = [on_what_was_trained(data, run.final) for run in row.runs if run.final is not None]
        below = sum(learned(data, number) is False for number in numbers)
        if below and row.learned:
            parts[row.operator] = f"{below} of {len(numbers)} seeds of {formats.named(row.label)}"
    if not parts:
        return None
    verb = "is" if len(parts) == 1 and next(iter(parts.values())).startswith("1 ") else "are"
    return Flag(
        "some seeds not learned",
        tuple(parts),
        f"{formats.enumerate_names(list(parts.values()))} {verb} {_guess(data)}: that mean is of runs that learned and "
        "runs that did not.",
    )


def _failed(data: ComparisonData, rows: Sequence[Row]) -> Flag | None:
    failed = [run for run in data.runs if run.status == "failed"]
    if not failed:
        return None
    diverged = sum(bool(run.message and _DIVERGED.search(run.message)) for run in failed)
    because = "because the loss or its gradient was no longer finite"
    some = f", {diverged} of them {because}" if diverged else ""
    labels = {row.operator: formats.named(row.label) for row in rows}
    groups = Counter((run.operator, run.learning_rate) for run in failed)
    tried = Counter((run.operator, run.learning_rate) for run in data.runs)  # some rates by the screening seeds alone
    which = "; ".join(
        f"{labels[operator]} at rate {formats.rate(rate)}, {count} of {tried[operator, rate]} "
        f"seed{'s' if tried[operator, rate] > 1 else ''}"
        for (operator, rate), count in groups.items()
    )
    verb = "was" if len(failed) == 1 else "were"
    why = f" {because}" if diverged == len(failed) else some
    return Flag(
        "failed",
        tuple(dict.fromkeys(run.operator for run in failed)),
        f"{len(failed)} of {len(data.runs)} runs {verb} dropped{why}: {which}.",
    )


def _steps(data: ComparisonData, rows: Sequence[Row]) -> Flag | None:
    runs = [(run, formats.named(row.label)) for row in rows for run in row.runs]
    if len({run.steps_done for run, _ in runs}) < 2:
        return None
    (least, few), (most, many) = (
        min(runs, key=lambda each: each[0].steps_done),
        max(runs, key=lambda each: each[0].steps_done),
    )
    why = (
        f"; each run stops at accuracy {data.stop:g}, so final numbers near it say nothing, and steps say who was "
        "sooner"
        if data.stop is not None
        else ""
    )
    sentence = (
        f"Runs were not trained equally long: from {formats.count(least.steps_done)} steps ({few}, "
        f"seed {least.seed}) to {formats.count(most.steps_done)} ({many}, seed {most.seed}){why}."
    )
    return Flag(
        "steps",
        tuple(row.operator for row in rows if any(run.steps_done < most.steps_done for run in row.runs)),
        sentence,
    )


def _ends(data: ComparisonData, row: Row, rate: float) -> list[tuple[float, int]]:
    """Headline number and steps of the runs of an operator at a rate, of the seeds that tried all rates."""
    return sorted(
        (capped(value, data.stop), run.steps_done)
        for run in data.runs
        if (run.operator, run.learning_rate) == (row.operator, rate) and run.seed in data.screening
        if run.done and (value := run.value(data.metric)) is not None
    )


def _edge(data: ComparisonData, rows: Sequence[Row]) -> Flag | None:
    grid = sorted(data.learning_rates)
    if len(grid) < 2:
        return None
    sides: Mapping[str, list[Row]] = {
        f"the {name} ({formats.rate(rate)})": [
            # no better than the rate beside it, it says nothing of those beyond
            row
            for row in rows
            if row.learning_rate == rate and _ends(data, row, rate) != _ends(data, row, beside)
        ]
        for name, rate, beside in (("lowest", grid[0], grid[1]), ("highest", grid[-1], grid[-2]))
    }
    at = [row for side in sides.values() for row in side]
    if not at:
        return None
    parts = "; ".join(
        f"{side} for {'all' if len(found) == len(rows) > 1 else _names(found)}"
        for side, found in sides.items()
        if found
    )
    return Flag(
        "edge",
        _specs(at),
        f"Best learning rates lie at the edge of the {len(grid)} that were tried: {parts}. "
        "A rate beyond the edge may do better.",
    )


def _parameters(rows: Sequence[Row]) -> Flag | None:
    sizes = [(row.parameters, row) for row in rows if row.parameters]
    if not sizes:
        return None
    (low, small), (high, large) = min(sizes, key=lambda each: each[0]), max(sizes, key=lambda each: each[0])
    if high <= low * _UNEQUAL:
        return None
    more = f"{100 * (high / low - 1):.1f}%"
    return Flag(
        "parameters",
        _specs([small, large]),
        f"Parameters differ by {more}: from {formats.count(low)} ({formats.named(small.label)}) "
        f"to {formats.count(high)} ({formats.named(large.label)}).",
    )
