"""The results table and the smaller ones as plain text cells, shared by the page and its Markdown twin."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar

from zonal.evaluation.efficiency import common_target, tokens_to
from zonal.evaluation.statistics import Spread
from zonal.report import formats, glossary, style
from zonal.report.diagnostics import Head
from zonal.report.fairness import NOT_LEARNED
from zonal.report.records import Run
from zonal.report.row import Row, spread_if_any
from zonal.report.summary import Summary, slice_order, tied

R = TypeVar("R", Row, Run)


@dataclass(frozen=True)
class Cell:
    """``text`` in large, ``note`` in small; ``best`` marks the best value of the column."""

    text: str
    note: str = ""
    best: bool = False


@dataclass(frozen=True)
class Table:
    """``head``: titles of all columns; ``rows``: (operator spec, cells), one cell a column."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]


class Grid(NamedTuple):
    """A table of words, of a page that has no rows of operators."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


_METRIC_TITLES = {"accuracy": "Accuracy", "loss": "Loss", "bits_per_byte": "Bits per byte"}


def spread_cell(total: Spread | None, best: bool) -> Cell:
    """Mean and spread over seeds; a dash where there is none."""
    return Cell(formats.spread(total), best=best)


def _behind(summary: Summary, row: Row) -> Cell:
    """How far behind the leader, and whether that is more than chance."""
    if row.operator in summary.unlearned:
        return Cell(formats.MISSING, NOT_LEARNED)
    if not summary.ranking:
        return Cell(formats.MISSING)
    if row.operator == summary.ranking[0]:
        equal = len(tied(summary.data, [summary.row(operator) for operator in summary.ranking])) > 1
        return Cell(formats.MISSING if len(summary.ranking) == 1 else "tied" if equal else "leads")
    verdict = next((verdict for verdict in summary.verdicts if verdict.other == row.operator), None)
    if verdict is None:
        return Cell(formats.MISSING)
    sign = "" if verdict.behind >= 0 else "−"
    behind, margin = verdict.behind, verdict.margin
    amount = formats.difference(behind) if margin is None else formats.margin(behind, margin)
    note = {None: "one seed: cannot say", True: "within the spread", False: "beyond the spread"}[verdict.within]
    return Cell(f"{sign}{amount}", note)


# what names a layer in its learned quantities and was not learned
_BOOKKEEPING = frozenset({"layer", "operator"})


def _threshold(summary: Summary) -> float | None:
    """The highest accuracy that every seed of some operator reached."""
    reached = [
        threshold
        for row in summary.rows
        for threshold in (row.runs[0].steps_to if row.runs else {})
        if all(run.steps_to.get(threshold) is not None for run in row.runs)
    ]
    return max(reached, default=None)


def _steps_to(row: Row, threshold: float) -> Cell:
    """Mean steps until the first evaluation at or above the threshold, over the seeds that reached it."""
    steps = [step for run in row.runs if (step := run.steps_to.get(threshold)) is not None]
    if not steps:
        return Cell(formats.MISSING, "not reached" if row.runs else "")
    note = "" if len(steps) == len(row.runs) else f"{len(steps)} of {len(row.runs)} seeds"
    return Cell(formats.count(sum(steps) / len(steps)), note)


def target_loss(summary: Summary) -> float | None:
    """The loss for counting tokens to a loss, when loss is the headline: the lowest that every run shown reached."""
    if summary.data.metric != "loss":
        return None
    return common_target([run.losses for row in summary.rows for run in row.runs])


def tokens_to_loss(row: Row, target: float) -> Spread | None:
    """Tokens of training until the held-out loss is at most the target, over seeds."""
    return spread_if_any([tokens for run in row.runs if (tokens := tokens_to(run.losses, target)) is not None])


def _tokens(summary: Summary, row: Row, target: float) -> Cell:
    """Tokens to the target loss, and how many times those of softmax."""
    softmax = [other for other in summary.rows if style.parse(other.operator)[0] == "softmax"]
    base = next((found for other in softmax if (found := tokens_to_loss(other, target))), None)
    mine = tokens_to_loss(row, target)
    if mine is None:
        return Cell(formats.MISSING)
    note = f"{formats.ratio(mine.mean / base.mean)} softmax" if base and base.mean else ""
    return Cell(formats.compact(mine.mean), note)


def metrics_of(summary: Summary) -> tuple[str, ...]:
    """The quality columns that have values, the headline number first."""
    present = [name for name in ("accuracy", "loss", "bits_per_byte") if any(row.value(name) for row in summary.rows)]
    return (summary.data.metric, *(name for name in present if name != summary.data.metric))


def _ordered(summary: Summary) -> list[Row]:
    """The best first, then those that did not learn the task, those without a result last."""
    known = _with_results(summary)
    return known + [row for row in summary.rows if row not in known]


def _with_results(summary: Summary) -> list[Row]:
    """Those with a result, the best first, and those that did not learn the task last."""
    return [summary.row(operator) for operator in (*summary.ranking, *summary.unlearned)]


def _speed(row: Row) -> Cell:
    ratio = f"{formats.ratio(row.speed_ratio)} softmax" if row.speed_ratio is not None else ""
    speed = row.tokens_per_second
    return Cell(formats.compact(speed.mean) if speed else formats.MISSING, ratio, "tokens_per_second" in row.best)


def _name(row: Row) -> Cell:
    return Cell(row.label)


def _table(rows: Iterable[R], columns: Sequence[tuple[str, Callable[[R], Cell]]]) -> Table:
    """A row for each of ``rows``, which are of operators or of runs, with the columns' titles and cells."""
    lines = tuple((row.operator, tuple(cell(row) for _, cell in columns)) for row in rows)
    return Table(tuple(title for title, _ in columns), lines)


