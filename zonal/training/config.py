"""What a training run is told; frozen, JSON-able, and checked once when it is made."""

import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from zonal.errors import ArgumentError, unknown_name
from zonal.limits import RATIO, SHARE, SIZE, STEPS, TOKENS, Between, whole_numbers
from zonal.names import known_names
from zonal.typed import check_fields

Dtype = Literal["float32", "bfloat16", "float64"]

# fields that never change a number of the run: two runs that differ in them only are the same run
_BOOKKEEPING = frozenset({"checkpoint_every", "checkpoint_seconds", "keep_best", "tensorboard"})
# fields that say nothing where they are None: runs that were begun without them go on
_ABSENT = frozenset({"curriculum"})


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """The settings of a run that ``TrainConfig`` and the command line share, as keywords."""

    accumulate: Annotated[int, SIZE] = 1
    """Split each batch into this many parts, which saves memory and takes more time. The gradient is the same."""
    weight_decay: Annotated[float, Between(0, 1000)] = 0.1
    """Weight decay of AdamW, applied to matrices only."""
    betas: Annotated[tuple[float, float], SHARE] = (0.9, 0.95)
    """Decay of AdamW's two moments. Where a class is rare, the second must remember longer than a class is away."""
    warmup_ratio: Annotated[float, SHARE] = 0.1
    """Share of the steps during which the learning rate rises."""
    min_lr_ratio: Annotated[float, SHARE] = 0.1
    """Final learning rate, as a fraction of the highest."""
    clip: Annotated[float | None, RATIO] = 1.0
    """Clip the gradient to this global norm. None: no clipping."""
    dtype: Dtype = "float32"
    """Number format. bfloat16 keeps parameters and optimiser in float32 and runs the model under autocast. On a CPU
    without instructions for bfloat16 that takes about ten times as long as float32.
    """
    eval_every: Annotated[int | None, STEPS] = None
    """Steps between evaluations; there is always one at the end. None: ten evaluations per run."""
    eval_batch_size: Annotated[int | None, SIZE] = None
    """Sequences per evaluation step. None: as many as per part of a training batch."""
    transfer_piece: Annotated[int | None, TOKENS] = None
    """After training, read long test sequences this many tokens at a time, from the model's memory. None: whole."""
    stop_at_accuracy: Annotated[float | None, SHARE] = None
    """End a run at the first evaluation with this accuracy on the validation set, or on the evaluation set of a task
    that has no validation set. None: never."""
    checkpoint_every: Annotated[int | None, STEPS] = None
    """Steps between checkpoints. None: only by time."""
    checkpoint_seconds: Annotated[float | None, Between(0, 1e9)] = 60.0
    """Seconds between checkpoints; there is always one when a run stops or ends. None: only by steps."""
    keep_best: bool = False
    """Also keep the weights of the best evaluation, in best.safetensors. The validation set chooses them, or the
    evaluation set of a task that has no validation set."""
    log_every: Annotated[int, STEPS] = 1
    """Steps between lines of metrics.jsonl. Each line has the mean loss since the last one. The last step has a line,
    and with stop_at_accuracy each step that is evaluated, since the run may end there."""
    tensorboard: bool = True
    """Also write TensorBoard events."""


