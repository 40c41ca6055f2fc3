"""``zonal train``: one model on one task; the folder can be continued, and generated from."""

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from zonal import tasks
from zonal.cli import parse, presets
from zonal.cli.app import MISTAKE
from zonal.cli.options import STOPPED, RunOptions, folder_of, given_of_model, given_options, shown
from zonal.cli.progress import held_out, watching
from zonal.errors import ArgumentError
from zonal.limits import PROCESSES, RATE, SEED
from zonal.models import ModelConfig, language_model, layer_list, preset
from zonal.models.layers import entry_of
from zonal.report import formats, style
from zonal.training import RunResult, curriculum, interruptible, train
from zonal.training.environment import check_device
from zonal.training.loop import run_identity
from zonal.training.processes import OneProcess
from zonal.training.sharded import OtherProcessError, Processes, launched, several_processes

_STEPS = 1000

DESCRIPTION = """\
Train one model. The operator is one for all layers, or a list with one per layer. Ctrl-C stops with a checkpoint; the
same command resumes.

Examples:
  zonal train --task text --operator sko --steps 500
  zonal train --task text --data my.txt --tokenizer gpt2 --operator 'softmax,ska(power=1),softmax' --steps 2000
  zonal train --task text --operator 'mamba2(state=64)*3, ska(power=0), mamba2(state=64)*3' --dim 128
  zonal train --preset echo-table3 --operator 'mamba2(state=16)*2, ska(power=1)*2'
  zonal train --preset text-contest --data my.txt --operator 'Mamba-2 and three windows' --learning-rate 1.6e-2
  zonal train --task mqar-demo --operator 'ska(power=1)' --conv 0 --stop-at-accuracy 0.99
  zonal train --task mqar-demo --model-preset echo-1M-mamba-attention --steps 2000

Several processes, on one machine or many (docs/scale.md): the same options after `-m zonal train` train the same model,
on the same batches. Each process takes its rows of a batch, and with --sequence-parallel S its stretch of each
sequence; parameters, gradients and optimiser are spread over all of them (FSDP2). Checkpoints go to DIR/checkpoints,
and any number of processes goes on from them. With --device cuda each process takes its own GPU.
  torchrun --nproc-per-node 4 -m zonal train --task text --operator sko --steps 500
  torchrun --nproc-per-node 8 -m zonal train --device cuda --dtype bfloat16 --task text --length 65536 \\
    --operator 'ska(power=1)' --sequence-parallel 4 --recompute"""


@dataclass(frozen=True)
class Train(RunOptions):
    """Train one model."""

    preset: Annotated[str | None, shown("NAME", "optional")] = None
    """A preset of an experiment, or a recipe.json, for options that are not given. An unknown name lists all."""
    operator: str = "softmax"
    """One operator (or mamba2, mesanet, ...) for all layers, or a list with one per layer; NAME*3 means three. With
    --preset also the name of one of its models."""
    model_preset: Annotated[str | None, shown("NAME", "default: none")] = None
    """A named model, such as echo-1M or echo-1M-mamba, in place of --operator and the model's options."""
    learning_rate: Annotated[float, RATE] = 3e-3
    """Highest learning rate."""
    seed: Annotated[int, SEED] = 0
    """Seed of initial weights and data order."""
    sequence_parallel: Annotated[int, PROCESSES] = 1
    """Under torchrun: processes that hold each sequence together. The others take other rows of the batch."""
    recompute: bool = False
    """Keep only the input of each block for the backward pass, which computes it again: less memory, more time."""
    out: Annotated[Path | None, shown("DIR", "default: runs/train-TASK-..., found from the settings")] = None
    """Folder for all files."""


def defaults(words: Sequence[str]) -> Train | None:
    """The options that a preset named among ``words`` stands for, with the model that --operator names, or its first.

    Raises: ArgumentError when there is none of that name.
    """
    named = presets.named(words, "train")
    if named is None:
        return None
    name, preset = named
    operator = preset.layers_of(presets.given(words, "--operator") or next(iter(preset.models)))
    return Train(
        preset=name,
        operator=operator,
        learning_rate=parse.learning_rates(preset.learning_rates)[0],
        seed=parse.seeds(preset.seeds)[0],
        task=preset.task,
        model=replace(preset.model, **preset.shape_of(operator)),
        training=preset.training,
    )


