"""`make fuzz`: random hostile input to public functions, memories, texts and readers of files.

    PYTHONPATH=tests python -m fuzz.run [--out results/fuzz.json] [--seed 0] [--share 1.0] [TARGET …]

A full run is more than 100,000 cases. Cases come in rounds of 500; round n of a target has the seed SEED + n, so that a
round can be run again by itself. A failure is shrunk and printed as a value to put into ``KEPT`` of test_fuzz.py, and
the run goes on with the next round. The record is written after each target. The exit status is 1 when a case failed.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import torch
import transformers
from fuzz import damaged
from fuzz.targets import TARGETS, Target
from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.console import Console

import zonal
from zonal.execution import machine

ROUND = 500
CONSOLE = Console(markup=False, highlight=False, soft_wrap=True)
# a reader that believes a size in a file is refused this much memory beside what is in use
ROOM = 8 * 2**30


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "targets", nargs="*", default=[], metavar="TARGET", help=f"of {', '.join(TARGETS)}; default: all"
    )
    parser.add_argument("--out", type=Path, help="the record to write, such as results/fuzz.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the cases of a full run")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (_in_use() + ROOM, resource.RLIM_INFINITY))
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "attention: key_padding_mask hides every key", UserWarning)
    warnings.filterwarnings("ignore", ".*torch.jit.*", DeprecationWarning)
    found: dict[str, Any] = {}
    for name in options.targets or TARGETS:
        target = TARGETS[name]
        found[name] = fuzzed(name, target, max(1, round(target.cases * options.share)), options.seed)
        if options.out is not None:
            options.out.write_text(
                json.dumps(record(found, options.seed, options.share), indent=1) + "\n", encoding="utf-8"
            )
    return 1 if any(each["failures"] for each in found.values()) else 0


def fuzzed(name: str, target: Target, cases: int, first: int) -> dict[str, Any]:
    """Run the cases of a target, in rounds."""
    began, run, failures = time.process_time(), 0, list[str]()
    for place in range(-(-cases // ROUND)):
        count, failure = one_round(target, min(ROUND, cases - place * ROUND), first + place)
        run += count
        if failure is not None:
            failures.append(failure)
            CONSOLE.print(f"{name}, seed {first + place}: {failure}")
    took = time.process_time() - began
    CONSOLE.print(f"{name:<12}{run:>8,} cases, {len(failures)} rounds with a failure, {took:,.0f} s of the processor")
    return {"cases": run, "failures": len(failures), "processor_seconds": round(took, 1)}


def one_round(target: Target, cases: int, number: int) -> tuple[int, str | None]:
    """How many cases ran, and the smallest case that failed, with its error."""
    run, smallest = 0, ("", "")

    @seed(number)
    @settings(
        max_examples=cases, database=None, deadline=None, suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink), report_multiple_bugs=False,
    )  # fmt: skip
    @given(target.draw())
    def each(case: Any) -> None:
        nonlocal run, smallest
        run += 1
        try:
            target.check(case)
        except BaseException as error:
            smallest = (repr(case), f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            raise

    try:
        each()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return run, ": ".join(smallest) if smallest[0] else f"{type(error).__name__}: {error}"
    return run, None


def record(found: dict[str, Any], first: int, share: float) -> dict[str, Any]:
    """What results/fuzz.json holds."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": f"PYTHONPATH=tests python -m fuzz.run --share {share:g} --seed {first} --out results/fuzz.json",
        "about": "hostile input to public functions, memories, texts and readers; failures are rounds of "
        f"{ROUND} cases with one",
        "commit": commit,
        "seed": first,
        "cases": sum(each["cases"] for each in found.values()),
        "failures": sum(each["failures"] for each in found.values()),
        "processor_seconds": round(sum(each["processor_seconds"] for each in found.values()), 1),
        "targets": found,
        "versions": {
            "zonal": zonal.__version__, "torch": torch.__version__, "hypothesis": hypothesis.__version__,
            "python": platform.python_version(), "transformers": transformers.__version__,
            "gguf": importlib.metadata.version("gguf") if "model.gguf" in damaged.PRETRAINED else None,
        },
        "processor": machine.machine_for(torch.device("cpu")).name,
    }  # fmt: skip


def _in_use() -> int:
    """Bytes of address space that the process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main())
