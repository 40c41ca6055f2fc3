"""What a person sees while training: bars, an estimate of the time left and a live table, or plain lines where no
terminal is.

``Board`` adds up the events, whatever displays them. ``watching`` picks the display: a live one on a terminal,
otherwise one line for each thing that happened.
"""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from zonal.report import formats, style
from zonal.report.row import spread_if_any
from zonal.training import events

EVALUATIONS = 10
"""How many evaluations a run is taken to have where the estimate weighs runs."""
_PLAIN_EVERY = 20.0
_SMOOTHING = 0.1


@dataclass
class RunBoard:
    """The latest numbers of one run. ``loss`` is smoothed over steps, ``speed`` in tokens a second of training."""

    operator: str
    label: str
    seed: int
    step: int = 0
    steps: int = 0
    loss: float | None = None
    speed: float | None = None
    held_out: dict[str, float] = field(default_factory=dict)
    status: str = "running"


class Board:
    """Everything known so far. ``metric``: the headline number of the task; ``clock``: seconds, for the estimate."""

    def __init__(self, metric: str, labels: dict[str, str], clock: Callable[[], float] = time.monotonic):
        self.metric, self.labels, self.clock = metric, labels, clock
        self.runs: dict[str, RunBoard] = {}
        self.planned: events.Planned | None = None
        self.rung: events.RungStarted | None = None
        self.phase = "Preparing"
        self._began = clock()
        self._at_start = 0.0

    def add(self, event: events.Event) -> None:
        """Take in one event."""
        match event:
            case events.Measuring():
                label = self.labels.get(event.operator, event.operator)
                self.phase = f"Measuring the speed of {label} ({event.index + 1} of {event.total})"
            case events.Planned():
                self.planned, self.phase, self._began = event, "Training", self.clock()
            case events.RungStarted():
                self.rung, self.phase = event, rung_words(event)
                # runs of earlier rungs are behind; what the bars show is this one
                self.runs = {}
            case events.RunStarted():
                run = RunBoard(event.operator, event.label, event.seed, event.step, event.steps)
                self.runs[event.run] = run
                self._at_start += self._weight(run.operator) * event.step / max(1, event.steps)
            case events.StepDone():
                run = self.runs[event.run]
                run.step = event.step
                run.loss = event.loss if run.loss is None else run.loss + _SMOOTHING * (event.loss - run.loss)
                run.speed = event.tokens / event.seconds if event.seconds else None
            case events.Evaluated():
                self.runs[event.run].held_out = _numbers(event.metrics)
            case events.RunFinished():
                known = self.runs.get(event.run)
                done = event.steps_done
                run = known or RunBoard(event.operator, event.label, event.seed, done, done)
                run.status, run.step = event.status, event.steps_done
                run.held_out = _numbers(event.final) if event.final else run.held_out
                self.runs[event.run] = run
                if event.skipped and known is None:
                    self._at_start += self._weight(run.operator)

    @property
    def current(self) -> list[RunBoard]:
        """Runs that are being trained."""
        return [run for run in self.runs.values() if run.status == "running"]

    def _weight(self, operator: str) -> float:
        """How long one run of the operator takes, in measured seconds; 1 where nothing was measured."""
        plan = self.planned
        if plan is None or operator not in plan.step_seconds:
            return 1.0
        return plan.steps * plan.step_seconds[operator] + EVALUATIONS * plan.evaluation_seconds[operator]

    def fraction(self) -> float:
        """Part of the whole work that is done, 0 to 1, runs weighed by the time they take."""
        done, total = self._work()
        return min(1.0, done / total) if total else 0.0

    def _work(self) -> tuple[float, float]:
        done = sum(
            self._weight(run.operator) * (1.0 if run.status in ("done", "failed") else run.step / max(1, run.steps))
            for run in self.runs.values()
        )
        if self.planned is None:
            return done, sum(self._weight(run.operator) for run in self.runs.values())
        operators = list(self.planned.step_seconds)
        return done, self.planned.runs / max(1, len(operators)) * sum(self._weight(operator) for operator in operators)

    def seconds_left(self) -> float | None:
        """The estimate: as planned at first, by the pace of this sitting once a twentieth of it is done."""
        done, total = self._work()
        elapsed, here = self.clock() - self._began, done - self._at_start
        if total and here > 0.05 * (total - self._at_start):
            return elapsed * max(0.0, total - done) / here
        # a plan whose time is up with nearly all still to do says nothing of what is left
        if self.planned is not None and elapsed < self.planned.estimated_seconds:
            return self.planned.estimated_seconds - elapsed
        return None

    def ended(self) -> int:
        """Runs that are done or failed."""
        return sum(run.status in ("done", "failed") for run in self.runs.values())

    def results(self, operator: str) -> list[float]:
        """Final headline numbers of the operator's finished runs."""
        return [
            run.held_out[self.metric]
            for run in self.runs.values()
            if run.operator == operator and run.status == "done" and self.metric in run.held_out
        ]


