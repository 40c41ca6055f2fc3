"""An archive: a folder with the memory of documents, and the index of the spans that are in it."""

import hashlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from zonal import store
from zonal.errors import ArgumentError, FileFormatError
from zonal.ingest import sums
from zonal.ingest.folder import BATCH, Skipped
from zonal.ingest.text import Read
from zonal.memory import Memory
from zonal.memory.sums import FeatureSums

FILE = "archive.json"
_SCHEMA = 2  # 1 had other words: marks ended them
_KIND = "spans"
_NAME = re.compile(r"(spans|memory)-\d{1,12}\.safetensors")
_ADVICE = "Read the folder again into a new archive."


@dataclass
class Shard:
    """Documents that are stored in one file. file: its name; None until it is written."""

    reads: list[Read]
    file: str | None = None
    checksum: str = ""


@dataclass
class Archive:
    """The memory of documents and the index of their spans, as they stand in ``folder`` after the last ``commit``.

    heads: size of the memory, 256 KiB each. size: words of a span, at most. Make one by ``ingest``, read it by
    ``Archive.open``.
    """

    folder: Path
    heads: int
    size: int
    memory: FeatureSums
    shards: list[Shard] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    number: int = 0
    """Of the next file that is written."""

    # --- reading ------------------------------------------------------------------------------------------------------

    @classmethod
    def open(cls, folder: str | os.PathLike[str]) -> Self:
        """Read an archive, and check all of it.

        Raises: FileFormatError for a folder of something else and for damaged files, by name.
        """
        source = Path(folder)
        while True:
            record = _record(source)
            try:
                return cls._loaded(source, record)
            except FileFormatError:
                if _record(source) == record:  # else another process has written meanwhile
                    raise

    @classmethod
    def _loaded(cls, source: Path, record: dict[str, Any]) -> Self:
        with store.understood("Archive.open", source / FILE):
            heads, size = int(record["heads"]), int(record["words"])
            stored, names = record["memory"], [record["memory"]["file"], *(each["file"] for each in record["shards"])]
            if not all(_NAME.fullmatch(name) for name in names):
                raise ValueError("it names files that no archive has")
            skipped = [Skipped(*each) for each in record["skipped"]]
            number = 1 + max(int(re.findall(r"\d+", name)[0]) for name in names)
            memory, like = Memory.load(source / stored["file"]), sums.empty(heads)
            if not isinstance(memory, FeatureSums) or memory.form != like.form or not like.of_operator(memory.operator):
                raise ValueError(f"{stored['file']} is not of an archive of its size")
            if store.read_header(source / stored["file"], "memory")["checksum"] != stored["checksum"]:
                raise ValueError(f"{stored['file']} belongs to another state of the archive")
            shards = [_shard(source, each, heads) for each in record["shards"]]
            found = cls(source, heads, size, memory, shards, skipped, number)
            if memory.count != found.count or len(found.documents()) != sum(len(shard.reads) for shard in shards):
                raise ValueError("its documents are not those of its memory")
        return found

    def documents(self) -> dict[tuple[str, str], Read]:
        """All documents by folder and path, in this order."""
        found = {read.name: read for shard in self.shards for read in shard.reads}
        return {name: found[name] for name in sorted(found)}

    @property
    def count(self) -> int:
        """Spans of all documents."""
        return sum(len(read.spans) for shard in self.shards for read in shard.reads)

    # --- changing -----------------------------------------------------------------------------------------------------

    def add(self, reads: Sequence[Read]) -> None:
        """Take in documents of new names. On the disk nothing changes before ``commit``."""
        self.memory = sums.together(self.memory, sums.of(reads, self.heads))
        self.shards.append(Shard(list(reads)))

    def remove(self, names: Iterable[tuple[str, str]]) -> None:
        """Subtract documents; names that are not there are passed over."""
        gone = set(names)
        for shard in self.shards if gone else ():
            leaving = [read for read in shard.reads if read.name in gone]
            if leaving:
                memory = self.memory.subtract(sums.of(leaving, self.heads))
                assert isinstance(memory, FeatureSums)
                self.memory = memory
                shard.reads, shard.file = [read for read in shard.reads if read.name not in gone], None

    def commit(self) -> None:
        """Write what has changed: new files first, then the record that names them, in one step. A process that is
        killed before that step leaves the archive as it was.

        Raises: FileWriteError, InsufficientSpaceError.
        """
        kept = [shard for shard in self.shards if shard.file is not None]
        changed = [shard for shard in self.shards if shard.file is None]
        if changed:  # small files are put together with what is written anyway
            small = [shard for shard in kept if len(shard.reads) < BATCH // 2]
            kept = [shard for shard in kept if len(shard.reads) >= BATCH // 2]
            reads = sorted((read for shard in (*small, *changed) for read in shard.reads), key=lambda read: read.name)
            groups = [reads[at : at + BATCH] for at in range(0, len(reads), BATCH)]
            self.shards = kept + [self._written(group) for group in groups]
        memory = self._next("memory")
        self.memory.save(self.folder / memory)
        record: dict[str, Any] = {
            "schema": _SCHEMA,
            "heads": self.heads,
            "words": self.size,
            "spans": self.count,
            "memory": {
                "file": memory,
                "checksum": store.read_header(self.folder / memory, "memory")["checksum"],
            },
            "shards": [
                {
                    "file": shard.file,
                    "checksum": shard.checksum,
                    "documents": [
                        {"folder": read.root, "path": read.path, "sha256": read.digest, "bytes": len(read.data),
                         "spans": len(read.spans)}
                        for read in shard.reads
                    ],
                }
                for shard in self.shards
            ],
            "skipped": [list(each) for each in self.skipped],
        }  # fmt: skip
        store.write_checked(self.folder / FILE, record)
        named = {memory, *(shard.file for shard in self.shards)}
        for file in self.folder.iterdir():  # of earlier states, and of processes that were killed
            if _NAME.fullmatch(file.name) and file.name not in named:
                file.unlink()

    def _next(self, kind: str) -> str:
        self.number += 1
        return f"{kind}-{self.number}.safetensors"

    def _written(self, reads: list[Read]) -> Shard:
        file = self._next("spans")
        tensors = {
            "data": torch.from_numpy(np.frombuffer(b"".join(read.data for read in reads), dtype=np.uint8).copy()),
            **{
                name: torch.from_numpy(np.concatenate([getattr(read, name) for read in reads]))
                for name in ("spans", "sizes", "keys")
            },
        }
        store.save_tensors(self.folder / file, tensors, {"kind": _KIND})
        return Shard(reads, file, store.read_header(self.folder / file, _KIND)["checksum"])


def _record(source: Path) -> dict[str, Any]:
    if not (source / FILE).exists():
        raise FileFormatError(
            f"Archive.open: {source} holds no archive (no {FILE}). Give the folder that `zonal ingest` wrote."
        )
    return store.read_record(source / FILE, _SCHEMA, "Archive.open", _ADVICE)


def _shard(source: Path, entry: dict[str, Any], heads: int) -> Shard:
    """The documents of a file, each checked against its digest. Raises: ValueError and the like for what does not
    fit.
    """
    tensors, header = store.load_tensors(source / entry["file"], _KIND)
    if header["checksum"] != entry["checksum"]:
        raise ValueError(f"{entry['file']} belongs to another state of the archive")
    data, spans, sizes, keys = (tensors[name].numpy() for name in ("data", "spans", "sizes", "keys"))
    shapes = data.shape[1:], spans.shape[1:], sizes.shape[1:], keys.shape[1:]
    if shapes != ((), (2,), (), ()) or {spans.dtype.kind, sizes.dtype.kind, keys.dtype.kind} != {"i"}:
        raise ValueError(f"{entry['file']} has tensors of other shapes or types")
    if not (sizes.sum() == len(keys) and len(sizes) == len(spans) and (keys >= 0).all()):
        raise ValueError(f"{entry['file']} has other spans than its memory")
    if (keys >= heads * sums.KEY_DIM).any():
        raise ValueError(f"{entry['file']} is of a larger memory")
    reads, at, span, key = [], 0, 0, 0
    for each in entry["documents"]:
        ends = at + each["bytes"], span + each["spans"], key + int(sizes[span : span + each["spans"]].sum())
        part = bytes(data[at : ends[0]])
        if hashlib.sha256(part).hexdigest() != each["sha256"]:
            raise ValueError(f"{each['path']} in {entry['file']} is not what was read")
        reads.append(
            Read(each["folder"], each["path"], each["sha256"], part, spans[span : ends[1]], sizes[span : ends[1]],
                 keys[key : ends[2]])
        )  # fmt: skip
        at, span, key = ends
    if span != len(spans) or key != len(keys):
        raise ValueError(f"{entry['file']} has more spans than documents")
    return Shard(reads, entry["file"], entry["checksum"])


def made(folder: Path, heads: int, size: int) -> Archive:
    """The archive of a folder, or an empty one where the folder has nothing but what a killed process left.

    Raises: ArgumentError for a folder of something else, and for an archive of another size or cut.
    """
    if (folder / FILE).exists():
        found = Archive.open(folder)
        if (found.heads, found.size) != (heads, size):
            raise ArgumentError(
                f"ingest: {folder} has a memory of {found.heads} heads and spans of {found.size} words; {heads} and "
                f"{size} were asked for. Use the same, or another folder."
            )
        return found
    strange = [file.name for file in folder.iterdir() if not _NAME.fullmatch(file.name)]
    if strange:
        raise ArgumentError(
            f"ingest: {folder} is not empty and holds no archive (there is {strange[0]}). Choose another folder."
        )
    return Archive(folder, heads, size, sums.empty(heads))


__all__ = ["FILE", "Archive", "Shard", "made"]
