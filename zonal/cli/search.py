"""``zonal search``: a walk among operators and parameters on one task, shown while it runs, ended by a page and a
recipe.
"""

import dataclasses
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from zonal.cli import parse
from zonal.cli.app import read
from zonal.cli.options import (
    STOPPED,
    RunOptions,
    TrainingOptions,
    folder_of,
    refuse_settings,
    refuse_threads,
    shown,
)
from zonal.cli.presets import RECIPE, Preset, write_recipe
from zonal.cli.progress import watching
from zonal.cli.train import layers_of
from zonal.errors import ArgumentError
from zonal.limits import RATE
from zonal.models.layers import split
from zonal.report import formats
from zonal.report import search as report
from zonal.store import read_json
from zonal.training.search import KINDS, PALETTE, Regime, Search, SearchResult, SearchSpec
from zonal.training.search.spec import SearchSettings
from zonal.workers import parsed

_STEPS = 300

DESCRIPTION = """\
Search for a good operator for a task. The search changes one thing at a time (score, link, anchor, power, rank, feature
map, layer placement, learning rate, head size), trains the result, and accepts or rejects the change. Impossible
combinations are not trained. Writes report.html with the graph of moves, report.md, findings.json, and the winner as
recipe.json. Ctrl-C stops with a checkpoint; the same command continues.

Examples:
  zonal search --task mqar-demo --operator softmax --steps 200 --seeds 2 --rounds 6 --budget 30m
  zonal search --task text --operator 'ska(power=1)' --moves anchor,link,power --rule metropolis --temperature 0.02
  zonal search --task mqar-demo --measure steps --target 0.9 --workers 4 --threads 1
  zonal search --resume runs/search-mqar-demo-1a2b3c4d"""


@dataclass(frozen=True)
class SearchOptions(RunOptions, SearchSettings):
    """Search over operators and parameters on one task."""

    operator: str = "softmax"
    """Start of the search: one operator for all layers, or a list with one per layer."""
    learning_rate: Annotated[float, RATE] = 3e-3
    """Learning rate at the start."""
    seeds: str = "2"
    """Seeds per regime, as a number or a list such as 0,1,2."""
    moves: str = ",".join(KINDS)
    """Kinds of moves."""
    palette: str = ",".join(PALETTE)
    """The operators that a placement move may put into a layer."""
    budget: Annotated[str | None, shown("TIME", "default: none")] = None
    """Time of training and evaluation of all runs, such as 10m or 2h. A rung starts only if it should fit."""
    workers: str = "1"
    """Regimes trained at a time, or ray for as many as a Ray cluster has cores for. Other than 1 needs Ray (pip install
    'zonal[ray]')."""
    out: Annotated[Path | None, shown("DIR", "default: runs/search-TASK-..., found from the settings")] = None
    """Folder for all files."""
    resume: Annotated[Path | None, shown("DIR", "optional")] = None
    """Continue the search in this folder; no other settings are needed."""
    title: Annotated[str | None, shown("TEXT", "default: from the task")] = None
    """Heading of the page of a new search. One that is there keeps its own."""
    training: TrainingOptions = field(default_factory=lambda: TrainingOptions(tensorboard=False))


def specification(options: SearchOptions, command: str) -> SearchSpec:
    """What the options ask for. Raises: ZonalError for anything that does not fit."""
    # names are checked before the data is read
    layers = layers_of("search", options.operator, options.model.layers, command)
    kinds = tuple(part.strip() for part in options.moves.split(","))
    palette, seeds = split(options.palette, "--palette"), parse.seeds(options.seeds)
    task = options.task.resolve("search")
    return SearchSpec(
        task=task,
        training=options.training.config(options.training.steps or _STEPS, options.learning_rate, seeds[0]),
        model=options.model.config(task, layers),
        seeds=seeds,
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(SearchSettings)},
        kinds=kinds,
        palette=palette,
        budget_seconds=None if options.budget is None else parse.duration(options.budget),
        device=options.device,
        title=options.title or f"Search: {task.heading()}",
        command=command,
    )


def preset_of(winner: Regime, options: SearchOptions, spec: SearchSpec) -> Preset:
    """The winner as settings of `zonal train` and `zonal compare`."""
    model = dataclasses.replace(options.model, layers=len(winner.layers), head_dim=winner.head_dim)
    training = dataclasses.replace(options.training, steps=spec.training.steps)
    seeds = ",".join(map(str, spec.seeds)) + "," * (len(spec.seeds) == 1)
    models, about = {winner.label: winner.operator}, f"the winner of {spec.title}"
    return Preset(about, models, seeds, repr(winner.learning_rate), options.task, model, training)


def run(options: SearchOptions, command: str) -> int:
    """Run the command; returns the exit code."""
    workers, threads = parsed("search: --workers", options.workers), options.threads
    if options.resume is not None:
        refuse_settings("search", options.resume, command, "--workers", "--threads")
        search = Search.open(options.resume)
        options = _asked(search)
    else:
        spec = specification(options, command)
        search = Search(options.out or folder_of(f"search-{spec.task.name}", spec.identity()), spec)
    refuse_threads("search", search.directory, search.threads, threads)
    spec = search.spec
    heading = (
        f"{spec.title}: from {spec.start.label}, at most {spec.rounds} rounds of {spec.width} moves; "
        f"files in {search.directory}"
    )
    with watching(spec.task.metric, {}, heading) as listener:
        result = search.run(on_event=listener, workers=workers, threads=threads)
    if result.winner is not None:
        write_recipe(search.directory / RECIPE, preset_of(result.winner, options, spec))
    return tell(result, search)


def _asked(search: Search) -> SearchOptions:
    """The options of the command that began a search.

    Raises: ArgumentError when it was begun from Python, which has no options.
    """
    words = shlex.split(search.spec.command)
    if words[:2] != ["zonal", "search"]:
        raise ArgumentError(
            f"search: {search.directory} was not started by `zonal search`. "
            "Resume it from Python: zonal.training.search.Search.open(...).run()."
        )
    return read("search", words[2:])[0]


def tell(result: SearchResult, search: Search) -> int:
    """Print what came of it; returns the exit code."""
    paths = report.write(search.directory)
    for line in report.headline(*(read_json(search.directory / name) for name in ("search.json", "findings.json"))):
        print(line)
    if result.status == "stopped":
        again = f"zonal search --resume {shlex.quote(str(search.directory))}"
        print(f"Stopped. Go on with the same command, or with: {again}")
    print(f"Report: {paths.html}")
    if result.winner is not None:
        best = formats.rate(result.winner.learning_rate)
        print(
            f"The winner again, {result.winner.operator} at learning rate {best}: "
            f"zonal compare --preset {shlex.quote(str(search.directory / RECIPE))}"
        )
    return STOPPED if result.status == "stopped" else 0
