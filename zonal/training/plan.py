"""How many updates a budget allows: each operator is timed on the real task, then every run gets the same number.

    budget · 0.9 - time spent so far  ≥  time until the last run ends, of runs that each take
                                         n · update + (evaluations(n) + 1) · evaluation + overhead

(the last of them is that of the validation set, where a task has one) and are started in order as one of the ``jobs``
becomes free, with ``end`` for each operator and seed. The largest such n is taken. A tenth is kept back, since a
machine is never as free for ten minutes as it was for one second.
"""

import bisect
import heapq
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import cast

import torch

from zonal.errors import ArgumentError
from zonal.evaluation.metrics import Accumulator, accumulate
from zonal.models import LanguageModel, language_model
from zonal.tasks.task import Examinee
from zonal.training.config import TrainConfig
from zonal.training.environment import deterministic
from zonal.training.optimiser import adamw, set_learning_rate
from zonal.training.spec import ComparisonSpec
from zonal.training.step import autocast, clip_gradient, forward_backward, split

SAFETY = 0.9
# parallel runs share caches and memory bandwidth
CROWDING = 1.15
# files, TensorBoard, checkpoints
_OVERHEAD_SECONDS = 0.25
# a process that starts anew imports torch
WORKER_SECONDS = 4.0
_MEASURED_SECONDS = 0.5
_LEAST_UPDATES, _MOST_UPDATES = 3, 20
_MEASURED_BATCHES = 3


class SmallBudgetError(ArgumentError):
    """A budget does not allow ten updates. ``needed``: seconds that would."""

    def __init__(self, message: str, needed: int):
        super().__init__(message)
        self.needed = needed


@dataclass(frozen=True)
class Timing:
    """Seconds of one operator: an update (median after a warm-up), a whole evaluation, the measurement at the end of a
    run, and everything else of a run.
    """

    update: float
    evaluation: float
    overhead: float
    end: float = 0.0


@dataclass(frozen=True)
class StepPlan:
    """The numbers of steps, and the measurements behind them. comparison.json keeps it, so that a resume reuses it."""

    steps: int
    timings: dict[str, Timing]
    estimated_seconds: float


def measure(spec: ComparisonSpec, operator: str, threads: int, should_stop: Callable[[], bool]) -> Timing | None:
    """Time ``operator`` on the task of ``spec`` with a model that is thrown away. None if a stop was requested."""
    config = spec.training
    device = torch.device(spec.device)
    for _ in range(2):  # the second time counts: at the first model of a process, torch loads parts of itself
        started = time.perf_counter()
        model = language_model(spec.model_for(operator), spec.seeds[0]).to(device)
        if config.dtype == "float64":
            model.double()
        optimiser = adamw(model, weight_decay=config.weight_decay, betas=config.betas)
        set_learning_rate(optimiser, min(spec.learning_rates))
        overhead = time.perf_counter() - started + _OVERHEAD_SECONDS
    updates: list[float] = []
    with deterministic(spec.seeds[0], threads, device):
        # one more than is counted: the first update fills caches and may compile or calibrate
        while len(updates) <= _LEAST_UPDATES or (
            len(updates) <= _MOST_UPDATES and sum(updates[1:]) < _MEASURED_SECONDS
        ):
            if should_stop():
                return None
            started = time.perf_counter()
            batch = spec.task.train_batch(len(updates), config.batch_size, spec.seeds[0])
            forward_backward(model, split(batch, config.accumulate, device), config.dtype)
            clip_gradient(model, config.clip)
            optimiser.step()
            updates.append(time.perf_counter() - started)
        model.eval()
        with torch.no_grad(), autocast(device, config.dtype):
            found = _evaluated(model, spec, should_stop)
    return None if found is None else Timing(median(updates[1:]), found[0], overhead, found[1])


