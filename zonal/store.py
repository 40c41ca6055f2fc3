"""Files that are either whole or absent: atomic writes, safetensors with a checked header, JSON.

Only safetensors and JSON are read. A tensor file has one JSON header under the metadata key ``zonal``. Its keys
``kind`` and ``checksum`` give what the file holds, and the SHA-256 over the header and the names, dtypes, shapes and
bytes of the tensors.
"""

import contextlib
import difflib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from zonal.errors import FileFormatError, FileWriteError, InsufficientSpaceError

Entry = TypeVar("Entry")

LINE = 120
"""Columns of a line of JSON."""
_FULL = {errno.ENOSPC, errno.EDQUOT}


@contextlib.contextmanager
def staged_folder(target: Path) -> Iterator[Path]:
    """A folder beside ``target`` to write into: it takes the place of ``target`` when the body ends, and vanishes when
    the body fails.
    """
    with _held_beside(target) as folder:
        staging = folder / target.name
        staging.mkdir()  # with the rights of new folders, which the temporary one does not have
        yield staging
        os.replace(staging, target)


@contextlib.contextmanager
def _temporary_beside(path: Path, over: bool = True) -> Iterator[Path]:
    """A temporary file, in a folder beside ``path``, that takes its place on success and vanishes on failure. over:
    also where there is a file already. In a folder, as safetensors has a temporary file of its own beside it.
    """
    with _held_beside(path) as folder:
        temporary = folder / path.name
        temporary.touch()
        rights = stat.S_IMODE(temporary.stat().st_mode)  # of new files, which the one of safetensors does not have
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, rights)
        if not over:
            try:
                os.link(temporary, path)
            except FileExistsError:
                pass
            except OSError:  # a file system without links: the last one wins, whole in any case
                os.replace(temporary, path)
            return
        os.replace(temporary, path)


@contextlib.contextmanager
def _held_beside(target: Path) -> Iterator[Path]:
    """A new folder beside ``target``, locked by this process for as long as the body runs, and then removed if
    it has not been moved. Those of processes that were killed, which nobody holds, are removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for left in _parts(target.parent, re.escape(target.name)):
        with _lock(left) as held:
            if held:
                _remove(left)
    begun = False
    while not begun:  # again where another process has just taken it for one that nobody holds
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
        try:
            with _lock(temporary) as held:
                if held is not False:
                    begun = True
                    yield temporary
        finally:
            _remove(temporary)


def _parts(folder: Path, name: str) -> list[Path]:
    """The folders that ``_held_beside`` made there for targets whose names match: another program's are not touched."""
    ours = re.compile(rf"\.{name}\.[a-z0-9_]{{8}}\.part")
    return [path for path in folder.glob(".*.part") if ours.fullmatch(path.name) and path.is_dir()]


def remove_parts(folder: Path) -> None:
    """Remove what killed processes were writing there. Call it where nobody else writes."""
    for part in _parts(folder, ".+"):
        with _lock(part) as held:
            if held is not False:
                _remove(part)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[bool | None]:
    """Whether this process now has the lock of a file or folder, which goes with the process. False: another process
    has it, or has removed the file. None: there are no such locks here.
    """
    if sys.platform == "win32":
        yield None
        return
    import fcntl

    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        held: bool | None = path.exists()
    except OSError as error:
        held = False if error.errno in (errno.EACCES, errno.EAGAIN) else None
    try:
        yield held
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def writing(call: str, path: Path) -> Iterator[None]:
    """Turn what the operating system refuses while the body writes into a FileWriteError that names the path.

    Raises: InsufficientSpaceError when the disk is full, FileWriteError for anything else.
    """
    try:
        yield
    except FileWriteError:
        raise
    except OSError as error:
        raise write_error(call, path, error) from error
    except safetensors.SafetensorError as error:
        # safetensors wraps the operating system's error and keeps only its words
        code = re.search(r"os error (\d+)", str(error))
        reason = OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(errno.EIO, str(error))
        raise write_error(call, path, reason) from error


def write_error(call: str, path: Path, error: OSError) -> FileWriteError:
    """The error for a file or folder that the operating system does not let the process write."""
    if error.errno in _FULL:
        return InsufficientSpaceError(
            f"{call}: no space left while writing {path}. Free some space and run again; nothing was half written."
        )
    return FileWriteError(
        f"{call}: {path} cannot be written ({error.strerror or error}). Choose another folder, or change its "
        "permissions; no partial file was left."
    )


def under(named: Mapping[str, Entry], start: str) -> dict[str, Entry]:
    """The entries whose names begin with ``start``, by the rest of their names."""
    return {name.removeprefix(start): entry for name, entry in named.items() if name.startswith(start)}


