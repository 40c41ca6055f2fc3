"""The harness of all benchmarks: options, a correctness gate, timing in turns, quantiles, peak memory, and results as
JSON with their circumstances.

A benchmark is a file with ``main(argv) -> int`` that states its rows. It checks what it times against the float64
definition first, times its subject and a named peer in turns in one process, and writes ratios of the two (below 1: the
subject is faster).
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from zonal import store
from zonal.errors import ArgumentError
from zonal.execution.machine import seconds, synchronise
from zonal.kernels.build import SETS
from zonal.kernels.choice import features, processor
from zonal.training.config import first_difference
from zonal.training.environment import PeakMemory, describe_device, versions

SCHEMA = 1
_CPU = torch.device("cpu")
Work = Callable[[], object]


class GateError(AssertionError):
    """What was to be timed is wrong; nothing was timed."""


@dataclass(frozen=True)
class Quantiles:
    """Of repeated runs. median, the quartiles, the least, and how many there were."""

    median: float
    low: float
    high: float
    least: float
    runs: int

    @staticmethod
    def of(values: Sequence[float]) -> "Quantiles":
        ordered = sorted(values)

        def at(share: float) -> float:
            place = share * (len(ordered) - 1)
            below = math.floor(place)
            return ordered[below] + (ordered[min(below + 1, len(ordered) - 1)] - ordered[below]) * (place - below)

        return Quantiles(statistics.median(ordered), at(0.25), at(0.75), ordered[0], len(ordered))


@dataclass(frozen=True)
class Compared:
    """A subject against a peer: seconds of each, and the ratio subject / peer over pairs of neighbouring runs."""

    subject: Quantiles
    peer: Quantiles
    ratio: Quantiles

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


SHARED: dict[str, dict[str, Any]] = {
    "budget": {"type": float, "help": "seconds for a row (default: %(default)s)"},
    "only": {"default": "", "help": "only rows whose description contains this text"},
    "page": {"action": "store_true", "help": "only write the page of the JSON that is there"},
    "resume": {"action": "store_true", "help": "keep the rows that --out already holds and measure the others"},
}
"""Options that several benchmarks have."""


DIGITS = 7
"""Significant digits of a record's fractions, as many as float32 has."""
MACHINE = "{machine}"
"""What a path has in place of ``machine_kind``."""


def parser(
    about: str, name: str, *shared: str, by_machine: bool = False, record: str | None = None, **defaults: Any
) -> argparse.ArgumentParser:
    """Options of every benchmark: --out, --threads, --device, --quick; of ``SHARED``, those named.

    by_machine: the results depend on the machine above all, and each kind of machine has a folder of its own. record:
    where results go in place of results/benchmarks.
    """
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    record = record or f"results/benchmarks/{f'{MACHINE}/' if by_machine else ''}{name}.json"
    made.add_argument(
        "--out",
        default=record,
        help=f"where the JSON goes, {MACHINE} being the kind of machine; '-' writes none (default: %(default)s, "
        "and none with --quick or --only)",
    )
    made.add_argument("--threads", type=int, default=None, help="threads of torch (default: as torch chooses)")
    made.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    made.add_argument("--quick", action="store_true", help="few and small shapes: a check that it runs, no result")
    for option in shared:
        made.add_argument(f"--{option}", **SHARED[option])
    made.set_defaults(name=name, about=about.strip(), record=record, **defaults)
    return made