@known_names
@dataclass(frozen=True)
class TrainConfig(TrainSettings):
    """Settings of one run; see also ``TrainSettings``.

    steps: updates. In a comparison with a time budget it is the most that is allowed.
    batch_size: sequences in one update, whatever ``accumulate`` is, which must divide it.
    learning_rate: the highest; see ``zonal.training.schedule``.
    curriculum: the parts of the run after which the second, the third and the last stage of
        ``zonal.training.curriculum`` begin, three rising numbers from 0 to 1; None opens all gates at once. Layers
        without gates learn as ever.
    thresholds: accuracies whose first evaluation is recorded as ``steps_to`` (tasks measured by accuracy).
    seed: data order and random numbers of the run.

    Raises: ArgumentError naming the field.
    """

    steps: int = 1000
    batch_size: int = 64
    learning_rate: float = 3e-3
    curriculum: tuple[float, ...] | None = None
    thresholds: tuple[float, ...] = (0.5, 0.9, 0.99)
    seed: int = 0

    def __post_init__(self):
        whole_numbers("TrainConfig", self)
        # JSON knows no tuples
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "thresholds", tuple(self.thresholds))
        if self.curriculum is not None:
            object.__setattr__(self, "curriculum", tuple(self.curriculum))
            rises = len(self.curriculum) == 3 and all(
                a <= b for a, b in itertools.pairwise((0.0, *self.curriculum, 1.0))
            )
            self._require(
                "curriculum", rises, "three rising parts of the run from 0 to 1, such as (0.25, 0.5, 0.75), or None"
            )
        for name in ("steps", "batch_size", "accumulate", "log_every"):
            self._require(name, getattr(self, name) >= 1, "at least 1")
        for name in ("eval_every", "eval_batch_size", "transfer_piece", "checkpoint_every"):
            value = getattr(self, name)
            self._require(name, value is None or value >= 1, "at least 1, or None")
        self._require(
            "accumulate", self.batch_size % self.accumulate == 0, f"a divisor of batch_size={self.batch_size}"
        )
        self._require("learning_rate", math.isfinite(self.learning_rate) and self.learning_rate > 0, "positive")
        self._require("weight_decay", math.isfinite(self.weight_decay) and self.weight_decay >= 0, "at least 0")
        self._require("min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "between 0 and 1")
        self._require("warmup_ratio", 0 <= self.warmup_ratio < 1, "at least 0 and below 1")
        self._require(
            "betas", len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas), "two numbers in [0, 1)"
        )
        self._require("clip", self.clip is None or self.clip > 0, "positive, or None")
        self._require("dtype", self.dtype in ("float32", "bfloat16", "float64"), "'float32', 'bfloat16' or 'float64'")
        self._require(
            "checkpoint_seconds", self.checkpoint_seconds is None or self.checkpoint_seconds >= 0, "at least 0, or None"
        )
        self._require("thresholds", all(0 < value <= 1 for value in self.thresholds), "accuracies in (0, 1]")
        stop = self.stop_at_accuracy
        self._require("stop_at_accuracy", stop is None or 0 < stop <= 1, "an accuracy in (0, 1], or None")
        self._require("seed", 0 <= self.seed < 2**63, "a whole number from 0 on, below 2**63")

    def check_metric(self, call: str, metric: str) -> None:
        """Raises: ArgumentError for a headline number that is neither accuracy nor loss, and where runs should stop at
        an accuracy on a task that is judged by its loss.
        """
        if metric not in ("accuracy", "loss"):
            raise ArgumentError(f"{call}: the task's metric must be 'accuracy' or 'loss', got {metric!r}.")
        if self.stop_at_accuracy is not None and metric != "accuracy":
            raise ArgumentError(
                f"{call}: stop_at_accuracy is for tasks whose headline number is accuracy, and that of this one is "
                f"{metric}. Leave it out."
            )

    def _require(self, name: str, holds: bool, what: str) -> None:
        if not holds:
            raise ArgumentError(f"TrainConfig: {name} must be {what}, got {getattr(self, name)!r}.")

    @property
    def decides_on_the_way(self) -> bool:
        """Whether evaluations decide something, for which each reads the validation set too."""
        return self.keep_best or self.stop_at_accuracy is not None

    @property
    def evaluation_interval(self) -> int:
        """Updates between evaluations: ``eval_every``, or a tenth of the run."""
        return self.eval_every if self.eval_every is not None else max(1, math.ceil(self.steps / 10))

    @property
    def evaluation_batch_size(self) -> int:
        """Sequences evaluated at a time."""
        return self.eval_batch_size if self.eval_batch_size is not None else self.batch_size // self.accumulate

    def to_dict(self) -> dict[str, Any]:
        """JSON-able; ``from_dict`` reverses it."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """From ``to_dict``. Raises ArgumentError for a name that is not a field."""
        names = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in names:
                raise unknown_name("TrainConfig.from_dict", "field", name, names)
        check_fields("TrainConfig.from_dict", cls, values)
        return cls(**values)

    def trajectory(self) -> dict[str, Any]:
        """The fields that decide the numbers of a run: all but those about files, and those that are left off in
        ``_ABSENT``.
        """
        return {
            name: value
            for name, value in self.to_dict().items()
            if name not in _BOOKKEEPING and not (name in _ABSENT and value is None)
        }


def short(number: float) -> str:
    """0.001 rather than 0.0010000, but never one name for two numbers."""
    return f"{number:g}" if float(f"{number:g}") == number else repr(number)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def first_difference(stored: Any, asked: Any, name: str = "") -> tuple[str, Any, Any] | None:
    """The first place where two JSON values differ, as (dotted name, stored, asked); None when they are equal."""
    if isinstance(stored, Mapping) and isinstance(asked, Mapping):
        keys = dict.fromkeys([*stored, *asked])
        parts = [(f"{name}.{key}" if name else str(key), stored.get(key), asked.get(key)) for key in keys]
    elif isinstance(stored, list | tuple) and isinstance(asked, list | tuple) and len(stored) == len(asked):
        parts = [(f"{name}[{index}]", *pair) for index, pair in enumerate(zip(stored, asked, strict=True))]
    else:
        return None if stored == asked else (name, stored, asked)
    return next(filter(None, (first_difference(old, new, inner) for inner, old, new in parts)), None)
