"""``zonal convert``: give layers of a pre-trained model of transformers a constant memory, by training."""

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from zonal.cli import parse
from zonal.cli.console import screen
from zonal.cli.options import STOPPED, shown
from zonal.errors import ArgumentError
from zonal.limits import COUNT, RATE, SEED, STEPS, THREADS, Between
from zonal.training.environment import interruptible

DESCRIPTION = """\
Convert layers of a pre-trained model of transformers to attention with a constant memory: softmax in a window and sums
of all earlier keys. They first learn the attention of the original, layer by layer, and then its predictions.
The original is not changed. Writes the converted model (safetensors and its config), conversion.json, and report.html
with perplexity before and after, recall, speed and bytes. Ctrl-C stops with a state; the same command continues.

Examples:
  zonal convert SmolLM2-135M --to hybrid --text my-corpus/ --out smol-memory --budget 3h
  zonal convert SmolLM2-135M-Instruct.Q4_1.gguf --to all --text novel,letters.txt --out smol-all
  zonal convert SmolLM2-135M --plan --text my-corpus/ --out smol-plan"""

LOCAL_GLOBAL = (
    "local_global(window=64, first=4, far='hedgehog(size=128, activation=\"exp\", init_scale=0.25)', weight=0.002)"
)
_HERE = ("budget", "threads")  # options that are not settings of the conversion


@dataclass(frozen=True)
class Convert:
    """Convert a pre-trained model."""

    model: tyro.conf.Positional[Annotated[Path | None, shown("MODEL", "required")]] = None
    """The folder of a model of transformers, or a GGUF file."""
    to: Literal["hybrid", "all"] = "hybrid"
    """hybrid: the half of the layers that convert best, the others keep keys and values; all: every layer."""
    operator: str = LOCAL_GLOBAL
    """The operator of converted layers."""
    text: Annotated[str, shown("TEXT,...", "the embedded novel")] = "novel"
    """Texts to learn from, as for --data of `zonal train`: files or folders. A tenth of each is held out."""
    out: Annotated[Path | None, shown("DIR", "required")] = None
    """Folder for the converted model."""
    plan: bool = False
    """Only measure how well each layer converts; the model is not written."""
    budget: Annotated[str | None, shown("TIME", "default: none")] = None
    """Time for both stages of training, half of it each, such as 30m or 3h."""
    length: Annotated[int, Between(16, 1_000_000)] = 512
    """Tokens of a window of text in training, one window a step. Most of attention transfer has windows of half."""
    transfer_steps: Annotated[int, STEPS] = 400
    """Steps of attention transfer, at most."""
    distil_steps: Annotated[int, STEPS] = 400
    """Steps of distillation, at most."""
    transfer_rate: Annotated[float, RATE] = 3e-2
    """Learning rate of attention transfer."""
    distil_rate: Annotated[float, RATE] = 3e-5
    """Learning rate of distillation."""
    windows: Annotated[int, Between(1, 10_000)] = 8
    """Held-out windows that are measured."""
    eval_length: Annotated[int, Between(16, 1_000_000)] = 1024
    """Tokens of a held-out window and of a question of recall."""
    questions: Annotated[int, COUNT] = 20
    """Questions of each kind of recall."""
    prompt: str = "The old house stood at the end of the road"
    """Prompt of the samples."""
    seed: Annotated[int, SEED] = 0
    """Seed of the windows of training."""
    threads: Annotated[int | None, THREADS, tyro.conf.arg(help_behavior_hint="(default: as torch has it)")] = None
    """Processor threads."""


def run(options: Convert, command: str) -> int:
    """Run the command; returns the exit code."""
    if options.model is None or options.out is None:
        raise ArgumentError(
            "convert: a model and --out are required, such as `zonal convert SmolLM2-135M --out smol-memory`."
        )
    try:
        pipeline = importlib.import_module("zonal.hf.pipeline")
    except ImportError as error:
        raise ArgumentError(f"convert: {error}") from error
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    bar = Progress(TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn(), console=screen())
    bars: dict[str, TaskID] = {}

    def show(update: Any) -> None:
        if update.stage not in bars:
            bars[update.stage] = bar.add_task(update.stage, total=1.0)
        numbers = ", ".join(f"{name} {value:.3f}" for name, value in update.losses.items() if isinstance(value, float))
        about = f"{update.stage}, step {update.step}: {numbers}"
        bar.update(bars[update.stage], completed=update.used, description=about)

    def say(line: str) -> None:
        bar.console.print(line, soft_wrap=True, markup=False, highlight=False)

    settings = pipeline.Settings(
        **{name: value for name, value in vars(options).items() if name not in _HERE},
        seconds=None if options.budget is None else parse.duration(options.budget),
    )
    with bar, interruptible() as interrupted:
        done = pipeline.run(settings, command, pipeline.Watch(say, show, interrupted))
    if not done:
        print(f"Stopped. To go on, run again: {command}")
        return STOPPED
    return 0
