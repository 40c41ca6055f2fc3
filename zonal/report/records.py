"""The content of a comparison folder, read from its files alone.

A folder holds ``comparison.json`` and, for every run, ``runs/<operator>/seed-<s>-lr-<lr>/run.json`` beside
``metrics.jsonl``, ``diagnostics.json`` where its memories were looked into, and ``witnesses.json`` where it attends by
distance. The runs may also be packed into one file (``zonal.report.archive``).
A run that was killed may leave a last line half written: that line is dropped. Anything else that does not fit is a
FileFormatError which names the file and the key.
"""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from zonal.errors import FileFormatError
from zonal.report import archive, diagnostics, key_embeddings
from zonal.report.diagnostics import Head
from zonal.report.key_embeddings import KeyEmbeddings
from zonal.report.published import Published
from zonal.store import checked, read_json, read_record, understood, unharmed
from zonal.typed import made

SCHEMA = 1
Status = Literal["pending", "running", "done", "failed", "stopped"]
# what an entry of "transfer" holds beside its slices
_MEASURED = ("accuracy", "loss", "examples")


@dataclass(frozen=True)
class Point:
    """One line of ``metrics.jsonl``: a mean over the steps since the last line (train) or over the held-out data
    (eval), with the weights of distances at that step.
    """

    step: int
    tokens: int
    seconds: float
    loss: float
    accuracy: float | None = None
    geometry: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True)
class Transfer:
    """Accuracy on another task or length, named by slices such as {"task": "needle", "pairs": 1, "length": 512}."""

    slices: Mapping[str, int | str]
    accuracy: float


@dataclass(frozen=True)
class Examined:
    """What a task found of a finished run in one cell: ``values`` by name, such as {"exact match": 0.5}, of the rows
    with these ``slices``.
    """

    slices: Mapping[str, int | str]
    values: Mapping[str, float]


