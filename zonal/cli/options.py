"""The options that commands share, as frozen values: what is learned, the model, the training, the machine."""

import dataclasses
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro

from zonal import tasks
from zonal.cli import parse
from zonal.cli.limits import COUNT, RATIO, SHARE, SIZE, STEPS, TOKENS, Between, FileName
from zonal.errors import ArgumentError, FileFormatError
from zonal.models import ModelConfig
from zonal.models.config import Mlp
from zonal.nn import Residual
from zonal.training import TrainConfig

_KINDS = {
    tasks.Retrieval: "Retrieval",
    tasks.Expressions: "Completing expressions",
    tasks.Lookup: "Recall by relation",
    tasks.Periodic: "Signals",
}
_OFTEN = "(default: as the task has it)"


def _shown(metavar: str, hint: str) -> Any:
    """How an option without a default value is shown in the help."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint=hint)


@dataclass(frozen=True)
class TaskOptions:
    """What is learned."""

    task: Annotated[str | None, _shown("NAME", "(required)")] = None
    """text, mqar, mixed, needle, sexpr, hypernyms, ... ; without it they are listed."""
    data: Annotated[str | None, FileName(), _shown("PATH", "(default: the embedded novel)")] = None
    """For text: a UTF-8 file, a folder, a pattern, a pre-tokenised corpus, novel, or hub:name[:split[:column]]."""
    tokenizer: Annotated[str | None, _shown("{byte,gpt2}", "(default: byte)")] = None
    """For text: what a token is."""
    length: Annotated[int | None, TOKENS, _shown("INT", _OFTEN)] = None
    """Tokens per sequence."""
    validation_fraction: Annotated[float | None, SHARE, _shown("FLOAT", "(default: 0.1)")] = None
    """For text: the share at its end that is held out."""
    evaluation_bytes: Annotated[int | None, Between(1, 2**40), _shown("INT", "(default: 65536)")] = None
    """For text: evaluate on this many bytes of the held-out part."""
    max_bytes: Annotated[int | None, Between(1, 2**40), _shown("INT", "(default: all)")] = None
    """For text: read only this many bytes of the source."""
    train_fraction: Annotated[float | None, SHARE, _shown("FLOAT", "(default: 1)")] = None
    """For text: the share of the training part that is used."""
    vocab_size: Annotated[int | None, COUNT, _shown("INT", _OFTEN)] = None
    """For recall, retrieval and periodic: size of the vocabulary."""
    pairs: Annotated[int | None, SIZE, _shown("INT", _OFTEN)] = None
    """For recall and retrieval: things to remember; for hypernyms and paths: candidates in the context."""
    train_examples: Annotated[int | None, COUNT, _shown("INT", _OFTEN)] = None
    """For mqar: training sequences."""
    test_examples: Annotated[int | None, COUNT, _shown("INT", _OFTEN)] = None
    """For all but text: test sequences (of retrieval and others, of each kind and size)."""
    subset: Annotated[str | None, _shown("WORD", "(default: mammal, of paths carnivore)")] = None
    """For hypernyms and paths: the word of WordNet, an animal's or an artifact's, below which entities are taken."""
    closure: Annotated[float | None, SHARE, _shown("FLOAT", "(default: 0.5)")] = None
    """For hypernyms: the part of the pairs at a distance of 2 or more that is trained."""
    hops: Annotated[int | None, Between(1, 64), _shown("INT", "(default: 4)")] = None
    """For paths: the most relations in a question."""
    questions: Annotated[int | None, SIZE, _shown("INT", "(default: 8)")] = None
    """For hypernyms and paths: questions per sequence."""
    depth: Annotated[int | None, Between(1, 64), _shown("INT", "(default: 5, 10 and 15)")] = None
    """For sexpr: depth of the expressions."""
    frequencies: Annotated[int | None, Between(1, 1024), _shown("INT", "(default: 1, 2, 4 and 8)")] = None
    """For periodic: waves in a signal."""

    def resolve(self, command: str) -> tasks.Task:
        """The task. Raises: ArgumentError for an unknown or unsuitable option, FileFormatError for unusable data."""
        if self.task is None:
            listed = "; ".join(f"{name} ({about})" for name, about in tasks.names().items())
            raise ArgumentError(f"{command}: --task is required. Tasks: {listed}.")
        if self.data is not None and not self.data.strip():
            raise FileFormatError(f"{command}: --data is empty; a file or folder of text was required.")
        return tasks.resolve(self.task, **{name: value for name, value in vars(self).items() if name != "task"})


@dataclass(frozen=True)
class ModelOptions:
    """The decoder in which every operator is trained."""

    layers: Annotated[int, Between(1, 4096)] = 2
    """Number of layers."""
    dim: Annotated[int, SIZE] = 64
    """Width of the residual stream."""
    heads: Annotated[int, Between(1, 4096)] = 4
    """Attention heads per layer."""
    kv_heads: Annotated[int | None, Between(1, 4096), _shown("INT", "(default: as heads)")] = None
    """Key and value heads; fewer than heads shares them between heads."""
    head_dim: Annotated[int | None, SIZE, _shown("INT", "(default: dim / heads)")] = None
    """Size per head."""
    qk_dim: Annotated[int | None, SIZE, _shown("INT", "(default: what the operator asks for, or head_dim)")] = None
    """Size of queries and keys per head."""
    mlp: Mlp = "swiglu"
    """The part between attention layers."""
    mlp_ratio: Annotated[float, Between(1e-6, 1024)] = 8 / 3
    """Hidden size of the mlp, or of each expert, over dim."""
    experts: Annotated[int, Between(1, 4096)] = 8
    """With --mlp experts: feed-forward layers of a block."""
    experts_per_token: Annotated[int, Between(1, 4096)] = 2
    """With --mlp experts: how many of them each token uses."""
    conv: Annotated[int, Between(0, 4096)] = 4
    """Width of the short causal convolution before the projections; 0 for none."""
    rotary: bool = False
    """Rotary positions."""
    qk_norm: bool = False
    """Normalise queries and keys."""
    residual: Residual = "pre"
    """Residual connection: pre-norm, post-norm, a gate per channel, or a learned sum of all earlier results."""
    silent_tokens: Annotated[str | None, _shown("LIST", "(default: none)")] = None
    """Tokens, such as 0,1, that ridge and Koopman read-outs do not store. Other layers treat them like any token."""
    init_std: Annotated[float, RATIO] = 0.02
    """Standard deviation of initial weights. Use a larger one, such as 0.125, with --residual post."""
    tie_embeddings: bool = True
    """Use the embedding as output layer, too."""

    def config(self, task: tasks.Task, layers: tuple[str, ...]) -> ModelConfig:
        """The model for ``task`` with these operators, one per layer."""
        silent = () if self.silent_tokens is None else parse.tokens(self.silent_tokens)
        changes = {"layers": layers, "silent_tokens": silent, "vocab_size": task.vocab_size, "max_len": task.length}
        return ModelConfig(**{**vars(self), **changes})


@dataclass(frozen=True)
class TrainingOptions:
    """Training: AdamW with warm-up and cosine decay, the same for every operator."""

    steps: Annotated[int | None, STEPS, _shown("INT", "(default: what the budget allows)")] = None
    """Training steps of every run; with --budget, the most allowed."""
    batch_size: Annotated[int, SIZE] = 32
    """Sequences per step."""
    accumulate: Annotated[int, SIZE] = 1
    """Run a batch in this many parts: less memory, the same gradient."""
    weight_decay: Annotated[float, Between(0, 1000)] = 0.1
    """Decoupled weight decay of matrices."""
    warmup_ratio: Annotated[float, SHARE] = 0.1
    """Share of the steps during which the learning rate rises."""
    min_lr_ratio: Annotated[float, SHARE] = 0.1
    """Last learning rate, as a fraction of the highest."""
    clip: Annotated[float, RATIO] = 1.0
    """Largest norm of the gradient."""
    curriculum: Annotated[str | None, _shown("LIST", "(default: none)")] = None
    """Open rewa's gates (sphere, plane, hyperbolic, all) one by one, the last three at these fractions of the run."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Number format."""
    eval_every: Annotated[int | None, STEPS, _shown("INT", "(default: ten times a run)")] = None
    """Steps between evaluations."""
    eval_batch_size: Annotated[int | None, SIZE, _shown("INT", "(default: as batch-size)")] = None
    """Sequences per step of evaluation."""
    transfer_piece: Annotated[int | None, TOKENS, _shown("INT", "(default: whole)")] = None
    """After training, read long test sequences this many tokens at a time, from the model's memory."""
    stop_at_accuracy: Annotated[float | None, SHARE, _shown("FLOAT", "(default: never)")] = None
    """End a run at the first evaluation with this accuracy."""
    checkpoint_seconds: Annotated[float, Between(0, 1e9)] = 60.0
    """Seconds between checkpoints; there is always one when a run stops or ends."""
    keep_best: bool = False
    """Also keep the weights of the best evaluation."""
    tensorboard: bool = True
    """Also write TensorBoard events."""

    def config(self, steps: int, learning_rate: float, seed: int) -> TrainConfig:
        """The settings of one run."""
        curriculum = None if self.curriculum is None else parse.parts(self.curriculum)
        changes = {"steps": steps, "learning_rate": learning_rate, "seed": seed, "curriculum": curriculum}
        return TrainConfig(**{**vars(self), **changes})


