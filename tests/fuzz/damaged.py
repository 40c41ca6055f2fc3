"""Damaged and forged files for every reader of the library: cut, overwritten, with other values and valid checksums."""

import atexit
import contextlib
import functools
import gzip
import io
import json
import os
import shutil
import tarfile
import tempfile
import threading
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from fuzz import pretrained
from hypothesis import strategies as st
from report.comparison_folder import write_comparison

import zonal
from zonal import ingest, report, store
from zonal import mechanisms as m
from zonal.data import images, open_corpus, tokenizers, write_corpus
from zonal.errors import ZonalError
from zonal.execution import machine
from zonal.memory import Criterion, Memory
from zonal.models import CausalLM, ModelConfig
from zonal.report import archive, packing
from zonal.training.checkpoint import load_model, save_weights
from zonal.training.record import RunResult

CONFIG = ModelConfig(vocab_size=11, dim=8, layers=("softmax", "ska(power=1)"), heads=2)


def model() -> CausalLM:
    torch.manual_seed(0)
    return CausalLM(CONFIG)


def memory_file(spec: str, spans: bool) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        draw = torch.Generator().manual_seed(0)
        k, v = torch.randn(2, 1, 2, 9, 4, generator=draw)
        memory = Memory.empty(m.resolve(spec), 1, 2, 4, 4)
        for at in range(0, 9, 3):
            memory = memory.absorb(k[:, :, at : at + 3], v[:, :, at : at + 3], span=f"s{at}" if spans else None)
        memory.save(path)

    return write


def read_memory(path: Path) -> Any:
    memory = Memory.load(path)
    return memory, memory.read(torch.zeros(1, 2, 1, 4))


def write_layers(path: Path) -> None:
    model().prefill(torch.zeros(1, 5, dtype=torch.int64))[1].save(path)


