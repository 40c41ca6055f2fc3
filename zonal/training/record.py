"""run.json: the definition, progress and results of one run. A flat object, written atomically, which reports read."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from zonal.errors import FileFormatError
from zonal.store import checked, read_json, understood, write_checked
from zonal.training import events
from zonal.typed import check_fields

Status = Literal["pending", "running", "done", "failed", "stopped"]
FILE = "run.json"
MEMORY_LENGTHS = (1024, 16384, 131072)


@dataclass
class RunResult:
    """One run.

    Identity: ``operator`` (spec; of a mixed model, the specs of its layers), ``label``, ``seed``, ``learning_rate``.
    State: ``status``, ``message`` (why it failed or stopped), ``steps_done`` of ``steps``, ``stopped_early`` (reached
        ``stop_at_accuracy``).
    Cost: ``parameters``; ``seconds`` of training alone, ``evaluation_seconds`` and ``checkpoint_seconds`` beside it;
        ``tokens_per_second`` while training; ``peak_memory_bytes``: parameters plus the growth of memory during the run
        (measured by ``peak_memory_method``); ``memory_bytes``: size of one sequence's memory after so many tokens.
    Findings: ``final`` and ``best`` metrics (``best`` with its ``step``; by the validation set where its weights are
        kept), ``steps_to``: threshold → first evaluated step with at least this accuracy; ``learned`` quantities of
        each layer, and ``learned_before`` the first step.
        ``measured``: False where ``final`` lacks what the task measures of finished runs beside its evaluation set.
    """

    operator: str
    label: str
    seed: int
    learning_rate: float
    status: Status = "pending"
    message: str | None = None
    steps_done: int = 0
    steps: int = 0
    stopped_early: bool = False
    parameters: int | None = None
    seconds: float = 0.0
    evaluation_seconds: float = 0.0
    checkpoint_seconds: float = 0.0
    tokens_per_second: float | None = None
    peak_memory_bytes: int | None = None
    peak_memory_method: str | None = None
    memory_bytes: dict[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    threads: int | None = None
    device: str = "cpu"
    final: dict[str, Any] | None = None
    best: dict[str, Any] | None = None
    steps_to: dict[str, int | None] = field(default_factory=dict)
    learned: list[Any] = field(default_factory=list)
    learned_before: list[Any] = field(default_factory=list)
    measured: bool = True

    def write(self, directory: Path) -> None:
        """Write run.json in ``directory``, atomically."""
        write_checked(directory / FILE, dataclasses.asdict(self))

    def ended(self, run: str, *, skipped: bool = False) -> events.RunFinished:
        """The event that ends the run called ``run``. skipped: it had ended before."""
        names = [each.name for each in dataclasses.fields(events.RunFinished) if each.name not in ("run", "skipped")]
        return events.RunFinished(run, **{name: getattr(self, name) for name in names}, skipped=skipped)

    @classmethod
    def read(cls, directory: Path) -> "RunResult":
        """Read run.json of ``directory``. Raises FileFormatError when it is absent, damaged or of another kind."""
        path = directory / FILE
        values = checked(path, read_json(path))
        names = {each.name for each in dataclasses.fields(cls)}
        if (
            not isinstance(values, Mapping)
            or not {"operator", "label", "seed", "learning_rate", "status"} <= set(values) <= names
        ):
            raise FileFormatError(f"run: {path} is not a run record of this version. Remove the folder to run it anew.")
        with understood("run", path):
            check_fields("run.json", cls, values)
        return cls(**values)
