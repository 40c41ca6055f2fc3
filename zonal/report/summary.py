"""From runs to a table and to sentences: means and spreads over seeds, who is ahead, and whether that can be told
apart.

The spread of one operator is the sample standard deviation over its seeds. Operators are compared seed by seed (the
same seed means the same data in the same order and the same initial values of shared parameters); a difference is
*within the spread* when the 95% interval of the paired differences contains zero (``zonal.evaluation.statistics``).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zonal.evaluation.selection import best_learning_rate
from zonal.evaluation.statistics import Difference, Spread, difference_within_spread, spread
from zonal.report import fairness, formats, style
from zonal.report.fairness import METRIC_NAMES, NOT_LEARNED, Flag
from zonal.report.records import ComparisonData, Run


@dataclass(frozen=True)
class Verdict:
    """The leader against one other operator. ``behind`` is the mean difference over common seeds in favour of the
    leader, ``margin`` half the width of its 95% interval; ``within`` is None where fewer than two seeds are common.
    """

    other: str
    behind: float
    margin: float | None
    seeds: int
    within: bool | None


@dataclass(frozen=True)
class Row:
    """One operator at its chosen learning rate. trained: the headline number on what was trained; learned: whether that
    is better than a guess, None where nobody knows.
    """

    operator: str
    label: str
    learning_rate: float | None
    runs: tuple[Run, ...]
    planned: int
    failed: int
    loss: Spread | None
    accuracy: Spread | None
    bits_per_byte: Spread | None
    seconds: Spread | None
    tokens_per_second: Spread | None
    peak_memory_bytes: Spread | None
    parameters: int | None
    memory_bytes: Mapping[int, int]
    slices: Mapping[str, Mapping[str, Spread]]
    sweep: Mapping[float, Spread]
    best: frozenset[str]
    speed_ratio: float | None
    trained: Spread | None = None
    learned: bool | None = None

    def value(self, metric: str) -> Spread | None:
        """The column called ``metric``: "loss", "accuracy" or "bits_per_byte"."""
        return {"loss": self.loss, "accuracy": self.accuracy, "bits_per_byte": self.bits_per_byte}[metric]


@dataclass(frozen=True)
class Summary:
    """The comparison in one table and a few sentences. ``ranking`` lists the operators that learned their task, the
    best first, ``unlearned`` those with results that did not; ``flags`` say what makes the comparison less than fair.
    """

    data: ComparisonData
    rows: tuple[Row, ...]
    ranking: tuple[str, ...]
    unlearned: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    headline: str
    sentences: tuple[str, ...]
    flags: tuple[Flag, ...]

    def row(self, operator: str) -> Row:
        return next(row for row in self.rows if row.operator == operator)


def _spread(values: Sequence[float]) -> Spread | None:
    return spread(values) if values else None


def _over(runs: Sequence[Run], name: str) -> Spread | None:
    """A number of runs over seeds."""
    return _spread([value for run in runs if (value := getattr(run, name)) is not None])


def _final(runs: Sequence[Run], metric: str) -> Spread | None:
    """A number of their last evaluations over seeds."""
    return _spread([value for run in runs if run.final and (value := run.final.value(metric)) is not None])


def _sweep(runs: Sequence[Run]) -> dict[float, tuple[Run, ...]]:
    """The runs of an operator by learning rate."""
    rates = sorted({run.learning_rate for run in runs})
    return {rate: tuple(run for run in runs if run.learning_rate == rate) for rate in rates}


def _choose(data: ComparisonData, sweep: Mapping[float, Sequence[Run]]) -> float | None:
    """The learning rate that an operator is shown with: the best mean of the headline number over the seeds that tried
    all rates.
    """
    sweep = {
        rate: tried for rate, runs in sweep.items() if (tried := [run for run in runs if run.seed in data.screening])
    }
    finals = {
        rate: [final.value(data.metric) for run in runs if (final := run.final) is not None and run.done]
        + [None] * sum(not run.done for run in runs)
        for rate, runs in sweep.items()
    }
    return best_learning_rate(finals, higher_is_better=data.higher_is_better)


def _slices(runs: Sequence[Run]) -> dict[str, dict[str, Spread]]:
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for name, values in (run.final.slices if run.final else {}).items():
            for key, value in values.items():
                found.setdefault(name, {}).setdefault(key, []).append(value)
    return {
        name: {key: total for key in sorted(values, key=slice_order) if (total := _spread(values[key]))}
        for name, values in found.items()
    }


def slice_order(key: str) -> tuple[int, float, str]:
    """Numbers by size, words after them by the alphabet."""
    try:
        return 0, float(key), key
    except ValueError:
        return 1, 0.0, key


def _mark_best(rows: Sequence[Row]) -> dict[str, set[str]]:
    """Which operators hold the best value of each column; ties share the mark, a lone operator gets none."""
    marks: dict[str, set[str]] = {row.operator: set() for row in rows}
    means = ("loss", "accuracy", "bits_per_byte", "tokens_per_second", "peak_memory_bytes")
    columns: dict[str, dict[str, float]] = {
        name: {row.operator: found.mean for row in rows if (found := getattr(row, name))} for name in means
    }
    columns["parameters"] = {row.operator: row.parameters for row in rows if row.parameters is not None}
    for length in {length for row in rows for length in row.memory_bytes}:
        known = [row for row in rows if length in row.memory_bytes]
        columns[f"memory_bytes.{length}"] = {row.operator: row.memory_bytes[length] for row in known}
    for name, values in columns.items():
        if len(values) < 2 or min(values.values()) == max(values.values()):
            continue
        top = (max if name in ("accuracy", "tokens_per_second") else min)(values.values())
        for operator, value in values.items():
            if value == top:
                marks[operator].add(name)
    return marks


def _verdict(data: ComparisonData, leader: Row, other: Row) -> Verdict | None:
    def by_seed(row: Row) -> dict[int, float]:
        return {
            run.seed: value
            for run in row.runs
            if run.final is not None and (value := run.final.value(data.metric)) is not None
        }

    sign = 1.0 if data.higher_is_better else -1.0
    found: Difference = difference_within_spread(by_seed(leader), by_seed(other))
    if found.mean is None:
        return None
    margin = None if found.low is None or found.high is None else (found.high - found.low) / 2
    within = {"within the spread": True, "beyond the spread": False, "not decidable": None}[found.verdict]
    return Verdict(other.operator, sign * found.mean, margin, found.n, within)


def summarise(data: ComparisonData) -> Summary:
    """Table, ranking and sentences of a comparison."""
    drafts: list[Row] = []
    labels = {run.operator: run.label for run in data.runs} | dict(zip(data.operators, data.labels, strict=False))
    for operator in dict.fromkeys((*data.operators, *(run.operator for run in data.runs))):
        runs = [run for run in data.runs if run.operator == operator]
        sweep = _sweep(runs)
        rate = _choose(data, sweep)
        chosen = tuple(run for run in sweep.get(rate, ()) if run.done) if rate is not None else ()
        label = labels.get(operator, operator)
        trained = fairness.trained_number(data, chosen)
        drafts.append(
            Row(
                operator=operator,
                label=style.label(operator) if label == operator else label,
                learning_rate=rate,
                runs=chosen,
                planned=len(data.seeds),
                failed=sum(run.status == "failed" for run in (runs if rate is None else sweep[rate])),
                **{name: _final(chosen, name) for name in ("loss", "accuracy", "bits_per_byte")},
                **{name: _over(chosen, name) for name in ("seconds", "tokens_per_second", "peak_memory_bytes")},
                parameters=next((run.parameters for run in (*chosen, *runs) if run.parameters is not None), None),
                memory_bytes=next((run.memory_bytes for run in (*chosen, *runs) if run.memory_bytes), {}),
                slices=_slices(chosen),
                sweep={
                    found: total
                    for found, each in sweep.items()
                    if (total := _final([run for run in each if run.done], data.metric))
                },
                best=frozenset(),
                speed_ratio=None,
                trained=trained,
                learned=fairness.learned(data, trained and trained.mean),
            )
        )
    marks = _mark_best(drafts)
    softmax = [row.tokens_per_second for row in drafts if style.parse(row.operator)[0] == "softmax"]
    base = next((speed.mean for speed in softmax if speed), None)
    rows = tuple(
        dataclasses.replace(
            row,
            best=frozenset(marks[row.operator]),
            speed_ratio=row.tokens_per_second.mean / base if base and row.tokens_per_second else None,
        )
        for row in drafts
    )
    sign = -1.0 if data.higher_is_better else 1.0
    # an operator that lacks seeds is not ranked above complete ones by a lucky seed: it comes after them
    scored = [
        (-found.n, sign * found.mean, index) for index, row in enumerate(rows) if (found := row.value(data.metric))
    ]
    by_score = [rows[index] for _, _, index in sorted(scored)]
    ordered = [row for row in by_score if row.learned is not False]
    unlearned = [row for row in by_score if row.learned is False]
    verdicts = tuple(verdict for row in ordered[1:] if (verdict := _verdict(data, ordered[0], row)))
    headline, sentences = _words(data, rows, ordered, unlearned, verdicts)
    ranking, behind = (tuple(row.operator for row in each) for each in (ordered, unlearned))
    return Summary(data, rows, ranking, behind, verdicts, headline, sentences, fairness.flags(data, rows))


def _words(
    data: ComparisonData,
    rows: Sequence[Row],
    ordered: Sequence[Row],
    unlearned: Sequence[Row],
    verdicts: Sequence[Verdict],
) -> tuple[str, tuple[str, ...]]:
    """The headline and the sentences under it."""
    state = _state(data)
    if not ordered and not unlearned:
        return "No run has finished yet, so there is nothing to compare.", tuple(state)
    name = METRIC_NAMES[data.metric]
    labels = {row.operator: formats.named(row.label) for row in rows}
    note = (data.note,) if data.note else ()
    if not ordered:
        best = unlearned[0].value(data.metric)
        assert best is not None
        assert data.guess is not None  # who is not learned has a value that was held against a guess
        best_of = (
            f"{labels[unlearned[0].operator]} reaches {name} {formats.spread(best.mean, best.deviation)}, "
            f"a guess {formats.number(data.guess.value)}"
        )
        return f"{'All operators are' if len(unlearned) > 1 else 'This operator is'} {NOT_LEARNED}: {best_of}.", (
            *note,
            *state,
        )
    leader, best = labels[ordered[0].operator], ordered[0].value(data.metric)
    assert best is not None  # ordered holds only rows with a value
    if len(ordered) == 1:
        others = f"; {'all others are' if len(unlearned) > 1 else 'the other is'} {NOT_LEARNED}" if unlearned else ""
        return f"{leader} reaches {name} {formats.spread(best.mean, best.deviation)}{others}.", (*note, *state)
    second, runner = labels[ordered[1].operator], ordered[1].value(data.metric)
    assert runner is not None
    level = [labels[verdict.other] for verdict in verdicts if verdict.within]
    decided = [verdict for verdict in verdicts if verdict.within is not None]
    first_number, second_number = formats.told_apart(best.mean, runner.mean)
    figures = f"{first_number} against {second_number} for {second}"
    if not decided and best.mean == runner.mean:
        headline = f"{leader} and {second} have the same {name}, {formats.number(best.mean)}, with one seed."
    elif not decided:
        headline = f"{leader} has the best {name}: {figures}. One seed cannot show whether that is more than chance."
    elif level:
        seeds = f"with {best.n} seeds"
        within = f"{formats.enumerate_names(level)} {'is' if len(level) == 1 else 'are'} within the spread of {leader}"
        headline = f"No clear winner {seeds}: {within}, which has the best mean {name}, {figures}."
        if len(level) == len(ordered) - 1 and len(level) > 1:
            headline = (
                f"No clear winner {seeds}: all {len(ordered)} operators{' that learned the task' if unlearned else ''} "
                f"are within the spread of {leader}, which has the best mean {name}, {figures}."
            )
    else:
        headline = (
            f"{leader} is ahead in {name}: {figures}. The difference, {formats.difference(verdicts[0].behind)}, "
            "is larger than the spread over seeds."
        )
    if decided:
        notes = [_verdict_words(leader, labels[verdict.other], name, verdict) for verdict in verdicts]
    else:
        amounts = [f"{labels[verdict.other]} {formats.difference(verdict.behind)}" for verdict in verdicts]
        notes = [
            f"Behind {leader} in {name}: {', '.join(amounts)}. "
            "The spread over seeds is unknown with one seed; run more to know it."
        ]
    return headline, (*note, *notes, *_costs(rows, labels), *state)


def _verdict_words(leader: str, other: str, name: str, verdict: Verdict) -> str:
    side = "behind" if verdict.behind >= 0 else "ahead of"
    if verdict.within is None or verdict.margin is None:
        return (
            f"{other} is {formats.difference(verdict.behind)} {side} {leader} in {name} with one seed in common; "
            "run more seeds to know the spread."
        )
    amount = f"{other} is {formats.margin(verdict.behind, verdict.margin)} {side} {leader} in {name}"
    if verdict.within:
        why = " (two seeds leave a wide interval)" if verdict.seeds == 2 else ""
        return f"{amount}, within the spread over {verdict.seeds} seeds{why}: these runs do not tell the two apart."
    return f"{amount}, beyond the spread over {verdict.seeds} seeds."


def _costs(rows: Sequence[Row], labels: Mapping[str, str]) -> list[str]:
    """Who trains fastest and who needs the least memory, where that differs."""
    notes: list[str] = []
    fastest = [row for row in rows if "tokens_per_second" in row.best]
    if fastest and fastest[0].tokens_per_second:
        ratio = fastest[0].speed_ratio
        against = f", {formats.ratio(ratio)} the speed of softmax" if ratio is not None and ratio >= 1.05 else ""
        figures = f"{formats.compact(fastest[0].tokens_per_second.mean)} tokens a second{against}"
        if _told_apart_in_speed(rows, fastest[0]):
            notes.append(f"{labels[fastest[0].operator]} trains fastest: {figures}.")
        else:
            notes.append(
                f"{labels[fastest[0].operator]} has the highest mean speed of training, {figures}, "
                "within the spread of these runs."
            )
    lengths = sorted({length for row in rows for length in row.memory_bytes})
    if len(lengths) > 1:
        last = lengths[-1]
        flat = [row for row in rows if row.memory_bytes and len(set(row.memory_bytes.values())) == 1]
        growing = [row for row in rows if last in row.memory_bytes and row not in flat]
        if flat and growing:
            small, large = min(row.memory_bytes[last] for row in flat), max(row.memory_bytes[last] for row in growing)
            verb = "needs" if len(flat) == 1 else "need"
            notes.append(
                f"{formats.enumerate_names([labels[row.operator] for row in flat])} {verb} the same memory at any "
                f"length (from {formats.bytes_(small)} a sequence); "
                f"{formats.enumerate_names([labels[row.operator] for row in growing])} up to {formats.bytes_(large)} "
                f"at {formats.tokens(last)} tokens."
            )
    return notes


def _told_apart_in_speed(rows: Sequence[Row], fastest: Row) -> bool:
    """Whether the fastest is faster than each other operator beyond the spread over seeds; one run a side has no spread
    to exceed.
    """

    def speeds(row: Row) -> dict[int, float]:
        return {run.seed: run.tokens_per_second for run in row.runs if run.tokens_per_second}

    mine = speeds(fastest)
    others = [found for row in rows if row is not fastest and (found := speeds(row))]
    return all(
        len(set(mine) & set(other)) < 2 or difference_within_spread(mine, other).verdict == "beyond the spread"
        for other in others
    )


def _state(data: ComparisonData) -> list[str]:
    """What is missing, if anything is."""
    tried = len(data.screening)
    each = tried * len(data.learning_rates) + len(data.seeds) - tried
    total = max(len(data.runs), len(data.operators) * each)
    done = sum(run.done for run in data.runs)
    if done == total:
        return []
    states = {status: sum(run.status == status for run in data.runs) for status in ("failed", "stopped", "running")}
    if done + states["failed"] == total:
        return [
            f"{states['failed']} of {total} runs failed; their messages are listed below. "
            "Means are over the seeds that finished."
        ]
    states["not started"] = total - done - sum(states.values())
    parts = ", ".join(f"{count} {status}" for status, count in states.items() if count > 0)
    return [f"Preliminary: {done} of {total} runs are done ({parts})."]