def write_packed(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as whole:
        small_comparison(Path(whole))
        packing.pack(whole, folder)


def small_comparison(folder: Path) -> None:
    write_comparison(folder, operators=("sko", "linear"), seeds=(0,), rates=(0.001,), steps=20)


def read_packed(folder: Path) -> Any:
    found = report.load(folder)
    archive.unpack(folder)
    return found


def write_archive(path: Path) -> None:
    with tempfile.TemporaryDirectory() as texts:
        for name in ("mill.txt", "inn.txt"):
            (Path(texts) / name).write_text(f"The {name} has nine rooms. It was built in 1804.", encoding="utf-8")
        ingest.ingest(texts, path, heads=1, size=20)


@dataclass(frozen=True)
class Reader:
    """How a file or folder of a kind is made and read."""

    write: Callable[[Path], object]
    read: Callable[[Path], object]


READERS: dict[str, Reader] = {
    "memory": Reader(memory_file("ska(power=1)", False), read_memory),
    "memory with spans": Reader(memory_file("retention", True), read_memory),
    "memory of a window": Reader(memory_file("local_global(window=4)", True), read_memory),
    "memory of keys": Reader(memory_file("softmax", True), read_memory),
    "memories of layers": Reader(write_layers, lambda path: model().load_memory(path)),
    "model": Reader(lambda path: model().save(path), CausalLM.load),
    "checkpoint": Reader(
        lambda path: save_weights(
            path,
            model(),
            {"identity": {"model": CONFIG.to_dict(), "training": {"dtype": "float32"}}, "operator": "x"},
            1,
        ),
        load_model,
    ),
    "criterion": Reader(lambda path: Criterion(0.5, 0.25, 0.1, 0.1, 10).save(path), Criterion.load),
    "machine": Reader(
        lambda path: store.write_checked(path, machine.machine_for(torch.device("cpu")).to_dict()),
        lambda path: machine.read(path, torch.device("cpu")),
    ),
    "tokenizer.json": Reader(
        lambda path: tokenizers.train(["to be or not to be"], 262, path), tokenizers.FileTokenizer
    ),
    "images": Reader(
        lambda path: path.write_bytes(gzip.compress(b"\0\0\x08\x03\0\0\0\x02\0\0\0\x03\0\0\0\x03" + bytes(range(18)))),
        images.read_idx,
    ),
    "corpus/": Reader(
        lambda path: write_corpus(
            path, [["To be, or not to be."]], tokenizers.resolve("byte"), source="x", shard_tokens=9
        ),
        open_corpus,
    ),
    "comparison/": Reader(small_comparison, report.load),
    "run/": Reader(small_comparison, lambda path: [RunResult.read(each.parent) for each in path.rglob("run.json")]),
    "packed/": Reader(write_packed, read_packed),
    "archive/": Reader(write_archive, lambda path: ingest.ask(ingest.Archive.open(path), "Who built the inn?")),
}
PRETRAINED = {name: Reader(*each) for name, each in pretrained.READERS.items()}
"""Readers that take a tenth of a second."""
NUMBERS = (None, True, 0, -1, 1.5, 1e308, float("nan"), 2**31, 2**63, 10**30)
VALUES = (
    *NUMBERS, "", "x", "\0", "../../x", "/etc/passwd", "softmax(scale='x')", "float16", "torch", "é" * 50, [], {},
    [[]], [None],
    {"x": 1}, [1, 2, 3], ["x"], {"type": "Dot"}, {"spec": 1}, list(range(50)),
)  # fmt: skip
BYTES = (
    b"",
    b"\0",
    b"\xff",
    b"{",
    b"}",
    b'"',
    b"\n",
    b"NaN",
    b"1e999",
    b"9" * 5000,
    b"[" * 100_000,
    b"\xed\xa0\x80",
    b"\\ud800",
)


@dataclass(frozen=True)
class Damage:
    """A file of a reader, and how it is changed: at ``place`` (of 10,000 parts of it), by ``value`` of the lists."""

    reader: str
    change: str
    file: int = 0
    place: int = 0
    value: int = 0


CHANGES = ("cut", "flip", "write", "json", "json", "json", "drop", "tensor", "gone", "link", "pipe", "folder")


@st.composite
def damages(draw: st.DrawFn, readers: Collection[str] = READERS) -> Damage:
    return Damage(
        draw(st.sampled_from(sorted(readers))),
        draw(st.sampled_from(CHANGES)),
        draw(st.integers(0, 40)),
        draw(st.integers(0, 9_999)),
        draw(st.integers(0, len(VALUES) - 1)),
    )


@functools.cache
def originals() -> tempfile.TemporaryDirectory[str]:
    found = tempfile.TemporaryDirectory()
    atexit.register(found.cleanup)
    return found


@functools.cache
def original(name: str) -> Path:
    """The file or folder of a reader, undamaged."""
    path = Path(originals().name) / name
    reader = (READERS | PRETRAINED)[name]
    reader.write(path)
    reader.read(path)  # it can be read
    if name == "packed/":
        shutil.rmtree(path)
        reader.write(path)
    return path


def check_damage(each: Damage) -> None:
    """Raise unless the file is refused by an error of the library, or read as it is."""
    source = original(each.reader)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "here" / source.name
        path.parent.mkdir()
        if source.is_dir():
            shutil.copytree(source, path)
            files = sorted(found for found in path.rglob("*") if found.is_file())
            changed = files[each.file % len(files)]
            change(changed, each)
            if each.reader == "archive/" and each.change in ("json", "drop", "tensor"):
                _told(path / ingest.archive.FILE, changed)
        else:
            shutil.copy(source, path)
            change(path, each)
        with contextlib.suppress(ZonalError), unopened(folder):
            (READERS | PRETRAINED)[each.reader].read(path)
        assert [found.name for found in Path(folder).iterdir()] == ["here"], "something was written outside the folder"


@contextlib.contextmanager
def unopened(folder: str) -> Iterator[None]:
    """Raise AssertionError if a pipe in a folder is opened, which a reader would wait at forever."""
    pipes = [found for found in Path(folder).rglob("*") if found.is_fifo()]
    writers = [threading.Thread(target=lambda pipe=pipe: os.close(os.open(pipe, os.O_WRONLY))) for pipe in pipes]
    for each in writers:
        each.start()
    try:
        yield
    finally:
        waiting = []
        for pipe, each in zip(pipes, writers, strict=True):
            each.join(0.005)
            waiting.append(each.is_alive())
            os.close(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK))
            each.join()
        assert all(waiting), "a pipe was opened"


def change(file: Path, each: Damage) -> None:
    data = file.read_bytes()
    size = min(len(data), 2000) if file.suffix == ".gguf" else len(data)  # its header, and some weights
    at, value = each.place * size // 10_000, VALUES[each.value]
    if each.change == "gone":
        file.unlink()
    elif each.change == "link":
        file.unlink()
        file.symlink_to(("/dev/null", "/dev/zero", file.name)[each.value % 3])
    elif each.change == "pipe":
        file.unlink()
        os.mkfifo(file)
    elif each.change == "folder":
        file.unlink()
        file.mkdir()
    elif each.change == "cut":
        file.write_bytes(data[:at])
    elif each.change == "flip":
        file.write_bytes(data[:at] + bytes([data[at] ^ 1 << each.value % 8]) + data[at + 1 :] if data else b"")
    elif file.suffix == ".xz" and each.change != "write":
        _repack(file, each, value)
    elif each.change == "write" or file.suffix in (".bin", ".gguf", ".html", ".jinja", ".md") or file.name == "images":
        file.write_bytes(data[:at] + BYTES[each.value % len(BYTES)] + data[at + each.value :])
    elif data[:1] in b"{[":
        lines = data.splitlines() if file.suffix == ".jsonl" else [data]
        line = each.place % len(lines)
        changed = _replaced(json.loads(lines[line]), each.place, value, each.change == "drop")
        if isinstance(changed, dict) and "checksum" in changed:
            changed["checksum"] = store.checksum({}, changed)
        lines[line] = json.dumps(changed).encode()
        file.write_bytes(b"\n".join(lines))
    else:
        _forge(file, each, value)


