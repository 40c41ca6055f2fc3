"""One run: a model, a task, a configuration and a folder. Killed at any moment and started again, it writes the same
numbers.

The loop looks at the state, never at what it did before: evaluate if this step is due and not yet evaluated, stop on
request or after the last step, write a checkpoint if one is due, else make an update. A checkpoint can be
taken at any turn and the run goes on from it in the same way.

Times: ``seconds`` in metrics.jsonl and run.json count training alone (data, update, logging), without evaluation and
checkpoints; after a resume they go on from the checkpoint's. They are the only entries that differ from run to run.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from zonal import device_memory
from zonal.errors import ArgumentError, NonFiniteError
from zonal.evaluation.examination import Marks
from zonal.evaluation.metrics import Accumulator, Cells, accumulate, evaluating
from zonal.models import CausalLM, LanguageModel
from zonal.models.layers import entry_of
from zonal.names import known_names
from zonal.store import read_header, remove_parts
from zonal.tasks.registry import checked_config
from zonal.tasks.task import Batch, Examinee, Task
from zonal.training import checkpoint as checkpoints
from zonal.training import events, inspect
from zonal.training.checkpoint import Progress
from zonal.training.config import TrainConfig, short
from zonal.training.curriculum import Curriculum
from zonal.training.environment import PeakMemory, check_threads, commit, deterministic, folder_lock, versions
from zonal.training.folder import check_own
from zonal.training.log import MetricsLog, SilentLog, kept
from zonal.training.optimiser import adamw, set_learning_rate
from zonal.training.processes import SHARDS, OneProcess, Written
from zonal.training.record import FILE as RECORD
from zonal.training.record import MEMORY_LENGTHS, RunResult, Status
from zonal.training.schedule import learning_rate
from zonal.training.sharded import Processes
from zonal.training.step import autocast, clip_gradient

T = TypeVar("T")
# metrics that only the last evaluation of a run has
_AT_END = ("transfer", "examined")


@known_names
def train(
    model: LanguageModel,
    task: Task,
    config: TrainConfig,
    directory: str | Path,
    *,
    resume: bool = True,
    on_event: events.Listener | None = None,
    should_stop: Callable[[], bool] | None = None,
    run: str | None = None,
    label: str | None = None,
    threads: int | None = None,
    processes: Processes | None = None,
    measure_end: bool = True,
) -> RunResult:
    """Train ``model`` on ``task`` and keep everything in ``directory``.

    Args:
        model: freshly built; its parameters are replaced by the checkpoint's where the run goes on. Runs on the device
            it is on. It holds the trained weights afterwards.
        task: batches by step and seed, and evaluation batches.
        directory: run.json, metrics.jsonl, checkpoint.safetensors, TensorBoard events; made when absent.
        resume: go on from the checkpoint there. False refuses a folder that has one.
        on_event: called with ``zonal.training.events``.
        should_stop: asked before each update and between evaluation batches; True ends the run with a checkpoint and
            status "stopped".
        run, label: names in the events and in run.json; by default the folder's name and the operator.
        threads: of torch, on the CPU; by default as many as it has now. A run that goes on keeps the number it began
            with.
        processes: how the run is spread over processes (``several_processes``); None: this one alone.
        measure_end: measure the finished run on what the task has beside its evaluation set (``transfer_batches``,
            ``examine``). False leaves that to a later call, since it may take longer than training.

    Returns: what run.json holds. A run that is finished (and measured, with measure_end) is returned as it is.

    Raises:
        NonFiniteError: the loss or the gradient became NaN or infinite; run.json then says "failed".
        ArgumentError: the model is not causal as the task is, resume=False and the folder holds a run, the folder is
            that of a comparison or a search, ``keep_best`` where the run has lost its best weights, or
            ``stop_at_accuracy`` for a task without accuracy.
            FolderInUseError, a kind of it: another process uses the folder.
        FileFormatError: the checkpoint is damaged or of another configuration.
        InsufficientSpaceError: the disk is full; the last checkpoint stands. FileWriteError: the folder cannot be
            written.
    """
    config.check_metric("train", task.metric)
    if model.config.causal != task.causal:
        raise ArgumentError(
            f"train: a model with causal={task.causal} is required, as the task says, got causal={model.config.causal}."
            " An encoder would see what it is to predict, and a decoder half of what it may."
        )
    folder = Path(directory)
    check_threads("train", threads)
    processes = processes or OneProcess()
    for file, noun in (("comparison.json", "comparison"), ("search.json", "search")):
        if (folder / file).exists():
            raise ArgumentError(
                f"train: {folder} holds a {noun}, whose runs have folders of their own. Choose another folder."
            )
    if not resume and processes.begun(folder):
        raise ArgumentError(
            f"train: {folder} already holds a run. Pass resume=True to go on with it, or choose another folder."
        )
    with contextlib.ExitStack() as held:
        processes.first(lambda: held.enter_context(folder_lock(folder, wait=30.0 if resume else 0.0)))
        listener = on_event if on_event is not None and processes.writes else events.ignore
        work = _Run(
            model, task, config, folder, processes, listener, should_stop or (lambda: False), run or folder.name, label,
            measure_end,
        )  # fmt: skip
        return work.execute(torch.get_num_threads() if threads is None else threads)


def _environment() -> dict[str, str]:
    """What the numbers of a run may depend on beside its settings."""
    return {**versions(), "commit": commit()}


def run_identity(model: LanguageModel, task: Task, config: TrainConfig) -> dict[str, Any]:
    """What must agree for two runs to be the same run, as JSON."""
    return {"model": model.config.to_dict(), "task": checked_config("train", task), "training": config.trajectory()}


def _check_room(model: LanguageModel, task: Task, config: TrainConfig, device: torch.device, processes: int) -> None:
    """Refuse what cannot fit: gradients, the two moments of AdamW, a batch, and of its activations what every layer
    hands on.
    """
    sequences = config.batch_size // config.accumulate
    numbers = 3 * model.num_parameters() + sequences * task.length * model.config.dim * len(model.config.layers)
    size = 4 * numbers // processes + 16 * config.batch_size * task.length
    device_memory.require(
        "train",
        f"a batch of {config.batch_size:,} sequences of {task.length:,} tokens and the optimiser",
        size,
        device,
        "Use a smaller batch, a larger accumulate, or a smaller model.",
    )


class _Run:
    """The state of ``train`` while it works."""

    def __init__(
        self,
        model: LanguageModel,
        task: Task,
        config: TrainConfig,
        folder: Path,
        processes: Processes,
        emit: events.Listener,
        should_stop: Callable[[], bool],
        name: str,
        label: str | None,
        measure_end: bool,
    ):
        self.model, self.task, self.config, self.folder = model, task, config, folder
        self.processes, self.emit, self.name, self.measure_end = processes, emit, name, measure_end
        self.should_stop = lambda: processes.any(should_stop())
        if config.dtype == "float64":
            model.double()
        else:
            model.float()
        operator = entry_of(model.config.layers)
        self.record = RunResult(
            operator, label or operator, config.seed, config.learning_rate, steps=config.steps, dtype=config.dtype,
            measured=measure_end or not task.measures_end(),
        )  # fmt: skip
        self.record.parameters = model.num_parameters()
        if isinstance(model, CausalLM):
            self.record.memory_bytes = {str(length): model.memory_bytes(length) for length in MEMORY_LENGTHS}
        self.learned_before = model.learned()
        self.device = processes.prepare(model, task, config)
        self.optimiser = adamw(model, weight_decay=config.weight_decay, betas=config.betas)
        _check_room(model, task, config, self.device, processes.size)
        self.curriculum = None if config.curriculum is None else Curriculum(model, config.curriculum, config.steps)
        # of every file of weights
        self.header = {"identity": run_identity(model, task, config), "operator": operator}
        self.notes: tuple[str, ...] = ()
        self.last_checkpoint: int | None = None
        self.saved: int | None = None

    # the whole

    def execute(self, threads: int) -> RunResult:
        if self.processes.begun(self.folder):
            self.progress, random_states = self.processes.restore(self.folder, self.model, self.optimiser, self.header)
            self.last_checkpoint = self.saved = self.progress.step
            self.notes = self._changes(threads)
            threads = self.progress.threads
            self.processes.first(self._require_best)
        else:
            self.processes.first(lambda: check_own(self.folder))
            random_states = {}
            if self.curriculum is not None:
                self.curriculum.close()
                self.learned_before = self.model.learned()
            self.progress = Progress(threads=threads, environment=_environment(), learned_before=self.learned_before)
            self.progress.steps_to = {
                short(value): None for value in self.config.thresholds if self.task.metric == "accuracy"
            }
        self.processes.first(lambda: remove_parts(self.folder))
        if self.curriculum is not None and self.curriculum.empty:
            self.notes += ("the model has no gates: the curriculum changes nothing",)
        if self._finished():
            return self._complete(threads)
        with deterministic(self.config.seed, threads, self.device):
            checkpoints.set_random_states(random_states, self.device)
            self.log: MetricsLog | SilentLog = SilentLog()
            self.processes.first(self._open_log)
            with self.log:
                return self._work()

    def _require_best(self) -> None:
        """Raises: ArgumentError where the best weights are asked for and were not kept."""
        best, path = self.progress.best, self.folder / checkpoints.BEST
        if not self.config.keep_best or best is None:
            return
        # a killed run may have left those of a later evaluation, which comes again
        if not path.exists() or read_header(path, checkpoints.KIND)["weights_of_step"] < best["step"]:
            raise ArgumentError(
                f"train: keep_best needs {path}, but this run was begun or went on without it, and the weights of its "
                f"best evaluation (step {best['step']}) were not kept. Leave keep_best out, or begin in another folder."
            )

    def _open_log(self) -> None:
        progress = self.progress
        self.log = MetricsLog(
            self.folder, progress.metrics_bytes, progress.metrics_sha256, elapsed=progress.seconds,
            tensorboard=self.config.tensorboard,
        )  # fmt: skip

    def _work(self) -> RunResult:
        batch = self.task.train_batch(self.progress.step, self.config.batch_size, self.config.seed)
        self.processes.warm_up(self.model, batch, self.config)
        self._begin_record()
        self._write("running")
        self._announce_start()
        try:
            status = self._loop()
        except NonFiniteError as error:
            self._write("failed", str(error))
            self._announce_end()
            raise
        self._checkpoint()
        self._arrived(self.processes.settle())
        self._inspect()
        self._write(status, "Stopped on request; run the same again to go on." if status == "stopped" else None)
        self._announce_end()
        return self.record

    def _loop(self) -> Status:
        self.checkpoint_clock = time.perf_counter()
        self.model.train()
        progress = self.progress
        while True:
            if self._evaluation_due() and not self._evaluate():
                return "stopped"
            if self._finished():
                return "done"
            if self.should_stop():
                return "stopped"
            if self._checkpoint_due():
                self._checkpoint()
                self._write("running")
            started = time.perf_counter()
            self._update(started)
            progress.seconds += time.perf_counter() - started

    def _finished(self) -> bool:
        progress = self.progress
        at_end = progress.step >= self.config.steps or progress.stopped_early
        return at_end and progress.evaluated == progress.step

    # one update

    def _update(self, started: float) -> None:
        config, progress = self.config, self.progress
        rate = learning_rate(
            progress.step,
            steps=config.steps,
            peak=config.learning_rate,
            warmup_ratio=config.warmup_ratio,
            min_ratio=config.min_lr_ratio,
        )
        batch = self.task.train_batch(progress.step, config.batch_size, config.seed)
        with self._naming_the_step():
            loss = self.processes.gradient(self.model, batch, config)
        if self.curriculum is not None:
            self.curriculum.hold(progress.step)
        norm = clip_gradient(self.model, config.clip) if math.isfinite(loss) else math.nan
        if not math.isfinite(loss):
            raise self._failed_update(f"the loss became {loss}", batch, backward=False)
        if not math.isfinite(norm):
            raise self._failed_update(f"the gradient norm became {norm} (the loss is {loss:.4g})", batch, backward=True)
        set_learning_rate(self.optimiser, rate)
        with contextlib.nullcontext() if self.curriculum is None else self.curriculum.paced(progress.step):
            self.optimiser.step()
        progress.step += 1
        progress.tokens += batch.tokens.numel()
        seconds = progress.seconds + time.perf_counter() - started
        progress.unlogged.append(loss)
        may_end = progress.step == config.steps or (config.stop_at_accuracy is not None and self._evaluation_due())
        if progress.step % config.log_every == 0 or may_end:
            mean = math.fsum(progress.unlogged) / len(progress.unlogged)
            progress.unlogged.clear()
            staged = {} if self.curriculum is None else self.curriculum.told(progress.step - 1)
            self.log.append(
                {
                    "kind": "train", "step": progress.step, "tokens": progress.tokens, "seconds": seconds,
                    "loss": mean, "learning_rate": rate, "gradient_norm": norm, **staged,
                }
            )  # fmt: skip
        self.emit(events.StepDone(self.name, progress.step, config.steps, loss, rate, norm, progress.tokens, seconds))

    def _failed_update(self, what: str, batch: Batch, *, backward: bool) -> NonFiniteError:
        where = self.processes.locate(self.model, batch, self.config, backward=backward)
        error = self._non_finite(f"{what} in step {self.progress.step + 1} of {self.config.steps}", where)
        return NonFiniteError(f"{error} This update was not applied.")

    @contextlib.contextmanager
    def _naming_the_step(self) -> Iterator[None]:
        """What a layer refuses, such as a kernel that is not positive definite, as an error of the run."""
        try:
            yield
        except NonFiniteError as error:
            step = f"a layer failed after {self.progress.step} of {self.config.steps} steps"
            raise self._non_finite(step, str(error).removesuffix(".")) from error

    def _non_finite(self, what: str, where: str) -> NonFiniteError:
        path = self.folder / (checkpoints.FILE if self.processes.whole_files else SHARDS)
        good = f"{path} (step {self.last_checkpoint})" if self.last_checkpoint is not None else "none was written yet"
        return NonFiniteError(
            f"train: {what}: {where}. Last good checkpoint: {good}. "
            "Lower the learning rate, lengthen the warm-up, or clip harder."
        )

    # evaluation

    def _evaluation_due(self) -> bool:
        step = self.progress.step
        return self.progress.evaluated != step and (
            step % self.config.evaluation_interval == 0 or step >= self.config.steps
        )

    def _evaluate(self) -> bool:
        """Evaluate this step. False if a stop was requested meanwhile."""
        config, progress = self.config, self.progress
        started = time.perf_counter()
        with evaluating(self.model), autocast(self.device, config.dtype):
            metrics = self._measured()
        progress.evaluation_seconds += time.perf_counter() - started
        if metrics is None:
            return False
        progress.evaluated = progress.step
        plain = self.processes.whole(self.model) if inspect.has_geometry(self.model) else None
        geometry = [] if plain is None else inspect.geometry(plain)
        self.log.append(
            {
                "kind": "eval", "step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds,
                **metrics, **({"geometry": geometry} if geometry else {}),
            }
        )  # fmt: skip
        self._judge(metrics)
        self.emit(events.Evaluated(self.name, progress.step, config.steps, metrics, progress.seconds))
        self._write("running")
        return True

    def _measured(self) -> dict[str, Any] | None:
        """The metrics of an evaluation; at the end of a run, and where it decides something, also those of the
        validation set; at the end also those of ``_measured_at_end``. None if a stop was requested meanwhile.
        """
        config, size = self.config, self.config.evaluation_batch_size
        total = self._read(lambda: self.task.evaluation_batches(size), "evaluation")
        if total is None:
            return None
        metrics, last = total.result(), self.progress.step == config.steps
        if last or config.decides_on_the_way:
            validation = self._read(lambda: self.task.validation_batches(size), "validation")
            if validation is None:
                return None
            if validation.positions:
                found = validation.result()
                metrics["validation"] = {name: found[name] for name in ("loss", "accuracy")}
        if not last and not self._good_enough(metrics):
            return metrics
        ended = self._measured_at_end() if self.measure_end else {}
        return None if ended is None else {**metrics, **ended}

    def _read(self, batches: Callable[[], Iterator[Batch]], name: str) -> Accumulator | None:
        """What the model makes of a set of batches. None if a stop was requested meanwhile."""
        predict = self.processes.predictor(self.model)
        total = Accumulator(self.task.bytes_per_token)
        for batch in self._until_stopped(batches()):
            if batch is None:
                return None
            with self._naming_the_step():
                accumulate(predict, batch, total, self.device)
        if total.positions and not math.isfinite(loss := total.result()["loss"]):
            raise self._non_finite(
                f"the {name} loss became {loss} after step {self.progress.step}", self._locate_in(batches())
            )
        return total

    def _measured_at_end(self) -> dict[str, Any] | None:
        """The metrics that only a finished run gets: transfer batches and the task's own examination. None if a stop
        was requested meanwhile.
        """
        config, size = self.config, self.config.evaluation_batch_size
        predict = self.processes.predictor(self.model)
        cells, marks = Cells(), Marks()
        for batch in self._until_stopped(self.task.transfer_batches(size)):
            if batch is None:
                return None
            accumulate(predict, batch, cells.of(batch), self.device, config.transfer_piece)
        for found in self._until_stopped(self.task.examine(cast(Examinee, self.model), size)):
            if found is None:
                return None
            marks.add(found)
        ended = {"transfer": cells.result(), "examined": marks.result()}
        return {name: found for name, found in ended.items() if found}

    def _until_stopped(self, items: Iterable[T]) -> Iterator[T | None]:
        """Yield the items, and report progress after each. Once a stop is requested, yield None and end."""
        for index, item in enumerate(items):
            if self.should_stop():
                yield None
                return
            yield item
            self.emit(events.EvaluationProgress(self.name, self.progress.step, index + 1))

    def _good_enough(self, metrics: dict[str, Any]) -> bool:
        stop = self.config.stop_at_accuracy
        return stop is not None and metrics.get("validation", metrics)["accuracy"] >= stop

    def _value(self, metrics: dict[str, Any]) -> float:
        """What the best evaluation is best by: weights that are kept are chosen by the validation set."""
        return (metrics.get("validation", metrics) if self.config.keep_best else metrics)[self.task.metric]

    def _judge(self, metrics: dict[str, Any]) -> None:
        """Keep final and best, note thresholds, and end the run where it is good enough."""
        progress = self.progress
        progress.final = metrics
        value = self._value(metrics)
        best = None if progress.best is None else self._value(progress.best)
        if best is None or (value > best if self.task.metric == "accuracy" else value < best):
            progress.best = {
                "step": progress.step,
                **{name: value for name, value in metrics.items() if name not in _AT_END},
            }
            plain = self.processes.whole(self.model) if self.config.keep_best else None
            if plain is not None:
                checkpoints.save_weights(self.folder / checkpoints.BEST, plain, self.header, progress.step)
        if self.task.metric == "accuracy":
            for threshold, step in progress.steps_to.items():
                if step is None and metrics["accuracy"] >= float(threshold):
                    progress.steps_to[threshold] = progress.step
            progress.stopped_early = self._good_enough(metrics)

    def _locate_in(self, batches: Iterator[Batch]) -> str:
        self.model.eval()
        for batch in batches:
            where = self.processes.locate(self.model, batch, replace(self.config, accumulate=1), backward=False)
            if "run again is finite" not in where:
                return where
        return "the same batches run again are finite"

    # files

    def _checkpoint_due(self) -> bool:
        config, step = self.config, self.progress.step
        if step == 0 or step == self.saved:
            return False
        if config.checkpoint_every is not None and step % config.checkpoint_every == 0:
            return True
        if config.checkpoint_seconds is None:
            return False
        return self.processes.any(time.perf_counter() - self.checkpoint_clock >= config.checkpoint_seconds)

    def _checkpoint(self) -> None:
        started = time.perf_counter()
        progress = self.progress
        progress.peak_memory_bytes = self._peak_bytes()
        progress.metrics_bytes, progress.metrics_sha256 = self.log.sync()
        written = self.processes.save(self.folder, self.model, self.optimiser, progress, self.header)
        self.saved = progress.step
        self.checkpoint_clock = time.perf_counter()
        progress.checkpoint_seconds += self.checkpoint_clock - started
        self._arrived(written)

    def _arrived(self, written: Iterable[Written]) -> None:
        for step, path in written:
            self.last_checkpoint = step
            self.emit(events.Checkpointed(self.name, step, str(path)))

    def _peak_bytes(self) -> int:
        return max(self.progress.peak_memory_bytes, self.processes.bytes(self.model) + self.memory.growth())

    def _begin_record(self) -> None:
        """What the record says of the run as a whole; from now on its memory is measured."""
        record, self.memory = self.record, PeakMemory(self.device)
        record.threads, record.device = self.progress.threads, str(self.device)
        record.learned_before, record.peak_memory_method = self.progress.learned_before, self.memory.method

    def _write(self, status: Status, message: str | None = None) -> None:
        record, progress = self.record, self.progress
        record.status, record.message = status, message
        record.steps_done, record.stopped_early = progress.step, progress.stopped_early
        record.seconds = progress.seconds
        record.evaluation_seconds, record.checkpoint_seconds = progress.evaluation_seconds, progress.checkpoint_seconds
        record.tokens_per_second = progress.tokens / progress.seconds if progress.seconds else None
        record.peak_memory_bytes = self._peak_bytes()
        record.final, record.best, record.steps_to = progress.final, progress.best, progress.steps_to
        if self.processes.writes:
            record.write(self.folder)

    def _inspect(self) -> None:
        """What the model learned, into the record; once it is done, what its memories hold, into a file of its own."""
        plain = self.processes.whole(self.model)
        if plain is None:
            return
        self.record.learned = plain.learned()
        if not self.processes.whole_files:
            checkpoints.save_weights(self.folder / checkpoints.FILE, plain, self.header, self.progress.step)
        if self._finished():
            inspect.write(self.folder, plain, self.task)

    def _complete(self, threads: int) -> RunResult:
        """A run whose last checkpoint is the last step. Its record may be complete, may have been lost by a kill just
        before it was written, or may lack the measurement at the end.
        """
        self.processes.first(lambda: kept(self.folder, self.progress.metrics_bytes, self.progress.metrics_sha256))
        found = RunResult.read(self.folder) if (self.folder / RECORD).exists() else None
        if found is not None and found.status == "done" and (found.measured or not self.measure_end):
            self.record = found
            self._announce_end(skipped=True)
            return self.record
        self._begin_record()
        if self.measure_end and not self._add_end(threads):
            if found is not None:
                self.record = found
            self._announce_end()
            return self.record
        self._inspect()
        self._write("done")
        self._announce_end(skipped=not self.measure_end)
        return self.record

    def _add_end(self, threads: int) -> bool:
        """Add the metrics of a finished run to ``final``. False if a stop was requested meanwhile."""
        self._announce_start()
        started = time.perf_counter()
        with (
            deterministic(self.config.seed, threads, self.device),
            evaluating(self.model),
            autocast(self.device, self.config.dtype),
        ):
            ended = self._measured_at_end()
        self.progress.evaluation_seconds += time.perf_counter() - started
        if ended is None:
            return False
        self.progress.final = {**(self.progress.final or {}), **ended}
        return True

    def _changes(self, threads: int) -> tuple[str, ...]:
        """What of the surroundings is not as it was when the run began, and so may change the bits."""
        now = _environment()
        found = [
            f"{name} {old} → {now[name]}"
            for name, old in self.progress.environment.items()
            if now.get(name, old) != old
        ]
        if threads != self.progress.threads:
            found.append(f"threads stay {self.progress.threads}, as the run began (the process has {threads})")
        return tuple(found)

    def _announce_start(self) -> None:
        self.emit(
            events.RunStarted(
                self.name, self.record.operator, self.record.label, self.config.seed, self.config.learning_rate,
                self.progress.step, self.config.steps, self.notes,
            )
        )  # fmt: skip

    def _announce_end(self, *, skipped: bool = False) -> None:
        self.emit(self.record.ended(self.name, skipped=skipped))