def _numbers(metrics: Mapping[str, object]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def rung_words(event: events.RungStarted) -> str:
    """A rung of a search in words."""
    if not event.round:
        return f"The start, {event.current}: {event.steps:,} steps"
    return (
        f"Round {event.round} of at most {event.rounds}, from {event.current}: "
        f"{len(event.regimes)} regime{'s' if len(event.regimes) != 1 else ''}, {event.steps:,} steps each"
    )


def judged_words(event: events.Judged) -> str:
    """The end of a round in words."""
    verdict = "the search goes there" if event.accepted else "the search stays"
    return f"Round {event.round}: {event.regime}, effort {event.effort:+.4f}; {verdict}."


def held_out(metrics: Mapping[str, object], metric: str) -> str:
    """The held-out numbers in words, the headline first."""
    numbers = _numbers(metrics)
    names = [metric, *(name for name in ("accuracy", "loss") if name != metric)]
    return ", ".join(f"{name} {formats.number(numbers[name])}" for name in names if name in numbers)


class LiveDisplay:
    """Bars and a table that are drawn again a few times a second."""

    def __init__(self, board: Board, console: Console, heading: str):
        self.board, self.heading = board, heading
        self.looks = style.looks(list(board.labels))
        self._live = Live(get_renderable=self.render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "LiveDisplay":
        self._live.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._live.stop()

    def __call__(self, event: events.Event) -> None:
        self.board.add(event)
        if isinstance(event, events.RunFinished) and event.status == "failed":
            self._live.console.print(Text(f"{event.label}, seed {event.seed} failed: {event.message}", style="red"))
        elif isinstance(event, events.RunStarted):
            for note in event.notes:
                self._live.console.print(Text(f"{event.label}, seed {event.seed}: {note}"))
        elif isinstance(event, events.Judged):
            self._live.console.print(Text(judged_words(event)))

    def render(self) -> RenderableType:
        """The whole display as it stands."""
        board = self.board
        parts: list[RenderableType] = [Text(self.heading, style="bold")]
        if board.planned is None and not board.runs:
            parts.append(Text(f"{board.phase} …"))
        elif board.rung is not None:
            words = f"{100 * board.rung.share:.0f} % of the most there may be"
            parts += [Text(board.phase), self._bars("search", board.rung.share, words)]
        else:
            left = board.seconds_left()
            estimate = f", about {_rounded(left)} left" if left is not None else ""
            plan, done = board.planned, board.fraction()
            count = f"{board.ended()} of {plan.runs} runs done" if plan else f"{100 * done:.0f} %"
            parts.append(self._bars("all runs" if plan else "", done, f"{count}{estimate}"))
        if len(board.labels) > 1 and board.planned:
            parts += [Text(), self._table()]
        parts.append(Text("Ctrl-C stops with a checkpoint; the same command resumes.", style="dim"))
        return Group(*parts)

    def _bars(self, name: str, done: float, words: str) -> Table:
        """A bar for the whole, and one for each run that is being trained."""
        bars = Table.grid(padding=(0, 1))
        bars.add_row(name, ProgressBar(total=1.0, completed=done, width=32), words)
        for run in self.board.current:
            facts = [f"step {run.step:,} of {run.steps:,}"]
            facts += [f"loss {formats.number(run.loss)}"] if run.loss is not None else []
            facts += [f"held out: {held_out(run.held_out, self.board.metric)}"] if run.held_out else []
            bar = ProgressBar(total=max(1, run.steps), completed=run.step, width=32)
            bars.add_row(Text(f"{run.label}, seed {run.seed}"), bar, " · ".join(facts))
        return bars

    def _table(self) -> Table:
        board = self.board
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
        table.add_column("operator")
        for title in (f"{board.metric} now", "finished, mean ± spread", "runs", "tokens/s"):
            table.add_column(title, justify="right")
        assert board.planned is not None
        each = board.planned.runs // max(1, len(board.labels))
        for operator, label in board.labels.items():
            runs = [run for run in board.runs.values() if run.operator == operator]
            latest = next((run for run in reversed(runs) if run.status == "running"), runs[-1] if runs else None)
            now = formats.number(latest.held_out.get(board.metric)) if latest else formats.MISSING
            speed = formats.compact(latest.speed) if latest else formats.MISSING
            name = Text.assemble(("● ", self.looks[operator].light), label)
            done = formats.spread(spread_if_any(board.results(operator)))
            table.add_row(name, now, done, f"{sum(run.status == 'done' for run in runs)} of {each}", speed)
        return table


class PlainDisplay:
    """One line for each thing that happened, and one now and then in between."""

    def __init__(self, board: Board, heading: str):
        self.board = board
        self._last = board.clock()
        self._say(heading)

    def __enter__(self) -> "PlainDisplay":
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def _say(self, text: str) -> None:
        print(text, flush=True)
        self._last = self.board.clock()

    def __call__(self, event: events.Event) -> None:
        board = self.board
        board.add(event)
        match event:
            case events.Measuring():
                self._say(f"{board.phase} …")
            case events.Planned():
                self._say(
                    f"{event.remaining} of {event.runs} runs to do, {event.steps:,} steps each, "
                    f"about {_rounded(event.estimated_seconds)}."
                )
            case events.RungStarted():
                told = f"{100 * event.share:.0f} %. {board.phase}: {', '.join(event.regimes)}."
                self._say(told if event.round else f"{board.phase}.")
            case events.Judged():
                self._say(judged_words(event))
            case events.RunStarted():
                start = f" goes on at step {event.step:,}" if event.step else " begins"
                self._say(
                    f"{event.label}, seed {event.seed}, learning rate {formats.rate(event.learning_rate)}:{start} "
                    f"({', '.join(event.notes)})".removesuffix(" ()")
                    + "."
                )
            case events.StepDone() if board.clock() - self._last > _PLAIN_EVERY:
                self._say(
                    f"{self._name(event.run)}: step {event.step:,} of {event.steps:,}, "
                    f"loss {formats.number(event.loss)}{self._left()}."
                )
            case events.Evaluated():
                self._say(
                    f"{self._name(event.run)}: step {event.step:,} of {event.steps:,}, "
                    f"held-out {held_out(event.metrics, board.metric)}{self._left()}."
                )
            case events.RunFinished():
                state = f"{event.status} before" if event.skipped else event.status
                reached = event.final if event.status == "done" else None
                numbers = f", {held_out(reached, board.metric)}" if reached else ""
                why = f": {event.message}" if event.status == "failed" else "."
                self._say(f"{event.label}, seed {event.seed}: {state} after {event.steps_done:,} steps{numbers}{why}")

    def _name(self, run: str) -> str:
        return f"{self.board.runs[run].label}, seed {self.board.runs[run].seed}"

    def _left(self) -> str:
        # how many runs a search will make is not known
        left = self.board.seconds_left() if self.board.rung is None else None
        return "" if left is None else f"; {100 * self.board.fraction():.0f} % of all, about {_rounded(left)} left"


def _rounded(seconds: float) -> str:
    return formats.seconds(float(round(seconds)))


@contextlib.contextmanager
def watching(metric: str, labels: dict[str, str], heading: str) -> Iterator[Callable[[events.Event], None]]:
    """A listener that shows what happens, for as long as the body runs. ``labels``: operator → its name for people."""
    board = Board(metric, labels)
    console = Console()
    display = (
        LiveDisplay(board, console, heading)
        if console.is_terminal and sys.stdout.isatty()
        else PlainDisplay(board, heading)
    )
    with display:
        yield display
