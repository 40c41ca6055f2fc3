"""`make faults`: kills, full disks, damaged files, dead workers, little memory, lost ranks, two processes in a folder.

    PYTHONPATH=tests python -m faults.run [--out results/faults/faults.json] [--seed 0] [--share 1.0] [PART …]

Each part draws its faults from the seed and its own name. The record is written after each part. Where parts are named,
it keeps the others that it has; each has the commit that was tried. The exit status is 1 when something failed.
"""

import argparse
import functools
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", TQDM_DISABLE="1")

import torch
import torch._dynamo  # the optimiser imports it lazily; better once than in every child
from faults.damage import KINDS, damaged
from faults.kills import full_disks, kills
from faults.others import dead_workers, little_memory, ranks, two_processes
from faults.victims import VICTIMS
from rich.console import Console

import zonal
import zonal.hf.pipeline
from zonal import store
from zonal.cli import app, compare, convert, report, train  # noqa: F401, the same
from zonal.cli import ingest as _ingest  # noqa: F401, the same
from zonal.execution import machine
from zonal.training.environment import commit

CONSOLE = Console(markup=False, highlight=False, soft_wrap=True)
Part = Callable[[Path, int, random.Random], dict[str, Any]]


def parts() -> Iterator[tuple[str, int, Part]]:
    """The name of each part, how many faults a full run has of it, and what does them."""
    # little memory comes first: later this process has freed memory, which the children of a limit could use
    for kind, count, do in (
        ("little memory", 6, little_memory), ("kills", 20, kills), ("full disk", 8, full_disks),
        ("two processes", 3, two_processes),
    ):  # fmt: skip
        yield from ((f"{kind}: {name}", count, functools.partial(do, name)) for name in VICTIMS)
    yield from ((f"damage: {name}", 100, functools.partial(damaged, name)) for name in KINDS)
    yield "dead workers", 4, dead_workers
    yield "ranks", 4, ranks


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=[], metavar="PART", help="beginnings of names, such as kills; all")
    parser.add_argument("--out", type=Path, help="the record to write, such as results/faults/faults.json")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=1.0, help="of the faults of a full run")
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    found, tree = before(options), commit()
    with tempfile.TemporaryDirectory(prefix="zonal-faults-") as folder:
        base = Path(folder)
        for name, count, do in parts():
            if not name.startswith(tuple(options.parts or [""])):
                continue
            began = time.perf_counter()
            found[name] = do(base, max(1, round(count * options.share)), random.Random(f"{options.seed} {name}"))
            found[name] |= {"seconds": round(time.perf_counter() - began, 1), "commit": tree}
            CONSOLE.print(f"{name}: {json.dumps(found[name], ensure_ascii=False)}")
            if options.out is not None:
                store.write_json(options.out, record(found, options))
    return 1 if any(each["failures"] for each in found.values()) else 0


def before(options: argparse.Namespace) -> dict[str, Any]:
    """Where some parts are named: the others, as the record has them."""
    if not options.parts or options.out is None or not options.out.exists():
        return {}
    return store.read_json(options.out)["parts"]


def record(found: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """What the file holds."""
    names = [name for name, _, _ in parts() if name in found]
    return {
        "command": f"PYTHONPATH=tests python -m faults.run --share {options.share:g} --seed {options.seed} "
        f"--out {options.out}",
        "seed": options.seed,
        "share": options.share,
        "kills": sum(each.get("kills", 0) for each in found.values()),
        "full_disks": sum(each.get("disks", 0) for each in found.values()),
        "damages": sum(each.get("damages", 0) for each in found.values()),
        "failures": sum(len(each["failures"]) for each in found.values()),
        "seconds": round(sum(each["seconds"] for each in found.values())),
        "parts": {name: found[name] for name in names},
        "versions": {"zonal": zonal.__version__, "torch": torch.__version__, "python": platform.python_version()},
        "processor": machine.name(torch.device("cpu")),
    }


if __name__ == "__main__":
    sys.exit(main())
