"""What faults are done to: commands that write, what of their work is acknowledged, and what must be the same bits."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zonal import ingest, store
from zonal.training import Comparison, RunResult
from zonal.training.checkpoint import FILE as CHECKPOINT
from zonal.training.checkpoint import KIND
from zonal.training.log import kept

Facts = frozenset[Hashable]
# what the clock and the allocator write
CLOCK = frozenset(
    {"seconds", "evaluation_seconds", "checkpoint_seconds", "tokens_per_second", "peak_memory_bytes", "checksum",
     "crc32", "decoding", "prefill", "surroundings", "command", "used"}
)  # fmt: skip
SMALL = [
    *("--task", "text", "--length", "16", "--evaluation-bytes", "512", "--batch-size", "4", "--dim", "16"),
    *("--heads", "2", "--layers", "1", "--threads", "1", "--eval-every", "8", "--no-tensorboard"),
]


def timeless(value: Any) -> Any:
    """JSON without what differs from run to run."""
    if isinstance(value, dict):
        return {name: timeless(each) for name, each in value.items() if name not in CLOCK}
    return [timeless(each) for each in value] if isinstance(value, list) else value


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def tensors(path: Path, kind: str) -> dict[str, str]:
    """Digests of the tensors of a whole file."""
    found, _ = store.load_tensors(path, kind)
    return {name: digest(x.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()) for name, x in found.items()}


def lines(path: Path) -> list[Any]:
    return [timeless(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


# --- training ---------------------------------------------------------------------------------------------------------


def run_told(run: Path) -> Facts:
    """The steps of the last checkpoint, which is whole and has its log beside it."""
    steps = 0
    if (run / CHECKPOINT).exists():
        _, header = store.load_tensors(run / CHECKPOINT, KIND)
        progress = header["progress"]
        steps = progress["step"]
        kept(run, progress["metrics_bytes"], progress["metrics_sha256"])
    if (run / "best.safetensors").exists():
        store.load_tensors(run / "best.safetensors", KIND)
    if (run / "run.json").exists():
        RunResult.read(run)
    return frozenset(("step", step) for step in range(1, steps + 1))


def run_result(run: Path) -> Any:
    weights = {name: tensors(run / name, KIND) for name in (CHECKPOINT, "best.safetensors") if (run / name).exists()}
    return lines(run / "metrics.jsonl"), weights, timeless(store.read_json(run / "run.json"))


def goes_on(said: str) -> Facts:
    """The step at which a run says that it goes on."""
    found = re.search(r"goes on at step ([\d,]+)", said)
    return frozenset(("step", step) for step in range(1, int(found[1].replace(",", "")) + 1)) if found else frozenset()


# --- comparisons and reports ------------------------------------------------------------------------------------------


def ended_runs(root: Path) -> Facts:
    """The runs that are recorded as done, with their final metrics, and the steps of the others."""
    folder = root / "out"
    if not (folder / "comparison.json").exists():
        return frozenset()
    facts: set[Hashable] = set()
    for record in Comparison.open(folder).records():
        if record.status == "done":
            facts.add((record.operator, record.seed, json.dumps(timeless(record.final))))
    for run in (folder / "runs").glob("*/*"):
        facts |= {(run.name, run.parent.name, fact) for fact in run_told(run)}
    return frozenset(facts)


def comparison_result(root: Path) -> Any:
    return {str(run.relative_to(root)): run_result(run) for run in sorted((root / "out" / "runs").glob("*/*"))}


def pages(root: Path) -> Facts:
    """The pages that are new; the others are as they were. Raises for any that is neither."""
    found: set[Hashable] = set()
    for name in ("report.html", "report.md", "summary.json"):
        now, new = (folder / name for folder in (root / "out", root.parent / "inputs" / "comparison"))
        data = now.read_bytes()
        assert data in (b"old\n", new.read_bytes()), f"{name} is neither the old page nor the new one"
        found |= {name} if data != b"old\n" else set()
    return frozenset(found)


def with_old_pages(root: Path) -> None:
    shutil.copytree(root.parent / "inputs" / "comparison", root / "out")
    for name in ("report.html", "report.md", "summary.json"):
        (root / "out" / name).write_bytes(b"old\n")


def contents(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): digest(path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def whole_folder(root: Path) -> Facts:
    """The files of a folder that appears whole or not at all."""
    return frozenset(contents(root / "out").items()) if (root / "out").exists() else frozenset()


# --- documents --------------------------------------------------------------------------------------------------------


def documents(root: Path) -> Facts:
    """The documents of the manifest that have not changed since."""
    if not (root / "out" / "archive.json").exists():
        return frozenset()
    texts, found = root.parent / "inputs" / "texts", ingest.Archive.open(root / "out").documents()
    return frozenset(
        (path, read.digest)
        for (_, path), read in found.items()
        if (texts / path).exists() and digest((texts / path).read_bytes()) == read.digest
    )


def archive_result(root: Path) -> Any:
    found = ingest.Archive.open(root / "out")
    return (
        digest(found.memory.state.numpy().tobytes()),
        [(name, read.digest, read.spans.tolist(), read.keys.tolist()) for name, read in found.documents().items()],
    )


def often() -> None:
    """Archives are committed after each batch of a few documents."""
    from zonal.ingest import archive, folder, update

    folder.BATCH = archive.BATCH = 8
    update._EVERY, update._SHARE = 0.0, 1e9


# --- conversion -------------------------------------------------------------------------------------------------------


def conversion(root: Path) -> Facts:
    """What the record of a conversion holds, and the steps of its stages; the folder of the model is whole."""
    work, facts = root / "out.work", set[Hashable]()
    if (work / "conversion.json").exists():
        facts |= {name for name in store.read_json(work / "conversion.json") if name not in CLOCK}
    for stage in ("transfer", "distillation"):
        if (work / f"{stage}.safetensors").exists():
            _, header = store.load_tensors(work / f"{stage}.safetensors", "state of a conversion")
            facts |= {(stage, each["step"]) for each in header["told"]}
    if (root / "out").exists():
        facts |= {"model", *sorted(path.name for path in (root / "out").iterdir())}
    return frozenset(facts)


def conversion_result(root: Path) -> Any:
    out = root / "out"
    files = {name: data for name, data in contents(out).items() if name not in ("report.html", "conversion.json")}
    return files, timeless(store.read_json(out / "conversion.json"))


def in_a_moment() -> None:
    """Speed is measured after short contexts, and states are kept after each step."""
    from zonal.hf import distil, pipeline

    pipeline._LENGTHS, pipeline._PREFILL = (8, 16), 16
    (distil.learn.__kwdefaults__ or {})["save_seconds"] = 0.0


# --- the table --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Victim:
    """A command. words: given the folder of inputs and that of the work, which has the folder ``out``. begin: what is
    there before. prepare: called in the child before the command. told: what is acknowledged on the disk; it raises for
    what is half written. claims: what words of the command acknowledge of it. result: what has to be the same bits.
    again: what a command may say that finds its work done, after a kill that came at its very end. needs: inputs.
    """

    words: Callable[[Path, Path], list[str]]
    told: Callable[[Path], Facts]
    result: Callable[[Path], Any]
    begin: Callable[[Path], object] = lambda root: None
    prepare: Callable[[], object] = lambda: None
    claims: Callable[[str], Facts] = lambda said: frozenset()
    again: str | None = None
    needs: tuple[str, ...] = ("texts",)


VICTIMS: dict[str, Victim] = {
    "train": Victim(
        lambda inputs, root: [
            *("train", *SMALL, "--data", str(inputs / "text.txt"), "--operator", "sko", "--steps", "40"),
            *("--checkpoint-every", "3", "--keep-best", "--out", str(root / "out")),
        ],
        lambda root: run_told(root / "out"),
        lambda root: run_result(root / "out"),
        claims=goes_on,
    ),
    "compare": Victim(
        lambda inputs, root: [
            *("compare", *SMALL, "--data", str(inputs / "text.txt"), "--operators", "softmax,linear", "--steps", "16"),
            *("--seeds", "2", "--checkpoint-every", "4", "--out", str(root / "out")),
        ],
        ended_runs,
        comparison_result,
    ),
    "report": Victim(
        lambda inputs, root: ["report", str(root / "out")],
        pages,
        lambda root: contents(root / "out"),
        with_old_pages,
        needs=("comparison",),
    ),
    "pack": Victim(
        lambda inputs, root: ["report", str(inputs / "comparison"), "--pack", str(root / "out")],
        whole_folder,
        lambda root: contents(root / "out"),
        again="is there already",
        needs=("comparison",),
    ),
    "ingest": Victim(
        lambda inputs, root: [
            *("ingest", str(inputs / "texts"), "--out", str(root / "out"), "--heads", "4", "--span-words", "20")
        ],
        documents,
        archive_result,
        prepare=often,
    ),
    "ingest of changed texts": Victim(
        lambda inputs, root: [
            *("ingest", str(inputs / "texts"), "--out", str(root / "out"), "--heads", "4", "--span-words", "20")
        ],
        documents,
        archive_result,
        lambda root: shutil.copytree(root.parent / "inputs" / "archive", root / "out"),
        often,
    ),
    "convert": Victim(
        lambda inputs, root: [
            *("convert", str(inputs / "model"), "--text", str(inputs / "text.txt"), "--out", str(root / "out")),
            *("--operator", "hedgehog", "--length", "32", "--windows", "2", "--eval-length", "32", "--questions", "1"),
            *("--transfer-steps", "12", "--distil-steps", "8", "--threads", "1"),
        ],
        conversion,
        conversion_result,
        prepare=in_a_moment,
        again="exists. Choose another folder",
        needs=("texts", "model"),
    ),
}


def leftovers(root: Path) -> list[str]:
    """Temporary files: what begins with a dot, or was made in the folder of temporary files."""
    return sorted(
        path.relative_to(root).as_posix()
        for path in root.rglob("*")
        if path.name.startswith((".", "tmp")) or path.suffix == ".part"
    )


__all__ = ["SMALL", "VICTIMS", "Facts", "Victim", "in_a_moment", "leftovers", "often"]
