"""What a setting may be: limits of its numbers, and names of files that a file system can hold. Classes of settings
state them in their annotations; the command line checks them before anything is made.
"""

import dataclasses
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from operator import index
from pathlib import Path
from typing import Any

from zonal.errors import ArgumentError

# of one name and of a whole path, in bytes, as Linux and macOS have them
_NAME, _PATH = 255, 4096


@dataclass(frozen=True)
class Between:
    """The least and the most that a number may be, both allowed."""

    least: float
    most: float

    def __str__(self) -> str:
        return f"from {self.least:,} to {self.most:,}"


@dataclass(frozen=True)
class FileName:
    """A text that names a file."""


SIZE = Between(1, 65_536)
COUNT = Between(1, 10_000_000)
TOKENS = Between(1, 16_777_216)
STEPS = Between(1, 1_000_000_000)
SEED = Between(0, 2**63 - 1)
SHARE = Between(0, 1)
RATE = Between(1e-30, 1e6)
RATIO = Between(1e-6, 1e6)
THREADS = Between(1, 1024)
PROCESSES = Between(1, 1024)


def whole_numbers(call: str, settings: Any) -> None:
    """Make int what a frozen dataclass declares as a whole number, which may be one of numpy.

    Raises: ArgumentError, naming call and field, for what is none, such as 1e4.
    """
    for name, hint in typing.get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        if hint not in (int, int | None, tuple[int, ...]) or value is None:
            continue
        try:
            numbers = tuple(map(index, value if isinstance(value, tuple) else (value,)))
        except TypeError as error:
            raise ArgumentError(f"{call}: {name} must be a whole number, got {value!r}.") from error
        object.__setattr__(settings, name, numbers if isinstance(value, tuple) else numbers[0])


def check(call: str, options: Any) -> None:
    """Raise ArgumentError, naming call and option, for a number outside its limits and for a name that no file can
    have.
    """
    hints = dict(_declared(type(options)))
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            check(call, value)
            continue
        option = f"{call}: --{field.name.replace('_', '-')}"
        for entry in value if isinstance(value, tuple) else (value,):
            for part in hints[field.name]:
                if isinstance(part, Between) and entry is not None and not part.least <= entry <= part.most:
                    raise ArgumentError(f"{option} must be {part}, received {entry}.")
            if isinstance(entry, Path | str):
                is_path = isinstance(entry, Path) or any(isinstance(part, FileName) for part in hints[field.name])
                _check_text(option, str(entry), is_path)


def _check_text(option: str, text: str, is_path: bool) -> None:
    if "\0" in text:
        raise ArgumentError(f"{option} must not hold a NUL character, received {text!r}.")
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:  # bytes of the shell that are no characters
        raise ArgumentError(f"{option} must be text in UTF-8, received {text!r}.") from error
    longest = max((len(part.encode()) for part in Path(text).parts), default=0)
    if is_path and (size > _PATH or longest > _NAME):
        raise ArgumentError(
            f"{option} must have names of at most {_NAME} bytes and {_PATH} in all, received {longest} and {size}. "
            "Choose a shorter one."
        )


def _declared(kind: type) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Each option with what its annotation holds besides the type."""
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            yield from _declared(hint)
        else:
            yield name, typing.get_args(hint)[1:] if typing.get_origin(hint) is typing.Annotated else ()