def results(summary: Summary) -> Table:
    """What each operator reached: one row an operator, best first."""
    swept, target, threshold = len(summary.data.learning_rates) > 1, target_loss(summary), _threshold(summary)

    def name(row: Row) -> Cell:
        rated = swept and row.learning_rate is not None
        return Cell(row.label, f"learning rate {formats.rate(row.learning_rate)}" if rated else "")

    def seeds(row: Row) -> Cell:
        return Cell(f"{len(row.runs)} of {row.planned}", f"{row.failed} failed" if row.failed else "")

    columns: list[tuple[str, Callable[[Row], Cell]]] = [("Operator", name)]
    for metric in metrics_of(summary):
        columns.append((_METRIC_TITLES[metric], lambda row, of=metric: spread_cell(row.value(of), of in row.best)))
    columns.append(("Behind the best", lambda row: _behind(summary, row)))
    if target is not None:
        columns.append((f"Tokens to loss {formats.number(target)}", lambda row: _tokens(summary, row, target)))
    elif threshold is not None:
        columns.append((f"Steps to {threshold:g}", lambda row: _steps_to(row, threshold)))
    return _table(_ordered(summary), [*columns, ("Tokens a second", _speed), ("Seeds", seeds)])


def costs(summary: Summary) -> Table:
    """What each operator takes: parameters, time, memory while training, memory of one sequence."""

    def time(row: Row) -> Cell:
        return Cell(formats.seconds(row.seconds and row.seconds.mean))

    def peak(row: Row) -> Cell:
        found = row.peak_memory_bytes
        return Cell(formats.bytes_(found and found.mean), best="peak_memory_bytes" in row.best)

    def kept(row: Row, length: int) -> Cell:
        return Cell(formats.bytes_(row.memory_bytes.get(length)), best=f"memory_bytes.{length}" in row.best)

    lengths = sorted({length for row in summary.rows for length in row.memory_bytes})
    columns: list[tuple[str, Callable[[Row], Cell]]] = [
        ("Operator", _name),
        ("Parameters", lambda row: Cell(formats.count(row.parameters), best="parameters" in row.best)),
        ("Tokens a second", _speed),
        ("Training time", time),
        ("Peak memory", peak),
        *((f"Memory at {formats.tokens(length)}", partial(kept, length=length)) for length in lengths),
    ]
    return _table(_ordered(summary), columns)


def slices(summary: Summary, name: str) -> Table:
    """Accuracy by one property of the examples: one row an operator, one column a value."""
    found = {row.operator: row.slices.get(name, {}) for row in summary.rows}
    keys = sorted({key for values in found.values() for key in values}, key=slice_order)
    top = {key: max(values[key].mean for values in found.values() if key in values) for key in keys}

    def accuracy(row: Row, key: str) -> Cell:
        value = found[row.operator].get(key)
        return spread_cell(value, value is not None and len(summary.rows) > 1 and value.mean == top[key])

    unit = {"pairs": "pairs", "length": "tokens"}.get(name, "")
    titles = {key: f"{glossary.slice_name(key)} {unit}".strip() for key in keys}
    columns = [(title, partial(accuracy, key=key)) for key, title in titles.items()]
    return _table(_with_results(summary), [("Operator", _name), *columns])