def device(name: str) -> torch.device:
    """The device called ``name``. Raises: ArgumentError when there is no such device here."""
    kind, _, index = name.partition(":")
    if name == "cpu":
        return torch.device("cpu")
    if kind != "cuda" or (index and not index.isdigit()):
        raise ArgumentError(f"--device: cpu, cuda or cuda:NUMBER was required, got {name!r}.")
    if int(index or 0) >= torch.cuda.device_count():
        raise ArgumentError(
            f"--device: {name} was asked for, this machine offers {torch.cuda.device_count()} CUDA devices. "
            "Use --device cpu."
        )
    return torch.device(name)


def title(task: tasks.Task) -> str:
    """The task as a heading: "Language modelling of my.txt", "Associative recall (mqar-demo)"."""
    if isinstance(task, tasks.Text):
        return f"Language modelling of {task.title}" + (
            "" if task.train_fraction == 1 else f", {task.train_fraction:.0%} of it"
        )
    return f"{_KINDS.get(type(task), 'Associative recall')} ({task.name})"


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


def training_steps(options: TrainingOptions, budget: str | None, *, default: str) -> tuple[int, float | None]:
    """Steps (with a budget: the most allowed) and the budget in seconds; with neither, the ``default`` budget."""
    if options.steps is not None:
        return options.steps, None if budget is None else parse.duration(budget)
    return 1_000_000, parse.duration(default if budget is None else budget)
