"""What a search is asked for, as a value with a JSON form."""

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from zonal import tasks
from zonal.errors import ArgumentError, unknown_name
from zonal.evaluation.selection import capped
from zonal.limits import RATIO, SEED, SHARE, Between, whole_numbers
from zonal.models import ModelConfig
from zonal.names import known_names
from zonal.store import understood
from zonal.training import curriculum
from zonal.training.config import TrainConfig, first_difference
from zonal.training.environment import check_device
from zonal.training.folder import stored_in
from zonal.training.record import RunResult
from zonal.training.search.moves import KINDS, PALETTE, model_of, refusal
from zonal.training.search.regime import Regime, canonical
from zonal.training.spec import ComparisonSpec

FILE = "search.json"
SCHEMA = 1
Rule = Literal["threshold", "metropolis"]
Measure = Literal["metric", "loss", "steps"]


@dataclass(frozen=True, kw_only=True)
class SearchSettings:
    """The settings of a search that ``SearchSpec`` and the command line share, as keywords."""

    rounds: Annotated[int, Between(1, 100_000)] = 8
    """The largest number of rounds. Each round decides on the best of some moves."""
    width: Annotated[int, Between(1, 1024)] = 4
    """Moves tried per round."""
    rungs: Annotated[int, Between(1, 64)] = 2
    """Rungs of successive halving; the last one has all steps. Each rung starts training from the beginning."""
    eta: Annotated[int, Between(2, 1024)] = 2
    """Each rung trains this many times as long as the one before, and one in this many regimes continues."""
    measure: Measure = "metric"
    """The number to minimise: that of the task (1 - accuracy, or loss), the held-out loss, or steps to the target."""
    target: Annotated[float, SHARE] = 0.9
    """With measure steps: the accuracy at which runs end."""
    rule: Rule = "threshold"
    """The rule for accepting a move by its effort, the mean difference in the measure."""
    threshold: Annotated[float, Between(-1e6, 1e6)] = 0.0
    """With rule threshold: the largest effort that is accepted. 0 accepts moves that are not worse."""
    temperature: Annotated[float, RATIO] = 0.02
    """With rule metropolis: an effort e is accepted with probability min(1, exp(-e / temperature))."""
    draw: Annotated[int, SEED] = 0
    """Seed of the search itself: which moves are tried, and whether a worse one is accepted."""


