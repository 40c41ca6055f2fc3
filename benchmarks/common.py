"""What every benchmark shares: a correctness gate, interleaved timing, quantiles, and results as JSON with their
circumstances.

A benchmark is a file with ``main(argv) -> int``. It checks what it times against the float64 definition first, times
its subject and a named peer in turns in one process, and writes ratios of the two (below 1: the subject is faster).
"""

import argparse
import contextlib
import datetime
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zonal import store
from zonal.errors import ArgumentError
from zonal.execution.machine import seconds, synchronise
from zonal.training.environment import describe_device, versions

SCHEMA = 1
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


def parser(description: str, default_name: str) -> argparse.ArgumentParser:
    """Arguments that all benchmarks have: --out, --threads, --device, --quick."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument(
        "--out",
        default=f"results/benchmarks/{default_name}.json",
        help="where the JSON goes; '-' writes none (default: %(default)s)",
    )
    made.add_argument("--threads", type=int, default=None, help="threads of torch (default: as torch chooses)")
    made.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    made.add_argument("--quick", action="store_true", help="few and small shapes: a check that it runs, no result")
    return made


def prepare(options: argparse.Namespace) -> torch.device:
    """Threads and device of the options; a fixed seed."""
    if options.threads is not None:
        if options.threads < 1:
            raise ArgumentError(f"bench: --threads must be >= 1, received {options.threads}.")
        torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArgumentError("bench: --device cuda was asked for and torch sees none. Use --device cpu.")
    torch.manual_seed(0)
    return device


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
        "rows": [dict(row) for row in rows],
    }
    store.write_json(target, value)
    print(f"wrote {target}")


def kept(out: str, resume: bool, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows that ``out`` holds of the same settings, to go on from; none without ``resume``.

    Raises: ArgumentError for rows of other settings.
    """
    if not resume or not Path(out).is_file():
        return []
    found = store.read_json(out)
    if found["settings"] != json.loads(json.dumps(dict(settings))):
        raise ArgumentError(
            f"bench: --resume goes on from {out}, which holds results of other settings. Give the options it was "
            "made with, or another --out."
        )
    return found["rows"]


def table(rows: Sequence[Sequence[str]], header: Sequence[str]) -> str:
    """Columns as wide as what is in them."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
