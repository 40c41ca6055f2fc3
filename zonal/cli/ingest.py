"""``zonal ingest``: folders of texts in one memory of constant size, with an index of the spans that were read."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from zonal import ingest, workers
from zonal.cli.console import screen
from zonal.cli.options import shown
from zonal.errors import ArgumentError
from zonal.ingest.update import HEADS, SIZE
from zonal.limits import SIZE as ANY_SIZE

DESCRIPTION = """\
Read the texts (UTF-8) below a folder into one memory of constant size, and an index of the spans that were read.
Later, the same command reads what is new, subtracts what was deleted, and subtracts and reads again what has changed.
After Ctrl-C or a kill it continues. `zonal ask` answers from the memory.

Examples:
  zonal ingest notes --out memory
  zonal ingest notes letters --out memory --workers 4
  zonal ingest --merge memory-a memory-b --out both"""

_MANY = 200  # spans of a head from which on the memory misses answers (docs/ingest.md)
_NAMED = 20  # files that were skipped are listed by name up to so many


@dataclass(frozen=True)
class Ingest:
    """Read folders of texts into one memory."""

    folders: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="FOLDER ...")] = ()
    """Folders of texts; with --merge, archives."""
    out: Annotated[Path | None, shown("DIR", "required")] = None
    """Folder of the archive, which is made where there is none."""
    workers: str = "1"
    """Processes that read files, or ray for tasks of a Ray cluster (pip install 'zonal[ray]')."""
    heads: Annotated[int, ANY_SIZE] = HEADS
    """Size of the memory in units of 256 KiB. Larger memories find spans among more documents."""
    span_words: Annotated[int, ANY_SIZE] = SIZE
    """Words of a span, at most."""
    merge: bool = False
    """Put archives together in a new one."""


def run(options: Ingest, command: str) -> int:
    """Run the command; returns the exit code."""
    if options.out is None or not options.folders:
        raise ArgumentError("ingest: a folder and --out were required: zonal ingest FOLDER --out DIR.")
    count = workers.parsed("ingest: --workers", options.workers)
    if options.merge:
        given = [name for name in ("heads", "span_words", "workers") if getattr(options, name) != getattr(Ingest, name)]
        if given:
            raise ArgumentError(
                f"ingest: --merge takes the sizes of its archives, and no --{given[0].replace('_', '-')}. Leave it out."
            )
        _tell(ingest.merge(list(options.folders), options.out))
        return 0
    for folder in options.folders:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        terminal = screen()
        with Progress(*columns, console=terminal, disable=not terminal.is_terminal) as bar:
            task = bar.add_task(f"Reading {folder}", total=None)
            made = ingest.ingest(
                folder, options.out, workers=count, heads=options.heads, size=options.span_words,
                on_progress=lambda done, files, bar=bar, task=task: bar.update(task, completed=done, total=files),
            )  # fmt: skip
        _tell(made)
    return 0


def _tell(made: ingest.Update) -> None:
    archive = made.archive
    for each in made.skipped[:_NAMED]:
        print(f"Skipped {each.path}: {each.reason}")
    if len(made.skipped) > _NAMED:
        print(f"Skipped {len(made.skipped) - _NAMED:,} more; {archive.folder / 'archive.json'} names all.")
    print(
        f"{made.read:,} documents read ({made.changed:,} of them had changed), {made.unchanged:,} unchanged, "
        f"{made.removed:,} removed, {len(made.skipped):,} files skipped."
    )
    documents = sum(len(shard.reads) for shard in archive.shards)
    print(
        f"{archive.folder} holds {documents:,} documents in {archive.count:,} spans; the memory takes "
        f"{archive.memory.nbytes / 2**20:,.1f} MiB."
    )
    if archive.count > _MANY * archive.heads:
        print(
            "The memory is small for so many spans and misses answers. A new archive finds more with "
            f"--heads {2 * archive.count // _MANY}."
        )
