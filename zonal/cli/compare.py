"""``zonal compare``: operators × seeds × learning rates on one task, shown while it runs, ended by a report."""

import dataclasses
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from rich.table import Table
from rich.text import Text

from zonal import report
from zonal.cli import parse, presets
from zonal.cli.console import screen
from zonal.cli.options import (
    STOPPED,
    RunOptions,
    folder_of,
    given_of_model,
    given_options,
    refuse_settings,
    refuse_threads,
    shown,
    training_steps,
)
from zonal.cli.progress import watching
from zonal.errors import ArgumentError
from zonal.limits import PROCESSES, SIZE
from zonal.models import ModelConfig, preset
from zonal.models.layers import check, entry_of, layers_for, split
from zonal.report import style
from zonal.training import Comparison, ComparisonResult, ComparisonSpec
from zonal.workers import parsed

FAILED = 1

DESCRIPTION = """\
Compare attention operators: each alone in the same small decoder, on the same task, with the same data and seeds.
Writes report.html, report.md and summary.json. Ctrl-C stops with a checkpoint; the same command continues.

Examples:
  zonal compare --task mqar-demo --operators softmax,sko,ridge --budget 2m
  zonal compare --task text --data my.txt --operators softmax,sko,ska --seeds 3 --budget 10m
  zonal compare --task text --operators 'softmax,sko(degrees=(2,3)),ska(power=1)' --steps 500 --learning-rates 1e-3,3e-3
  zonal compare --task mqar-demo --layers 4 --operators 'softmax,mamba2,[mamba2*3, ska]' --budget 5m
  zonal compare --task mqar-grid --model-preset echo-1M --operators 'ska(power=2),softmax' --steps 2000
  zonal compare --preset echo-table3 --jobs 2 --threads 1
  zonal compare --preset echo-table3 --operators 'Gated DeltaNet,Mamba-2 alone'
  zonal compare --resume runs/text-1a2b3c4d"""


@dataclass(frozen=True)
class Compare(RunOptions):
    """Compare attention operators on one task."""

    preset: Annotated[str | None, shown("NAME", "optional")] = None
    """A preset of an experiment, or a recipe.json, for options that are not given. An unknown name lists all."""
    operators: str = "softmax,sko,squared_affine,linear,ska(power=0)"
    """Operators, separated by commas: NAME or NAME(argument=value, ...), or a list of layers as [mamba2*3, ska]. With
    --preset also names of its models, in quotation marks where they contain commas."""
    model_preset: Annotated[str | None, shown("NAME", "default: none")] = None
    """A named model, such as echo-1M, in place of the model options. Without --operators, also its layers."""
    seeds: str = "1"
    """The number of seeds, or a list of seeds such as 0,1,2. A single seed 7 is `7,`."""
    budget: Annotated[str | None, shown("TIME", "default: 10m, without --steps")] = None
    """Wall-clock time for the whole comparison, such as 90s, 10m or 2h. Every run gets the same number of steps."""
    learning_rates: str = "3e-3"
    """Learning rates to try, the same for every operator."""
    screening_seeds: Annotated[int | None, SIZE] = None
    """Only the first so many seeds try all rates; the others take their operator's best rate. None: all try all."""
    out: Annotated[Path | None, shown("DIR", "default: runs/TASK-..., found from the settings")] = None
    """Folder for all files."""
    resume: Annotated[Path | None, shown("DIR", "optional")] = None
    """Continue the comparison in this folder; no other settings are needed."""
    retry_failed: bool = False
    """Run failed runs again, from their last good checkpoint."""
    title: Annotated[str | None, shown("TEXT", "default: from the task")] = None
    """Heading of the report of a new comparison. One that is there keeps its own."""
    jobs: Annotated[int, PROCESSES] = 1
    """Runs at a time, each in its own process. Compare speeds only within such a comparison."""
    workers: Annotated[str | None, shown("ray", "default: none")] = None
    """ray: runs as tasks of a Ray cluster, as many as it has cores for (pip install 'zonal[ray]'). A number: as
    --jobs."""


def defaults(words: Sequence[str]) -> Compare | None:
    """The options that a preset named among ``words`` stands for.

    Raises: ArgumentError when there is none of that name.
    """
    named = presets.named(words, "compare")
    if named is None:
        return None
    name, found = named
    return Compare(
        preset=name,
        operators=found.operators,
        seeds=found.seeds,
        learning_rates=found.learning_rates,
        screening_seeds=found.screening_seeds,
        task=found.task,
        model=found.model,
        training=found.training,
    )


def specification(options: Compare, command: str) -> ComparisonSpec:
    """What the options ask for. Raises: ZonalError for anything that does not fit."""
    base, own = named_model(options, command), given_of_model(command)
    dim, count = (options.model.dim, options.model.layers) if base is None else (base.dim, len(base.layers))
    experiment = None if options.preset is None else presets.find(options.preset, "compare")
    operators = (
        split(options.operators, "--operators")
        if base is None or "--operators" in given_options(command)
        else (entry_of(base.layers),)
    )
    if experiment is not None:
        operators = tuple(map(experiment.layers_of, operators))
    seeds, rates = parse.seeds(options.seeds), parse.learning_rates(options.learning_rates)
    steps, budget = training_steps(options.training, options.budget)
    shapes = {
        operator: dataclasses.replace(options.model, **{name: shape[name] for name in shape if name not in own})
        for operator in operators
        if experiment is not None and base is None and (shape := experiment.shape_of(operator))
    }
    # names are checked before the data is read: a misspelt operator should not wait for a large text
    for operator in operators:
        size = (shapes[operator].dim, shapes[operator].layers) if operator in shapes else (dim, count)
        for layer in dict.fromkeys(layers_for(operator, size[1])):
            check(layer, size[0])
    layers = layers_for(next((name for name in operators if name not in shapes), operators[0]), count)
    labels = tuple((experiment and experiment.label_of(operator)) or style.label(operator) for operator in operators)
    task = options.task.resolve("compare")
    return ComparisonSpec(
        task=task,
        model=options.model.config(task, layers)
        if base is None
        else dataclasses.replace(base, layers=layers, vocab_size=task.vocab_size, max_len=task.length),
        training=options.training.config(steps, rates[0], seeds[0]),
        operators=operators,
        seeds=seeds,
        learning_rates=rates,
        screening_seeds=options.screening_seeds,
        budget_seconds=budget,
        labels=labels,
        device=options.device,
        title=options.title or task.heading(),
        command=command,
        published=None if experiment is None else experiment.published,
        shapes={operator: shape.config(task, layers_for(operator, shape.layers)) for operator, shape in shapes.items()},
    )