def slice_names(summary: Summary) -> tuple[str, ...]:
    """The properties that examples are grouped by; one with a single value says nothing beyond the accuracy."""
    names = dict.fromkeys(name for row in summary.rows for name in row.slices)
    return tuple(name for name in names if len({key for row in summary.rows for key in row.slices.get(name, {})}) > 1)


def examined(summary: Summary) -> list[tuple[str, Table]]:
    """(what was measured, table) of everything that the task found by other means than the next token: one row an
    operator, one column a cell.
    """
    cells = [cell for row in summary.rows for run in row.runs if run.final for cell in run.final.examined]
    columns = list(dict.fromkeys(tuple(cell.slices.items()) for cell in cells))
    found = []
    for name in dict.fromkeys(name for cell in cells for name in cell.values):
        measured = {tuple(cell.slices.items()) for cell in cells if name in cell.values}
        kept = [column for column in columns if column in measured]
        rows = []
        for row in _with_results(summary):
            ours = [_examined(row, name, column) for column in kept]
            if any(value is not None for value in ours):
                rows.append((row.operator, (Cell(row.label), *(spread_cell(value, best=False) for value in ours))))
        found.append((name, Table(("Operator", *(glossary.cell_name(dict(column)) for column in kept)), tuple(rows))))
    return found


def _examined(row: Row, name: str, slices: tuple[tuple[str, int | str], ...]) -> Spread | None:
    """One number over the seeds of an operator."""
    values = [
        cell.values[name]
        for run in row.runs
        if run.final
        for cell in run.final.examined
        if tuple(cell.slices.items()) == slices and name in cell.values
    ]
    return spread_if_any(values)


def learned(summary: Summary) -> Table:
    """η, γ, ridge, degrees … of the first seed: one row an operator and layer, heads side by side."""
    rows: list[tuple[str, Mapping[str, object], str, int]] = []
    for row in summary.rows:
        first = next((run for run in sorted(row.runs, key=lambda run: run.seed) if run.learned), None)
        if first is not None:
            rows += [
                (row.operator, {**values, **_weights(values)}, row.label, layer)
                for layer, values in enumerate(first.learned, start=1)
            ]
    found = [item for _, values, _, _ in rows for item in values.items()]
    keys = list(dict.fromkeys(key for key, value in found if key not in _BOOKKEEPING and _numbers(value) is not None))
    shown = [
        (
            operator,
            (Cell(label), Cell(str(layer)), *(Cell(_numbers(values.get(key)) or formats.MISSING) for key in keys)),
        )
        for operator, values, label, layer in rows
        if any(_numbers(values.get(key)) is not None for key in keys)
    ]
    return Table(("Operator", "Layer", *(glossary.learned_name(key) for key in keys)), tuple(shown))


def _weights(values: Mapping[str, Any]) -> dict[str, list[float]]:
    """The weights of distances as learned numbers of their own."""
    return {f"weight of {name}": heads for name, heads in values.get("weights", {}).items()}


def _numbers(value: Any) -> str | None:
    """A number or a flat list of numbers as text; None for anything else. Equal heads are shown once."""
    numbers = value if isinstance(value, list) else [value]
    if not numbers or any(isinstance(each, bool) or not isinstance(each, int | float) for each in numbers):
        return None
    texts = [formats.number(float(each)) for each in numbers]
    return texts[0] if len(set(texts)) == 1 else "  ".join(texts)


def diagnostics(found: Sequence[tuple[Row, Sequence[Head]]]) -> Table:
    """What is inside the memories, by layer: the worst head for the first two, means after them."""
    quantities = ("Smallest eigenvalue", "Condition", "Effective rank", "Largest |eigenvalue|", "Median leverage")
    rows = []
    for row, heads in found:
        for layer in dict.fromkeys(head.layer for head in heads):
            cells = _diagnosed([head for head in heads if head.layer == layer])
            rows.append((row.operator, (_name(row), Cell(str(layer)), *cells)))
    return Table(("Operator", "Layer", *quantities, "Capacity"), tuple(rows))


