"""From runs to a table and to sentences: means and spreads over seeds, who is ahead, and whether that can be told
apart.

The spread of one operator is the sample standard deviation over its seeds. Operators are compared seed by seed (the
same seed means the same data in the same order and the same initial values of shared parameters); a difference is
*within the spread* when the 95% interval of the paired differences contains zero (``zonal.evaluation.statistics``).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from zonal.evaluation.selection import Final, best_learning_rate, capped
from zonal.evaluation.statistics import Difference, Spread, difference_within_spread, spread
from zonal.report import fairness, formats, style
from zonal.report.fairness import METRIC_NAMES, NOT_LEARNED, Flag
from zonal.report.records import ComparisonData, Run
from zonal.report.row import Row, spread_if_any


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


def _over(runs: Sequence[Run], name: str) -> Spread | None:
    """A number of runs over seeds."""
    return spread_if_any([value for run in runs if (value := getattr(run, name)) is not None])


def _final(runs: Sequence[Run], metric: str) -> Spread | None:
    """A number of their last evaluations over seeds."""
    return spread_if_any([value for run in runs if (value := run.value(metric)) is not None])


def _sweep(runs: Sequence[Run]) -> dict[float, tuple[Run, ...]]:
    """The runs of an operator by learning rate."""
    rates = sorted({run.learning_rate for run in runs})
    return {rate: tuple(run for run in runs if run.learning_rate == rate) for rate in rates}


def _choose(data: ComparisonData, sweep: Mapping[float, Sequence[Run]]) -> float | None:
    """The learning rate that an operator is shown with: the best mean of the headline number over the seeds that tried
    all rates.
    """
    ended: dict[float, dict[int, Final]] = {rate: {} for rate in sweep}
    for rate, runs in sweep.items():
        for run in runs:
            if run.final and (score := _score(data, run)) is not None:
                ended[rate][run.seed] = Final(score, run.steps_done, run.final.validation.get(data.metric))
    return best_learning_rate(ended, data.screening, higher_is_better=data.higher_is_better, stop=data.stop)


def _score(data: ComparisonData, run: Run) -> float | None:
    """The headline number of a run that is done, as it is compared: a run that stops at an accuracy has reached it on
    the validation set, if there is one.
    """
    if not run.done or run.final is None or (value := run.value(data.metric)) is None:
        return None
    if data.stop is not None and run.final.validation.get(data.metric, value) >= data.stop:
        return data.stop
    return capped(value, data.stop)


def _scores(data: ComparisonData, row: Row) -> dict[int, float]:
    """``_score`` by seed."""
    return {run.seed: score for run in row.runs if (score := _score(data, run)) is not None}


def _slices(runs: Sequence[Run]) -> dict[str, dict[str, Spread]]:
    found: dict[str, dict[str, list[float]]] = {}
    for run in runs:
        for name, values in (run.final.slices if run.final else {}).items():
            for key, value in values.items():
                found.setdefault(name, {}).setdefault(key, []).append(value)
    return {
        name: {key: spread(values[key]) for key in sorted(values, key=slice_order)} for name, values in found.items()
    }


def slice_order(key: str) -> tuple[int, float, str]:
    """Numbers by size, words after them by the alphabet."""
    try:
        return 0, float(key), key
    except ValueError:
        return 1, 0.0, key


def _mark_best(rows: Sequence[Row], stop: float | None) -> dict[str, set[str]]:
    """Which operators hold the best value of each column; ties share the mark, a lone operator gets none. stop: the
    accuracy at which runs stop.
    """
    marks: dict[str, set[str]] = {row.operator: set() for row in rows}
    means = ("loss", "accuracy", "bits_per_byte", "tokens_per_second", "peak_memory_bytes")
    columns: dict[str, dict[str, float]] = {
        name: {row.operator: found.mean for row in rows if (found := getattr(row, name))} for name in means
    }
    columns["accuracy"] = {operator: capped(mean, stop) for operator, mean in columns["accuracy"].items()}
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
    sign = 1.0 if data.higher_is_better else -1.0
    found: Difference = difference_within_spread(_scores(data, leader), _scores(data, other))
    if found.mean is None:
        return None
    margin = None if found.low is None or found.high is None else (found.high - found.low) / 2
    within = {"within the spread": True, "beyond the spread": False, "not decidable": None}[found.verdict]
    return Verdict(other.operator, sign * found.mean, margin, found.n, within)


def _row(data: ComparisonData, operator: str, label: str) -> Row:
    """An operator at its chosen learning rate, without what needs the other rows: ``best`` and ``speed_ratio``."""
    runs = [run for run in data.runs if run.operator == operator]
    sweep = _sweep(runs)
    rate = _choose(data, sweep)
    chosen = tuple(run for run in sweep.get(rate, ()) if run.done) if rate is not None else ()
    means = {found: _final([run for run in each if run.done], data.metric) for found, each in sweep.items()}
    return Row(
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
        sweep={found: total for found, total in means.items() if total},
        best=frozenset(),
        speed_ratio=None,
        learned=fairness.learned(data, fairness.trained_number(data, chosen)),
    )


def summarise(data: ComparisonData) -> Summary:
    """Table, ranking and sentences of a comparison."""
    labels = {run.operator: run.label for run in data.runs} | dict(zip(data.operators, data.labels, strict=False))
    operators = dict.fromkeys((*data.operators, *(run.operator for run in data.runs)))
    drafts = [_row(data, operator, labels.get(operator, operator)) for operator in operators]
    marks = _mark_best(drafts, data.stop)
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
        (-found.n, sign * found.mean, sum(run.steps_done for run in row.runs), index)
        for index, row in enumerate(rows)
        if (found := spread_if_any(list(_scores(data, row).values())))
    ]
    by_score = [rows[index] for *_, index in sorted(scored)]
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
        failed = sum(run.status == "failed" for run in data.runs) == _total(data)
        none = "Every run failed" if failed else "No run has finished yet"
        return f"{none}, so there is nothing to compare.", tuple(state)
    name = METRIC_NAMES[data.metric]
    labels = {row.operator: formats.named(row.label) for row in rows}
    note = (data.note,) if data.note else ()
    if not ordered:
        best = unlearned[0].value(data.metric)
        assert best is not None
        assert data.guess is not None  # "not learned" means no better than a guess
        best_of = (
            f"{labels[unlearned[0].operator]} reaches {name} {formats.spread(best)}, "
            f"a guess {formats.number(data.guess.value)}"
        )
        who = (
            f"This operator is {NOT_LEARNED}" if len(unlearned) == 1 else "No operator is trained far enough to compare"
        )
        return f"{who}: {best_of}.", (*note, *state)
    if len(ordered) == 1:
        leader, best = labels[ordered[0].operator], ordered[0].value(data.metric)
        assert best is not None  # ordered holds only rows with a value
        others = f"; {'all others are' if len(unlearned) > 1 else 'the other is'} {NOT_LEARNED}" if unlearned else ""
        return f"{leader} reaches {name} {formats.spread(best)}{others}.", (*note, *state)
    scores = {row.operator: spread(list(_scores(data, row).values())) for row in ordered}
    headline = _headline(_Standing(data, ordered, labels, verdicts, scores, not unlearned))
    return headline, (*note, *_differences(data, ordered, labels, verdicts), *_costs(rows, labels), *state)


def _stopped(data: ComparisonData, rows: Sequence[Row]) -> list[str]:
    """The operators with as many scores as the first, all of them the accuracy at which runs stop."""
    whole = [data.stop] * len(_scores(data, rows[0]))
    return [row.operator for row in rows if list(_scores(data, row).values()) == whole]


def tied(data: ComparisonData, rows: Sequence[Row]) -> list[Row]:
    """The operators with as many scores as the first and, but for rounding, the same mean; the first is one of them."""
    first, *others = (spread(list(_scores(data, row).values())) for row in rows)
    return [
        rows[0],
        *(
            row
            for row, found in zip(rows[1:], others, strict=True)
            if found.n == first.n and math.isclose(found.mean, first.mean, rel_tol=1e-9)
        ),
    ]


class _Standing(NamedTuple):
    """What the headline is read from. ordered: the operators that learned the task, the best first."""

    data: ComparisonData
    ordered: Sequence[Row]
    labels: Mapping[str, str]
    verdicts: Sequence[Verdict]
    scores: Mapping[str, Spread]
    all_learned: bool  # no other operator was compared

    @property
    def name(self) -> str:
        return METRIC_NAMES[self.data.metric]

    @property
    def leader(self) -> str:
        return self.labels[self.ordered[0].operator]

    @property
    def best(self) -> Spread:
        return self.scores[self.ordered[0].operator]

    def figures(self, second: str) -> str:
        """The leader's number against that of another operator."""
        told = formats.told_apart(self.best.mean, self.scores[second].mean)
        return f"{' against '.join(told)} for {self.labels[second]}"


