"""Files of a folder, read with care: links are not followed, what is not text is named and passed over."""

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from zonal.errors import ArgumentError
from zonal.ingest.text import Read, read

BATCH = 128
"""Documents that a worker reads at a time, and the most that a file of the index holds."""
_BATCH_BYTES = 8 << 20
LARGEST = 64 << 20
"""A file of more bytes is passed over."""


class Skipped(NamedTuple):
    """A file that was not read, and why."""

    root: str
    path: str
    reason: str


class Batch(NamedTuple):
    """Files for one call of ``read_batch``: their paths in ``root``, with the digest of what has been read of each."""

    root: str
    files: tuple[tuple[str, str | None], ...]
    size: int
    buckets: int


def listed(root: Path, leave_out: Path) -> tuple[list[tuple[str, int]], list[Skipped]]:
    """Regular files below a folder with their bytes, in the order of their paths, and what else is there.

    Names that begin with a dot, and the folder ``leave_out``, are passed over in silence.

    Raises: ArgumentError for a folder that cannot be listed.
    """
    found: list[tuple[str, int]] = []
    skipped: list[Skipped] = []

    def refuse(error: OSError) -> None:
        raise ArgumentError(f"ingest: {error.filename} cannot be listed ({error.strerror}). Change its permissions.")

    for place, folders, files in os.walk(root, onerror=refuse):
        here = Path(place)
        folders[:] = [name for name in folders if not name.startswith(".") and here / name != leave_out]
        for name in sorted([*files, *(name for name in folders if (here / name).is_symlink())]):
            if name.startswith("."):
                continue
            path = (here / name).relative_to(root).as_posix()
            reason, size = _unsuitable(here / name, path)
            if reason is None:
                found.append((path, size))
            else:
                skipped.append(Skipped(str(root), path.encode(errors="backslashreplace").decode(), reason))
    return sorted(found), skipped


def _unsuitable(file: Path, path: str) -> tuple[str | None, int]:
    """Why a file is not read, and its bytes."""
    try:
        path.encode()
        about = file.lstat()
    except UnicodeEncodeError:
        return "its name is not UTF-8", 0
    except OSError as error:
        return f"it cannot be read ({error.strerror})", 0
    if stat.S_ISLNK(about.st_mode):
        return "it is a link, and links are not followed", 0
    if not stat.S_ISREG(about.st_mode):
        return "it is no regular file", 0
    return (f"it has more than {LARGEST >> 20} MiB" if about.st_size > LARGEST else None), about.st_size


def batches(files: Sequence[tuple[str, int]], known: dict[str, str], batch: Batch) -> list[Batch]:
    """Files with their bytes, in batches like ``batch``. known: digests of what has been read before."""
    groups: list[list[tuple[str, str | None]]] = []
    held = 0
    for path, size in files:
        if not groups or len(groups[-1]) == BATCH or held + size > _BATCH_BYTES:
            groups.append([])
            held = 0
        groups[-1].append((path, known.get(path)))
        held += size
    return [batch._replace(files=tuple(group)) for group in groups]


def read_batch(batch: Batch) -> list[Read | Skipped | None]:
    """What is in each file of a batch; None where it has not changed."""
    return [_read(batch, path, digest) for path, digest in batch.files]


def _read(batch: Batch, path: str, digest: str | None) -> Read | Skipped | None:
    def skipped(reason: str) -> Skipped:
        return Skipped(batch.root, path, reason)

    try:
        data = _bytes(Path(batch.root) / path)
    except OSError as error:  # gone since it was listed, without rights, or a link now
        return skipped(f"it cannot be read ({error.strerror})")
    if data is None:
        return skipped("it changed its kind or grew while it was read")
    if hashlib.sha256(data).hexdigest() == digest:
        return None
    if b"\0" in data:
        return skipped("it is binary")
    try:
        return read(batch.root, path, data, batch.size, batch.buckets)
    except UnicodeDecodeError as error:
        return skipped(f"it is not UTF-8 (byte {error.start})")


def _bytes(path: Path) -> bytes | None:
    """What a regular file holds; None for anything else and for one that is too large."""
    # a pipe that took the place of the file since it was listed must not be waited for
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            return None
        data = file.read(LARGEST + 1)
    return data if len(data) <= LARGEST else None


__all__ = ["BATCH", "Batch", "Skipped", "batches", "listed", "read_batch"]
