"""The pages of a comparison or a search, and its packed form, in which finished experiments are kept."""

import errno
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from zonal import report, store
from zonal.errors import ArgumentError, FileFormatError, FileWriteError
from zonal.report import archive, charts, diagnostics, key_embeddings, search

KEPT = ("comparison.json", "search.json", "findings.json", "recipe.json")
"""Files kept beside the archive. The pages and ``summary.json`` are made from these files and from the runs."""
SETTINGS = ("comparison.json", "search.json")
"""Those of them that hold the task and the command."""
ENDED = ("done", "failed")


def write_pages(folder: str | os.PathLike[str]) -> tuple[Path, Path]:
    """Write report.html and report.md into the folder of a comparison (with summary.json) or of a search; returns the
    two.

    Raises: FileFormatError when the folder holds neither, or a file in it is damaged; InsufficientSpaceError.
    """
    found = Path(folder)
    _check_kind(found)
    paths = search.write(found) if (found / "search.json").is_file() else report.write(found)
    return paths.html, paths.markdown


def _check_kind(folder: Path) -> None:
    if not any((folder / name).is_file() for name in SETTINGS):
        raise FileFormatError(
            f"report: {folder} has no comparison.json and no search.json. "
            "Required: a folder that `zonal compare` or `zonal search` wrote."
        )
    if (folder / "search.json").is_file() and not (folder / "findings.json").is_file():
        raise FileFormatError(
            f"report: the search in {folder} has not ended (no findings.json). Go on with "
            f"`zonal search --resume {shlex.quote(str(folder))}`."
        )


def pack(folder: str | os.PathLike[str], out: str | os.PathLike[str]) -> Path:
    """Write the packed form of a comparison or a finished search into the new folder ``out``; ``folder`` stays as it
    is.

    ``out`` holds comparison.json, or search.json with findings.json and recipe.json; the runs in ``runs.tar.xz`` (see
    ``zonal.report.archive``); ``report.md`` and ``summary.json``. It appears whole or not at all. Of a comparison it
    leaves out runs that have not ended, which ``zonal compare --resume`` makes, and what was seen inside memories and
    keys of runs that the page does not draw. Paths of texts and tokenisers are written as in the command, without the
    folders of the machine that ran it.

    Raises: ArgumentError when ``out`` is there already, no run has ended, or runs of a search have not. FileFormatError
    when a file in ``folder`` is damaged. InsufficientSpaceError when the disk is full, FileWriteError for what else the
    operating system refuses.
    """
    source, target = Path(folder), Path(out)
    _check_kind(source)
    if target.exists():
        raise ArgumentError(f"pack: {target} is there already. Choose a new folder.")
    if (source / archive.NAME).is_file():
        raise ArgumentError(f"pack: {source} is packed already (it has {archive.NAME}). Copy the folder as it is.")
    contents = _kept(source)
    settings = {name: (source / name).read_bytes() for name in KEPT if (source / name).is_file()}
    try:
        with store.staged_folder(target) as staging:
            for name, data in settings.items():
                store.write_bytes(staging / name, data)
                if name in SETTINGS:
                    _name_paths_as_commanded(staging / name)
            archive.write(staging / archive.NAME, contents)
            page, _ = write_pages(staging)
            page.unlink()
    except FileWriteError:
        raise
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise store.write_error("pack", target, error) from error
        raise ArgumentError(f"pack: {target} is there already: another process has written it.") from error
    return target


def _kept(source: Path) -> dict[str, bytes]:
    """The files of runs that the packed form holds.

    Raises: ArgumentError when no run has ended, or runs of a search have not.
    """
    contents = archive.members(source)
    runs = {name: data for name, data in contents.items() if name.endswith("/run.json")}
    unfinished = {os.path.dirname(name) for name, data in runs.items() if not _ended(source / name, data)}
    contents = {name: data for name, data in contents.items() if os.path.dirname(name) not in unfinished}
    if unfinished and (not contents or (source / "search.json").is_file()):
        raise ArgumentError(
            f"pack: {len(unfinished)} runs of {source} have not ended. Finish them with "
            f"--resume {shlex.quote(str(source))}."
        )
    undrawn = _undrawn(source, runs) if (source / "comparison.json").is_file() else set()
    return {name: data for name, data in contents.items() if name not in undrawn}


def _name_paths_as_commanded(path: Path) -> None:
    """Shorten the paths in the task of an experiment to what its command says, where they end like that."""
    record = store.checked(path, store.read_json(path), "pack")
    with store.understood("pack", path):
        words = shlex.split(record.get("command", ""))
        named = {
            key: max((word for word in words if word and value.endswith(f"/{word}")), key=len, default=value)
            for key, value in record["task"].items()
            if isinstance(value, str) and os.path.isabs(value)
        }
    if named:
        store.write_checked(path, {**record, "task": record["task"] | named})


def _undrawn(folder: Path, runs: Mapping[str, bytes]) -> set[str]:
    """The files of a comparison that its page does not draw; ``runs`` holds the records of its runs by path."""
    summary = report.summarise(report.load(folder))
    found = set()
    for name, choose in ((diagnostics.NAME, charts.run_of_memories), (key_embeddings.NAME, charts.run_of_keys)):
        chosen = [choose(summary, row) for row in summary.rows]
        drawn = {(run.operator, run.seed, run.learning_rate) for run in chosen if run is not None}
        for path, data in runs.items():
            record = json.loads(data)
            if (record["operator"], record["seed"], record["learning_rate"]) not in drawn:
                found.add(f"{os.path.dirname(path)}/{name}")
    return found


def _ended(path: Path, data: bytes) -> bool:
    """Whether the record of a run says that it has ended."""
    with store.understood("pack", path):
        return json.loads(data)["status"] in ENDED