def _headline(standing: _Standing) -> str:
    """Who is ahead, of two operators or more that learned the task: the first case that holds."""
    cases = (_all_stopped, _better_with_fewer_seeds, _the_same, _within, _beyond, _one_seed)
    return next(words for case in cases if (words := case(standing)))


def _all_stopped(standing: _Standing) -> str | None:
    """Several reached the accuracy at which runs stop."""
    stopped = _stopped(standing.data, standing.ordered)
    if len(stopped) < 2:
        return None
    names = formats.enumerate_names([standing.labels[operator] for operator in stopped])
    return (
        f"No clear winner: {names} {'both' if len(stopped) == 2 else 'all'} reach {standing.name} "
        f"{standing.data.stop:g}, at which a run stops. How many steps they took tells them apart."
    )


def _better_with_fewer_seeds(standing: _Standing) -> str | None:
    """The leader has the most seeds, and another is better over fewer."""
    best, sign = standing.best, 1 if standing.data.higher_is_better else -1
    behind = {verdict.other: verdict.behind for verdict in standing.verdicts}
    fewer = [
        f"{standing.labels[operator]} {formats.number(found.mean)} ({found.n} seed{'s' * (found.n > 1)})"
        for operator, found in standing.scores.items()
        if found.n < best.n and (sign * (found.mean - best.mean) >= 0 or behind.get(operator, 0) < 0)
    ]
    if not fewer:
        return None
    return (
        f"No clear winner: {standing.leader} has the best mean {standing.name} of the operators with {best.n} seeds, "
        f"{formats.number(best.mean)}. With fewer seeds: {formats.enumerate_names(fewer)}."
    )


