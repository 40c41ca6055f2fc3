"""Flipped and cut bytes in every kind of file that is read: refused by name, or without any effect on what is read."""

import dataclasses
import functools
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from faults.inputs import need
from fuzz.damaged import READERS, Reader, read_packed
from torch import nn

from zonal import ingest, report, store
from zonal.cache import cache_folder
from zonal.errors import ArgumentError, FileFormatError
from zonal.kernels import build
from zonal.report import packing
from zonal.training import Comparison, shards
from zonal.training.checkpoint import KIND

Copy = Callable[[Path, Path], object]


def _copied(name: str) -> Copy:
    return lambda inputs, path: shutil.copytree(inputs / name, path)


def _kernel(inputs: Path, folder: Path) -> None:
    library = next(each for each in sorted((cache_folder() / "kernels").glob("*.so")) if build.good(each))
    folder.mkdir()
    for each in (library, library.with_suffix(".json")):
        shutil.copy(each, folder)


def _read_kernel(folder: Path) -> bytes:
    (library,) = folder.glob("*.so")
    if not build.good(library):
        raise FileFormatError(f"{library} and {library.with_suffix('.json')} are compiled again")
    return library.read_bytes()


def _read_comparison(folder: Path) -> Any:
    found = Comparison.open(folder)
    return found.spec, found.plan, found.threads, found.records(), report.load(folder)


def _read_converted(folder: Path) -> Any:
    from zonal import hf  # an extra
    from zonal.hf.pretrained import opened

    model, tokenizer = opened("generate", folder)
    return model, tokenizer.encode("The old house"), tokenizer.decode(list(range(50))), hf.from_pretrained(folder)


def _read_work(folder: Path) -> Any:
    states = [store.load_tensors(folder / f"{stage}.safetensors", "state of a conversion") for stage in
              ("transfer", "distillation")]  # fmt: skip
    path = folder / "conversion.json"
    return states, store.checked(path, store.read_json(path))


def _sharded(inputs: Path, folder: Path) -> None:
    newest = shards.newest(inputs / "sharded")
    assert newest is not None
    shutil.copytree(newest, folder / "checkpoints" / newest.name)


def _read_sharded(folder: Path) -> Any:
    path = shards.newest(folder)
    if path is None:
        raise FileFormatError(f"{folder} has no checkpoint")
    header = store.read_json(path / shards.INDEX)
    with store.understood("train", path / shards.INDEX):
        config = header["config"]
    progress, files = shards.read_index(path, config)
    shards.check(path, files, 0, 1)
    return progress, files


def _read_run(folder: Path) -> Any:
    names = ("checkpoint.safetensors", "best.safetensors")
    return [store.load_tensors(folder / name, KIND) for name in names if (folder / name).exists()]


MADE: dict[str, tuple[str, Copy, Callable[[Path], Any]]] = {
    "archive/": ("texts", _copied("archive"), ingest.Archive.open),
    "comparison/": ("comparison", _copied("comparison"), _read_comparison),
    "packed/": ("comparison", lambda inputs, path: packing.pack(inputs / "comparison", path), read_packed),
    "converted model/": ("converted", _copied("converted"), _read_converted),
    "stopped conversion/": ("converted", _copied("converted.work"), _read_work),
    "sharded checkpoint/": ("sharded", _sharded, _read_sharded),
    "compiled kernel/": ("texts", _kernel, _read_kernel),
}
"""Files of commands: the input they need, how they are copied and read. ``READERS`` of the fuzzer has other kinds."""
UNREAD = ("report.html", "report.md", "summary.json", ".lock")
"""Pages, which no command reads."""
FOREIGN = {"tokenizer.json": "another tokeniser: corpora and checkpoints of runs name the digest of their tokens"}
"""Formats of others that have no place for a checksum, and what a change of a value leads to."""


KINDS = (*(name for name in READERS if name not in ("run/", *MADE)), *MADE)


def reader_of(name: str, base: Path) -> Reader:
    """How a file of a kind is made and read."""
    if name not in MADE:
        return READERS[name]
    needs, copy, read = MADE[name]
    need(base, needs)
    return Reader(functools.partial(copy, base / "inputs"), read)


def plain(value: Any, here: str) -> Any:
    """What was read as values that can be compared, without the folder that it was read from."""
    if isinstance(value, torch.Tensor):
        numbers = value.detach().cpu().reshape(-1).view(torch.uint8).numpy()
        return str(value.dtype), tuple(value.shape), numbers.tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, nn.Module):
        return repr(value), plain(dict(value.state_dict()), here), str(getattr(value, "config", "")).replace(here, "")
    if dataclasses.is_dataclass(value):
        return {each.name: plain(getattr(value, each.name), here) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(each, here) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each, here) for each in value]
    if hasattr(value, "fingerprint"):
        return value.fingerprint
    if hasattr(value, "__dict__") and not callable(value):
        return {name: plain(each, here) for name, each in vars(value).items()}
    return value if isinstance(value, bytes) else str(value).replace(here, "")


def damaged(name: str, base: Path, count: int, draw: random.Random) -> dict[str, Any]:
    """Damage files of a kind ``count`` times, one bit or the end of one file at a time."""
    reader, root = reader_of(name, base), base / "damage"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    sound, hurt = root / "sound" / name.strip("/"), root / "hurt" / name.strip("/")
    sound.parent.mkdir()
    reader.write(sound)
    whole = _read(reader, sound, hurt)
    outcomes = {"refused by name": 0, "without effect": 0, "another value": 0}
    failures: list[str] = []
    for _ in range(count):
        _fresh(sound, hurt)
        file = draw.choice([each for each in _files(hurt) if not each.name.endswith(UNREAD)])
        data = file.read_bytes()
        at, bit = draw.randrange(len(data)), draw.randrange(8)
        cut = draw.random() < 0.25
        file.write_bytes(data[:at] if cut else data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :])
        what = f"{file.relative_to(hurt.parent)}, " + (f"cut to {at} bytes" if cut else f"bit {bit} of byte {at}")
        try:
            found = plain(reader.read(hurt), str(hurt))
        except (FileFormatError, ArgumentError) as error:
            outcomes["refused by name"] += 1
            if file.name not in str(error) and hurt.name not in str(error):
                failures.append(f"{what}: the error does not name it: {error}")
        except Exception as error:
            failures.append(f"{what}: {type(error).__name__}: {error}")
        else:
            same = found == whole
            outcomes["without effect" if same else "another value"] += 1
            if not same and name not in FOREIGN:
                failures.append(f"{what}: another value was read")
    shutil.rmtree(root)
    about = {"about": FOREIGN[name]} if name in FOREIGN else {}
    return {"damages": count, **outcomes, **about, "failures": [each[:400] for each in failures[:5]]}


def _files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]


def _fresh(sound: Path, hurt: Path) -> None:
    shutil.rmtree(hurt.parent, ignore_errors=True)
    hurt.parent.mkdir()
    if sound.is_dir():
        shutil.copytree(sound, hurt)
    else:
        shutil.copy(sound, hurt)
        os.chmod(hurt, 0o600)


def _read(reader: Reader, sound: Path, hurt: Path) -> Any:
    _fresh(sound, hurt)
    return plain(reader.read(hurt), str(hurt))
