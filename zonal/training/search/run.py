"""A search over regimes: propose moves, train what they lead to, go on from there or not; any number of sittings.

Every regime on every rung is a comparison of its own (``zonal.training.Comparison``) in a folder of its own, so that
data, seeds, files and resume are those of all runs. What the search decides follows from their results and from numbers
drawn by (draw, round) alone: a search that was killed is walked again from its start, finds what has been trained, and
goes on at the first run that is not done.
"""

import contextlib
import functools
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from zonal import tasks
from zonal import workers as parallel
from zonal.errors import ArgumentError, FileWriteError, ZonalError
from zonal.evaluation.statistics import spread
from zonal.store import understood, write_checked
from zonal.training import events
from zonal.training.compare import Comparison
from zonal.training.environment import FolderInUseError, check_threads, surroundings, threads_each, when_free
from zonal.training.folder import claimed, sitting
from zonal.training.record import FILE as RECORD
from zonal.training.record import RunResult
from zonal.training.search import findings
from zonal.training.search.graph import effort
from zonal.training.search.moves import Move, Moves, moves
from zonal.training.search.regime import Regime
from zonal.training.search.result import Outcome, Round, SearchResult
from zonal.training.search.spec import FILE, SearchSpec, read_search


class _Stopped(Exception):  # noqa: N818, a request is not an error
    """A stop was requested during a run."""


class Search:
    """A search in ``directory``: new, or the same one that is there already.

    Raises: ArgumentError when the folder holds another search (the first field that differs is named), or is a
    non-empty folder without one.
    """

    def __init__(self, directory: str | Path, spec: SearchSpec):
        self.directory = Path(directory)
        self.spec = spec
        self.threads: int | None = None
        stored = claimed(self.directory, FILE, "search", "search", spec, functools.partial(read_search, task=spec.task))
        if stored is not None:
            with understood("search", self.directory / FILE):
                self.threads = stored["device"]["threads"]
                check_threads("search.json", self.threads)

    @classmethod
    def open(cls, directory: str | Path) -> "Search":
        """The search in a folder, as it was asked for. Raises FileFormatError when there is none."""
        return cls(directory, read_search(Path(directory))[0])

    def folder(self, regime: Regime, steps: int) -> Path:
        """Where a regime on a rung is kept: a comparison of its own."""
        return self.directory / "regimes" / regime.name / f"steps-{steps}"

    def run(
        self,
        *,
        on_event: events.Listener | None = None,
        should_stop: Callable[[], bool] | None = None,
        workers: int | str = 1,
        threads: int | None = None,
    ) -> SearchResult:
        """Search, or go on; search.json, findings.json and all runs are in the folder afterwards.

        Args:
            on_event: called with ``zonal.training.events``, in this process and thread.
            should_stop: asked often; True stops with a checkpoint. By default Ctrl-C does that.
            workers: regimes of a rung at a time, by tasks of Ray when more than one; "ray" for as many as the cluster
                has cores for. A task whose process or machine is lost is started again and goes on from the last
                checkpoint. Decisions and numbers are the same whatever their number.
            threads: of each run, when the search is new; by default torch's number, divided by ``workers``. It is
                stored.

        Raises: ArgumentError for more than one worker without Ray, and as ``Comparison.run``.
        """
        parallel.check("Search.run", "workers", workers)
        check_threads("Search.run", threads)
        number = None if workers == parallel.RAY else int(workers)
        if workers != 1:  # other processes make the task from its configuration
            tasks.kind_of(self.spec.task.config())
            parallel.require_ray("Search.run")
        with sitting(self.directory, "search") as interrupted:
            if self.threads is None:
                self.threads = threads_each(number or 1) if threads is None else threads
                machine = surroundings(torch.device(self.spec.device), self.threads)
                write_checked(self.directory / FILE, {**self.spec.to_dict(), **machine})
            with parallel.session(number, self.threads) if number != 1 else contextlib.nullcontext():
                result = _Walk(self, on_event or events.ignore, should_stop, interrupted, number).result()
            findings.write(self.directory, self.spec, result)
            return result

    def outcome(self, regime: Regime, steps: int) -> Outcome | None:
        """What the files say of a regime on a rung; None when a run of it is not at its end."""
        folder = self.folder(regime, steps)
        records = [folder / run.name for run in self.spec.comparison(regime, steps).runs()]
        if not all((path / RECORD).exists() for path in records):
            return None
        runs = tuple(RunResult.read(path) for path in records)
        if any(run.status not in ("done", "failed") for run in runs):
            return None
        costs = {run.seed: cost for run in runs if (cost := self.spec.cost(run)) is not None}
        failed = next((run.message or "a number that is not finite" for run in runs if run.seed not in costs), None)
        reported = {run.seed: value for run in runs if (value := self.spec.reported(run)) is not None}
        whole = failed is None and len(reported) == len(runs)
        return Outcome(runs, costs if failed is None else None, failed, reported if whole else None)

    def train(
        self, regime: Regime, steps: int, emit: events.Listener, should_stop: Callable[[], bool] | None
    ) -> Outcome | None:
        """Finish the runs of a regime on a rung, in this process. None if a stop was requested.

        Raises: FileWriteError, FolderInUseError; what else refuses a regime is its outcome.
        """
        assert self.threads is not None
        folder = self.folder(regime, steps)

        def listen(event: events.Event) -> None:
            # plans and ends of the parts are the search's own affair
            if isinstance(event, events.Planned | events.ComparisonFinished | events.Measuring):
                return
            inner = getattr(event, "run", None)
            name = f"{folder.relative_to(self.directory)}/{inner}"
            emit(event if inner is None else replace(event, run=name))  # type: ignore[call-arg]

        try:
            result = Comparison(folder, self.spec.comparison(regime, steps)).run(
                on_event=listen, should_stop=should_stop, threads=self.threads
            )
        except (FileWriteError, FolderInUseError):
            raise
        except ZonalError as error:
            return Outcome((), None, str(error))
        return None if result.status == "stopped" else self.outcome(regime, steps)


