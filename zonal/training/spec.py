"""What a comparison compares: operators × learning rates × seeds on one task in one model, as a value with a JSON form."""

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zonal import tasks
from zonal.errors import ArgumentError
from zonal.models import ModelConfig
from zonal.models.layers import entry_of, is_list, layer_list, layers_for
from zonal.report.published import Published
from zonal.store import understood
from zonal.training import curriculum
from zonal.training.config import TrainConfig
from zonal.training.environment import check_device
from zonal.training.folder import stored_in
from zonal.typed import check_fields

FILE = "comparison.json"
SCHEMA = 1
SLOT = "operator"
"""What stands in ``model.layers`` of comparison.json where each run puts its operator."""


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison; ``name`` is its folder relative to the comparison's."""

    name: str
    operator: str
    label: str
    seed: int
    learning_rate: float


@dataclass(frozen=True)
class ComparisonSpec:
    """
    task: what all operators are trained and evaluated on.
    model: the decoder; every entry of ``layers`` gives way to the operator of the run, so only their number counts.
    training: settings of all runs. ``steps`` is the number for every run, or with a budget the most allowed;
        ``learning_rate`` and ``seed`` give way to the grids below.
    operators: specs such as "softmax", "ska(power=1)" or "mamba2", each once; "[mamba2*3, ska]" is a model with these layers.
    seeds: data order and initial weights; the same for every operator.
    learning_rates: the grid, the same for every operator; empty means ``training.learning_rate`` alone.
    budget_seconds: wall-clock for everything, measuring and evaluating included; None takes ``training.steps``.
    labels: names for people, one an operator; empty takes the specs.
    device: "cpu", "cuda" or "cuda:1".
    title, command: for the report; the command is what remakes the comparison.
    published: for the report: what a paper prints, to stand beside.

    Raises: ArgumentError naming the field.
    """

    task: tasks.Task
    model: ModelConfig
    training: TrainConfig
    operators: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    learning_rates: tuple[float, ...] = ()
    budget_seconds: float | None = None
    labels: tuple[str, ...] = ()
    device: str = "cpu"
    title: str = "Comparison of attention operators"
    command: str = ""
    published: Published | None = None

    def __post_init__(self):
        # one name for one model, as its runs record it
        object.__setattr__(
            self,
            "operators",
            tuple(entry_of(layer_list(entry)) if is_list(entry) else entry for entry in self.operators),
        )
        for name in ("operators", "seeds", "learning_rates", "labels"):
            values = tuple(getattr(self, name))
            object.__setattr__(self, name, values)
            if name != "labels" and len(set(values)) != len(values):
                raise ArgumentError(f"ComparisonSpec: {name} must not repeat, got {', '.join(map(str, values))}.")
        if not self.operators or not self.seeds:
            raise ArgumentError("ComparisonSpec: at least one operator and one seed are required.")
        for operator in self.operators:
            self.model_for(operator)  # refuses what is no model
        if self.training.curriculum is not None:
            curriculum.check(
                [layer for operator in self.operators for layer in self.model_for(operator).layers], "ComparisonSpec"
            )
        if self.labels and len(self.labels) != len(self.operators):
            raise ArgumentError(
                f"ComparisonSpec: labels needs one name an operator ({len(self.operators)}), got {len(self.labels)}."
            )
        if not self.learning_rates:
            object.__setattr__(self, "learning_rates", (self.training.learning_rate,))
        for rate in self.learning_rates:
            replace(self.training, learning_rate=rate)
        for seed in self.seeds:
            replace(self.training, seed=seed)
        if self.budget_seconds is not None and not self.budget_seconds > 0:
            raise ArgumentError(f"ComparisonSpec: budget_seconds must be positive or None, got {self.budget_seconds}.")
        check_device(self.device)
        if self.model.vocab_size != self.task.vocab_size:
            raise ArgumentError(
                f"ComparisonSpec: model.vocab_size must be that of the task ({self.task.vocab_size}), got {self.model.vocab_size}."
            )

    def model_for(self, operator: str) -> ModelConfig:
        """The model with ``operator`` in every layer, or with the layers of a list such as "[mamba2*3, ska]"."""
        return replace(self.model, layers=layers_for(operator, len(self.model.layers)))

    def runs(self) -> list[PlannedRun]:
        """All runs, in the order they are run: the first seed of every operator comes before the second of any."""
        slugs = self._slugs()
        labels = self.labels or self.operators
        return [
            PlannedRun(f"runs/{slugs[operator]}/seed-{seed}-lr-{_short(rate)}", operator, label, seed, rate)
            for seed in self.seeds
            for rate in self.learning_rates
            for operator, label in zip(self.operators, labels, strict=True)
        ]

    def _slugs(self) -> dict[str, str]:
        slugs: dict[str, str] = {}
        for operator in self.operators:
            base = re.sub(r"[^a-z0-9.]+", "-", operator.lower()).strip("-.") or "operator"
            slug, number = base, 2
            while slug in slugs.values():
                slug, number = f"{base}-{number}", number + 1
            slugs[operator] = slug
        return slugs

    def identity(self) -> dict[str, Any]:
        """What must agree for a folder to be this comparison, as JSON."""
        training = self.training.trajectory()
        del training["learning_rate"], training["seed"]
        values = {
            "task": self.task.config(),
            "model": {**self.model.to_dict(), "layers": [SLOT] * len(self.model.layers)},
            "training": training,
            "operators": self.operators,
            "seeds": self.seeds,
            "learning_rates": self.learning_rates,
            "budget_seconds": self.budget_seconds,
            "run_on": self.device,
        }
        return json.loads(json.dumps(values))

    def to_dict(self) -> dict[str, Any]:
        """The part of comparison.json that says what was asked; ``from_file`` reverses it."""
        published = {} if self.published is None else {"published": self.published.to_dict()}
        return {
            "schema": SCHEMA,
            "title": self.title,
            "command": self.command,
            **self.identity(),
            "training": self.training.to_dict(),
            "labels": list(self.labels or self.operators),
            "task_description": self.task.describe(),
            "metric": self.task.metric,
            **published,
        }


