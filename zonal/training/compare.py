"""Many runs that differ in one thing only: a comparison, planned once, run in any number of sittings.

The same settings in the same folder go on where it stood: finished runs are kept, the interrupted one goes on from its
checkpoint, the number of updates stays what was planned first. All runs of a seed see the same batches in the same
order and start with the same values of shared parameters, since a batch is a function of (step, seed) and an initial
value of (seed, name of the parameter).
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from zonal import device_memory, tasks, workers
from zonal.errors import ArgumentError, FileWriteError, ZonalError
from zonal.evaluation.selection import Final, best_learning_rate
from zonal.models import language_model
from zonal.report import archive
from zonal.store import understood, write_checked
from zonal.training import events
from zonal.training.config import TrainConfig
from zonal.training.environment import FolderInUseError, check_threads, surroundings, threads_each, when_free
from zonal.training.folder import claimed, sitting
from zonal.training.loop import train
from zonal.training.parallel import run_in_processes
from zonal.training.plan import StepPlan, Timing, decide_steps, estimate, measure
from zonal.training.record import FILE as RECORD
from zonal.training.record import RunResult
from zonal.training.spec import FILE, GRID, ComparisonSpec, PlannedRun, read_comparison


@dataclass(frozen=True)
class ComparisonResult:
    """The state of a comparison.

    status: "done" (every run finished), "failed" (some failed, none is left to run) or "stopped" (some are left).
    runs: the records of all runs that are known, in the order of the plan. best_learning_rates: of each operator.
    left: how many runs are left, with those that wait for a rate to be chosen.
    """

    directory: Path
    status: str
    runs: tuple[RunResult, ...]
    best_learning_rates: dict[str, float | None]
    left: int


class Comparison:
    """A comparison in ``directory``: new, the same one that is there already, or one with more operators, seeds or
    learning rates, which keeps the finished runs and the number of steps.

    Raises: ArgumentError when the folder holds another comparison (the first field that differs is named), or is a
    non-empty folder without one.
    """

    def __init__(self, directory: str | Path, spec: ComparisonSpec):
        self.directory = Path(directory)
        self.spec = spec
        self.plan: StepPlan | None = None
        self.threads: int | None = None
        read = functools.partial(read_comparison, task=spec.task)
        self._stored = stored = claimed(self.directory, FILE, "compare", "comparison", spec, read)
        if stored is not None:
            with understood("compare", self.directory / FILE):
                timings = {name: Timing(**times) for name, times in stored["plan"]["timings"].items()}
                self.plan = StepPlan(stored["steps"], timings, stored["plan"]["estimated_seconds"])
                self.threads = stored["device"]["threads"]
                check_threads("comparison.json", self.threads)

    @classmethod
    def open(cls, directory: str | Path) -> "Comparison":
        """The comparison in a folder, as it was asked for. Raises FileFormatError when there is none."""
        return cls(directory, read_comparison(Path(directory))[0])

    @property
    def training(self) -> TrainConfig:
        """Settings of every run, with the planned number of updates."""
        if self.plan is None:
            raise ArgumentError("Comparison.training: nothing is planned yet; call run() first.")
        return replace(self.spec.training, steps=self.plan.steps)

    def records(self) -> list[RunResult]:
        """What run.json of every run that is known says now; a run without one is pending."""
        with archive.opened(self.directory) as root:
            first = [self._record(run, root) for run in self.spec.runs()]
            return first + [self._record(run, root) for run in self._screened(first)]

    def _chosen(self, records: list[RunResult]) -> dict[str, float]:
        """The best rate of each operator whose runs that try the rates have all ended, if one was done."""
        tried = [record for record in records if record.seed in self.spec.screening]
        waiting = {record.operator for record in tried if record.status not in ("done", "failed")}
        best = self.best_learning_rates(records)
        return {operator: rate for operator, rate in best.items() if rate is not None and operator not in waiting}

    def _screened(self, screening: list[RunResult]) -> list[PlannedRun]:
        """The runs of the seeds that take the rate chosen by ``screening``, for the operators that have one."""
        return [
            self.spec.planned(operator, seed, rate)
            for operator, rate in self._chosen(screening).items()
            for seed in self.spec.seeds[len(self.spec.screening) :]
        ]

    def _unmeasured(self, records: list[RunResult]) -> list[PlannedRun]:
        """The finished runs at the chosen rates that are still to be measured at their end."""
        chosen = self._chosen(records)
        return [
            self.spec.planned(record.operator, record.seed, record.learning_rate)
            for record in records
            if record.status == "done" and not record.measured and chosen.get(record.operator) == record.learning_rate
        ]

    def run(
        self,
        *,
        on_event: events.Listener | None = None,
        should_stop: Callable[[], bool] | None = None,
        jobs: int | str = 1,
        threads: int | None = None,
        retry_failed: bool = False,
    ) -> ComparisonResult:
        """Plan if that has not been done, then run what is left.

        Args:
            on_event: called with ``zonal.training.events``, in this process and thread.
            should_stop: asked often; True stops after the current update, with a checkpoint. By default Ctrl-C does
                that (a second one interrupts at once).
            jobs: runs at a time, each in a process of its own when more than one; "ray" for tasks of a Ray cluster, as
                many as it has cores for, whose machines share the folder. A task whose process or machine is lost is
                started again and goes on from the last checkpoint. Times are comparable for one run at a time only.
            threads: of each run, when the comparison is new; by default torch's number, divided by ``jobs``. It is
                stored, since sums depend on it.
            retry_failed: run failed runs again, from their last good checkpoint.

        Returns: the state of the comparison. One run that fails does not stop the others.

        Raises: FileWriteError when the disk is full or the folder cannot be written. ArgumentError when an operator
        cannot run in this model, the budget is too small, or another process works in the folder.
        """
        workers.check("Comparison.run", "jobs", jobs)
        check_threads("Comparison.run", threads)
        if jobs != 1:  # other processes make the task from its configuration
            tasks.kind_of(self.spec.task.config())
        started, ray = time.perf_counter(), jobs == workers.RAY
        session = workers.session(None, 1) if ray else contextlib.nullcontext()
        with sitting(self.directory, "compare") as interrupted, session:
            if ray and threads is None:
                threads = threads_each(1)
            jobs = workers.slots(self.threads or threads or 1) if ray else int(jobs)
            stop = should_stop or interrupted
            emit = on_event or events.ignore
            if not self._is_written() and not self._make_plan(emit, stop, jobs, threads, started):
                return self._finish(emit)
            self._announce_plan(emit, jobs, retry_failed)
            for runs in self._rounds(jobs):
                for run in runs:
                    if not (self.directory / run.name / RECORD).exists():
                        self._record(run).write(self.directory / run.name)
                if stop():
                    break
                left = self._left(runs, emit, retry_failed)
                if ray:
                    self._run_in_tasks(left, emit, stop)
                elif jobs == 1 or not left:
                    for run in left:
                        if stop():
                            break
                        self.execute(run, emit, stop)
                else:
                    assert self.threads is not None
                    run_in_processes(self.directory, left, jobs=jobs, threads=self.threads, emit=emit, should_stop=stop)
            return self._finish(emit)

    def _run_in_tasks(self, runs: list[PlannedRun], emit: events.Listener, stop: Callable[[], bool]) -> None:
        """Run ``runs`` by tasks of Ray. Their events are not seen, only their ends."""
        assert self.threads is not None
        function = functools.partial(_executed, str(self.directory.resolve()))
        for number, _ in workers.tasks(function, runs, cores=self.threads, in_order=False, should_stop=stop):
            emit(self._record(runs[number]).ended(runs[number].name))

    def _rounds(self, jobs: int) -> Iterator[list[PlannedRun]]:
        """What can be run at once: runs that try the rates, then what waits for the best of them.

        With screening and one run at a time, an operator at a time: the first is complete early.
        """
        runs = self.spec.runs()
        groups = [(operator,) for operator in self.spec.operators]
        for group in groups if self.spec.screening_seeds is not None and jobs == 1 else [self.spec.operators]:
            tried = [run for run in runs if run.operator in group]
            yield tried
            records = [self._record(run) for run in tried]
            yield self._unmeasured(records) + self._screened(records)

    def execute(self, run: PlannedRun, emit: events.Listener, should_stop: Callable[[], bool]) -> RunResult:
        """Start or resume one run. A failure is recorded in its run.json and ends only this run.

        Measurements at the end may take longer than training. Where several rates are tried, a run is measured only
        once its rate is known to be the best of its operator.

        Raises: FileWriteError, since no other run could be written either; FolderInUseError.
        """
        folder = self.directory / run.name
        config = replace(self.training, learning_rate=run.learning_rate, seed=run.seed)
        tried = [self._record(each) for each in self.spec.runs() if each.operator == run.operator]
        measure_end = (
            len(self.spec.learning_rates) == 1
            or run.seed not in self.spec.screening
            or self._chosen(tried).get(run.operator) == run.learning_rate
        )
        try:
            model = language_model(self.spec.model_for(run.operator), run.seed).to(self.spec.device)
            return train(
                model, self.spec.task, config, folder, on_event=emit, should_stop=should_stop, run=run.name,
                label=run.label, threads=self.threads, measure_end=measure_end,
            )  # fmt: skip
        except (FileWriteError, FolderInUseError):
            raise
        except (ZonalError, RuntimeError) as error:
            message = str(error)
            if isinstance(error, RuntimeError):
                if not device_memory.exhausted(error):
                    raise
                message = (
                    f"train: out of memory ({message.splitlines()[0]}). Use a smaller batch, or a larger accumulate."
                )
            record = self._record(run)
            if record.status != "failed":  # what train put down itself, with its announcement, stands
                record.status, record.message = "failed", message
                record.write(folder)
                emit(record.ended(run.name))
            return record

    def _is_written(self) -> bool:
        """Whether comparison.json has the runs that are asked for."""
        asked = self.spec.identity()
        return self._stored is not None and all(self._stored.get(name) == asked.get(name) for name in GRID)

    def _make_plan(
        self, emit: events.Listener, stop: Callable[[], bool], jobs: int, threads: int | None, started: float
    ) -> bool:
        """Time the new operators, fix the number of steps unless it is, and write comparison.json. False: a stop was
        requested first.
        """
        spec, before = self.spec, self.plan
        if self.threads is None:
            self.threads = threads_each(jobs) if threads is None else threads
        timings = {} if before is None else dict(before.timings)
        new = [operator for operator in spec.operators if operator not in timings]
        for index, operator in enumerate(new):
            emit(events.Measuring(operator, index, len(new)))
            timing = measure(spec, operator, self.threads, stop)
            if timing is None:
                return False
            timings[operator] = timing
        if before is None:
            self.plan = decide_steps(spec, timings, time.perf_counter() - started, jobs)
        else:
            self.plan = StepPlan(before.steps, timings, estimate(spec, timings, before.steps, jobs))
        guess = spec.task.guess()
        first = self._stored or {
            "title": spec.title,
            "requested_steps": spec.training.steps,
            "guess": None if guess is None else guess._asdict(),
            **surroundings(torch.device(spec.device), self.threads),
        }
        stored = {
            **{name: value for name, value in first.items() if name not in GRID},
            **spec.to_dict(),
            "title": first["title"],
            "training": self.training.to_dict(),
            "steps": self.plan.steps,
            "plan": {
                "timings": {name: dataclasses.asdict(timing) for name, timing in timings.items()},
                "estimated_seconds": self.plan.estimated_seconds,
                "jobs": jobs,
            },
        }
        write_checked(self.directory / FILE, stored)
        self._stored = stored
        return True

    def _announce_plan(self, emit: events.Listener, jobs: int, retry_failed: bool) -> None:
        assert self.plan is not None
        records, steps, timings = self.records(), self.plan.steps, self.plan.timings
        total = len(self.spec.operators) * self.spec.runs_each
        remaining = self._remaining(records, retry_failed)
        emit(
            events.Planned(
                runs=total,
                remaining=remaining,
                steps=steps,
                step_seconds={name: timing.update for name, timing in timings.items()},
                evaluation_seconds={name: timing.evaluation for name, timing in timings.items()},
                estimated_seconds=remaining / total * estimate(self.spec, timings, steps, jobs),
            )
        )

    def _remaining(self, records: list[RunResult], retry_failed: bool = False) -> int:
        """How many runs are left, measurements included. An operator that failed at every rate has no runs with other
        seeds.
        """
        ended = sum(record.status in _ended(retry_failed) for record in records)
        total = len(records) if ended == len(records) else len(self.spec.operators) * self.spec.runs_each
        return total - ended + len(self._unmeasured(records))

    def _left(self, runs: list[PlannedRun], emit: events.Listener, retry_failed: bool) -> list[PlannedRun]:
        """Those of ``runs`` that are not at their end, in order; the others are announced as skipped."""
        ended = _ended(retry_failed)
        left: list[PlannedRun] = []
        owed = self._unmeasured(self.records())
        for run in runs:
            record = self._record(run)
            if record.status in ended and run not in owed:
                emit(record.ended(run.name, skipped=True))
            else:
                left.append(run)
        return left

    def _record(self, run: PlannedRun, root: Path | None = None) -> RunResult:
        """What run.json of a run says. root: where the runs are, by default in the folder itself."""
        folder = (root or self.directory) / run.name
        if (folder / RECORD).is_file():
            return RunResult.read(folder)
        steps = 0 if self.plan is None else self.plan.steps
        settings = {"steps": steps, "dtype": self.spec.training.dtype, "device": self.spec.device}
        return RunResult(run.operator, run.label, run.seed, run.learning_rate, **settings)

    def _finish(self, emit: events.Listener) -> ComparisonResult:
        records = self.records()
        done, failed = (sum(record.status == status for record in records) for status in ("done", "failed"))
        left = self._remaining(records)
        status = "stopped" if left else "failed" if failed else "done"
        best = self.best_learning_rates(records)
        emit(events.ComparisonFinished(status, done, failed, left, best))
        return ComparisonResult(self.directory, status, tuple(records), best, left)

    def best_learning_rates(self, records: Sequence[RunResult]) -> dict[str, float | None]:
        """Operator → learning rate with the best mean final headline metric over the seeds that try all rates
        (``zonal.evaluation.selection``).
        """
        metric, found = self.spec.task.metric, {}
        for operator in self.spec.operators:
            ended: dict[float, dict[int, Final]] = {rate: {} for rate in self.spec.learning_rates}
            for record in records:
                if record.operator == operator and record.status == "done" and record.final:
                    validation = record.final.get("validation", {}).get(metric)
                    ended[record.learning_rate][record.seed] = Final(
                        record.final[metric], record.steps_done, validation
                    )
            found[operator] = best_learning_rate(
                ended,
                self.spec.screening,
                higher_is_better=metric == "accuracy",
                stop=self.spec.training.stop_at_accuracy,
            )
        return found


def _ended(retry_failed: bool) -> tuple[str, ...]:
    """The states of runs that are not run again."""
    return ("done",) if retry_failed else ("done", "failed")


def _executed(directory: str, run: PlannedRun) -> None:
    """A run of the comparison in a folder, in a task."""
    when_free(lambda: Comparison.open(directory).execute(run, events.ignore, lambda: False))