class _Walk:
    """One sitting of a search, from its start."""

    def __init__(
        self,
        search: Search,
        emit: events.Listener,
        should_stop: Callable[[], bool] | None,
        interrupted: Callable[[], bool],
        workers: int | None,
    ):
        self.search, self.spec, self.emit, self.workers = search, search.spec, emit, workers
        self.should_stop, self.stop = should_stop, should_stop or interrupted
        self.outcomes: dict[Regime, dict[int, Outcome]] = {}
        self.judged: dict[Regime, Moves] = {}
        self.rounds: list[Round] = []
        self._done = 0

    def result(self) -> SearchResult:
        try:
            status, reason = "done", self._search()
        except _Stopped:
            status, reason = "stopped", "it was stopped; the same command goes on"
        last = self.spec.steps[-1]
        finished = {
            regime: found[last].costs for regime, found in self.outcomes.items() if last in found and found[last].costs
        }
        winner = min(finished, key=lambda regime: self._cost(regime, last), default=None)
        return SearchResult(
            self.search.directory, status, reason, tuple(self.rounds), self.outcomes, self.judged, winner
        )

    def _search(self) -> str:
        """Run all rounds; returns the reason why the search ended."""
        spec, current = self.spec, self.spec.start
        for steps in spec.steps:
            self._evaluate([current], steps, 0, current)
        if self.outcomes[current][spec.steps[-1]].costs is None:
            raise ArgumentError(
                f"search: the start, {current.label}, could not be trained: "
                f"{self.outcomes[current][spec.steps[-1]].message}"
            )
        for number in range(1, spec.rounds + 1):
            if current not in self.judged:
                self.judged[current] = moves(current, spec.model, spec.kinds, spec.palette)
            open_moves = [move for move in self.judged[current].legal if move.target not in self.outcomes]
            if not open_moves:
                return f"every move out of {current.label} had been tried"
            chance = random.Random(f"{spec.draw}/{number}")
            drawn = tuple(chance.sample(open_moves, min(spec.width, len(open_moves))))
            alive, rungs = [move.target for move in drawn], []
            for rung, steps in enumerate(spec.steps):
                if not self._affords(len(alive), steps):
                    self._close(current, drawn, rungs, None, chance.random(), number)
                    return f"the next rung would have gone beyond the budget of {spec.budget_seconds:g} s"
                self._evaluate(alive, steps, number, current)
                scored = sorted(
                    (regime for regime in alive if self.outcomes[regime][steps].costs),
                    key=lambda regime, at=steps: (self._cost(regime, at), regime.name),
                )
                rungs.append((steps, tuple(scored)))
                alive = scored if rung == len(spec.steps) - 1 else scored[: max(1, math.ceil(len(alive) / spec.eta))]
                if not alive:
                    break
            current = self._close(current, drawn, rungs, alive[0] if alive else None, chance.random(), number)
        return f"all {spec.rounds} rounds were made"

    def _close(
        self,
        current: Regime,
        drawn: tuple[Move, ...],
        rungs: list[tuple[int, tuple[Regime, ...]]],
        chosen: Regime | None,
        chance: float,
        number: int,
    ) -> Regime:
        """Accept or reject the best regime of a round; returns the regime from which the search continues."""
        amount, probability, accepted = None, None, False
        if chosen is not None:
            measured = effort(
                *(
                    {steps: found.costs for steps, found in self.outcomes[regime].items() if found.costs}
                    for regime in (current, chosen)
                )
            )
            assert measured is not None  # both were trained on the last rung
            amount = spread(measured[1])
            probability = acceptance(self.spec, amount.mean)
            accepted = chance < probability
            self.emit(events.Judged(number, chosen.label, amount.mean, accepted))
        self.rounds.append(Round(current, drawn, tuple(rungs), chosen, amount, probability, accepted))
        return chosen if accepted and chosen is not None else current

    def _cost(self, regime: Regime, steps: int) -> float:
        costs = self.outcomes[regime][steps].costs
        assert costs
        return math.fsum(costs.values()) / len(costs)

    def _affords(self, count: int, steps: int) -> bool:
        """Whether ``count`` regimes of so many steps are expected to fit into what is left of the budget, at the mean
        speed so far.
        """
        if self.spec.budget_seconds is None:
            return True
        runs = [run for found in self.outcomes.values() for outcome in found.values() for run in outcome.runs]
        spent = sum(run.seconds + run.evaluation_seconds for run in runs)
        made = sum(run.steps_done for run in runs)
        return spent + spent / max(1, made) * count * steps * len(self.spec.seeds) <= self.spec.budget_seconds

    def _evaluate(self, regimes: Sequence[Regime], steps: int, number: int, current: Regime) -> None:
        """Outcomes of all ``regimes`` on the rung of ``steps``. Raises _Stopped."""
        labels = tuple(regime.label for regime in regimes)
        share = min(1.0, self._done / self._most())
        self.emit(events.RungStarted(number, self.spec.rounds, current.label, labels, steps, share))
        found = {regime: self.search.outcome(regime, steps) for regime in regimes}
        left = [regime for regime, outcome in found.items() if outcome is None]
        for regime in (regime for regime in regimes if found[regime] is not None):
            self._tell(regime, steps)
        if self.workers != 1 and left:
            found |= self._together(left, steps)
        else:
            for regime in left:
                if self.stop():
                    raise _Stopped
                # without should_stop, the comparison handles Ctrl-C itself and reports that it was stopped
                found[regime] = self.search.train(regime, steps, self.emit, self.should_stop)
                if found[regime] is None:
                    raise _Stopped
        for regime in regimes:
            outcome = found[regime]
            if outcome is None:
                raise _Stopped
            self.outcomes.setdefault(regime, {})[steps] = outcome
        self._done += len(regimes) * steps

    def _together(self, regimes: Sequence[Regime], steps: int) -> dict[Regime, Outcome | None]:
        """What Ray's workers make of ``regimes``."""
        assert self.search.threads is not None
        function = functools.partial(_trial, str(self.search.directory.resolve()), steps)
        items, refused = [json.dumps(regime.to_dict()) for regime in regimes], {}
        for number, (ended, message) in parallel.tasks(
            function, items, cores=self.search.threads, at_once=self.workers, in_order=False, should_stop=self.stop
        ):
            if ended:
                self._tell(regimes[number], steps)
            else:
                refused[regimes[number]] = Outcome((), None, message)
        return {regime: refused.get(regime) or self.search.outcome(regime, steps) for regime in regimes}

    def _tell(self, regime: Regime, steps: int) -> None:
        """The ends of runs that were not watched: of an earlier sitting, or of a worker."""
        outcome = self.search.outcome(regime, steps)
        folder = self.search.folder(regime, steps).relative_to(self.search.directory)
        planned_runs = self.spec.comparison(regime, steps).runs()
        for planned, run in zip(planned_runs, outcome.runs if outcome else (), strict=False):
            self.emit(run.ended(f"{folder}/{planned.name}", skipped=True))

    def _most(self) -> int:
        """Training steps per seed if no round ends early."""
        width, total = self.spec.width, 0
        for steps in self.spec.steps:
            total += width * steps
            width = max(1, math.ceil(width / self.spec.eta))
        return sum(self.spec.steps) + self.spec.rounds * total


def _trial(directory: str, steps: int, item: str) -> tuple[bool, str | None]:
    """One regime on one rung, in a task: whether it has runs, and why not."""
    regime = Regime.from_dict(json.loads(item))
    outcome = when_free(lambda: Search.open(directory).train(regime, steps, events.ignore, lambda: False))
    assert outcome is not None  # nobody stops it
    return bool(outcome.runs), outcome.message


def acceptance(spec: SearchSpec, amount: float) -> float:
    """The probability of going where the measure differs by ``amount``: 1 or 0 by the threshold, min(1, exp(-amount /
    temperature)) by Metropolis.
    """
    if spec.rule == "threshold":
        return 1.0 if amount <= spec.threshold else 0.0
    return math.exp(min(0.0, -amount / spec.temperature))
