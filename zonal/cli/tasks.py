"""``zonal tasks``: which tasks there are, and what one of them asks."""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from zonal import limits, tasks
from zonal.cli.options import shown
from zonal.errors import ArgumentError

DESCRIPTION = """\
List the tasks that `zonal compare` and `zonal train` take, or show one: what it asks, what a guess reaches,
and examples. An example is what the model reads; the words that it is asked for stand in [brackets], each after the
token at which it is predicted.

Examples:
  zonal tasks
  zonal tasks show sort
  zonal tasks show tool-trace --length 64 --pairs 2 --count 1"""

_LONGEST = 400
"""Most tokens of an example that are printed."""


@dataclass(frozen=True)
class Tasks(tasks.TaskSettings):
    """List the tasks, or show one."""

    what: tyro.conf.Positional[Literal["list", "show"]] = "list"
    """list: all tasks. show: one of them, with examples."""
    name: tyro.conf.Positional[Annotated[str | None, shown("NAME", "for show")]] = None
    """The task to show."""
    count: Annotated[int, limits.SIZE] = 3
    """Examples to show."""


def run(options: Tasks, command: str) -> int:
    """Run the command. Returns 0."""
    if options.what == "list":
        if options.name is not None:
            raise ArgumentError(f"tasks: list takes no name. Run: zonal tasks show {options.name}")
        for name, about in tasks.names().items():
            print(f"{name:<28}{about}")
        return 0
    if options.name is None:
        raise ArgumentError("tasks: show requires the name of a task. `zonal tasks` lists them.")
    task = tasks.resolve(options.name, options)
    print(task.describe())
    print(f"metric  {task.metric}{_guess(task)}")
    print(f"tokens  {task.vocab_size:,} different ones; up to {task.length:,} in a sequence")
    for step in range(options.count):
        print(f"\n{example(task, task.train_batch(step, 1, 0))}")
    return 0


def _guess(task: tasks.Task) -> str:
    """What a guess reaches, and on which part of the evaluation where that holds more than was trained."""
    guess = task.guess()
    if guess is None:
        return ""
    part = "" if guess.trained is None else f" on what was trained ({guess.trained[0]} {', '.join(guess.trained[1])})"
    return f"; a guess {guess.value:.3f}{part}"


def example(task: tasks.Task, batch: tasks.Batch) -> str:
    """The first sequence of a batch as people read it, with the words that are asked in brackets."""
    pairs = list(zip(batch.tokens[0].tolist(), batch.targets[0].tolist(), strict=True))[:_LONGEST]
    if all(target != tasks.IGNORED for _, target in pairs):
        return task.decode([token for token, _ in pairs]) or str([token for token, _ in pairs])
    said = [
        _word(task, token) + ("" if target == tasks.IGNORED else f" [{_word(task, target)}]") for token, target in pairs
    ]
    return " ".join(said)


def _word(task: tasks.Task, token: int) -> str:
    return task.decode([token]) or str(token)
