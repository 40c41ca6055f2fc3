"""Readers of texts and files as functions of bytes, for ``fuzz.guided``."""

import atexit
import contextlib
import functools
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from fuzz import damaged, texts
from fuzz.damaged import CHANGES, VALUES, Damage

from zonal.errors import ZonalError

FILES = damaged.READERS | damaged.PRETRAINED
TARGETS = ("specs", "presets", *FILES)
TEXTS = ("operator", *texts.READERS)
SUFFIXES = (".toml", ".json")
TEXT_SEEDS = {
    "operator": [*texts.NAMES, "softmax(scale=0.5)", "ska(power=1)", "sinkhorn(bounds=(0.5, 1.0))"],
    "layers": ["softmax, ska(power=1)", "2 * (softmax, linear)"], "layer": ["local_global(window=4)"],
    "duration": ["90s"], "seeds": ["0-4"], "rates": ["1e-3,1e-4"], "parts": ["1/2"], "tokens": ["10M"],
    "ranks": ["8,16"], "shape": ["1,1,4,8"],
}  # fmt: skip
"""How the changes of damaged.py that leave a file are named."""
LEFT = [each for each in CHANGES if each not in ("gone", "link", "pipe", "folder")]


@contextlib.contextmanager
def unsummed() -> Iterator[None]:
    """All checksums are the same, so that changed files come past them."""
    with mock.patch("zonal.store.checksum", return_value="0" * 64), mock.patch("zonal.store._crc", return_value=0):
        yield


@functools.cache
def good(name: str) -> tuple[Path, list[Path]]:
    """A good file or folder of a reader, and the places of its files in it."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    path = Path(folder.name) / name.rstrip("/")
    with unsummed():
        FILES[name].write(path)
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return path, [each.relative_to(path) for each in files]


def seeds(name: str) -> list[bytes]:
    """Good bytes to begin with."""
    if name == "specs":
        return [bytes([TEXTS.index(reader)]) + text.encode() for reader, all_ in TEXT_SEEDS.items() for text in all_]
    if name == "presets":
        return [b"\0" + text.encode() for text in texts.SHIPPED.values()] + [b"\1{}"]
    path, files = good(name)
    return [bytes([at]) + (path / each).read_bytes() for at, each in enumerate(files[:256])]


def changed(name: str, data: bytes, number: int) -> bytes | None:
    """Bytes of a file of a target with a part replaced, left out or cut; None where these are not such bytes."""
    if name not in FILES or not data:
        return None
    draw = random.Random(number)
    path, files = good(name)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / (path / files[data[0] % len(files)]).name
        file.write_bytes(data[1:])
        each = Damage(name, draw.choice(LEFT), draw.randrange(41), draw.randrange(10_000), draw.randrange(len(VALUES)))
        try:
            damaged.change(file, each)
        except Exception:  # what is not JSON, or no safetensors any more, cannot be changed in its parts
            return None
        return data[:1] + file.read_bytes()


def check(name: str, data: bytes) -> None:
    """Raise unless the reader refuses the bytes by an error of the library, or reads them."""
    which, rest = data[0] if data else 0, data[1:]
    if name == "specs":
        texts.check_spec(texts.Spec(rest.decode("utf-8", "surrogateescape"), TEXTS[which % len(TEXTS)]))
        return
    if name == "presets":
        text = rest.decode("utf-8", "surrogateescape")
        texts.check_preset(texts.Preset(text, SUFFIXES[which % len(SUFFIXES)]))
        return
    source, files = good(name)
    with tempfile.TemporaryDirectory() as folder, unsummed():
        path = Path(folder) / "here" / source.name
        path.parent.mkdir()
        if source.is_dir():
            shutil.copytree(source, path)
        (path / files[which % len(files)]).write_bytes(rest)
        with contextlib.suppress(ZonalError):
            FILES[name].read(path)
        assert [each.name for each in Path(folder).iterdir()] == ["here"], "something was written outside the folder"


__all__ = ["TARGETS", "changed", "check", "seeds"]
