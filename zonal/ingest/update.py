"""Folders into an archive: what is new is read, what has changed or gone is subtracted."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from zonal.algebra.declaration import require_whole
from zonal.errors import ArgumentError
from zonal.ingest.archive import Archive, made
from zonal.ingest.folder import Batch, Skipped, batches, listed, read_batch
from zonal.ingest.sums import KEY_DIM
from zonal.ingest.text import Read
from zonal.store import remove_parts
from zonal.training.environment import folder_lock
from zonal.workers import check, mapped

HEADS, SIZE = 64, 80
_EVERY = 10.0  # seconds between commits, at least
_SHARE = 0.1  # of the time at most goes into commits before the last


class Update(NamedTuple):
    """What ``ingest`` or ``merge`` did: documents that were read (``changed`` of them again), those that had not
    changed, those that were subtracted because their files are gone, and files that were skipped.
    """

    archive: Archive
    read: int
    changed: int
    unchanged: int
    removed: int
    skipped: tuple[Skipped, ...]


def ingest(
    folder: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    workers: int | str = 1,
    heads: int = HEADS,
    size: int = SIZE,
    on_progress: Callable[[int, int], None] = lambda done, files: None,
) -> Update:
    """Bring the archive in ``out`` up to date with the texts below ``folder``; it is made where there is none.

    New files are read. Files whose bytes have changed are subtracted and read again, those that are gone are
    subtracted. What was read of other folders stays. The memory is the same bits for any number of workers and any
    order. It is written every ten seconds or more; the same call after a kill goes on from there.

    Args:
        workers: processes; 1 for this one, "ray" for tasks of a Ray cluster, whose machines must share ``folder``.
        heads: size of the memory, 256 KiB each. size: words of a span, at most. An archive keeps those that it has.
        on_progress: called with the number of files that are done, and of all.

    Raises: ArgumentError for what is no folder, another process in ``out``, and an ``out`` of something else;
        FileFormatError for a damaged archive; FileWriteError.
    """
    root, target = _resolved(folder), Path(out).resolve()
    if root == target:
        raise ArgumentError(f"ingest: {folder} cannot be both the folder and the archive. Choose another --out.")
    for name, value in (("heads", heads), ("size", size)):
        require_whole(f"ingest: {name}", value, most=65_536)
    check("ingest", "workers", workers)
    with folder_lock(target, call="ingest"):
        remove_parts(target)
        archive = made(target, heads, size)
        files, skipped = listed(root, target)
        known = {path: read.digest for (where, path), read in archive.documents().items() if where == str(root)}
        gone = set(known) - {path for path, _ in files}
        archive.remove((str(root), path) for path in gone)
        archive.skipped = [each for each in archive.skipped if each.root != str(root)] + skipped
        read, changed, done = 0, 0, 0
        began, spent, last = time.monotonic(), 0.0, time.monotonic()
        todo = batches(files, known, Batch(str(root), (), size, heads * KEY_DIM))
        for batch, found in zip(todo, mapped(read_batch, todo, workers), strict=True):
            reads = [each for each in found if isinstance(each, Read)]
            lost = [each for each in found if isinstance(each, Skipped)]
            again = [each.path for each in reads if each.path in known]
            no_text = [each.path for each in lost if each.path in known]  # any more
            archive.remove((str(root), path) for path in again + no_text)
            if reads:
                archive.add(reads)
            archive.skipped += lost
            gone |= set(no_text)
            read, changed = read + len(reads), changed + len(again)
            done += len(batch.files)
            on_progress(done, len(files))
            now = time.monotonic()
            if now - last > _EVERY and spent <= _SHARE * (now - began):
                archive.commit()
                last = time.monotonic()
                spent += last - now
        skipped = tuple(each for each in archive.skipped if each.root == str(root))
        archive.commit()
    return Update(archive, read, changed, len(known) - len(gone) - changed, len(gone), skipped)


def merge(archives: list[str | os.PathLike[str]], out: str | os.PathLike[str]) -> Update:
    """One archive of the documents of several, in a new or empty folder. A document that is the same in two is there
    once.

    Raises: ArgumentError for archives of different sizes and for documents of one name that are not the same;
        FileFormatError for damaged ones.
    """
    if not archives or isinstance(archives, str | os.PathLike):
        raise ArgumentError(f"merge: a list of at least one archive is required, received {archives!r}.")
    sources = [Archive.open(each) for each in archives]
    first, target = sources[0], Path(out)
    with folder_lock(target, call="merge"):
        remove_parts(target)
        merged = made(target, first.heads, first.size)
        if merged.shards:
            raise ArgumentError(f"merge: {target} holds an archive already. Choose another folder.")
        for source in sources:
            if (source.heads, source.size) != (first.heads, first.size):
                raise ArgumentError(
                    f"merge: {source.folder} has {source.heads} heads and spans of {source.size} words, {first.folder} "
                    f"{first.heads} and {first.size}. Read its folder again with the same."
                )
            there, new = merged.documents(), []
            for name, read in source.documents().items():
                if name not in there:
                    new.append(read)
                elif there[name].digest != read.digest:
                    raise ArgumentError(
                        f"merge: {'/'.join(name)} is not the same in {source.folder} and in another of the archives. "
                        "Read its folder again into one of them."
                    )
            merged.add(new)
            merged.skipped += [each for each in source.skipped if each not in merged.skipped]
        merged.commit()
    return Update(merged, len(merged.documents()), 0, 0, 0, tuple(merged.skipped))


def _resolved(folder: str | os.PathLike[str]) -> Path:
    path = Path(folder).resolve()
    if not path.is_dir():
        raise ArgumentError(f"ingest: {folder} is not a folder. Name a folder of texts.")
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise ArgumentError(f"ingest: the path {str(path)!r} is not UTF-8. Rename the folder.") from error
    return path


__all__ = ["HEADS", "SIZE", "Update", "ingest", "merge"]