def _short(rate: float) -> str:
    """0.001 rather than 0.0010000, but never two rates in one folder."""
    return f"{rate:g}" if float(f"{rate:g}") == rate else repr(rate)


@dataclass(frozen=True)
class _Stored:
    """The plain values of comparison.json, which a file may have as anything."""

    operators: list[str]
    seeds: list[int]
    learning_rates: list[float]
    labels: list[str]
    budget_seconds: float | None
    run_on: str
    title: str
    command: str
    steps: int
    requested_steps: int
    plan: dict[str, Any]
    device: dict[str, Any]


def read_comparison(directory: Path) -> tuple[ComparisonSpec, dict[str, Any]]:
    """The spec in a folder and everything else its comparison.json says.

    Raises: FileFormatError when the folder holds no comparison of this version.
    """
    path = directory / FILE
    stored = stored_in(directory, FILE, SCHEMA, "compare", "comparison")
    with understood("compare", path):
        check_fields(FILE, _Stored, stored)
        operators = tuple(stored["operators"])
        spec = ComparisonSpec(
            task=tasks.from_config(stored["task"]),
            model=ModelConfig.from_dict(
                {**stored["model"], "layers": layers_for(operators[0], len(stored["model"]["layers"]))}
            ),
            training=TrainConfig.from_dict({**stored["training"], "steps": stored["requested_steps"]}),
            operators=operators,
            seeds=tuple(stored["seeds"]),
            learning_rates=tuple(stored["learning_rates"]),
            budget_seconds=stored["budget_seconds"],
            labels=tuple(stored["labels"]),
            device=stored["run_on"],
            title=stored["title"],
            command=stored["command"],
            published=Published.from_dict(stored["published"], path) if "published" in stored else None,
        )
    return spec, stored