def prepare(options: argparse.Namespace) -> torch.device:
    """Threads and device of the options; a fixed seed. ``options.out`` gets the kind of machine, and is "-" for a part
    that was not told where to write (``spare_record``).
    """
    if options.threads is not None:
        if options.threads < 1:
            raise ArgumentError(f"bench: --threads must be >= 1, received {options.threads}.")
        torch.set_num_threads(options.threads)
    budget = getattr(options, "budget", 1.0)
    if not 0 < budget < math.inf:
        raise ArgumentError(f"bench: --budget must be a number of seconds > 0, received {budget:g}.")
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        raise ArgumentError(f"bench: --device {options.device!r} is no device. Use cpu, cuda or cuda:1.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("bench: --device cuda was asked for and torch sees none. Use --device cpu.")
    torch.manual_seed(0)
    if options.quick or getattr(options, "only", ""):
        spare_record(options)
    options.out = options.out.replace(MACHINE, machine_kind(device))
    return device


def spare_record(options: argparse.Namespace) -> None:
    """Let a run that measures a part of the rows replace no file: it writes where it was told, or nowhere. With
    --resume it adds its rows to those that are there.
    """
    adds = getattr(options, "resume", False)
    if options.out == options.record and (options.quick or not adds):
        options.out = "-"
    if options.out != "-" and not adds and Path(options.out).exists():
        raise ArgumentError(
            f"bench: {options.out} exists, and a part of the rows would replace it. Choose another --out."
        )


def machine_kind(device: torch.device) -> str:
    """A folder's name for machines with this processor and its highest instruction set, or with this GPU."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    words = re.sub(r"\(\w+\)|\bprocessor\b|\bcpu\b.*", " ", name.lower())
    if device.type == "cpu":
        words += f" {next(isa.name for isa in SETS if isa.needs <= features())}"
    return "-".join(re.findall(r"[a-z0-9]+", words))


class Run:
    """A benchmark that runs: its options, its device, what was so when it began, and the record that it writes.

    Args:
        options: of ``parser``.
        only_cpu: why it cannot run elsewhere; ArgumentError there. None: it can.
    """

    def __init__(self, options: argparse.Namespace, *, only_cpu: str | None = None) -> None:
        self.options, self.device = options, prepare(options)
        if only_cpu is not None and self.device.type != "cpu":
            raise ArgumentError(f"bench: {only_cpu}, received --device {self.device}. Leave --device out.")
        self.start = circumstances(self.device)
        self.partial = bool(options.quick or getattr(options, "only", ""))
        """Whether it measures a part of the rows, which is no result."""
        self.target: str = options.out
        """Where the JSON goes; "-": nowhere."""
        self.budget: float = 0.2 if options.quick else getattr(options, "budget", 0.0)
        """Seconds for a row."""

    def write(
        self, rows: Sequence[Mapping[str, Any]], summary: Mapping[str, Any],
        settings: Mapping[str, Any] | None = None, out: str | None = None,
    ) -> None:  # fmt: skip
        """Write the record. settings: what does not depend on the row (default: the budget). out: in place of
        ``target``.
        """
        report(
            self.target if out is None else out, self.options.name, self.options.about,
            {"budget_seconds": self.options.budget} if settings is None else settings, rows, summary, self.start,
        )  # fmt: skip


def folder_of_records(about: str) -> Path:
    """The folder that a command which only reads records is given."""
    made = argparse.ArgumentParser(description=about)
    made.add_argument("folder", type=Path, help="the folder of the records, such as results/benchmarks")
    folder = made.parse_args().folder
    if not folder.is_dir():
        made.error(f"{folder} is no folder. Required: the folder of the records, such as results/benchmarks.")
    return folder


def write_page(out: str, page: Callable[[Any], str]) -> None:
    """Write the HTML page of the JSON ``out`` beside it; nothing for "-". page: made of what the JSON holds."""
    if out == "-":
        return
    with store.understood("bench", out):
        text = page(store.read_json(out))
    store.write_bytes(Path(out).with_suffix(".html"), text.encode())


class Row(Protocol):
    """A row to be measured. bound: the ratio to reach; None: it is only measured."""

    @property
    def bound(self) -> float | None: ...


R = TypeVar("R", bound=Row)


def held(row: Mapping[str, Any], case: Row) -> bool:
    """Whether the ratio of a measured row is within its bound."""
    return case.bound is None or _compared(row)["ratio"]["median"] <= case.bound


def _compared(row: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(value for name, value in row.items() if name.startswith("against_"))


def ratio_text(compared: Mapping[str, Any] | None, digits: int = 3) -> str:
    """The ratio for people: "0.512 [0.497-0.530]"; "-" where nothing was compared."""
    if compared is None:
        return "-"
    ratio = compared["ratio"]
    return f"{ratio['median']:.{digits}f} [{ratio['low']:.{digits}f}-{ratio['high']:.{digits}f}]"


def bounded(
    run: Run,
    cases: Sequence[R],
    gate: Callable[[Sequence[R]], dict[str, float]],
    measured: Callable[[R], dict[str, Any]],
    line: Callable[[dict[str, Any], R], str],
) -> int:
    """Check the cases, measure and print each, and write the record; 0 when every bound holds, and for a part.

    A measured row holds the dictionary of a ``Compared`` under a name that begins with "against_", or "refused".
    """
    if not cases:
        raise ArgumentError(
            f"bench: no row has --only {run.options.only!r} in its description. Leave it out to see all."
        )
    print("checking outputs and gradients against the float64 definition …", flush=True)
    errors = gate(cases)
    rows, missed = [], []
    for case in cases:
        row = measured(case)
        rows.append(row)
        goal = ""
        if case.bound is not None:
            missed += [] if held(row, case) else [str(case)]
            goal = f"; at most {case.bound}: {'holds' if held(row, case) else 'MISSED'}"
        print(f"{line(row, case)}{goal}", flush=True)
    bounds = sum(case.bound is not None for case in cases)
    print(f"{bounds - len(missed)} of {bounds} bounds hold")
    run.write(rows, {"errors": errors, "bounds": bounds, "missed": missed})
    return 1 if missed and not run.partial else 0


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Run the body with these environment variables; what they were before is put back."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def gate(name: str, got: Tensor, reference: Tensor, tolerance: float) -> float:
    """The error of ``got`` relative to the largest entry of a float64 reference.

    Raises: GateError when it exceeds the tolerance.
    """
    if got.shape != reference.shape:
        raise GateError(f"{name}: shape {tuple(got.shape)}, the reference has {tuple(reference.shape)}")
    if not reference.numel():
        return 0.0
    error = float((got.double() - reference).abs().max() / (1e-30 + reference.abs().max()))
    if not error <= tolerance:  # NaN is an error too
        raise GateError(
            f"{name}: off by {error:.3g} of the largest entry, {tolerance:.3g} is allowed; nothing was timed"
        )
    return error


def gate_gradients(
    name: str, got: Tensor, inputs: Sequence[Tensor], reference: Tensor, exact: Sequence[Tensor], tolerance: float
) -> None:
    """Gate the gradients of the sum of ``got`` by ``inputs`` against those of the reference by ``exact``."""
    for a, b in zip(torch.autograd.grad(got.sum(), inputs), torch.autograd.grad(reference.sum(), exact), strict=True):
        gate(f"{name}, a gradient", a, b, tolerance)


def passed(run: Callable[[], Tensor], leaves: Sequence[Tensor], gradients: bool) -> object:
    """What a call gives: its output, or with gradients those of the sum of its output by ``leaves``."""
    with torch.set_grad_enabled(gradients):
        y = run()
        return torch.autograd.grad(y.sum(), leaves, allow_unused=True) if gradients else y


def once(work: Work, device: torch.device) -> float:
    """Seconds of one run, on CUDA by events."""
    synchronise(device)
    return seconds(device, work)


def interleaved(
    works: Mapping[str, Work], device: torch.device, *, rounds: int = 7, budget: float = 2.0, cap: float = math.inf
) -> dict[str, list[float]]:
    """Seconds of several pieces of work, in turns, after one warm-up each.

    At least ``rounds`` rounds while ``budget`` seconds last, more of them for short work, and one round in any case.
    Work that takes more than ``cap`` seconds once is not run again: its only (cold) time stands.
    """
    times: dict[str, list[float]] = {}
    warm: dict[str, Work] = {}
    for name, work in works.items():
        first = once(work, device)
        if first > cap:
            times[name] = [first]
        else:
            warm[name] = work
            times[name] = []
    start, done = time.perf_counter(), 0
    while warm and (done < 1 or (time.perf_counter() - start < budget and done < 40 * rounds)):
        for name, work in warm.items():
            times[name].append(once(work, device))
        done += 1
        if done >= rounds and time.perf_counter() - start > budget / 2:
            break
    return times


def compare(subject: Work, peer: Work, device: torch.device, *, pairs: int = 7, budget: float = 4.0) -> Compared:
    """Time a subject against a peer in turns; the ratio is taken pair by pair, so that a slow moment hits both."""
    times = interleaved({"subject": subject, "peer": peer}, device, rounds=pairs, budget=budget)
    ratios = [a / b for a, b in zip(times["subject"], times["peer"], strict=True)]
    return Compared(Quantiles.of(times["subject"]), Quantiles.of(times["peer"]), Quantiles.of(ratios))


def peak_bytes(work: Work, device: torch.device = _CPU) -> int:
    """The most memory that ``work`` took beyond what was there before, in bytes, as ``PeakMemory`` measures it."""
    memory = PeakMemory(device)
    kept = work()
    most = memory.growth()
    del kept
    return most


def circumstances(device: torch.device) -> dict[str, Any]:
    """Device, versions, date, and how busy the machine was when asked (1-minute load per core; above about 1 something
    else ran).
    """
    described = describe_device(device, torch.get_num_threads())
    load = (
        os.getloadavg()[0] / max(described["cores"], 1) if device.type == "cpu" and hasattr(os, "getloadavg") else None
    )
    return {
        "device": described, "versions": versions(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "load_per_core": None if load is None else round(load, 2),
    }  # fmt: skip


def text_of(value: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """A record as indented JSON with its rows at the end, one a line, their fractions with ``DIGITS`` significant
    digits. NaN and infinity raise ValueError.
    """
    head = json.dumps(dict(value), indent=1, ensure_ascii=False, allow_nan=False)
    lines = ",\n".join(
        f"  {json.dumps(store.shortened(row, DIGITS), ensure_ascii=False, allow_nan=False)}" for row in rows
    )
    return f'{head.removesuffix(chr(10) + "}")},\n "rows": [\n{lines}\n ]\n}}\n'


def report(
    out: str,
    name: str,
    about: str,
    settings: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    summary: Mapping[str, Any],
    start: Mapping[str, Any],
) -> None:
    """Write the results, whole or not at all. ``start``: ``circumstances`` from before the first timing."""
    if out == "-":
        return
    target = Path(out)
    value = {
        "schema": SCHEMA,
        "benchmark": name,
        "about": about,
        **start,
        "settings": dict(settings),
        "summary": dict(summary),
    }
    store.write_bytes(target, text_of(value, rows).encode())
    print(f"wrote {target}")


def kept(out: str, resume: bool, settings: Mapping[str, Any] | None, device: torch.device) -> list[dict[str, Any]]:
    """The rows that ``out`` holds of the same settings, processor and threads, to go on from; none without ``resume``.
    settings: None where each row has its own.

    Raises: ArgumentError for rows of others, FileFormatError for what is no record.
    """
    if not resume or not Path(out).is_file():
        return []
    found = store.read_json(out)
    with store.understood("bench", out):
        stored, machine, rows = (found[name] for name in ("settings", "device", "rows"))
    difference = None if settings is None else first_difference(stored, json.loads(json.dumps(dict(settings))))
    if difference is not None:
        name, old, new = difference
        raise ArgumentError(
            f"bench: --resume goes on from {out}, which holds results of other settings: {name} is {old!r} there and "
            f"{new!r} here. Give the options it was made with, or another --out."
        )
    if machine != describe_device(device, torch.get_num_threads()):
        raise ArgumentError(
            f"bench: --resume goes on from {out}, which was made on another machine or with another number of threads "
            '(its "device" says which). Give --threads as then, or another --out.'
        )
    return rows


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns as wide as what is in them."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )


def document_edges(documents: int, tokens: int) -> list[int]:
    """Borders of documents of uneven lengths."""
    weights = torch.arange(1, documents + 1).double().sqrt().cumsum(0)
    return [0, *sorted({int(x) for x in (weights / weights[-1] * tokens).round()})]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
