"""A comparison's specification: operators × learning rates × seeds on one task and model, with a JSON form."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from zonal import tasks
from zonal.errors import ArgumentError
from zonal.limits import whole_numbers
from zonal.models import ModelConfig
from zonal.models.layers import canonical_layers, declarations, entry_of, is_list, layer_list, layers_for
from zonal.names import known_names
from zonal.report.published import Published
from zonal.store import understood
from zonal.training import curriculum
from zonal.training.config import TrainConfig, first_difference, short
from zonal.training.environment import check_device
from zonal.training.folder import stored_in
from zonal.typed import check_fields, made

FILE = "comparison.json"
SCHEMA = 1
GRID = ("operators", "seeds", "learning_rates", "screening_seeds", "shapes")
"""The fields of comparison.json that say which runs there are."""
SLOT = "operator"
"""What stands in ``model.layers`` of comparison.json where each run puts its operator."""
# of the 255 bytes that a name may have, some are left for the number that tells equal names apart
_LONGEST_SLUG, _CUT_SLUG = 250, 100


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison; ``name`` is its folder relative to the comparison's."""

    name: str
    operator: str
    label: str
    seed: int
    learning_rate: float


@known_names
@dataclass(frozen=True)
class ComparisonSpec:
    """
    task: what all operators are trained and evaluated on.
    model: the decoder; every entry of ``layers`` gives way to the operator of the run, so only their number counts.
    training: settings of all runs. ``steps`` is the number for every run, or with a budget the most allowed;
        ``learning_rate`` and ``seed`` give way to the grids below.
    operators: specs such as "softmax", "ska(power=1)" or "mamba2", each once; "[mamba2*3, ska]" is a model with these
    layers.
    seeds: data order and initial weights; the same for every operator.
    learning_rates: the grid, the same for every operator; empty means ``training.learning_rate`` alone.
    screening_seeds: only the first so many seeds try all rates; the others take the best rate of their operator on
        those. None, as many as there are seeds, or one rate: all seeds try all rates.
    budget_seconds: wall-clock for everything, measuring and evaluating included; None takes ``training.steps``.
    labels: names for people, one an operator; empty takes the specs.
    device: "cpu", "cuda" or "cuda:1".
    title, command: for the report; the command is what remakes the comparison.
    published: for the report: what a paper prints, to stand beside.
    shapes: operator → its model in place of ``model``, for baselines of another size. Only the number of its layers
        counts, as in ``model``.

    Raises: ArgumentError naming the field.
    """

    task: tasks.Task
    model: ModelConfig
    training: TrainConfig
    operators: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    learning_rates: tuple[float, ...] = ()
    screening_seeds: int | None = None
    budget_seconds: float | None = None
    labels: tuple[str, ...] = ()
    device: str = "cpu"
    title: str = "Comparison of attention operators"
    command: str = ""
    published: Published | None = None
    shapes: Mapping[str, ModelConfig] = field(default_factory=dict)

    def __post_init__(self):
        # one name for one model, as its runs record it
        object.__setattr__(self, "operators", tuple(map(_one_name, self.operators)))
        object.__setattr__(self, "shapes", {_one_name(entry): model for entry, model in self.shapes.items()})
        for name in ("seeds", "learning_rates", "labels"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if not self.learning_rates:
            object.__setattr__(self, "learning_rates", (self.training.learning_rate,))
        whole_numbers("ComparisonSpec", self)
        self._check_grid()
        self._check_models()
        # one name for one comparison; and no seed waits for others where there is one rate
        if self.screening_seeds == len(self.seeds) or len(self.learning_rates) < 2:
            object.__setattr__(self, "screening_seeds", None)
        self.training.check_metric("ComparisonSpec", self.task.metric)
        if self.budget_seconds is not None and not self.budget_seconds > 0:
            raise ArgumentError(f"ComparisonSpec: budget_seconds must be positive or None, got {self.budget_seconds}.")
        check_device(self.device)

    def _check_grid(self) -> None:
        """Operators, their labels, seeds and learning rates."""
        same = {
            "operators": tuple(map(canonical_layers, self.operators)),
            "seeds": self.seeds,
            "learning_rates": self.learning_rates,
        }
        for name, values in same.items():
            if len(set(values)) != len(values):
                raise ArgumentError(
                    f"ComparisonSpec: {name} must not repeat, got {', '.join(map(str, getattr(self, name)))}."
                )
        if not self.operators or not self.seeds:
            raise ArgumentError("ComparisonSpec: at least one operator and one seed are required.")
        if self.labels and len(self.labels) != len(self.operators):
            raise ArgumentError(
                f"ComparisonSpec: labels needs one name an operator ({len(self.operators)}), got {len(self.labels)}."
            )
        for rate in self.learning_rates:
            replace(self.training, learning_rate=rate)
        for seed in self.seeds:
            replace(self.training, seed=seed)
        if self.screening_seeds is not None and not 1 <= self.screening_seeds <= len(self.seeds):
            raise ArgumentError(
                "ComparisonSpec: screening_seeds must be at least 1 and at most the number of seeds "
                f"({len(self.seeds)}), or None, got {self.screening_seeds}."
            )

    def _check_models(self) -> None:
        """The model of each operator: each is another one, and they fit the task and the curriculum."""
        for entry in self.shapes:
            if entry not in self.operators:
                raise ArgumentError(f"ComparisonSpec: shapes names {entry!r}, which is none of the operators.")
        models: dict[str, dict[str, Any]] = {}
        for operator in self.operators:
            model = self.model_for(operator)  # refuses what is no model
            declared = {**model.to_dict(), "layers": declarations(model.layers)}
            twins = [other for other, earlier in models.items() if earlier == declared]
            if twins:
                raise ArgumentError(
                    f"ComparisonSpec: operators must differ, and {operator!r} is the same model as {twins[0]!r}. "
                    "Leave one out."
                )
            models[operator] = declared
        if self.training.curriculum is not None:
            curriculum.check(
                [layer for operator in self.operators for layer in self.model_for(operator).layers], "ComparisonSpec"
            )
        for model in (self.model, *self.shapes.values()):
            if model.vocab_size != self.task.vocab_size:
                raise ArgumentError(
                    f"ComparisonSpec: model.vocab_size must be that of the task ({self.task.vocab_size}), "
                    f"got {model.vocab_size}."
                )
            if model.causal != self.task.causal:
                raise ArgumentError(
                    f"ComparisonSpec: model.causal must be that of the task ({self.task.causal}), got {model.causal}."
                )

    def model_for(self, operator: str) -> ModelConfig:
        """The model with ``operator`` in every layer, or with the layers of a list such as "[mamba2*3, ska]"."""
        model = self.shapes.get(operator, self.model)
        return replace(model, layers=layers_for(operator, len(model.layers)))

    @property
    def screening(self) -> tuple[int, ...]:
        """The seeds that try all rates."""
        return self.seeds[: self.screening_seeds]

    @property
    def runs_each(self) -> int:
        """The number of runs of an operator."""
        tried = len(self.screening)
        return tried * len(self.learning_rates) + len(self.seeds) - tried

    def runs(self) -> list[PlannedRun]:
        """The runs that are known from the start, in the order they are run: the first seed of every operator comes
        before the second of any.
        """
        return [
            self.planned(operator, seed, rate)
            for seed in self.screening
            for rate in self.learning_rates
            for operator in self.operators
        ]

    def planned(self, operator: str, seed: int, rate: float) -> PlannedRun:
        """The run of an operator with this seed and rate."""
        label = dict(zip(self.operators, self.labels or self.operators, strict=True))[operator]
        return PlannedRun(
            f"runs/{slugs(self.operators)[operator]}/seed-{seed}-lr-{short(rate)}", operator, label, seed, rate
        )

    def identity(self) -> dict[str, Any]:
        """What must agree for a folder to be this comparison, as JSON."""
        training = self.training.trajectory()
        del training["learning_rate"], training["seed"]
        values = {
            "task": tasks.checked_config("ComparisonSpec", self.task),
            "model": _stored_model(self.model),
            "training": training,
            "operators": self.operators,
            "seeds": self.seeds,
            "learning_rates": self.learning_rates,
            "budget_seconds": self.budget_seconds,
            "run_on": self.device,
        }
        if self.screening_seeds is not None:
            values["screening_seeds"] = self.screening_seeds
        if self.shapes:
            values["shapes"] = {operator: _stored_model(model) for operator, model in self.shapes.items()}
        return json.loads(json.dumps(values))

    def difference(self, there: "ComparisonSpec") -> tuple[str, Any, Any] | None:
        """The first setting in which this differs from the comparison in a folder, there and here. None where every run
        there is one of these: operators, seeds and learning rates may be added to a comparison.
        """
        found, asked = there.identity(), self.identity()
        if self._contains(there):
            found, asked = ({name: one[name] for name in one if name not in GRID} for one in (found, asked))
        return first_difference(found, asked)

    def _contains(self, there: "ComparisonSpec") -> bool:
        """Whether the runs of another comparison are all of this one, in the same folders and with the same models."""
        known, own = ({(run.name, run.operator) for run in spec.runs()} for spec in (there, self))
        same = all(there.shapes.get(operator) == self.shapes.get(operator) for operator in there.operators)
        return same and known <= own and set(there.seeds) <= set(self.seeds)

    def to_dict(self) -> dict[str, Any]:
        """The part of comparison.json that says what was asked; ``read_comparison`` reverses it."""
        published = {} if self.published is None else {"published": asdict(self.published)}
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


def slugs(operators: Sequence[str]) -> dict[str, str]:
    """The folder of each operator of a comparison, below ``runs``."""
    found: dict[str, str] = {}
    for operator in operators:
        base = re.sub(r"[^a-z0-9.]+", "-", operator.lower()).strip("-.") or "operator"
        if len(base) > _LONGEST_SLUG:  # a list of many layers: no file system has a name for all of it
            base = f"{base[:_CUT_SLUG]}-{hashlib.sha256(operator.encode()).hexdigest()[:8]}"
        slug, number = base, 2
        while slug in found.values():
            slug, number = f"{base}-{number}", number + 1
        found[operator] = slug
    return found


def _one_name(entry: str) -> str:
    """An operator as runs record it: a list of layers has one way to be written."""
    return entry_of(layer_list(entry)) if is_list(entry) else entry


def _stored_model(model: ModelConfig) -> dict[str, Any]:
    return {**model.to_dict(), "layers": [SLOT] * len(model.layers)}


def read_model(values: dict[str, Any], operator: str) -> ModelConfig:
    """A model in comparison.json, with ``operator`` in its layers."""
    return ModelConfig.from_dict({**values, "layers": layers_for(operator, len(values["layers"]))})


@dataclass(frozen=True)
class _Stored:
    """The plain values of comparison.json, which a file may have as anything."""

    operators: list[str]
    seeds: list[int]
    learning_rates: list[float]
    screening_seeds: int | None
    labels: list[str]
    budget_seconds: float | None
    run_on: str
    title: str
    command: str
    steps: int
    requested_steps: int
    plan: dict[str, Any]
    device: dict[str, Any]
    shapes: dict[str, Any]


def stored_comparison(directory: Path, call: str) -> dict[str, Any]:
    """What comparison.json of a folder says. call: the name in errors.

    Raises: FileFormatError when the folder holds no comparison of this version.
    """
    stored = stored_in(directory, FILE, SCHEMA, call, "comparison")
    with understood(call, directory / FILE):
        check_fields(FILE, _Stored, stored)
    return stored


def read_comparison(directory: Path, task: tasks.Task | None = None) -> tuple[ComparisonSpec, dict[str, Any]]:
    """The spec in a folder and everything else its comparison.json says. task: taken where it is the stored one.

    Raises: FileFormatError when the folder holds no comparison of this version.
    """
    stored = stored_comparison(directory, "compare")
    with understood("compare", directory / FILE):
        operators = tuple(stored["operators"])
        shapes = {operator: read_model(values, operator) for operator, values in stored.get("shapes", {}).items()}
        spec = ComparisonSpec(
            task=tasks.restored(stored["task"], task),
            model=read_model(stored["model"], next((name for name in operators if name not in shapes), operators[0])),
            training=TrainConfig.from_dict({**stored["training"], "steps": stored["requested_steps"]}),
            operators=operators,
            seeds=tuple(stored["seeds"]),
            learning_rates=tuple(stored["learning_rates"]),
            screening_seeds=stored.get("screening_seeds"),
            budget_seconds=stored["budget_seconds"],
            labels=tuple(stored["labels"]),
            device=stored["run_on"],
            title=stored["title"],
            command=stored["command"],
            published=made(Published | None, stored.get("published"), "published"),
            shapes=shapes,
        )
    return spec, stored
