"""``runs.tar.xz``: the runs of a finished comparison or search in one file, at their paths in its folder.

The file is a plain tar archive, so ``tar -xf`` also makes the folder again. It is compressed as a whole, because runs
resemble each other: a zip archive, which compresses each file by itself, takes nearly twice as much. It keeps of every
run: ``run.json`` as it is, and of ``metrics.jsonl`` all evaluations and ``POINTS`` lines of training, their fractions
with ``DIGITS`` significant digits, which are those of float32. Of the runs that the page draws it also keeps
``diagnostics.json`` and ``witnesses.json``. Weights and TensorBoard events are not kept. The same runs give the same
bytes.
"""

import contextlib
import io
import json
import lzma
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from zonal.errors import FileFormatError
from zonal.store import shortened, unharmed, writing

NAME = "runs.tar.xz"
POINTS = 50
DIGITS = 7
KEPT = ("comparison.json", "run.json", "metrics.jsonl", "diagnostics.json", "witnesses.json")
"""The files of a run that are kept, and what a search keeps beside its runs."""
TREES = ("runs", "regimes")
"""Where the runs of a comparison and of a search are in its folder."""
_MOST = 2**28
"""Bytes that all runs of an archive may have. A comparison of a hundred runs has less than a fiftieth of it."""


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
    """All evaluations of a log, and ``POINTS`` lines of training, evenly spaced, the first and the last among them.

    The archive is checked as a whole, so its lines of training have no checksums of their own.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()  # a killed process may leave its last line half written
    try:
        read = [json.loads(line) for line in lines]
        training = [index for index, line in enumerate(read) if line["kind"] == "train"]
        if not all(map(unharmed, read)):
            raise ValueError("its CRC-32 is of something else")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileFormatError(f"pack: {path} has a line that cannot be read ({error!r}). Run it again.") from error
    last = len(training) - 1
    kept = {training[round(place * last / (POINTS - 1))] for place in range(POINTS)} if last >= POINTS else training
    for index in training:
        point = {name: value for name, value in read[index].items() if name != "crc32"}
        lines[index] = json.dumps(shortened(point, DIGITS)).encode() + b"\n" if index in kept else b""
    return b"".join(lines)


def write(path: Path, contents: dict[str, bytes]) -> None:
    """Write an archive. Its bytes depend on ``contents`` alone: names are sorted, dates and owners are fixed."""
    # files of one kind stand side by side, where the compressor sees that they are alike
    names = sorted(contents, key=lambda name: (PurePosixPath(name).name, name))
    with tarfile.open(path, "w:xz", preset=9) as archive:
        for name in names:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(contents[name]), 0o644
            archive.addfile(entry, io.BytesIO(contents[name]))


def read(path: Path) -> dict[str, bytes]:
    """All that an archive of runs holds, by name. Raises: FileFormatError."""
    try:
        with lzma.open(path) as file:
            whole = file.read(_MOST + 1)
        entries = _entries(whole) if len(whole) <= _MOST else []
    except (lzma.LZMAError, tarfile.TarError, OSError, EOFError, ValueError) as error:
        raise FileFormatError(
            f"report: {path} is not a whole archive ({error}). It was cut short or damaged; take another copy of it."
        ) from error
    if len(whole) > _MOST:
        raise FileFormatError(
            f"report: {path} would unpack to more than {_MOST:,} bytes. Another program made it, or it was damaged."
        )
    contents: dict[str, bytes] = {}
    for name, data in entries:
        if data is None or name in contents or not _is_of_a_run(name):
            raise FileFormatError(
                f"report: {path} holds {name!r}, which is no file of a run, or stands there twice. "
                "Another program made it."
            )
        contents[name] = data
    return contents


def _entries(archive: bytes) -> list[tuple[str, bytes | None]]:
    """The names in a tar archive, each with its contents; None for a link, a device or a file with holes."""
    entries: list[tuple[str, bytes | None]] = []
    with tarfile.open(fileobj=io.BytesIO(archive), mode="r:") as tar:
        for entry in tar:
            file = tar.extractfile(entry) if entry.isreg() and not entry.issparse() else None
            entries.append((entry.name, None if file is None else file.read()))
    return entries


def _is_of_a_run(name: str) -> bool:
    """Whether runs have a file of this name. No such name leads out of a folder."""
    place = PurePosixPath(name)
    plain = place.as_posix() == name and ".." not in place.parts and "\0" not in name
    return plain and len(place.parts) > 2 and place.parts[0] in TREES and place.name in KEPT


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Path]:
    """The runs in ``folder``, packed or not, as a folder to read, which has ``runs``. Packed runs lie in a temporary
    one until the end.

    Raises: FileFormatError naming the archive when it is damaged, or when other runs lie unpacked beside it.
    InsufficientSpaceError and FileWriteError where the temporary folder cannot be written.
    """
    path = folder / NAME
    if not path.is_file() or _beside(folder):
        yield folder
        return
    contents = read(path)
    with tempfile.TemporaryDirectory(prefix="zonal.runs.") as made:
        with writing("report", Path(made)):
            _put(contents, Path(made))
        yield Path(made)


def unpack(folder: Path) -> None:
    """Replace ``runs.tar.xz`` in ``folder`` by the folders that it holds; nothing happens where there is none.

    A process that is killed leaves the archive in place until all runs are there.

    Raises: FileFormatError as ``opened``. InsufficientSpaceError when the disk is full, FileWriteError for what else
    the operating system refuses; the archive is then as it was.
    """
    path = folder / NAME
    if not path.is_file():
        return
    contents = {} if _beside(folder) else read(path)
    with writing("unpack", folder):
        _put_whole(contents, folder)
        path.unlink()


def _put_whole(contents: dict[str, bytes], folder: Path) -> None:
    """Write files into a folder of others, each tree of them at once."""
    staging = Path(tempfile.mkdtemp(prefix=".runs.", suffix=".part", dir=folder))
    try:
        _put(contents, staging)
        for tree in staging.iterdir():
            os.replace(tree, folder / tree.name)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _put(contents: dict[str, bytes], folder: Path) -> None:
    """Write files into a folder that is empty."""
    for name, data in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)


def _beside(folder: Path) -> bool:
    """Whether the runs of the archive also lie in folders beside it, as a process leaves them that is killed while it
    unpacks.
    """
    if not any((folder / tree).exists() for tree in TREES):
        return False
    for name, data in read(folder / NAME).items():
        if not (folder / name).is_file() or (folder / name).read_bytes() != data:
            raise FileFormatError(
                f"report: {folder} holds {NAME} and other runs beside it ({name} differs). "
                "Delete the archive or the folders, whichever is out of date."
            )
    return True