def named_model(options: Compare, command: str) -> ModelConfig | None:
    """The model of --model-preset.

    Raises: ArgumentError for an unknown name, and when it comes with options of the model.
    """
    if options.model_preset is None:
        return None
    if given_of_model(command):
        raise ArgumentError(
            "compare: --model-preset names the whole shape. Leave out the model's options, or leave out --model-preset."
        )
    return preset(options.model_preset)


def execute(
    comparison: Comparison, *, jobs: int | str = 1, threads: int | None = None, retry_failed: bool = False
) -> ComparisonResult:
    """Run what is left of a comparison under a progress display."""
    spec = comparison.spec
    labels = dict(zip(spec.operators, spec.labels or spec.operators, strict=True))
    seeds = f"{len(spec.seeds)} seed{'s' if len(spec.seeds) > 1 else ''}"
    rates = f", {len(spec.learning_rates)} learning rates" if len(spec.learning_rates) > 1 else ""
    heading = (
        f"{spec.title}: {len(labels)} operator{'s' if len(labels) > 1 else ''}, {seeds}{rates}; "
        f"files in {comparison.directory}"
    )
    with watching(spec.task.metric, labels, heading) as listener:
        return comparison.run(on_event=listener, jobs=jobs, threads=threads, retry_failed=retry_failed)


def run(options: Compare, command: str) -> int:
    """Run the command; returns the exit code."""
    if options.resume is not None:
        kept = ("--retry-failed", "--no-retry-failed", "--jobs", "--workers", "--threads")
        advice = (
            "begin another folder with --out. To add operators, seeds or learning rates, give all settings again, with "
            "this folder as --out"
        )
        refuse_settings("compare", options.resume, command, *kept, advice=advice)
        comparison = Comparison.open(options.resume)
    else:
        spec = specification(options, command)
        comparison = Comparison(options.out or folder_of(spec.task.name, spec.identity()), spec)
    refuse_threads("compare", comparison.directory, comparison.threads, options.threads)
    if options.workers is not None and options.jobs != Compare.jobs:
        raise ArgumentError(
            f"compare: --jobs {options.jobs} and --workers {options.workers} both say how many runs go on at a time. "
            "Give one of them."
        )
    jobs = options.jobs if options.workers is None else parsed("compare: --workers", options.workers)
    result = execute(comparison, jobs=jobs, threads=options.threads, retry_failed=options.retry_failed)
    if comparison.plan is None:
        print("Stopped before anything was trained. Run the same command again.")
        return STOPPED
    paths = report.write(comparison.directory)
    summary = report.summarise(report.load(comparison.directory))
    print_summary(summary)
    print(f"Report: {paths.html}")
    return exit_code(result, comparison.directory, jobs)


def print_summary(summary: report.Summary) -> None:
    """Print the headline, the flags and sentences, and the table of results."""
    print(f"\n{summary.headline}")
    for flag in summary.flags:
        print(f"  ! {flag.sentence}")
    for sentence in summary.sentences:
        print(f"  {sentence}")
    if summary.ranking or summary.unlearned:
        console = screen(200)
        results = report.results(summary)
        table = Table(box=None, padding=(0, 3, 0, 0), header_style="dim")
        for index, column in enumerate(results.head):
            table.add_column(column.lower(), justify="right" if index else "left", no_wrap=not console.is_terminal)
        for _, cells in results.rows:
            table.add_row(
                *(
                    Text(f"{cell.text} ({cell.note})" if cell.note else cell.text, style="bold" if cell.best else "")
                    for cell in cells
                )
            )
        print()
        console.print(table)
    print()


def exit_code(result: ComparisonResult, directory: Path, jobs: int | str) -> int:
    """0 when all is done; 1 when runs failed, 130 when some are left, each with a line on what to do.

    jobs: how many runs there were at a time, or "ray". The comparison does not store it, so the line repeats it.
    """
    option = "--workers" if isinstance(jobs, str) else "--jobs"
    again = f"zonal compare --resume {shlex.quote(str(directory))}" + ("" if jobs == 1 else f" {option} {jobs}")
    done, failed = (sum(record.status == status for record in result.runs) for status in ("done", "failed"))
    if result.status == "stopped":
        print(
            f"Stopped with {result.left} of {done + failed + result.left} runs left. Resume with the same command, "
            f"or with: {again}"
        )
        return STOPPED
    if failed:
        print(
            f"{failed} of {len(result.runs)} runs failed; the report has their messages. "
            f"Run them again with: {again} --retry-failed"
        )
        return FAILED
    return 0
