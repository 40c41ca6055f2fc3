"""Checkpoints of several processes: a folder with a safetensors file of each process and one JSON file.

    checkpoints/step-0000000200/
        checkpoint.json       where the run stood, its configuration, and the size and SHA-256 of each other file
        shard-00001-….safetensors

``torch.distributed.checkpoint`` copies the tensors, writes them while training goes on, and reads them on any number of
processes. Its safetensors storage holds no pickle. A folder has another name until all of its files are on the disk;
the two newest are kept.
"""

import dataclasses
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zonal.errors import FileFormatError
from zonal.store import read_record, understood, write_checked, write_error
from zonal.training.checkpoint import Progress, header_of, progress_in
from zonal.training.processes import SHARDS, Written

INDEX = "checkpoint.json"
SCHEMA = 1
KEPT = 2
_NAME = re.compile(r"step-\d{10}(-evaluated)?")


def newest(folder: Path) -> Path | None:
    """The last whole checkpoint of a run's folder."""
    try:
        return max((each for each in (folder / SHARDS).iterdir() if _NAME.fullmatch(each.name)), default=None)
    except FileNotFoundError:
        return None


def prepare(folder: Path) -> None:
    """Make the place of a run's checkpoints, and remove what a killed process was writing there."""
    (folder / SHARDS).mkdir(exist_ok=True)
    for part in (folder / SHARDS).glob(".step-*.part"):
        shutil.rmtree(part)


def read_index(path: Path, config: dict[str, Any]) -> tuple[Progress, dict[str, Any]]:
    """Where the run stood, and the files of the checkpoint with their sizes and digests.

    Raises: FileFormatError where it is damaged or of another run.
    """
    index = read_record(path / INDEX, SCHEMA, "train", f"Remove {path} to go on from the checkpoint before it.")
    with understood("train", path / INDEX):
        return progress_in(path, index, config), dict(index["files"])


def check(path: Path, files: Mapping[str, Mapping[str, Any]], part: int, parts: int) -> None:
    """Check each ``parts``-th of the files, from the number ``part`` on. Raises: FileFormatError."""
    for name in sorted(files)[part::parts]:
        advice = f"Restore it from a copy, or remove {path} to go on from the checkpoint before it."
        try:
            found = _described(path / name)
        except OSError as error:
            raise FileFormatError(
                f"train: {path / name} is missing or cannot be read ({error.strerror}); the checkpoint consists of "
                f"{len(files)} such files. {advice}"
            ) from error
        if found != files[name]:
            raise FileFormatError(f"train: {path / name} was damaged: its bytes are not those written. {advice}")


def _described(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def load(path: Path, state: dict[str, Tensor], group: dist.ProcessGroup) -> None:
    """Fill the tensors of ``state`` with this process's parts of those in the files, whatever number of processes
    wrote them. The files have been checked. Raises: FileFormatError.
    """
    # imported here, as in other functions: it takes most of a second, which other commands should not wait
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load as load_state

    try:
        load_state(state, storage_reader=HuggingFaceStorageReader(str(path)), process_group=group)
    except CheckpointException as error:
        raise FileFormatError(
            f"train: {path} does not fit the model ({_cause(error)}). It was written by another version of this "
            "library; use that version, or start again in another folder."
        ) from error


def _cause(error: Any) -> BaseException:
    """The first of the errors that processes met."""
    return next((failure for failure, _ in error.failures.values()), error)


class Writer:
    """Writes checkpoints to a run's folder in the background, one at a time. group: of processor messages between the
    processes, for nothing else, as they are sent while the run sends its own.
    """

    def __init__(self, folder: Path, group: dist.ProcessGroup) -> None:
        self._folder, self._group = folder / SHARDS, group
        self._rank, self._size = dist.get_rank(group), dist.get_world_size(group)
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[Written, Future[None]] | None = None

    def begin(self, state: dict[str, Tensor], progress: Progress, config: dict[str, Any]) -> None:
        """Copy the tensors and begin to write them. The one before has to be in place.

        A checkpoint of the same step that is there stays: it has the same tensors.
        """
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
        from torch.distributed.checkpoint.staging import BlockingAsyncStager
        from torch.distributed.checkpoint.state_dict_saver import async_save

        assert self._pending is None
        # the evaluation of a step comes after its update, and may be cut off by a stop: two states of one step
        suffix = "-evaluated" if progress.evaluated == progress.step else ""
        target = self._folder / f"step-{progress.step:010d}{suffix}"
        if target.exists():
            return
        part = target.with_name(f".{target.name}.part")
        header = {"schema": SCHEMA, **header_of(config), "progress": dataclasses.asdict(progress)}
        header = json.loads(json.dumps(header, allow_nan=False))  # now, as training goes on and changes it
        saving = async_save(
            state,
            storage_writer=HuggingFaceStorageWriter(str(part), save_distributed=True),
            async_stager=BlockingAsyncStager(),
            process_group=self._group,
        )
        assert isinstance(saving, Future)
        self._pending = Written(progress.step, target), self._pool.submit(self._publish, saving, part, target, header)

    def settle(self) -> list[Written]:
        """Wait for the checkpoint that was begun. Raises: FileWriteError where it cannot be written."""
        from torch.distributed.checkpoint.api import CheckpointException

        if self._pending is None:
            return []
        written, self._pending = self._pending, None
        try:
            written[1].result()
        except CheckpointException as error:
            cause = _cause(error)
            if isinstance(cause, OSError):
                raise write_error("train", written[0].path, cause) from error
            raise
        except OSError as error:
            raise write_error("train", written[0].path, error) from error
        return [written[0]]

    def close(self) -> None:
        """Let what was begun end."""
        self._pool.shutdown()

    def _publish(self, saving: "Future[Any]", part: Path, target: Path, header: dict[str, Any]) -> None:
        """When all processes have written: list the files, and give the folder its name."""
        saving.result()
        (own,) = part.glob(f"shard-{self._rank + 1:05d}-*.safetensors")
        found = _described(own)
        told = torch.tensor([*bytes.fromhex(found["sha256"]), *found["bytes"].to_bytes(8, "big")], dtype=torch.uint8)
        each = [torch.empty_like(told) for _ in range(self._size)]
        dist.all_gather(each, told, group=self._group)
        if self._rank == 0:
            files = {
                own.name.replace("00001", f"{rank:05d}", 1): {
                    "bytes": int.from_bytes(bytes(one[32:].tolist()), "big"), "sha256": bytes(one[:32].tolist()).hex()
                }
                for rank, one in enumerate(each, start=1)
            }  # fmt: skip
            index = {**header, "files": files}
            write_checked(part / INDEX, index)
            os.replace(part, target)
            whole = sorted(each for each in self._folder.iterdir() if _NAME.fullmatch(each.name))
            for old in whole[:-KEPT]:
                shutil.rmtree(old)
        dist.barrier(group=self._group)


__all__ = ["INDEX", "Writer", "check", "load", "newest", "prepare", "read_index"]
