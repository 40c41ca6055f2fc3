"""The words of a command, and the commands that repeat a comparison, or one row of it, from the one that made it."""

import shlex
from collections.abc import Mapping, Sequence

# options that name a place or a state, or that a fixed number of steps replaces
_DROPPED = {"--out", "--resume", "--budget"}


def parted(words: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Leading words, then every option, as --help writes it, with the words after it, in order. Of an option that comes
    several times the last counts.
    """
    head: list[str] = []
    options: dict[str, list[str]] = {}
    current: list[str] = head
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            current = options.setdefault(name.replace("_", "-"), [])  # both forms are read
            current.clear()
            if equals:
                current.append(value)
        else:
            current.append(word)
    return head, options


def variant(command: str, changes: Mapping[str, str]) -> str:
    """``command`` with the options in ``changes`` set; where results are kept and how long it may take are left out.

    A text that is no ``zonal compare`` command is returned as it is.
    """
    try:
        words = shlex.split(command)
    except ValueError:
        return command
    head, options = parted(words)
    if "compare" not in head:
        return command
    options = {name: values for name, values in options.items() if name not in _DROPPED}
    options.update({name: [value] for name, value in changes.items()})
    return shlex.join([*head, *(word for name, values in options.items() for word in (name, *values))])


def row_command(command: str, operator: str, learning_rate: float | None, steps: int | None) -> str:
    """The command that repeats one operator with all seeds at its chosen learning rate."""
    changes = {"--operators": operator}
    if learning_rate is not None:
        changes["--learning-rates"] = repr(learning_rate)
    if steps is not None:
        changes["--steps"] = str(steps)
    return variant(command, changes)


def fixed_command(command: str, steps: int | None) -> str:
    """The command that repeats the whole comparison with the same number of steps on a machine of any speed."""
    return variant(command, {} if steps is None else {"--steps": str(steps)})