@dataclass(frozen=True)
class Metrics:
    """Numbers of one evaluation. ``slices`` maps "pairs" or "length" to {value: accuracy}; ``transfer``: other tasks
    and lengths; ``examined``: what the task measures by other means; ``positions``: how many answers were read;
    ``validation``: loss and accuracy on other data, by which rates are chosen.
    """

    loss: float
    accuracy: float | None = None
    bits_per_byte: float | None = None
    slices: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    transfer: tuple[Transfer, ...] = ()
    examined: tuple[Examined, ...] = ()
    positions: int | None = None
    validation: Mapping[str, float] = field(default_factory=dict)

    def value(self, metric: str) -> float | None:
        """The number called ``metric``: "loss", "accuracy" or "bits_per_byte"."""
        return {"loss": self.loss, "accuracy": self.accuracy, "bits_per_byte": self.bits_per_byte}[metric]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One operator trained once: its state, its costs (seconds, bytes) and its curves."""

    operator: str
    label: str
    seed: int
    learning_rate: float
    status: Status
    message: str | None = None
    steps_done: int = 0
    parameters: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    memory_bytes: Mapping[int, int] = field(default_factory=dict)
    final: Metrics | None = None
    steps_to: Mapping[float, int | None] = field(default_factory=dict)
    learned: tuple[Mapping[str, Any], ...] = ()
    learned_before: tuple[Mapping[str, Any], ...] = ()
    training: tuple[Point, ...]
    evaluations: tuple[Point, ...]
    diagnostics: tuple[Head, ...] | None = None
    key_embeddings: KeyEmbeddings | None = None

    @property
    def done(self) -> bool:
        return self.status == "done" and self.final is not None

    def value(self, metric: str) -> float | None:
        """The number called ``metric`` of its last evaluation; None where there is none."""
        return None if self.final is None else self.final.value(metric)

    @property
    def losses(self) -> tuple[tuple[int, float], ...]:
        """(tokens trained, held-out loss) of each evaluation."""
        return tuple((point.tokens, point.loss) for point in self.evaluations)


@dataclass(frozen=True)
class Guess:
    """The headline metric of a model that has not learned the task. trained: (slice, its values) that were trained, if
    evaluations also have others.
    """

    value: float
    trained: tuple[str, tuple[str, ...]] | None = None


@dataclass(frozen=True, kw_only=True)
class ComparisonData:
    """Everything in one comparison folder. note: a remark for readers, added to comparison.json by hand."""

    title: str
    command: str
    created: str = ""
    task: Mapping[str, Any]
    task_description: str = ""
    model: Mapping[str, Any]
    training: Mapping[str, Any]
    operators: tuple[str, ...]
    seeds: tuple[int, ...]
    learning_rates: tuple[float, ...]
    screening_seeds: int | None = None
    labels: tuple[str, ...] = ()
    budget_seconds: float | None = None
    steps: int | None = None
    versions: Mapping[str, Any] = field(default_factory=dict)
    device: Mapping[str, Any] = field(default_factory=dict)
    metric: Literal["accuracy", "loss"]
    runs: tuple[Run, ...]
    note: str = ""
    published: Published | None = None
    guess: Guess | None = None
    commit: str = ""
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def higher_is_better(self) -> bool:
        return self.metric == "accuracy"

    @property
    def screening(self) -> tuple[int, ...]:
        """The seeds that tried all rates."""
        return self.seeds[: self.screening_seeds]

    @property
    def stop(self) -> float | None:
        """The accuracy at which a run stopped."""
        return self.training.get("stop_at_accuracy")


def _final(values: Any) -> Metrics | None:
    """An evaluation; None where there is none, or where its loss was not finite (training writes null then)."""
    values = made(Mapping[str, Any], values or {}, "final")
    if made(float | None, values.get("loss"), "final.loss") is None:
        return None
    cells = made(tuple[Mapping[str, Any], ...], values.get("transfer") or (), "final.transfer")
    transfer = [{**cell, "slices": {key: cell[key] for key in cell if key not in _MEASURED}} for cell in cells]
    return made(Metrics, {**values, "transfer": transfer}, "final")


def _points(path: Path) -> dict[str, tuple[Point, ...]]:
    """The curves of one run, by kind. A step that was repeated after a resume counts once, with its last values."""
    curves: dict[str, dict[int, Point]] = {"train": {}, "eval": {}}
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"report: {path} is not a text file ({error}). It was not written by zonal or was damaged."
        ) from error
    # a killed process may leave its last line half written, without an end
    for number, line in enumerate(text[: text.rfind("\n") + 1].splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            kind, step = record["kind"], int(record["step"])
            if not unharmed(record):
                raise ValueError("its checksum is of something else")
        except (KeyError, TypeError, ValueError, RecursionError) as error:
            raise FileFormatError(
                f"report: {path}, line {number} is not a metrics record ({error!r}). "
                "The file was damaged; run the comparison again."
            ) from error
        with understood("report", path):
            if kind in curves and made(float | None, record.get("loss"), "loss") is not None:
                curves[kind][step] = made(Point, record, f"line {number}")
    return {kind: tuple(points[step] for step in sorted(points)) for kind, points in curves.items()}


def _run(folder: Path) -> Run:
    path = folder / "run.json"
    curves = _points(folder / "metrics.jsonl")
    with understood("report", path):
        record = made(Mapping[str, Any], checked(path, read_json(path)), "the record")
        found = {
            "label": record.get("label") or record.get("operator"),
            "final": _final(record.get("final")),
            "training": curves["train"],
            "evaluations": curves["eval"],
            "diagnostics": diagnostics.load(folder),
            "key_embeddings": key_embeddings.load(folder),
        }
        run = made(Run, {**record, **found}, "run")
    last = run.evaluations[-1].step if run.evaluations else 0
    if run.done and last < run.steps_done:
        raise FileFormatError(
            f"report: {folder / 'metrics.jsonl'} has no evaluation after step {last}, and the run ended at step "
            f"{run.steps_done}. The file was cut short; remove the folder of the run to run it again."
        )
    return run


def _run_folders(runs: Path) -> list[Path]:
    """The folders of ``runs`` that hold a run, in the order of their names."""
    operators = [found for found in runs.iterdir() if found.is_dir()] if runs.is_dir() else []
    found = [run for operator in operators for run in operator.iterdir() if (run / "run.json").is_file()]
    return sorted(found, key=str)


def _check_once(folder: Path, runs: Mapping[str, Run]) -> None:
    """Raises: FileFormatError for two folders of one run, such as a copy that somebody has kept beside it."""
    found: dict[tuple[str, int, float], str] = {}
    for name, run in runs.items():
        other = found.setdefault((run.operator, run.seed, run.learning_rate), name)
        if other != name:
            raise FileFormatError(
                f"report: in {folder}, {other} and {name} both hold seed {run.seed} of {run.operator!r} at the "
                f"learning rate {run.learning_rate:g}. Move the copy out of the folder."
            )


def load(directory: str | os.PathLike[str]) -> ComparisonData:
    """Read a comparison folder.

    Raises: FileFormatError when the folder is missing, is no comparison, has no runs, or a file in it is damaged.
    """
    folder = Path(directory)
    path = folder / "comparison.json"
    if not path.is_file():
        missing = f"{folder} has no comparison.json" if folder.is_dir() else f"{folder} is not a folder"
        raise FileFormatError(f"report: {missing}. Required: the folder that `zonal compare` wrote.")
    record = read_record(
        path, SCHEMA, "report", "Take a whole copy of the folder, and the version that ran the comparison."
    )
    with archive.opened(folder) as root:
        folders = _run_folders(root / "runs")
        runs = [_run(found) for found in folders]
        _check_once(folder, {str(found.relative_to(root)): run for found, run in zip(folders, runs, strict=True)})
    if not runs:
        raise FileFormatError(
            f"report: {folder} has no runs yet (no runs/*/*/run.json). "
            f"Run the comparison first: {record.get('command') or 'zonal compare'}"
        )
    with understood("report", path):
        data = made(ComparisonData, {**record, "runs": ()}, "comparison")
        made(float | None, data.stop, "comparison.training.stop_at_accuracy")
    order = {spec: index for index, spec in enumerate(data.operators)}
    runs.sort(key=lambda run: (order.get(run.operator, len(order)), run.operator, run.learning_rate, run.seed))
    return replace(data, runs=tuple(runs))
