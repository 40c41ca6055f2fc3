"""``zonal demo``: five operators on two real tasks in 4 to 9 minutes on two cores, ended by one report page.

The settings are ``PARTS``: a fixed number of steps each, so that every machine gets the same numbers and a slow one
only takes longer. Everything else is machinery of ``zonal compare``. Each part is the value of a `zonal compare`
command, which the report prints, so that a reader can run one part alone.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from zonal import report
from zonal.cli import compare, parse
from zonal.cli.compare import Compare
from zonal.cli.options import STOPPED, ModelOptions, TaskOptions, TrainingOptions, command_line
from zonal.errors import ArgumentError
from zonal.training import Comparison
from zonal.training.plan import SmallBudgetError

OPERATORS = "softmax,sko,squared_affine,linear,ska(power=0)"

# small models gain little from a second thread: two runs at a time, of one thread each, use two cores better
JOBS = 2

_SHARED = Compare(operators=OPERATORS, jobs=JOBS, threads=1)
PARTS = {
    "recall": dataclasses.replace(
        _SHARED,
        learning_rates="1e-2",
        task=TaskOptions(task="mqar-demo", test_examples=500),
        model=ModelOptions(layers=2, dim=64, heads=2, mlp="none", conv=4),
        training=TrainingOptions(steps=500, batch_size=64, eval_batch_size=250, tensorboard=False),
    ),
    "text": dataclasses.replace(
        _SHARED,
        learning_rates="3e-3",
        task=TaskOptions(task="text", data="novel", length=128, evaluation_bytes=16_384),
        model=ModelOptions(layers=2, dim=64, heads=2, conv=4),
        training=TrainingOptions(steps=500, batch_size=16, eval_batch_size=64, tensorboard=False),
    ),
}
"""The settings of each part by its name. A budget is divided equally."""

DESCRIPTION = """\
Compare softmax, SKO, squared-affine, linear and ridge attention on two tasks, multi-query associative recall and the
embedded novel, and write one report page. It takes 4 to 9 minutes on two cores, by processor. Ctrl-C stops with a
checkpoint; the same command resumes.

Examples:
  zonal demo
  zonal demo --seeds 3 --budget 20m --out runs/longer-demo"""


@dataclass(frozen=True)
class Demo:
    """Compare five operators on two tasks."""

    budget: str | None = None
    """Wall-clock time for the whole demo, such as 20m. None: a fixed number of steps."""
    seeds: str = "1"
    """Number of seeds. With more than one, the page shows the spread."""
    out: Path = Path("runs/demo")
    """Folder for all files."""


def parts(options: Demo) -> list[tuple[Path, Compare]]:
    """The comparisons of the demo, each with its folder."""
    parse.seeds(options.seeds)
    found = []
    for name, part in PARTS.items():
        settings = dataclasses.replace(part, seeds=options.seeds)
        if options.budget is not None:
            share = parse.duration(options.budget) / len(PARTS)
            training = dataclasses.replace(part.training, steps=None)  # as many as the time allows
            settings = dataclasses.replace(settings, budget=f"{share:.10g}s", training=training)
        found.append((options.out / name, settings))
    return found


def run(options: Demo, command: str) -> int:
    """Run the command; returns the exit code."""
    # both are checked before either is run
    comparisons = [
        (Comparison(folder, compare.specification(settings, command_line("compare", settings))), settings)
        for folder, settings in parts(options)
    ]
    codes: list[int] = []
    for comparison, settings in comparisons:
        try:
            result = compare.execute(comparison, jobs=settings.jobs, threads=settings.threads)
        except SmallBudgetError as error:
            raise ArgumentError(
                f"demo: --budget {options.budget} is too small; about {error.needed * len(PARTS)} s are needed. "
                "Give as much, and another folder with --out, or leave --budget out."
            ) from error
        if comparison.plan is None or result.status == "stopped":
            print(f"Stopped. Run the same command to resume: {command}")
            return STOPPED
        # should the next part fail, this one is not lost
        report.write(comparison.directory)
        summary = report.summarise(report.load(comparison.directory))
        compare.print_summary(summary)
        codes.append(compare.exit_code(result, comparison.directory, settings.jobs))
    paths = report.write_many([comparison.directory for comparison, _ in comparisons], options.out)
    print(f"Report: {paths.html.resolve()}  (open it in a browser; no network is needed)")
    return max(codes)