def _the_same(standing: _Standing) -> str | None:
    """Several have the best mean."""
    equal, best = tied(standing.data, standing.ordered), standing.best
    if len(equal) < 2:
        return None
    names = formats.enumerate_names([standing.labels[row.operator] for row in equal])
    same = standing.name if best.n == 1 else f"mean {standing.name}"
    seeds = "one seed" if best.n == 1 else f"{best.n} seeds"
    return f"{names} have the same {same}, {formats.number(best.mean)}, with {seeds}."


def _within(standing: _Standing) -> str | None:
    """Some are within the spread of the leader."""
    ordered, verdicts = standing.ordered, [verdict for verdict in standing.verdicts if verdict.within]
    if not verdicts:
        return None
    common = sorted({verdict.seeds for verdict in verdicts})
    seeds = f"with {common[0]} seeds" if len(common) == 1 else f"with {common[0]} to {common[-1]} seeds"
    if common[-1] < standing.best.n:  # the means are over more
        seeds += " in common"
    if len(verdicts) == len(ordered) - 1 > 1:
        who = f"all {len(ordered)} operators{'' if standing.all_learned else ' that learned the task'} are"
    else:
        names = formats.enumerate_names([standing.labels[verdict.other] for verdict in verdicts])
        who = f"{names} {'is' if len(verdicts) == 1 else 'are'}"
    return (
        f"No clear winner {seeds}: {who} within the spread of {standing.leader}, which has the best mean "
        f"{standing.name}, {standing.figures(ordered[1].operator)}."
    )