def _forge(file: Path, each: Damage, value: Any) -> None:
    """Other values in the header or the tensors of a file, with a checksum that fits."""
    with safetensors.safe_open(file, framework="pt") as opened:
        metadata = opened.metadata()
    header = json.loads(metadata.get("zonal", "null"))
    tensors = safetensors.torch.load_file(file)
    if each.change == "tensor":
        name = sorted(tensors)[each.place % len(tensors)]
        x = tensors[name]
        changes = (
            x[..., :0], x.unsqueeze(0), x.double(), x.to(torch.int32), torch.full_like(x,
            True if x.dtype == torch.bool else 3),
            x.float() * float("nan"), x.float() * float("inf"), torch.zeros(()), x.flatten(), -x.float(),
            x.to(torch.bool),
            torch.cat([x, x]) if x.ndim else x, x.to(torch.complex64), x.float() * 1e30,
        )  # fmt: skip
        tensors[name] = changes[each.value % len(changes)].contiguous()
    else:
        header = _replaced(header, each.place, value, each.change == "drop")
    told = {key: x for key, x in header.items() if key != "checksum"} if isinstance(header, dict) else header
    if isinstance(told, dict):
        told = {**told, "checksum": store.checksum(tensors, told)}
    if "zonal" in metadata:
        metadata = {"zonal": json.dumps(told)}
    safetensors.torch.save_file(tensors, file, metadata=metadata)


# names that lead out of a folder, or cannot be made in one; @: the entry's own
NAMES = (
    "../x", "/tmp/x", "runs/../../x", "runs/a/../../../x", "runs/a/run.json/run.json", f"runs/{'x' * 300}/run.json",
    "runs//run.json", "runs/a\\..\\..\\x/run.json", "/runs/a/run.json", "regimes/a/run.json/metrics.jsonl",
    "runs/a/run.json/", "./runs/a/run.json", "C:/runs/run.json", "runs/\0/run.json", " ", "@", "@/run.json", "@/",
)  # fmt: skip


def _repack(file: Path, each: Damage, value: Any) -> None:
    """An archive with an entry under another name, with other contents, or without it."""
    entries = list(archive.read(file).items())
    at = each.place % len(entries)
    name, data = entries[at]
    if each.change == "tensor":
        entries.insert(at + each.file % 2, (NAMES[each.value % len(NAMES)].replace("@", name), data))
    elif each.change == "drop":
        del entries[at]
    else:
        entries[at] = name, json.dumps(_replaced(json.loads(data.splitlines()[0]), each.place, value, False)).encode()
    with tarfile.open(file, "w:xz", format=(tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)[each.file % 2]) as made:
        for name, data in entries:
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            made.addfile(entry, io.BytesIO(data))


def _told(index: Path, file: Path) -> None:
    """The checksum of a changed file in the index of an archive."""
    record = json.loads(index.read_text(encoding="utf-8"))
    if file == index or not isinstance(record, dict):
        return
    with safetensors.safe_open(file, framework="pt") as opened:
        header = json.loads(opened.metadata()["zonal"])
    for entry in (record["memory"], *record["shards"]):
        if entry["file"] == file.name and isinstance(header, dict):
            entry["checksum"] = header["checksum"]
    store.write_json(index, {**record, "checksum": store.checksum({}, record)})


def _replaced(tree: Any, place: int, value: Any, drop: bool) -> Any:
    """A JSON value with one of its parts replaced, or left out."""
    spots: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, inner in list(node.items()) if isinstance(node, dict) else list(enumerate(node)):
            spots.append((node, key))
            if isinstance(inner, dict | list):
                walk(inner)

    if isinstance(tree, dict | list):
        walk(tree)
    if not spots:
        return value
    node, key = spots[place % len(spots)]
    if drop:
        del node[key]
    else:
        node[key] = value
    return tree


__all__ = ["Damage", "check_damage", "damages", "zonal"]