def layers_of(call: str, text: str, layers: int, command: str) -> tuple[str, ...]:
    """The operator of each layer.

    Raises: ArgumentError when a list has another length than --layers on the command line.
    """
    operators = layer_list(text, "--operator")
    if len(operators) == 1:
        return operators * layers
    if layers != len(operators) and "--layers" in given_options(command):
        raise ArgumentError(
            f"{call}: --operator names {len(operators)} layers, --layers asks for {layers}. "
            "Give one operator, one per layer, or leave --layers out."
        )
    return operators


def model_of(options: Train, task: tasks.Task, command: str) -> ModelConfig:
    """The model of the options, with the vocabulary of the task.

    Raises: ArgumentError when a model by name comes with options of the model.
    """
    if options.model_preset is None:
        operator = options.operator
        if options.preset is not None:
            operator = presets.find(options.preset, "train").layers_of(operator)
        return options.model.config(task, layers_of("train", operator, options.model.layers, command))
    if "--operator" in given_options(command) or given_of_model(command):
        raise ArgumentError(
            "train: --model-preset names the whole model. Leave out --operator and the model's options, "
            "or leave out --model-preset."
        )
    return preset(options.model_preset, vocab_size=task.vocab_size, max_len=task.length)


def run(options: Train, command: str) -> int:
    """Run the command; returns the exit code."""
    if not launched():
        if options.sequence_parallel > 1:
            raise ArgumentError(
                f"train: --sequence-parallel {options.sequence_parallel} needs as many processes. Start them with "
                f"`torchrun --nproc-per-node {options.sequence_parallel} -m zonal train …`."
            )
        return _train(options, command, OneProcess(recompute=options.recompute))
    try:
        with several_processes(
            sequence=options.sequence_parallel, device=options.device, recompute=options.recompute
        ) as processes:
            return _train(options, command, processes)
    except OtherProcessError:
        return MISTAKE


def _train(options: Train, command: str, processes: Processes) -> int:
    task = options.task.resolve("train")
    config = options.training.config(options.training.steps or _STEPS, options.learning_rate, options.seed)
    shape = model_of(options, task, command)
    if config.curriculum is not None:
        curriculum.check(shape.layers, "train")
    model = language_model(shape, options.seed)
    if processes.whole_files:  # otherwise each process takes its part
        model.to(check_device(options.device))
    folder = options.out or folder_of(f"train-{task.name}", run_identity(model, task, config))
    label = options.model_preset or (style.label(shape.layers[0]) if len(set(shape.layers)) == 1 else options.operator)
    heading = (
        f"{task.heading()}: {label}, {formats.count(model.num_parameters())} parameters, {config.steps:,} steps; "
        f"files in {folder}"
    )
    with contextlib.ExitStack() as held:
        stopped = held.enter_context(interruptible())
        listener = None
        if processes.writes:
            listener = held.enter_context(watching(task.metric, {entry_of(shape.layers): label}, heading))
        result = train(
            model, task, config, folder, on_event=listener, should_stop=stopped, label=label, threads=options.threads,
            processes=processes,
        )  # fmt: skip
    return tell(result, task, folder, command) if processes.writes else STOPPED if result.status == "stopped" else 0


def tell(result: RunResult, task: tasks.Task, folder: Path, command: str) -> int:
    """Print what came of it; returns the exit code."""
    if result.status == "stopped":
        print(
            f"Stopped at step {result.steps_done:,} of {result.steps:,} with a checkpoint. "
            f"Run the same command to resume: {command}"
        )
        return STOPPED
    if result.final is not None:
        print(
            f"Held-out {held_out(result.final, task.metric)} after {result.steps_done:,} steps in "
            f"{formats.seconds(result.seconds)} of training."
        )
    print(f"Model: {folder / 'checkpoint.safetensors'}")
    if isinstance(task, tasks.Text) and task.causal:
        print(f'Try: zonal generate --model {shlex.quote(str(folder))} --prompt "Once" --max-new-tokens 200')
    return 0