def _beyond(standing: _Standing) -> str | None:
    """The leader is ahead of all that have enough seeds."""
    beyond = [verdict for verdict in standing.verdicts if verdict.within is False]
    if not beyond:
        return None
    known = {verdict.other for verdict in beyond}
    unknown = [standing.labels[row.operator] for row in standing.ordered[1:] if row.operator not in known]
    verb = "has" if len(unknown) == 1 else "have"
    others = f" {formats.enumerate_names(unknown)} {verb} too few seeds to be told apart from it." if unknown else ""
    return (
        f"{standing.leader} is ahead in {standing.name}: {standing.figures(beyond[0].other)}. The difference, "
        f"{formats.difference(beyond[0].behind)}, is larger than the spread over seeds.{others}"
    )


def _one_seed(standing: _Standing) -> str:
    """The leader has the best number, and nobody knows the spread."""
    second = standing.ordered[1].operator
    common = any(verdict.other == second for verdict in standing.verdicts)
    seeds = "One seed" if common else "Without a seed in common they"
    return (
        f"{standing.leader} has the best {standing.name}: {standing.figures(second)}. {seeds} cannot show whether that "
        "is more than chance."
    )


def _differences(
    data: ComparisonData, ordered: Sequence[Row], labels: Mapping[str, str], verdicts: Sequence[Verdict]
) -> list[str]:
    """How far the others are behind the first; of those that stopped at the same accuracy, nothing."""
    name, leader = METRIC_NAMES[data.metric], labels[ordered[0].operator]
    stopped = _stopped(data, ordered)
    told = [verdict for verdict in verdicts if not {ordered[0].operator, verdict.other} <= set(stopped)]
    if any(verdict.within is not None or verdict.behind < 0 for verdict in told):
        return [_verdict_words(leader, labels[verdict.other], name, verdict) for verdict in told]
    amounts = [f"{labels[verdict.other]} {formats.difference(verdict.behind)}" for verdict in told]
    return [
        f"Behind {leader} in {name}: {', '.join(amounts)}. "
        "The spread over seeds is unknown with one seed; run more to know it."
    ] * bool(told)


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
        leader, verdicts = labels[fastest[0].operator], _verdicts_on_speed(rows, fastest[0])
        if "within the spread" in verdicts:
            notes.append(
                f"{leader} has the highest mean speed of training, {figures}, within the spread of these runs."
            )
        elif "not decidable" in verdicts:
            notes.append(f"{leader} was the fastest in one run each: {figures}. More seeds show whether it is faster.")
        else:
            notes.append(f"{leader} trains fastest: {figures}.")
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


def _verdicts_on_speed(rows: Sequence[Row], fastest: Row) -> set[str]:
    """The verdicts on the speed of the fastest against that of each other operator, seed by seed."""

    def speeds(row: Row) -> dict[int, float]:
        return {run.seed: run.tokens_per_second for run in row.runs if run.tokens_per_second}

    mine = speeds(fastest)
    others = [found for row in rows if row is not fastest and (found := speeds(row))]
    return {difference_within_spread(mine, other).verdict for other in others}


def _planned(data: ComparisonData, operator: str) -> int:
    """The runs of an operator. One that failed at every rate has none with the seeds that take the chosen rate."""
    screening = len(data.screening) * len(data.learning_rates)
    tried = [run for run in data.runs if run.operator == operator and run.seed in data.screening]
    if len(tried) == screening and all(run.status == "failed" for run in tried):
        return screening
    return screening + len(data.seeds) - len(data.screening)


def _total(data: ComparisonData) -> int:
    """The number of runs, those that were not begun included."""
    return max(len(data.runs), sum(_planned(data, operator) for operator in data.operators))


def _state(data: ComparisonData) -> list[str]:
    """What is missing, if anything is."""
    total = _total(data)
    done = sum(run.done for run in data.runs)
    if done == total:
        return []
    states = {status: sum(run.status == status for run in data.runs) for status in ("failed", "stopped", "running")}
    if done + states["failed"] == total:
        means = " Means are over the seeds that finished." if done else ""
        return [f"{states['failed']} of {total} runs failed; the report lists their messages.{means}"]
    states["not started"] = total - done - sum(states.values())
    parts = ", ".join(f"{count} {status}" for status, count in states.items() if count > 0)
    return [f"Preliminary: {done} of {total} runs are done ({parts})."]
