"""What a comparison folder says, read from its files alone.

A folder holds ``comparison.json`` and, for every run, ``runs/<operator>/seed-<s>-lr-<lr>/run.json`` beside
``metrics.jsonl``, ``diagnostics.json`` where its memories were looked into, and ``witnesses.json`` where it attends by
distance. The runs may also be packed into one file (``zonal.report.archive``).
A run that was killed may leave a last line half written: that line is dropped. Anything else that does not fit is a
FileFormatError which names the file and the key.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from zonal.errors import FileFormatError
from zonal.report import archive, diagnostics, key_embeddings
from zonal.report.diagnostics import Diagnostics
from zonal.report.key_embeddings import KeyEmbeddings
from zonal.report.published import Published
from zonal.store import read_json

STATUSES = ("pending", "running", "done", "failed", "stopped")
SCHEMA = 1


@dataclass(frozen=True)
class Point:
    """One line of ``metrics.jsonl``: a mean over the steps since the last line (train) or over the held-out data
    (eval), with the weights of distances at that step.
    """

    step: int
    tokens: int
    seconds: float
    loss: float
    accuracy: float | None
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
    and lengths; ``examined``: what the task measures by other means.
    """

    loss: float
    accuracy: float | None
    bits_per_byte: float | None
    slices: Mapping[str, Mapping[str, float]]
    transfer: tuple[Transfer, ...] = ()
    examined: tuple[Examined, ...] = ()

    def value(self, metric: str) -> float | None:
        """The number called ``metric``: "loss", "accuracy" or "bits_per_byte"."""
        return {"loss": self.loss, "accuracy": self.accuracy, "bits_per_byte": self.bits_per_byte}[metric]


@dataclass(frozen=True)
class Run:
    """One operator trained once: its state, its costs (seconds, bytes) and its curves."""

    operator: str
    label: str
    seed: int
    learning_rate: float
    status: str
    message: str | None
    steps_done: int
    parameters: int | None
    seconds: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    memory_bytes: Mapping[int, int]
    final: Metrics | None
    best: Metrics | None
    steps_to: Mapping[float, int | None]
    learned: tuple[Mapping[str, Any], ...]
    learned_before: tuple[Mapping[str, Any], ...]
    training: tuple[Point, ...]
    evaluations: tuple[Point, ...]
    diagnostics: Diagnostics | None = None
    key_embeddings: KeyEmbeddings | None = None

    @property
    def done(self) -> bool:
        return self.status == "done" and self.final is not None

    @property
    def losses(self) -> tuple[tuple[int, float], ...]:
        """(tokens trained, held-out loss) of each evaluation."""
        return tuple((point.tokens, point.loss) for point in self.evaluations)


@dataclass(frozen=True)
class Guess:
    """The headline number of who has not learned the task. trained: (slice, its values) that were trained, where an
    evaluation holds more.
    """

    value: float
    trained: tuple[str, tuple[str, ...]] | None = None


@dataclass(frozen=True)
class ComparisonData:
    """Everything in one comparison folder."""

    directory: Path
    title: str
    command: str
    created: str
    task: Mapping[str, Any]
    task_description: str
    model: Mapping[str, Any]
    training: Mapping[str, Any]
    operators: tuple[str, ...]
    seeds: tuple[int, ...]
    learning_rates: tuple[float, ...]
    budget_seconds: float | None
    steps: int | None
    versions: Mapping[str, Any]
    device: Mapping[str, Any]
    metric: str
    runs: tuple[Run, ...]
    note: str = ""
    published: Published | None = None
    guess: Guess | None = None
    commit: str = ""
    shapes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def higher_is_better(self) -> bool:
        return self.metric == "accuracy"


def _field(record: Mapping[str, Any], key: str, path: Traversable) -> Any:
    if key not in record:
        raise FileFormatError(
            f"report: {path} lacks the key {key!r}. It is not a file of this version of zonal, or it was edited; "
            "run the comparison again."
        )
    return record[key]


