"""Texts to learn from: the embedded novel, files and folders of UTF-8 text, data sets of the hub, pre-tokenised
corpora.
"""

import codecs
import hashlib
import itertools
import lzma
import os
from collections.abc import Iterable, Iterator
from importlib import resources
from pathlib import Path

from zonal.data.hub import HUB, HubDataset
from zonal.data.source import Source, pieces
from zonal.errors import ArgumentError, FileFormatError

NOVEL = "novel"
_NOVEL_SHA256 = "fe282a57094ed62e7144fb7c804a9748fc1c909bf3b49d06e7276015f9f67240"
_BLOCK = 1 << 20
_FORMS = (
    "a UTF-8 text file, a folder of them, a pattern such as 'texts/**/*.txt', a pre-tokenised corpus, 'novel', "
    "or 'hub:name[:split[:column]]'"
)


def novel() -> str:
    """The text of Moby-Dick; or, The Whale by Herman Melville (1851, public domain), 1.2 million characters.

    Raises: FileFormatError when the shipped file is damaged.
    """
    packed = (resources.files("zonal.data") / "assets" / "moby.txt.xz").read_bytes()
    try:
        data = lzma.decompress(packed)
    except lzma.LZMAError as error:
        raise FileFormatError("novel: the shipped file moby.txt.xz is damaged. Install the package again.") from error
    if hashlib.sha256(data).hexdigest() != _NOVEL_SHA256:
        raise FileFormatError(
            "novel: the checksum of the shipped file moby.txt.xz does not match. Install the package again."
        )
    return data.decode("utf-8")


class Novel(Source):
    """The embedded novel as one document."""

    spec = NOVEL
    title = "Moby-Dick (embedded)"

    def fingerprint(self) -> str:
        return _NOVEL_SHA256

    def documents(self) -> Iterator[Iterable[str]]:
        text = novel()
        yield pieces(text[at : at + _BLOCK] for at in range(0, len(text), _BLOCK))


def _opened(path: Path):
    try:
        return open(path, "rb")
    except OSError as error:
        raise FileFormatError(f"text source: {path} cannot be read ({error.strerror}).") from error


def _file_blocks(path: Path) -> Iterator[str]:
    """The text of a file, checked; a byte-order mark at its start is dropped, line ends stay as they are."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    at = 0
    with _opened(path) as file:
        for data in iter(lambda: file.read(_BLOCK), b""):
            if at == 0 and data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                raise FileFormatError(
                    f"text source: {path} is UTF-16 or binary, UTF-8 was required. Convert it, e.g. "
                    "with iconv -t UTF-8."
                )
            if b"\0" in data:
                raise FileFormatError(
                    f"text source: {path} is binary (byte 0 at offset {at + data.index(0)}), UTF-8 text was required. "
                    "Leave it out."
                )
            waiting = len(decoder.getstate()[0])
            try:
                text = decoder.decode(data)
            except UnicodeDecodeError as error:
                place = at - waiting + error.start
                raise FileFormatError(
                    f"text source: {path} is not UTF-8 text ({error.reason} at offset {place}). "
                    "Convert it or leave it out."
                ) from error
            yield text.removeprefix("\ufeff") if at == 0 else text
            at += len(data)
    try:
        decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"text source: {path} ends in the middle of a UTF-8 character; it is truncated or not UTF-8."
        ) from error


class TextFiles(Source):
    """UTF-8 files, one document each, in the order given."""

    def __init__(self, files: list[Path], spec: str, title: str) -> None:
        self.files, self.spec, self.title = files, spec, title

    def fingerprint(self) -> str:
        digest = hashlib.sha256()
        for path in self.files:
            with _opened(path) as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
        return digest.hexdigest()

    def documents(self) -> Iterator[Iterable[str]]:
        for path in self.files:
            yield pieces(_file_blocks(path))


def _folder_files(folder: Path) -> list[Path]:
    """The files under ``folder`` in the order of their paths with / between parts; names that begin with a dot are
    passed over.
    """

    def failed(error: OSError) -> None:
        raise FileFormatError(f"text source: {error.filename} cannot be read ({error.strerror}).") from error

    found = []
    for place, subfolders, files in os.walk(folder, onerror=failed):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        found += [Path(place) / name for name in files if not name.startswith(".")]
    # symbolic links that lead nowhere and sockets are not text; is_file follows links to files
    return sorted((path for path in found if path.is_file()), key=lambda path: path.relative_to(folder).as_posix())


def open_source(spec: str | os.PathLike[str]) -> Source:
    """The source that ``spec`` names: "novel", "hub:…" (see ``zonal.data.hub``), a file, a folder, or a pattern with *
    or ?.

    A folder is read with its subfolders, files in the order of their paths; hidden files are passed over, and so are
    empty ones as long as some other has text. Every other file must be UTF-8 text. The result depends on names and
    contents only, not on the file system's order. A pattern begins after the longest leading path that is a folder.
    Raises: FileFormatError when there is no such place or no file in it; ArgumentError when ``spec`` is not understood.
    """
    text = os.fspath(spec)
    if text == NOVEL:
        return Novel()
    if text.startswith(HUB):
        return HubDataset.parse(text)
    if not text:
        raise ArgumentError(f"text source: the name is empty; required: {_FORMS}.")
    path = Path(text).expanduser().absolute()
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = _folder_files(path)
        if not files:
            raise FileFormatError(
                f"text source: the folder {path} has no files; at least one UTF-8 text file was required."
            )
    elif any(character in text for character in "*?["):
        # what is there is meant as it is written, also with a [ in the name of the working folder
        anchor = next(folder for folder in path.parents if folder.is_dir())
        files = sorted(
            (found for found in anchor.glob(path.relative_to(anchor).as_posix()) if found.is_file()),
            key=lambda found: found.as_posix(),
        )
        if not files:
            raise FileFormatError(f"text source: no file matches the pattern {text!r}.")
    else:
        raise FileFormatError(f"text source: {path} does not exist. Required: {_FORMS}.")
    if not any(file.stat().st_size for file in files):
        raise FileFormatError(f"text source: {path} is empty; at least one character was required.")
    return TextFiles(files, path.as_posix(), path.name)


def limited(documents: Iterable[Iterable[str]], max_bytes: int) -> Iterator[Iterable[str]]:
    """The documents up to ``max_bytes`` bytes of UTF-8 in all, cut between characters."""
    left = max_bytes

    def first(document: Iterable[str]) -> Iterator[str]:
        nonlocal left
        for piece in document:
            data = piece.encode("utf-8")
            if len(data) > left:
                left, piece = 0, data[:left].decode("utf-8", errors="ignore")
            else:
                left -= len(data)
            yield piece
            if not left:
                return

    yield from map(first, itertools.takewhile(lambda _: left > 0, documents))
