"""Token streams on disk: a folder of memory-mapped shards, each with a checked description, and an index that is
written last.

A corpus folder holds

    corpus.json         {"magic": "zonal-corpus", "version": 1, "tokenizer", "tokenizer_sha256", "vocab_size", "dtype",
                         "tokens", "bytes", "documents", "source", "shards": [names of .bin files in order]}
    shard-00000.bin     the tokens, little-endian unsigned integers, nothing else
    shard-00000.json    {"magic": "zonal-tokens", "version": 1, "dtype": "<u2", "count", "sha256", "tokenizer",
    "vocab_size"} …

``dtype`` is the smallest of u1, <u2 and <u4 that holds the vocabulary; ``bytes`` counts the UTF-8 the tokens stand for.
The folder is built under a temporary name and renamed when whole, so it is complete or absent, and processes that build
the same one do not meet.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zonal import store
from zonal.data import tokenizers
from zonal.data.tokenizers import Tokenizer
from zonal.errors import ArgumentError, FileFormatError, ZonalError

INDEX = "corpus.json"
_CORPUS_MAGIC, _SHARD_MAGIC, _VERSION = "zonal-corpus", "zonal-tokens", 1
_DTYPES = ("|u1", "<u2", "<u4")
SHARD_TOKENS = 1 << 25


def _dtype_for(vocab_size: int) -> str:
    return next(name for name in _DTYPES if vocab_size - 1 <= np.iinfo(np.dtype(name)).max)


class Corpus:
    """A verified, read-only token stream. Made by ``open_corpus``.

    tokenizer: the name of the one that made it, as it was then. count: tokens; bytes: UTF-8 bytes they stand for;
    documents: texts that were joined by separators. sha256: of the shards' checksums in order.
    """

    def __init__(self, folder: Path, index: dict[str, Any], shards: list[np.ndarray], sha256: str) -> None:
        self.sha256 = sha256
        self.folder = folder
        self.tokenizer: str = index["tokenizer"]
        self.vocab_size: int = index["vocab_size"]
        self.source: str = index["source"]
        self.bytes: int = index["bytes"]
        self.documents: int = index["documents"]
        self._shards = shards
        self._ends = np.cumsum([len(shard) for shard in shards])
        self.count = int(self._ends[-1])

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens start … stop-1 as (stop-start,) int64.

        Raises: ArgumentError when the range is not inside the stream.
        """
        if not 0 <= start <= stop <= self.count:
            raise ArgumentError(
                f"Corpus.read: required 0 <= start <= stop <= {self.count}, got start={start}, stop={stop}."
            )
        parts = []
        for shard, end in zip(self._shards, self._ends.tolist(), strict=True):
            begin = end - len(shard)
            if begin < stop and start < end:
                parts.append(shard[max(start, begin) - begin : min(stop, end) - begin])
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)


@dataclass
class _Writer:
    """Collects tokens into shards of ``shard_tokens`` inside ``folder``."""

    folder: Path
    tokenizer: Tokenizer
    shard_tokens: int

    def __post_init__(self) -> None:
        self.dtype = _dtype_for(self.tokenizer.vocab_size)
        self.names: list[str] = []
        self.tokens = self.bytes = 0
        self._waiting: list[np.ndarray] = []
        self._waiting_count = 0

    def append(self, tokens: np.ndarray) -> None:
        self.tokens += len(tokens)
        self.bytes += int(self.tokenizer.token_bytes[tokens].sum())
        self._waiting.append(tokens.astype(self.dtype))
        self._waiting_count += len(tokens)
        while self._waiting_count >= self.shard_tokens:
            joined = np.concatenate(self._waiting)
            self._write(joined[: self.shard_tokens])
            self._waiting, self._waiting_count = [joined[self.shard_tokens :]], len(joined) - self.shard_tokens

    def finish(self, source: str, documents: int) -> None:
        if self._waiting_count:
            self._write(np.concatenate(self._waiting))
        index = {
            "magic": _CORPUS_MAGIC, "version": _VERSION, "tokenizer": self.tokenizer.name,
            "tokenizer_sha256": self.tokenizer.fingerprint, "vocab_size": self.tokenizer.vocab_size,
            "dtype": self.dtype, "tokens": self.tokens, "bytes": self.bytes, "documents": documents,
            "source": source, "shards": self.names,
        }  # fmt: skip
        store.write_checked(self.folder / INDEX, index)

    def _write(self, tokens: np.ndarray) -> None:
        data = tokens.tobytes()
        name = f"shard-{len(self.names):05d}.bin"
        description = {
            "magic": _SHARD_MAGIC, "version": _VERSION, "dtype": self.dtype, "count": len(tokens),
            "sha256": hashlib.sha256(data).hexdigest(), "tokenizer": self.tokenizer.name,
            "vocab_size": self.tokenizer.vocab_size,
        }  # fmt: skip
        store.write_bytes(self.folder / name, data)
        store.write_checked((self.folder / name).with_suffix(".json"), description)
        self.names.append(name)