def _diagnosed(heads: Sequence[Head]) -> list[Cell]:
    def of(key: str) -> list[float]:
        return [head.numbers[key] for head in heads if key in head.numbers]

    def cell(value: float | None, note: str = "") -> Cell:
        return Cell(formats.MISSING) if value is None else Cell(f"{value:.3g}", note)

    ranks, sizes = of("effective_rank"), of("size")
    radius = [math.hypot(*pair) for head in heads for pair in head.spectrum]
    leverage = [value for head in heads for value in head.leverage]
    last = [(head.stored[-1], head.estimate[-1]) for head in heads if head.stored]
    return [
        cell(min(of("smallest_eigenvalue"), default=None)),
        cell(max(of("condition"), default=None)),
        cell(statistics.fmean(ranks) if ranks else None, f"of {max(sizes):g}" if sizes else ""),
        cell(max(radius, default=None)),
        cell(statistics.median(leverage) if leverage else None),
        cell(
            statistics.fmean(estimate for _, estimate in last) if last else None,
            f"of {max(stored for stored, _ in last):g} stored" if last else "",
        ),
    ]


def runs(summary: Summary) -> Table:
    """Every run, with its status."""
    metrics = [
        (_METRIC_TITLES[name], lambda run, of=name: Cell(formats.number(run.value(of)))) for name in metrics_of(summary)
    ]
    columns: list[tuple[str, Callable[[Run], Cell]]] = [
        ("Operator", lambda run: Cell(summary.row(run.operator).label)),
        ("Seed", lambda run: Cell(str(run.seed))),
        ("Learning rate", lambda run: Cell(formats.rate(run.learning_rate))),
        ("State", lambda run: Cell(run.status)),
        ("Steps", lambda run: Cell(formats.count(run.steps_done))),
        *metrics,
        ("Training time", lambda run: Cell(formats.seconds(run.seconds))),
        ("Tokens a second", lambda run: Cell(formats.compact(run.tokens_per_second))),
    ]
    return _table(summary.data.runs, columns)


def unfinished(summary: Summary) -> Table:
    """Runs that failed, stopped or are still open, with their messages."""
    total = f" of {formats.count(summary.data.steps)}" if summary.data.steps else ""
    columns: list[tuple[str, Callable[[Run], Cell]]] = [
        ("Operator", lambda run: Cell(summary.row(run.operator).label)),
        ("Run", lambda run: Cell(f"seed {run.seed}, learning rate {formats.rate(run.learning_rate)}")),
        ("State", lambda run: Cell(run.status)),
        ("Steps", lambda run: Cell(f"{formats.count(run.steps_done)}{total}")),
        ("Message", lambda run: Cell(run.message or formats.MISSING)),
    ]
    return _table((run for run in summary.data.runs if run.status != "done"), columns)


def settings(values: Mapping[str, object], prefix: str = "") -> list[tuple[str, str]]:
    """A nested mapping as flat (name, value) rows in its own order; a list of records with the same fields is one."""
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            rows += settings(value, f"{name}.")
        elif not isinstance(value, list | tuple):
            rows.append((name, formats.MISSING if value is None else str(value)))
        elif fields := _fields(value):
            records = (" ".join(str(item[field]) for field in fields) for item in value)
            rows.append((f"{name} ({', '.join(fields)})", "; ".join(records)))
        elif any(isinstance(item, Mapping) for item in value):
            rows += settings({f"{name}[{index}]": item for index, item in enumerate(value)})
        else:
            rows.append((name, ", ".join(str(item) for item in value)))
    return rows


def _fields(items: Sequence[object]) -> tuple[str, ...]:
    """The fields of a list of records that all have the same ones, each with a single value; () for any other list."""
    records = [item for item in items if isinstance(item, Mapping)]
    fields = {tuple(record) for record in records}
    nested = any(isinstance(value, Mapping | list | tuple) for record in records for value in record.values())
    return fields.pop() if len(fields) == 1 and len(records) == len(items) and not nested else ()


def device(values: Mapping[str, object]) -> str:
    """One line on the machine."""
    cores, memory = values.get("cores"), values.get("memory_bytes")
    parts = [str(values.get("name") or "unnamed device")]
    if isinstance(cores, int):
        threads = values.get("threads")
        parts.append(
            f"{cores} core{'s' if cores != 1 else ''}"
            + (f", {threads} thread{'s' if threads != 1 else ''} used" if isinstance(threads, int) else "")
        )
    if isinstance(memory, int | float) and memory:
        parts.append(f"{formats.bytes_(memory)} memory")
    return ", ".join(parts)
