"""The options that commands share, as frozen values: what is learned, the model, the training, the machine."""

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from zonal import tasks
from zonal.cli import parse
from zonal.errors import ArgumentError, FileFormatError
from zonal.limits import SIZE, STEPS, THREADS, Between
from zonal.models import ModelConfig
from zonal.models.config import ModelSettings
from zonal.report.commands import parted
from zonal.training import TrainConfig
from zonal.training.checkpoint import fingerprint
from zonal.training.config import TrainSettings

STOPPED = 130
"""The exit code of a command that was stopped with a checkpoint."""


def shown(metavar: str, default: str) -> Any:
    """How --help shows an option: the placeholder of its value, and the text about its default."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=f"({default})")


def given_options(command: str) -> list[str]:
    """The options that stand on a command line, at their defaults or not: each once, as --help writes it."""
    return list(parted(shlex.split(command))[1])


def refuse_settings(
    call: str, folder: Path, command: str, *kept: str, advice: str = "begin another folder with --out"
) -> None:
    """Raises: ArgumentError where --resume comes with settings, which the folder has already: any option of the command
    line but ``kept``, at its default or not. advice: what to do instead.
    """
    given = [option for option in given_options(command) if option not in ("--resume", *kept)]
    if given:
        raise ArgumentError(
            f"{call}: --resume goes on with the settings in {folder}, so {', '.join(given)} would change nothing. "
            f"Leave {'it' if len(given) == 1 else 'them'} out, or {advice}."
        )


def refuse_threads(call: str, folder: Path, begun: int | None, asked: int | None) -> None:
    """Raises: ArgumentError where the runs in a folder were begun with another number of threads than is asked for."""
    if begun is not None and asked not in (None, begun):
        raise ArgumentError(
            f"{call}: --threads {asked} would change nothing: what is in {folder} was begun with {begun}, and sums "
            "depend on it. Leave --threads out, or choose another folder."
        )


@dataclass(frozen=True)
class _TaskName:
    task: Annotated[str | None, shown("NAME", "required")] = None
    """Name of the task, such as text, mqar or needle. Without it, the command lists all tasks."""


@dataclass(frozen=True)
class TaskOptions(tasks.TaskSettings, _TaskName):  # fields of the last base come first
    """The task."""

    def resolve(self, command: str) -> tasks.Task:
        """The task. Raises: ArgumentError for an unknown or unsuitable option, FileFormatError for unusable data."""
        if self.task is None:
            listed = "; ".join(f"{name} ({about})" for name, about in tasks.names().items())
            raise ArgumentError(f"{command}: --task is required. Tasks: {listed}.")
        if self.data is not None and not self.data.strip():
            raise FileFormatError(f"{command}: --data is empty; a file or folder of text was required.")
        return tasks.resolve(self.task, self)


@dataclass(frozen=True)
class ModelOptions(ModelSettings):
    """The model in which every operator is trained: a decoder, or an encoder where the task lets tokens see all."""

    layers: Annotated[int, Between(1, 4096)] = 2
    """Number of layers."""
    dim: Annotated[int, SIZE] = 64
    """Width of the residual stream."""
    heads: Annotated[int, Between(1, 4096)] = 4
    """Attention heads per layer."""
    conv: Annotated[int | None, Between(0, 4096)] = None
    """Width of the short causal convolution before the projections; 0 for none. None: 4, or 0 where tokens see all."""
    silent_tokens: str | None = None
    """Tokens, such as 0,1, that ridge and Koopman read-outs do not store. Other layers treat them like any token."""

    def config(self, task: tasks.Task, layers: tuple[str, ...]) -> ModelConfig:
        """The model for ``task`` with these operators, one per layer."""
        silent = () if self.silent_tokens is None else parse.tokens(self.silent_tokens)
        changes = {
            "layers": layers, "silent_tokens": silent, "vocab_size": task.vocab_size, "max_len": task.length,
            "causal": task.causal, "conv": (4 if task.causal else 0) if self.conv is None else self.conv,
        }  # fmt: skip
        return ModelConfig(**{**vars(self), **changes})


def given_of_model(command: str) -> set[str]:
    """The fields of ``ModelOptions`` that stand on a command line, at their defaults or not."""
    names = {option.removeprefix("--no-").removeprefix("--").replace("-", "_") for option in given_options(command)}
    return names & {field.name for field in dataclasses.fields(ModelOptions)}


@dataclass(frozen=True)
class TrainingOptions(TrainSettings):
    """Training: AdamW with warm-up and cosine decay, the same for every operator."""

    steps: Annotated[int | None, STEPS] = None
    """Training steps of every run; with --budget, the most allowed. None: what the budget allows."""
    batch_size: Annotated[int, SIZE] = 32
    """Sequences per step."""
    curriculum: str | None = None
    """Fractions of the run at which the gates of rewa open after the sphere: plane, hyperbolic space, all."""

    def config(self, steps: int, learning_rate: float, seed: int) -> TrainConfig:
        """The settings of one run."""
        curriculum = None if self.curriculum is None else parse.parts(self.curriculum)
        changes = {"steps": steps, "learning_rate": learning_rate, "seed": seed, "curriculum": curriculum}
        return TrainConfig(**{**vars(self), **changes})


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What every command that trains takes, after its own options."""

    device: str = "cpu"
    """cpu, cuda or cuda:1."""
    threads: Annotated[int | None, THREADS, tyro.conf.arg(help_behavior_hint="(default: as torch has it)")] = None
    """Processor threads of each run."""
    task: TaskOptions = dataclasses.field(default_factory=TaskOptions)
    model: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    training: TrainingOptions = dataclasses.field(default_factory=TrainingOptions)


def folder_of(name: str, identity: Any) -> Path:
    """``runs/<name>-<hash of the settings>``: the same settings find the same folder again."""
    return Path("runs") / f"{name}-{fingerprint(identity)[:8]}"


def command_line(command: str, options: Any) -> str:
    """The command that gives ``options`` (a dataclass of this package): every option that is not at its default."""
    return shlex.join(["zonal", command, *_words(options, type(options)())])


def _words(values: Any, defaults: Any) -> list[str]:
    words: list[str] = []
    for field in dataclasses.fields(values):
        value, default = getattr(values, field.name), getattr(defaults, field.name)
        option = f"--{field.name.replace('_', '-')}"
        if dataclasses.is_dataclass(value):
            words += _words(value, default)
        elif value == default:
            continue
        elif isinstance(value, bool):
            words.append(option if value else option.replace("--", "--no-", 1))
        else:
            words += [option, value.as_posix() if isinstance(value, Path) else str(value)]
    return words


def training_steps(options: TrainingOptions, budget: str | None) -> tuple[int, float | None]:
    """Steps (with a budget: the most allowed) and the budget in seconds; with neither, ten minutes."""
    if options.steps is not None:
        return options.steps, None if budget is None else parse.duration(budget)
    return 1_000_000, parse.duration("10m" if budget is None else budget)