def _evaluated(
    model: LanguageModel, spec: ComparisonSpec, should_stop: Callable[[], bool]
) -> tuple[float, float] | None:
    """Seconds of a whole evaluation, and of the measurement at the end of a run. None if a stop was requested."""
    size, device, total = spec.training.evaluation_batch_size, torch.device(spec.device), Accumulator()
    batches: list[float] = []
    making, tokens, count = 0.0, 0, 0
    started = time.perf_counter()
    for count, batch in enumerate(spec.task.evaluation_batches(size), start=1):
        making += time.perf_counter() - started
        if count <= _MEASURED_BATCHES:
            if should_stop():
                return None
            started = time.perf_counter()
            accumulate(model.predict, batch, total, device)
            batches.append(time.perf_counter() - started)
            tokens += batch.tokens.numel()
        started = time.perf_counter()
    # what a finished run is measured on is long; its time is taken from its tokens
    started = time.perf_counter()
    transferred = sum(batch.tokens.numel() for batch in spec.task.transfer_batches(size))
    end = time.perf_counter() - started + transferred * sum(batches) / tokens
    # an examination has about as many batches as an evaluation; one is enough to know what they take
    started = time.perf_counter()
    if next(iter(spec.task.examine(cast(Examinee, model), size)), None) is not None:
        end += (time.perf_counter() - started) * count
    return making + count * median(batches), end


def evaluations(config: TrainConfig, steps: int) -> int:
    """How many evaluations a run of ``steps`` updates makes."""
    return math.ceil(steps / replace(config, steps=steps).evaluation_interval)


def estimate(spec: ComparisonSpec, timings: dict[str, Timing], steps: int, jobs: int) -> float:
    """Seconds that all runs of ``spec`` take with ``steps`` updates each."""
    count, ends = evaluations(spec.training, steps), [timing.end for timing in timings.values()]
    if next(spec.task.validation_batches(1), None) is not None:  # is read like an evaluation
        count += count if spec.training.decides_on_the_way else 1
    runs = [steps * timing.update + count * timing.evaluation + timing.overhead for timing in timings.values()]
    measured = [run + end for run, end in zip(runs, ends, strict=True)]
    if len(spec.learning_rates) == 1:
        rounds = [measured * len(spec.seeds)]
    else:  # only runs at the best rate are measured at their end
        tried = len(spec.screening)
        rounds = [
            runs * (tried * len(spec.learning_rates)),
            ends * tried + measured * (len(spec.seeds) - tried),
        ]
    total = sum(_until_all_end(each, jobs) for each in rounds)
    return total if jobs == 1 else total * CROWDING + WORKER_SECONDS


def _until_all_end(seconds: Sequence[float], jobs: int) -> float:
    """Seconds until the last of some runs ends, each of which starts when one of ``jobs`` places becomes free."""
    free = [0.0] * jobs
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def decide_steps(spec: ComparisonSpec, timings: dict[str, Timing], spent: float, jobs: int) -> StepPlan:
    """The number of updates of every run.

    Raises: SmallBudgetError when the budget does not allow ten updates; it says what budget would.
    """
    most = spec.training.steps
    if spec.budget_seconds is None:
        return StepPlan(most, timings, estimate(spec, timings, most, jobs))
    left = spec.budget_seconds * SAFETY - spent
    least = min(10, most)

    def fits(steps: int) -> bool:
        return estimate(spec, timings, steps, jobs) <= left

    # up to 100 steps each is tried: a run of more steps may have fewer evaluations, and take less time
    few = range(least, min(100, most) + 1)
    low = max(filter(fits, few), default=None)
    if low is None:
        needed = math.ceil((spent + estimate(spec, timings, least, jobs)) / SAFETY)
        runs = len(spec.operators) * spec.runs_each
        raise SmallBudgetError(
            f"compare: a budget of {spec.budget_seconds:g} s is too small for {least} updates in each of {runs} runs; "
            f"about {needed} s are needed. Give more time, or fewer seeds, learning rates or operators, a "
            "smaller batch, or a smaller model.",
            needed,
        )
    if low == few[-1]:  # more steps take longer from here on
        low += bisect.bisect_left(range(low + 1, most + 1), True, key=lambda steps: not fits(steps))
    return StepPlan(low, timings, estimate(spec, timings, low, jobs))