def unlike(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Which tensors are missing, unknown, or of another shape or kind of number than those wanted: the first three, ""
    for none.
    """
    wrong = [f"{name} is missing" for name in wanted if name not in found]
    wrong += [f"{name} is unknown" for name in found if name not in wanted]
    for name, value in wanted.items():
        held = found.get(name, value)
        if held.shape != value.shape:
            wrong.append(f"{name} is {tuple(held.shape)} and should be {tuple(value.shape)}")
        elif held.is_floating_point() != value.is_floating_point():
            wrong.append(f"{name} is {held.dtype} and should be {value.dtype}")
    return "; ".join(wrong[:3])


@contextlib.contextmanager
def understood(call: str, path: str | os.PathLike[str] | Traversable) -> Iterator[None]:
    """Turn errors on the contents of an intact file into a FileFormatError in one line that names the file.

    Raises: FileFormatError.
    """
    try:
        yield
    except FileFormatError:
        raise
    # ArgumentError is a ValueError, RecursionError a RuntimeError
    except (KeyError, IndexError, TypeError, AttributeError, ValueError, OverflowError, RuntimeError) as error:
        detail = f"{error} is missing" if isinstance(error, KeyError) else str(error).partition("\n")[0].rstrip(".")
        raise FileFormatError(
            f"{call}: {path} does not fit: {detail}. It was edited, damaged or written by another version. "
            "Use an older copy or make it anew."
        ) from error


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data`` to ``path`` atomically.

    Raises: InsufficientSpaceError when the disk is full, FileWriteError for what else the operating system refuses.
    """
    target = Path(path)
    with writing("store", target), _temporary_beside(target) as temporary:
        temporary.write_bytes(data)


def shortened(value: Any, digits: int) -> Any:
    """A value of JSON whose fractions have so many significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{digits}g}")
    if isinstance(value, Mapping):
        return {name: shortened(each, digits) for name, each in value.items()}
    return [shortened(each, digits) for each in value] if isinstance(value, list | tuple) else value


def write_json(path: str | os.PathLike[str], value: Any) -> None:
    """Write ``value`` as indented UTF-8 JSON, atomically. What fits on a line of ``LINE`` columns stands on one. NaN
    and infinity raise ValueError.
    """
    write_bytes(path, _json(value))


def _json(value: Any) -> bytes:
    plain = json.loads(json.dumps(value, allow_nan=False))  # tuples are lists, and names are strings
    return f"{_laid_out('', plain, 0)}\n".encode()


def _laid_out(name: str, value: Any, indent: int) -> str:
    """JSON of ``value`` behind its name, of which lines after the first are indented."""
    text = json.dumps(value, ensure_ascii=False)
    if not isinstance(value, dict | list) or indent + len(name) + len(text) <= LINE:
        return name + text
    if isinstance(value, dict):
        named = [(f"{json.dumps(key, ensure_ascii=False)}: ", each) for key, each in value.items()]
    else:
        named = [("", each) for each in value]
    inner = "\n" + " " * (indent + 1)
    parts = f",{inner}".join(_laid_out(key, each, indent + 1) for key, each in named)
    return f"{name}{text[0]}{inner}{parts}{inner[:-1]}{text[-1]}"


def write_checked(path: str | os.PathLike[str], record: Mapping[str, Any], *, over: bool = True) -> None:
    """Write an object as ``write_json``, with a checksum of the rest under "checksum", which ``checked`` checks.

    over: replace a file that is there; otherwise the first one stays.
    """
    stated = json.loads(json.dumps({name: value for name, value in record.items() if name != "checksum"}))
    data, target = _json({**stated, "checksum": checksum({}, stated)}), Path(path)
    with writing("store", target), _temporary_beside(target, over) as temporary:
        temporary.write_bytes(data)


def checked(
    path: str | os.PathLike[str] | Traversable, value: Any, call: str = "load",
    advice: str = "Use an older copy or make it anew.",
) -> Any:  # fmt: skip
    """The JSON ``value`` of a file without its checksum. Files from before there were checksums have none.

    Raises: FileFormatError when the checksum is of something else, or is there under another name.
    """
    if not isinstance(value, dict):
        return value
    stated = {name: each for name, each in value.items() if name != "checksum"}
    misspelt = difflib.get_close_matches("checksum", stated, n=1, cutoff=0.8)
    if value["checksum"] != checksum({}, stated) if "checksum" in value else misspelt:
        raise FileFormatError(
            f"{call}: the checksum of {path} does not match its contents: it was damaged. {advice} "
            'If it was edited on purpose, remove "checksum" from it.'
        )
    return stated


def summed(line: Mapping[str, Any]) -> dict[str, Any]:
    """An object for one line of a file, with the CRC-32 of the rest under "crc32", which ``unharmed`` checks."""
    return {**line, "crc32": _crc(line)}


def unharmed(line: Any) -> bool:
    """Whether a line of JSON is what was written. Lines from before there were checksums have none."""
    return not isinstance(line, dict) or "crc32" not in line or line["crc32"] == _crc(line)


def _crc(line: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps({name: value for name, value in line.items() if name != "crc32"}).encode())


def check_file(call: str, path: Path) -> None:
    """Raise FileFormatError for what is there and no file: a folder, or a pipe or device, which may never end."""
    if path.exists() and not path.is_file():
        raise FileFormatError(
            f"{call}: {path} is a folder, a pipe or a device; a file was required. Take another copy."
        )


def read_json(path: str | os.PathLike[str] | Traversable) -> Any:
    """Read a JSON file, on the disk or in an archive; a missing or malformed one is a FileFormatError in one line."""
    target = Path(path) if isinstance(path, str | os.PathLike) else path
    if isinstance(target, Path):
        check_file("read_json", target)
    try:
        return json.loads(target.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FileFormatError(f"read_json: {target} does not exist.") from error
    except OSError as error:
        raise FileFormatError(f"read_json: {target} cannot be read ({error.strerror}).") from error
    except (ValueError, RecursionError) as error:
        # the first of JSON, of UTF-8 and of a number with thousands of digits; the second of deep brackets
        raise FileFormatError(
            f"read_json: {target} is not valid JSON ({error}). It was not written by this library or was damaged."
        ) from error


def read_record(path: str | os.PathLike[str] | Traversable, schema: int, call: str, advice: str) -> dict[str, Any]:
    """The JSON object with ``schema`` in a file, without its checksum. Raises: FileFormatError for anything else; it
    ends with ``advice``.
    """
    values = read_json(path)
    if not isinstance(values, dict) or values.get("schema") != schema:
        received = f"schema {values.get('schema')!r}" if isinstance(values, dict) else f"a {type(values).__name__}"
        raise FileFormatError(
            f"{call}: {path} must be a JSON object with schema {schema}, received {received}. {advice}"
        )
    return checked(path, values, call, advice)


def checksum(tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> str:
    """SHA-256 over the header without its checksum, and over each tensor in the order of names.

    A tensor contributes its name, dtype, shape and little-endian bytes.
    """
    digest = hashlib.sha256(json.dumps({k: v for k, v in header.items() if k != "checksum"}, sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        digest.update(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}|".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()


def save_tensors(path: str | os.PathLike[str], tensors: Mapping[str, Tensor], header: Mapping[str, Any]) -> None:
    """Write tensors and a JSON header to one safetensors file, atomically.

    ``header`` must have the key ``kind``; ``checksum`` is added here.
    """
    target = Path(path)
    # clone: safetensors refuses tensors that share storage, and a tied weight saved twice is still right; with the
    # format, a slice of one number, which counts as contiguous with any stride, gets a plain one
    plain = {
        name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()
    }
    # as it will be read back: tuples as lists, numbers as JSON has them
    stated = json.loads(json.dumps(dict(header), allow_nan=False))
    metadata = {"zonal": json.dumps({**stated, "checksum": checksum(plain, stated)})}
    with writing("store", target), _temporary_beside(target) as temporary:
        safetensors.torch.save_file(plain, temporary, metadata=metadata)


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str], kind: str) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A tensor file and its header, both of one opening: another file may take its place at any time."""
    target = Path(path)
    if not target.is_file():
        raise FileFormatError(f"load {kind}: {target} does not exist or is not a file.")
    try:
        with safetensors.safe_open(target, framework="pt") as file:
            yield file, _header(file.metadata() or {}, target, kind)
    except (safetensors.SafetensorError, OSError) as error:
        raise FileFormatError(
            f"load {kind}: {target} is not a readable safetensors file ({error}). It may be truncated; "
            "use an older copy."
        ) from error


def _header(metadata: Mapping[str, str], target: Path, kind: str) -> dict[str, Any]:
    if "zonal" not in metadata:
        raise FileFormatError(
            f"load {kind}: {target} is a safetensors file of another program (no 'zonal' header). Required: "
            f"a {kind} written by this library."
        )
    try:
        header = json.loads(metadata["zonal"])
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"load {kind}: the header of {target} is damaged ({error}).") from error
    if not isinstance(header, dict) or header.get("kind") != kind:
        found = header.get("kind") if isinstance(header, dict) else header
        raise FileFormatError(
            f"load {kind}: {target} holds a {found!r}, a {kind!r} was required. Read it with the load of what saved it."
        )
    return header


def read_header(path: str | os.PathLike[str], kind: str) -> dict[str, Any]:
    """The JSON header of a tensor file, without reading its tensors."""
    with _opened(path, kind) as (_, header):
        return header


def load_tensors(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Read a file of ``save_tensors`` and check its kind and checksum.

    Raises: FileFormatError when the file is missing, truncated, foreign, of another kind, or its bytes do not match.
    """
    with _opened(path, kind) as (file, header):
        names = file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
    if checksum(tensors, header) != header.get("checksum"):
        raise FileFormatError(
            f"load {kind}: the checksum of {path} does not match its contents. The file was damaged; use an older copy."
        )
    return tensors, header
