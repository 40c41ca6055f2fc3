"""metrics.jsonl, one line an update or evaluation, and TensorBoard events made from the same lines.

The file is only ever appended to, with a flush a line: a killed process loses nothing that was logged, and at most
leaves its last line half written. A checkpoint notes how many bytes the file had; going on from it cuts the file to
that length, so what follows repeats the lost lines exactly once. The bytes before are never touched. TensorBoard events
are a projection of this file: they are written anew from its lines when a run goes on, so no step appears twice.
"""

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

from zonal.errors import FileFormatError
from zonal.store import summed, writing

FILE = "metrics.jsonl"
EVENTS = "events.out.tfevents.*"


def kept(directory: Path, size: int, digest: str) -> bytes:
    """The first ``size`` bytes of the log in ``directory``, as the checkpoint beside it describes them. digest: their
    SHA-256; "" where it was not noted.

    Raises: FileFormatError when the file is shorter, was not cut at the end of a line, or holds something else.
    """
    path = directory / FILE
    try:
        with open(path, "rb") as file:
            found = file.read(size)
    except FileNotFoundError:
        found = b""
    except OSError as error:
        raise FileFormatError(f"train: {path} cannot be read ({error.strerror}).") from error
    if len(found) < size:
        raise FileFormatError(
            f"train: {path} has {len(found)} bytes, the checkpoint beside it was written after {size}. "
            "The file was shortened; remove the folder to run it again."
        )
    if (size and not found.endswith(b"\n")) or digest not in ("", hashlib.sha256(found).hexdigest()):
        raise FileFormatError(
            f"train: {path} was changed since the checkpoint beside it. Remove the folder to run it anew."
        )
    return found


class MetricsLog:
    """Append-only log in ``directory``, cut to ``size`` bytes first, which have the SHA-256 ``digest``. Use as a
    context manager.

    Raises: FileFormatError as ``kept``; InsufficientSpaceError when the disk is full, FileWriteError for what else the
    operating system refuses.
    """

    def __init__(self, directory: Path, size: int, digest: str = "", *, elapsed: float, tensorboard: bool):
        self.path = directory / FILE
        before = kept(directory, size, digest)
        self._digest = hashlib.sha256(before)
        with writing("train", self.path):
            # unbuffered: a line is in the operating system's hands once written, and closing has nothing left that
            # could fail;
            # a link that was put there is not followed
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
            self._file = open(descriptor, "r+b", buffering=0)  # noqa: SIM115, closed by __exit__
        try:
            self._file.truncate(size)
            self._file.seek(size)
            self._events = _Events(directory, before.splitlines(), elapsed) if tensorboard else None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._events is not None:
            self._events.writer.close()

    def append(self, line: dict[str, Any]) -> None:
        """Append one object; it is in the operating system's hands when this returns."""
        data = json.dumps(summed(line), allow_nan=False).encode() + b"\n"
        self._digest.update(data)
        with writing("train", self.path):
            while data:
                data = data[self._file.write(data) :]
        if self._events is not None:
            self._events.add(line)

    def sync(self) -> tuple[int, str]:
        """Force everything onto the disk; returns the size in bytes and the SHA-256, for the checkpoint."""
        with writing("train", self.path):
            os.fsync(self._file.fileno())
            if self._events is not None:
                self._events.writer.flush()
        return self._file.tell(), self._digest.hexdigest()


class SilentLog:
    """The log of a process that writes none."""

    def __enter__(self) -> "SilentLog":
        return self

    def __exit__(self, *_: object) -> None: ...

    def append(self, line: dict[str, Any]) -> None: ...

    def sync(self) -> tuple[int, str]:
        return 0, ""


class _Events:
    """TensorBoard events of the lines ``kept`` and of those that ``add`` brings."""

    def __init__(self, directory: Path, kept: list[bytes], elapsed: float):
        # imported here: it takes a second, and runs without events should not pay for it
        from torch.utils.tensorboard.writer import SummaryWriter

        for old in directory.glob(EVENTS):
            old.unlink()
        self.writer = SummaryWriter(directory)
        # the clock of the events is the training time of the run, counted from a start that is now minus that time
        self._start = time.time() - elapsed
        for line in kept:
            self.add(json.loads(line))

    def add(self, line: dict[str, Any]) -> None:
        group = {"train": "train", "eval": "evaluation"}[line["kind"]]
        for name, value in line.items():
            if name in ("loss", "accuracy", "bits_per_byte", "learning_rate", "gradient_norm", "stage"):
                self._scalar(f"{group}/{name}", value, line)
        for name, value in line.get("gates", {}).items():
            self._scalar(f"gates/{name}", value, line)
        for name, values in line.get("slices", {}).items():
            for key, value in values.items():
                self._scalar(f"{group}/accuracy by {name}/{key}", value, line)

    def _scalar(self, tag: str, value: float, line: dict[str, Any]) -> None:
        self.writer.add_scalar(tag, value, line["step"], walltime=self._start + line["seconds"])