@known_names
@dataclass(frozen=True)
class SearchSpec(SearchSettings):
    """What a search is asked for; see also ``SearchSettings``.

    task: what every regime is trained and evaluated on.
    model: the decoder; its layers are the start's, and a move may change them and ``head_dim``.
    training: settings of all runs; ``steps`` is what a regime is given on the last rung, ``learning_rate`` the start's.
    seeds: data order and initial weights; the same for every regime, whose differences are paired by them.
    kinds, palette: which moves are proposed, and what one of placement may put into a layer.
    budget_seconds: of training and evaluating, summed over all runs; None = no limit. A rung begins when it is expected
    to fit.

    Raises: ArgumentError naming the field.
    """

    task: tasks.Task
    model: ModelConfig
    training: TrainConfig
    seeds: tuple[int, ...] = (0,)
    kinds: tuple[str, ...] = KINDS
    palette: tuple[str, ...] = PALETTE
    budget_seconds: float | None = None
    device: str = "cpu"
    title: str = "Search over regimes of attention"
    command: str = ""

    def __post_init__(self):
        for name in ("seeds", "kinds", "palette"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        whole_numbers("SearchSpec", self)
        # one name for one model
        object.__setattr__(
            self, "model", replace(self.model, layers=tuple(canonical(spec) for spec in self.model.layers))
        )
        for name in ("rounds", "width", "rungs"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        self._require("eta", self.eta >= 2, "at least 2")
        least = self.eta ** (self.rungs - 1)
        allowed = next(rungs for rungs in itertools.count(1) if self.eta**rungs > self.training.steps)
        self._require(
            "rungs",
            self.training.steps >= least,
            f"few enough that the first has a step: {self.training.steps} steps allow {allowed}",
        )
        self._require("seeds", bool(self.seeds) and len(set(self.seeds)) == len(self.seeds), "at least one, each once")
        self._require("measure", self.measure in get_args(Measure), "'metric', 'loss' or 'steps'")
        self._require("rule", self.rule in get_args(Rule), "'threshold' or 'metropolis'")
        self._require("threshold", math.isfinite(self.threshold), "a finite effort")
        self._require("temperature", math.isfinite(self.temperature) and self.temperature > 0, "an effort above 0")
        self._require("budget_seconds", self.budget_seconds is None or self.budget_seconds > 0, "positive, or None")
        if self.measure == "steps":
            self._require(
                "measure",
                self.task.metric == "accuracy",
                f"'metric' or 'loss' on a task measured by {self.task.metric}",
            )
            self._require("target", 0 < self.target <= 1, "an accuracy in (0, 1]")
        self._require("kinds", bool(self.kinds), f"some of {', '.join(KINDS)}")
        for kind in self.kinds:
            if kind not in KINDS:
                raise unknown_name("SearchSpec", "kind of move", kind, KINDS)
        for entry in self.palette:
            canonical(entry)  # refuses what is no spec; sizes that do not fit are moves that are not made
        check_device(self.device)
        reason = refusal(self.start, self.model)
        if reason is not None:
            raise ArgumentError(f"SearchSpec: the start is no model: {reason}")
        if self.training.curriculum is not None:
            curriculum.check(self.start.layers, "SearchSpec")
        self.comparison(self.start, self.training.steps)

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ArgumentError(f"SearchSpec: {name} must be {what}, got {getattr(self, name)!r}.")

    @property
    def start(self) -> Regime:
        """Where the search begins."""
        own = None if self.model.dim % self.model.heads else self.model.dim // self.model.heads
        return Regime(
            self.model.layers, self.training.learning_rate, None if self.model.head_dim == own else self.model.head_dim
        )

    @property
    def steps(self) -> tuple[int, ...]:
        """Training steps on each rung; the last are ``training.steps``."""
        return tuple(max(1, self.training.steps // self.eta ** (self.rungs - 1 - rung)) for rung in range(self.rungs))

    def comparison(self, regime: Regime, steps: int) -> ComparisonSpec:
        """One regime on one rung: its seeds, trained by the machinery of comparisons."""
        ends: dict[str, Any] = {}
        if self.measure == "steps":
            ends = {"stop_at_accuracy": self.target, "thresholds": (self.target,)}
        return ComparisonSpec(
            task=self.task,
            model=model_of(regime, self.model),
            training=replace(
                self.training,
                **ends,
                steps=steps,
                learning_rate=regime.learning_rate,
                # a move may lead to operators without gates, which learn as ever
                curriculum=self.training.curriculum if curriculum.any_gated(regime.layers) else None,
            ),
            operators=(regime.operator,),
            seeds=self.seeds,
            labels=(regime.label,),
            device=self.device,
            title=f"{regime.label}, {steps} steps",
            command=self.command,
        )

    def cost(self, run: RunResult) -> float | None:
        """What a finished run is judged by, smaller being better, on the validation set if its task has one; None for
        a run that failed.
        """
        if run.status != "done" or run.final is None:
            return None
        if self.measure == "steps":
            return float(run.steps_done)
        return self._value(run.final.get("validation", run.final))

    def reported(self, run: RunResult) -> float | None:
        """``cost`` on the evaluation set, by which nothing was chosen; None where that set is what ``cost`` reads."""
        if self.measure == "steps" or run.status != "done" or run.final is None or "validation" not in run.final:
            return None
        return self._value(run.final)

    def _value(self, metrics: Mapping[str, Any]) -> float | None:
        name = "loss" if self.measure == "loss" else self.task.metric
        value = metrics[name]
        if value is None or not math.isfinite(value):
            return None
        return 1 - capped(value, self.training.stop_at_accuracy) if name == "accuracy" else value

    @property
    def measured(self) -> str:
        """``cost`` in words."""
        if self.measure == "steps":
            return f"steps to {self.target:g} accuracy"
        return (
            "error (1 - accuracy)" if self.measure == "metric" and self.task.metric == "accuracy" else "held-out loss"
        )

    @property
    def guess(self) -> float | None:
        """``cost`` of a model that has not learned the task; None where that is not known, or cannot be worse."""
        found = self.task.guess()
        if found is None or found.trained is not None:
            return None
        if self.task.metric == "loss":
            return found.value
        return 1 - found.value if self.measure == "metric" and found.value < 1 else None

    def identity(self) -> dict[str, Any]:
        """What must agree for a folder to be this search, as JSON."""
        names = ("kinds", "palette", "budget_seconds", *(field.name for field in dataclasses.fields(SearchSettings)))
        values = {
            "task": tasks.checked_config("SearchSpec", self.task),
            "model": self.model.to_dict(),
            "training": {name: value for name, value in self.training.trajectory().items() if name != "seed"},
            "seeds": self.seeds,
            **{name: getattr(self, name) for name in names},
            "run_on": self.device,
        }
        return json.loads(json.dumps(values))

    def difference(self, there: "SearchSpec") -> tuple[str, Any, Any] | None:
        """The first setting in which this differs from the search in a folder, there and here."""
        return first_difference(there.identity(), self.identity())

    def to_dict(self) -> dict[str, Any]:
        """search.json, but for the machine; ``read_search`` reverses it."""
        return {
            "schema": SCHEMA,
            "title": self.title,
            "command": self.command,
            **self.identity(),
            "training": self.training.to_dict(),
            "task_description": self.task.describe(),
            "metric": self.task.metric,
            "measured": self.measured,
            "guess": self.guess,
        }


def read_search(directory: Path, task: tasks.Task | None = None) -> tuple[SearchSpec, dict[str, Any]]:
    """The spec in a folder and everything else its search.json says. task: taken where it is the stored one.

    Raises: FileFormatError when the folder holds no search of this version.
    """
    path = directory / FILE
    stored = stored_in(directory, FILE, SCHEMA, "search", "search")
    with understood("search", path):
        names = {field.name for field in dataclasses.fields(SearchSpec)} - {"task", "model", "training", "device"}
        plain: dict[str, Any] = {
            name: tuple(stored[name]) if isinstance(stored[name], list) else stored[name] for name in names
        }
        spec = SearchSpec(
            tasks.restored(stored["task"], task), ModelConfig.from_dict(stored["model"]),
            TrainConfig.from_dict(stored["training"]), device=stored["run_on"], **plain,
        )  # fmt: skip
    return spec, stored