def _number(value: Any, key: str, path: Traversable) -> float | None:
    """A finite number, or None where the file has null (how training writes NaN and infinity)."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise FileFormatError(f"report: {path}: {key!r} must be a number, got {value!r}.")
    return float(value) if math.isfinite(value) else None


def _count(value: Any, key: str, path: Traversable) -> int | None:
    number = _number(value, key, path)
    return None if number is None else int(number)


def _metrics(record: Any, key: str, path: Traversable) -> Metrics | None:
    if not record:
        return None
    if not isinstance(record, dict):
        raise FileFormatError(f"report: {path}: {key!r} must be an object, got {type(record).__name__}.")
    loss = _number(record.get("loss"), f"{key}.loss", path)
    if loss is None:
        return None
    slices = {
        name: {
            str(k): number
            for k, v in values.items()
            if (number := _number(v, f"{key}.slices.{name}.{k}", path)) is not None
        }
        for name, values in (record.get("slices") or {}).items()
    }
    transfer = tuple(_transfer(cell, f"{key}.transfer", path) for cell in record.get("transfer") or ())
    examined = tuple(_examined(cell, f"{key}.examined", path) for cell in record.get("examined") or ())
    accuracy, bits = (_number(record.get(name), f"{key}.{name}", path) for name in ("accuracy", "bits_per_byte"))
    return Metrics(loss, accuracy, bits, slices, transfer, examined)


def _transfer(cell: Any, key: str, path: Traversable) -> Transfer:
    accuracy = _number(cell.get("accuracy"), f"{key}.accuracy", path) if isinstance(cell, dict) else None
    if accuracy is None:
        raise FileFormatError(
            f"report: {path}: each entry of {key!r} must be an object with an accuracy, got {cell!r}."
        )
    return Transfer(
        {name: value for name, value in cell.items() if name not in ("accuracy", "loss", "examples")}, accuracy
    )


def _examined(cell: Any, key: str, path: Traversable) -> Examined:
    if (
        not isinstance(cell, dict)
        or not isinstance(cell.get("slices"), dict)
        or not isinstance(cell.get("values"), dict)
    ):
        raise FileFormatError(
            f"report: {path}: each entry of {key!r} must be an object with slices and values, got {cell!r}."
        )
    values = {
        name: number
        for name, value in cell["values"].items()
        if (number := _number(value, f"{key}.values.{name}", path)) is not None
    }
    return Examined(cell["slices"], values)


def _points(path: Traversable) -> dict[str, tuple[Point, ...]]:
    """The curves of one run, by kind. A step that was repeated after a resume counts once, with its last values."""
    curves: dict[str, dict[int, Point]] = {"train": {}, "eval": {}}
    if not path.is_file():
        return {kind: () for kind in curves}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"report: {path} is not a text file ({error}). It was not written by zonal or was damaged."
        ) from error
    for index, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            kind, step = record["kind"], int(record["step"])
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            if index == len(lines) - 1:
                break
            raise FileFormatError(
                f"report: {path}, line {index + 1} is not a metrics record ({error!r}). "
                "The file was damaged; run the comparison again."
            ) from error
        loss = _number(record.get("loss"), "loss", path)
        if kind not in curves or loss is None:
            continue
        tokens, seconds = _count(record.get("tokens"), "tokens", path), _number(record.get("seconds"), "seconds", path)
        curves[kind][step] = Point(
            step,
            tokens or 0,
            seconds or 0.0,
            loss,
            _number(record.get("accuracy"), "accuracy", path),
            tuple(record.get("geometry") or ()),
        )
    return {kind: tuple(points[step] for step in sorted(points)) for kind, points in curves.items()}


def _run(folder: Traversable) -> Run:
    path = folder / "run.json"
    record = read_json(path)
    if not isinstance(record, dict):
        raise FileFormatError(f"report: {path} must hold a JSON object, got {type(record).__name__}.")
    status = _field(record, "status", path)
    if status not in STATUSES:
        raise FileFormatError(f"report: {path}: unknown status {status!r}. Valid: {', '.join(STATUSES)}.")
    operator = str(_field(record, "operator", path))
    curves = _points(folder / "metrics.jsonl")
    rate = _number(_field(record, "learning_rate", path), "learning_rate", path)
    seed = _count(_field(record, "seed", path), "seed", path)
    if rate is None or seed is None:
        raise FileFormatError(f"report: {path}: 'learning_rate' and 'seed' must be numbers.")
    return Run(
        operator=operator,
        label=str(record.get("label") or operator),
        seed=seed,
        learning_rate=rate,
        status=status,
        message=None if record.get("message") is None else str(record["message"]),
        steps_done=_count(record.get("steps_done"), "steps_done", path) or 0,
        parameters=_count(record.get("parameters"), "parameters", path),
        seconds=_number(record.get("seconds"), "seconds", path),
        tokens_per_second=_number(record.get("tokens_per_second"), "tokens_per_second", path),
        peak_memory_bytes=_count(record.get("peak_memory_bytes"), "peak_memory_bytes", path),
        memory_bytes={int(length): int(size) for length, size in (record.get("memory_bytes") or {}).items()},
        final=_metrics(record.get("final"), "final", path),
        best=_metrics(record.get("best"), "best", path),
        steps_to={
            float(threshold): _count(step, "steps_to", path)
            for threshold, step in (record.get("steps_to") or {}).items()
        },
        learned=tuple(record.get("learned") or ()),
        learned_before=tuple(record.get("learned_before") or ()),
        training=curves["train"],
        evaluations=curves["eval"],
        diagnostics=diagnostics.load(folder),
        key_embeddings=key_embeddings.load(folder),
    )


def _metric(record: Mapping[str, Any], path: Traversable) -> str:
    """The headline number, as the task names it."""
    named = _field(record, "metric", path)
    if named not in ("accuracy", "loss"):
        raise FileFormatError(f"report: {path}: 'metric' must be 'accuracy' or 'loss', got {named!r}.")
    return named


def _guessed(record: Mapping[str, Any], path: Traversable) -> Guess | None:
    """What a guess reaches, None where the file does not say (those of older versions do not)."""
    found = record.get("guess")
    if found is None:
        return None
    value = _number(found.get("value"), "guess.value", path) if isinstance(found, dict) else None
    if value is None:
        raise FileFormatError(f"report: {path}: 'guess' must be an object with a finite value, got {found!r}.")
    trained = found.get("trained")
    return Guess(value, None if trained is None else (str(trained[0]), tuple(map(str, trained[1]))))


def _run_folders(runs: Traversable) -> list[Traversable]:
    """The folders of ``runs`` that hold a run, in the order of their names."""
    operators = [found for found in runs.iterdir() if found.is_dir()] if runs.is_dir() else []
    found = [run for operator in operators for run in operator.iterdir() if (run / "run.json").is_file()]
    return sorted(found, key=str)


def load(directory: str | os.PathLike[str]) -> ComparisonData:
    """Read a comparison folder.

    Raises: FileFormatError when the folder is missing, is no comparison, has no runs, or a file in it is damaged.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise FileFormatError(
            f"report: {folder} is not a folder. "
            "Required: the folder that `zonal compare` wrote (it holds comparison.json)."
        )
    path = folder / "comparison.json"
    if not path.is_file():
        raise FileFormatError(
            f"report: {folder} has no comparison.json. Required: the folder that `zonal compare` wrote."
        )
    record = read_json(path)
    if not isinstance(record, dict):
        raise FileFormatError(f"report: {path} must hold a JSON object, got {type(record).__name__}.")
    schema = _field(record, "schema", path)
    if schema != SCHEMA:
        raise FileFormatError(
            f"report: {path} has schema {schema!r}, this version of zonal reads schema {SCHEMA}. "
            "Write the report with the version that ran the comparison."
        )
    with archive.opened(folder) as root:
        runs = tuple(_run(found) for found in _run_folders(root / "runs"))
    if not runs:
        raise FileFormatError(
            f"report: {folder} has no runs yet (no runs/*/*/run.json). "
            f"Run the comparison first: {record.get('command', 'zonal compare')}"
        )
    operators = tuple(str(spec) for spec in _field(record, "operators", path))
    order = {spec: index for index, spec in enumerate(operators)}
    runs = tuple(
        sorted(runs, key=lambda run: (order.get(run.operator, len(order)), run.operator, run.learning_rate, run.seed))
    )
    return ComparisonData(
        directory=folder,
        title=str(_field(record, "title", path)),
        command=str(_field(record, "command", path)),
        created=str(record.get("created") or ""),
        task=_field(record, "task", path),
        task_description=str(record.get("task_description") or ""),
        model=_field(record, "model", path),
        training=_field(record, "training", path),
        operators=operators,
        seeds=tuple(int(seed) for seed in _field(record, "seeds", path)),
        learning_rates=tuple(float(rate) for rate in _field(record, "learning_rates", path)),
        budget_seconds=_number(record.get("budget_seconds"), "budget_seconds", path),
        steps=_count(record.get("steps"), "steps", path),
        versions=record.get("versions") or {},
        device=record.get("device") or {},
        metric=_metric(record, path),
        runs=runs,
        note=str(
            record.get("note") or ""
        ),  # what whoever ran it wants readers to know, put into comparison.json by hand
        published=Published.from_dict(record["published"], path) if record.get("published") else None,
        guess=_guessed(record, path),
        commit=str(record.get("commit") or ""),
        shapes=record.get("shapes") or {},
    )
