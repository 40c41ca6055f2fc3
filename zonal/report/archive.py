"""``runs.zip``: the runs of a finished comparison or search in one file, at their paths in its folder.

The file is a plain zip archive (bzip2), so ``unzip`` also makes the folder again. It keeps of every run: ``run.json``
as it is, and of ``metrics.jsonl`` all evaluations and ``POINTS`` lines of training. Of the runs that the page draws it
also keeps ``diagnostics.json`` and ``witnesses.json``. Weights and TensorBoard events are not kept. The same runs give
the same bytes.
"""

import contextlib
import json
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from zonal.errors import FileFormatError
from zonal.store import write_error

NAME = "runs.zip"
POINTS = 50
KEPT = ("comparison.json", "run.json", "metrics.jsonl", "diagnostics.json", "witnesses.json")
"""The files of a run that are kept, and what a search keeps beside its runs."""
TREES = ("runs", "regimes")
"""Where the runs of a comparison and of a search are in its folder."""
# zip has no field for an unknown time; this is its earliest
_DATE = (1980, 1, 1, 0, 0, 0)
_DAMAGED = (
    zipfile.BadZipFile,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    zlib.error,
)  # RuntimeError: of unknown methods, of passwords
_MOST = 2**31
"""Bytes that all runs of an archive may have. A comparison of a hundred runs has a hundredth of it."""


def members(folder: Path) -> dict[str, bytes]:
    """What an archive of the unpacked runs in ``folder`` keeps: contents by path.

    Raises: FileFormatError for a log of which a line cannot be read.
    """
    found = sorted(path for tree in TREES for name in KEPT for path in (folder / tree).rglob(name))
    return {
        path.relative_to(folder).as_posix(): _thinned(path) if path.name == "metrics.jsonl" else path.read_bytes()
        for path in found
    }


def _thinned(path: Path) -> bytes:
    """All evaluations of a log, and ``POINTS`` lines of training, evenly spaced, the first and the last among them."""
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # a killed process may leave its last line half written
    try:
        training = [index for index, line in enumerate(lines) if json.loads(line)["kind"] == "train"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileFormatError(f"pack: {path} has a line that cannot be read ({error!r}). Run it again.") from error
    last = len(training) - 1
    kept = {training[round(place * last / (POINTS - 1))] for place in range(POINTS)} if last >= POINTS else training
    dropped = set(training).difference(kept)
    return b"".join(line for index, line in enumerate(lines) if index not in dropped)


def write(path: Path, contents: dict[str, bytes]) -> None:
    """Write an archive. Its bytes depend on ``contents`` alone: names are sorted, dates are fixed."""
    with zipfile.ZipFile(path, "w") as archive:
        for name in sorted(contents):
            entry = zipfile.ZipInfo(name, _DATE)
            entry.compress_type, entry.external_attr = zipfile.ZIP_BZIP2, 0o644 << 16
            archive.writestr(entry, contents[name], compresslevel=9)


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Traversable]:
    """The runs in ``folder``, packed or not, as a folder to read: ``root / "runs"`` and what is below.

    Raises: FileFormatError naming the archive when it is damaged, or when other runs lie unpacked beside it.
    """
    path = folder / NAME
    if not path.is_file() or _beside(folder):
        yield folder
        return
    with _archive(path) as archive:
        yield zipfile.Path(archive)


def unpack(folder: Path) -> None:
    """Replace ``runs.zip`` in ``folder`` by the folders that it holds; nothing happens where there is none.

    A process that is killed leaves the archive in place until all runs are there.

    Raises: FileFormatError as ``opened``. InsufficientSpaceError when the disk is full, FileWriteError for what else
    the operating system refuses; the archive is then as it was.
    """
    path = folder / NAME
    if not path.is_file():
        return
    beside = _beside(folder)
    try:
        if not beside:
            _unpack_beside(path)
        path.unlink()
    except OSError as error:
        raise write_error("unpack", folder, error) from error


def _unpack_beside(path: Path) -> None:
    """Put the folders of an archive beside it."""
    staging = Path(tempfile.mkdtemp(prefix=".runs.", suffix=".part", dir=path.parent))
    try:
        with _archive(path) as archive:
            archive.extractall(staging)
        for tree in staging.iterdir():
            os.replace(tree, path.parent / tree.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _beside(folder: Path) -> bool:
    """Whether the runs of the archive also lie in folders beside it, as a process leaves them that is killed while it
    unpacks.
    """
    if not any((folder / tree).exists() for tree in TREES):
        return False
    with _archive(folder / NAME) as archive:
        for name in archive.namelist():
            if not (folder / name).is_file() or (folder / name).read_bytes() != archive.read(name):
                raise FileFormatError(
                    f"report: {folder} holds {NAME} and other runs beside it ({name} differs). "
                    "Delete the archive or the folders, whichever is out of date."
                )
    return True


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """A whole archive of runs, opened. Raises: FileFormatError."""
    with contextlib.ExitStack() as stack:
        try:
            archive = stack.enter_context(zipfile.ZipFile(path))
            size = sum(entry.file_size for entry in archive.infolist())
            if size > _MOST:  # no more than that is unpacked of any entry
                raise FileFormatError(
                    f"report: {path} would unpack to {size:,} bytes, at most {_MOST:,} are read. "
                    "Another program made it, or it was damaged."
                )
            damaged = archive.testzip()
        except FileFormatError:
            raise
        except _DAMAGED as error:
            raise FileFormatError(
                f"report: {path} is not a whole archive ({error}). "
                "It was cut short or damaged; take another copy of it."
            ) from error
        if damaged is not None:
            raise FileFormatError(f"report: {path} is damaged at {damaged}. Take another copy of it.")
        for name in archive.namelist():
            parts = PurePosixPath(name).parts
            if ".." in parts or len(parts) < 3 or parts[0] not in TREES or parts[-1] not in KEPT:
                raise FileFormatError(
                    f"report: {path} holds {name!r}, which is no file of a run. Another program made it."
                )
        yield archive