def is_corpus(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a folder with a corpus index in it."""
    return (Path(path) / INDEX).is_file()


def write_corpus(
    folder: str | os.PathLike[str],
    documents: Iterable[Iterable[str]],
    tokenizer: Tokenizer,
    *,
    source: str,
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Tokenise ``documents`` into the new corpus folder ``folder``.

    documents: texts, each an iterable of pieces cut where the tokeniser cuts anyway (see ``zonal.data.corpora``);
    documents without text are passed over, and ``tokenizer.separator`` stands between two documents. source: words for
    people, kept in the index. When a whole corpus is at ``folder`` by the time this one is whole, as when two processes
    prepare the same text, that one stays.
    Raises: ArgumentError when the folder exists as something else; FileFormatError when there is no text;
    InsufficientSpaceError when the disk is full.
    """
    target = Path(folder)
    if target.exists() and not is_corpus(target):
        raise ArgumentError(f"write_corpus: {target} exists and is not a corpus. Remove it or choose another folder.")
    if shard_tokens < 1:
        raise ArgumentError(f"write_corpus: shard_tokens must be at least 1, got {shard_tokens}.")
    try:
        with store.staged_folder(target) as building:
            _write_documents(building, documents, tokenizer, source, shard_tokens)
    except ZonalError:
        raise
    except OSError as error:
        # renaming onto a folder with files in it fails; a whole corpus there is another process's equal result
        if is_corpus(target):
            return
        if isinstance(error, PermissionError | FileExistsError | NotADirectoryError):
            raise ArgumentError(
                f"write_corpus: cannot write in {target.parent} ({error.strerror}). "
                "Choose another folder; ZONAL_CACHE names the cache's."
            ) from error
        raise store.write_error("write_corpus", target.parent, error) from error


def _write_documents(
    folder: Path, documents: Iterable[Iterable[str]], tokenizer: Tokenizer, source: str, shard_tokens: int
) -> None:
    writer, separator, count = _Writer(folder, tokenizer, shard_tokens), np.array([tokenizer.separator]), 0
    for pieces in documents:
        started = False
        for piece in filter(None, pieces):
            if not started and count:
                writer.append(separator)
            count += not started
            started = True
            writer.append(tokenizer.encode(piece))
    if not writer.tokens:
        raise FileFormatError(f"write_corpus: {source} has no text; at least one character was required.")
    writer.finish(source, count)


def _described(path: Path, magic: str, types: dict[str, type]) -> dict[str, Any]:
    found = store.checked(path, store.read_json(path))
    if not isinstance(found, dict) or found.get("magic") != magic:
        raise FileFormatError(f"open_corpus: {path} is not a {magic} file; it was written by another program.")
    if found.get("version") != _VERSION:
        raise FileFormatError(
            f"open_corpus: {path} has version {found.get('version')!r}, this program reads version {_VERSION}. "
            "Prepare the corpus again."
        )
    for key, kind in types.items():
        if not isinstance(found.get(key), kind):
            raise FileFormatError(
                f"open_corpus: {path} lacks a valid {key!r} ({kind.__name__} required, got {found.get(key)!r}). "
                "Prepare the corpus again."
            )
    return found


def _open_shard(path: Path, dtype: str, vocab_size: int, tokenizer: str) -> tuple[np.ndarray, str]:
    again = "Remove its folder and prepare the corpus again."
    description = _described(
        path.with_suffix(".json"),
        _SHARD_MAGIC,
        {"dtype": str, "count": int, "sha256": str, "tokenizer": str, "vocab_size": int},
    )
    if (description["dtype"], description["vocab_size"], description["tokenizer"]) != (dtype, vocab_size, tokenizer):
        raise FileFormatError(
            f"open_corpus: {path} belongs to another corpus (its dtype, vocabulary or tokenizer differ from the "
            f"index). {again}"
        )
    try:
        size = path.stat().st_size
    except OSError as error:
        raise FileFormatError(f"open_corpus: the shard {path} is missing ({error.strerror}). {again}") from error
    expected = description["count"] * np.dtype(dtype).itemsize
    if size != expected or not size:
        raise FileFormatError(
            f"open_corpus: {path} has {size} bytes, {expected} were required: it is truncated or foreign. {again}"
        )
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != description["sha256"]:
        raise FileFormatError(
            f"open_corpus: the checksum of {path} does not match its contents: it was damaged. {again}"
        )
    tokens = np.memmap(path, dtype=dtype, mode="r")
    if int(tokens.max()) >= vocab_size:
        raise FileFormatError(
            f"open_corpus: {path} has the token {int(tokens.max())}, the vocabulary ends at {vocab_size - 1}. {again}"
        )
    return tokens, digest


def _named(name: str, folder: Path) -> Tokenizer:
    try:
        return tokenizers.resolve(name)
    except ZonalError as error:
        raise FileFormatError(
            f"open_corpus: {folder} was made with the tokenizer {name}, which is not to be had here. Give its file, "
            f"from where it lies now, as the tokenizer. ({error})"
        ) from error


def open_corpus(folder: str | os.PathLike[str], tokenizer: Tokenizer | None = None) -> Corpus:
    """Open a corpus folder: every shard's description, size, checksum and token range is verified, then mapped into
    memory.

    tokenizer: the one that made the tokens, wherever its file lies now; None looks for it under the name in the index.
    Raises: FileFormatError in one line when something is missing, truncated, foreign or damaged.
    """
    path = Path(folder)
    types = {
        "tokenizer": str, "tokenizer_sha256": str, "vocab_size": int, "dtype": str, "tokens": int, "bytes": int,
        "documents": int, "source": str, "shards": list,
    }  # fmt: skip
    index = _described(path / INDEX, _CORPUS_MAGIC, types)
    if tokenizer is None:
        tokenizer = _named(index["tokenizer"], path)
    if (index["tokenizer_sha256"], index["vocab_size"]) != (tokenizer.fingerprint, tokenizer.vocab_size):
        raise FileFormatError(
            f"open_corpus: {path} was made with another tokenizer ({index['tokenizer']}) than {tokenizer.name}. "
            "Name the one that made it, or prepare the corpus again."
        )
    if index["dtype"] not in _DTYPES or not index["shards"]:
        raise FileFormatError(
            f"open_corpus: the index of {path} names dtype {index['dtype']!r} and {len(index['shards'])} shards; "
            "it was damaged."
        )
    for name in index["shards"]:
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".bin"):
            raise FileFormatError(
                f"open_corpus: the index of {path} names the shard {name!r}; "
                "a .bin file in the same folder was required."
            )
    opened = [
        _open_shard(path / name, index["dtype"], index["vocab_size"], index["tokenizer"]) for name in index["shards"]
    ]
    digests = "".join(digest for _, digest in opened)
    corpus = Corpus(path, index, [tokens for tokens, _ in opened], hashlib.sha256(digests.encode()).hexdigest())
    if corpus.count != index["tokens"]:
        raise FileFormatError(
            f"open_corpus: {path} has {corpus.count} tokens, its index says {index['tokens']}: shards are missing. "
            "Prepare the corpus again."
        )
    return corpus
