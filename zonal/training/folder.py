"""The folder of a run, a comparison or a search: whether it is theirs, and what the file says that makes it so."""

import contextlib
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from zonal.errors import ArgumentError, FileFormatError
from zonal.report import archive
from zonal.store import read_record, remove_parts
from zonal.training.config import TrainConfig
from zonal.training.environment import folder_lock, interruptible
from zonal.training.log import EVENTS
from zonal.training.log import FILE as LOG
from zonal.training.record import FILE as RECORD
from zonal.training.record import RunResult


class Spec(Protocol):
    """What is asked for."""

    @property
    def training(self) -> TrainConfig: ...

    def difference(self, there: Any) -> tuple[str, Any, Any] | None:
        """The first setting in which this may not differ from what a folder holds, there and here; None if it goes on
        from there.
        """
        ...


def claimed(
    directory: Path, file: str, call: str, noun: str, spec: Spec, read: Callable[[Path], tuple[Any, dict[str, Any]]]
) -> dict[str, Any] | None:
    """What the file of a folder says, None for a folder that is to be made or is empty. call: "compare"; noun:
    "comparison".

    Raises: ArgumentError for a folder of other settings (the first that differs is named) or begun without keep_best,
    for a file, and for a folder of something else.
    """
    if (directory / file).exists():
        stored_spec, stored = read(directory)
        difference = spec.difference(stored_spec)
        if difference is not None:
            name, old, new = difference
            added = "Operators, seeds and learning rates may be added. " if noun == "comparison" else ""
            raise ArgumentError(
                f"{call}: {directory} holds another {noun}: {name} is {old!r} there and {new!r} here. {added}"
                f"Use the same settings to resume (or `zonal {call} --resume {shlex.quote(str(directory))}`), "
                "choose another folder, or delete this one."
            )
        if spec.training.keep_best and not stored_spec.training.keep_best:
            raise ArgumentError(
                f"{call}: {directory} was begun without keep_best, so the best weights of its runs were not kept. "
                "Leave keep_best out, or begin in another folder."
            )
        return stored
    if directory.exists() and not directory.is_dir():
        raise ArgumentError(f"{call}: {directory} is a file, a folder was required.")
    if directory.exists() and any(path.suffix != ".part" for path in directory.iterdir()):
        raise ArgumentError(
            f"{call}: {directory} is not empty and holds no {noun}. Choose another folder, or empty this one."
        )
    return None


def check_own(directory: Path) -> None:
    """For a run without a checkpoint: raise ArgumentError where another program has written files of the same names,
    which would be lost.
    """
    record, lines, events = directory / RECORD, directory / LOG, next(directory.glob(EVENTS), None)
    foreign: Path | None = None
    if record.exists():
        try:
            RunResult.read(directory)
        except FileFormatError:
            foreign = record
    elif lines.exists():  # a run that was killed before its record has an empty one, and perhaps events
        foreign = lines if lines.stat().st_size else None
    else:
        foreign = events
    if foreign is not None:
        raise ArgumentError(
            f"train: {foreign} would be overwritten, and is not of a run of this library, or is damaged. Choose "
            "another folder, or move the file away."
        )


def stored_in(directory: Path, file: str, schema: int, call: str, noun: str) -> dict[str, Any]:
    """What the file says. Raises: FileFormatError when the folder has none, or one of another version."""
    path = directory / file
    if not path.is_file():
        writer = "compare" if noun == "comparison" else noun
        raise FileFormatError(
            f"{call}: {directory} holds no {noun} (no {file}). Give the folder that `zonal {writer}` wrote."
        )
    return read_record(path, schema, call, "Choose another folder.")


@contextlib.contextmanager
def sitting(directory: Path, call: str) -> Iterator[Callable[[], bool]]:
    """Hold a folder to run what is left in it: without the parts of a killed process, and with its runs unpacked.
    Yields the function of ``interruptible``. call: the name in errors.
    """
    with folder_lock(directory, call=call), interruptible() as interrupted:
        remove_parts(directory)
        archive.unpack(directory)
        yield interrupted
