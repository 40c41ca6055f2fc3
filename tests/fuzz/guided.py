"""`make fuzz-readers`: texts and files that libFuzzer makes, guided by which lines of the library they reach.

    PYTHONPATH=tests python -m fuzz.guided [--runs 20000] [--seconds 60] [--seed 1] [TARGET …]

A target is a reader of ``fuzz.readers`` and has a process of its own, until so many runs or seconds have passed. Its
bytes are a number of one byte, which file of a folder (or which reader of texts) they are for, and then the whole of
that file. They begin as good files; libFuzzer changes them by itself, or as damaged.py does. All checksums are one
constant here, else little would come past them. A failure is an error that is not the library's own, a crash, a run of
thirty seconds, or 4 GiB of memory. It ends the target, and its bytes are printed in base64, as a value to put into
``BYTES`` of test_fuzz.py. The exit status is 1 when a target failed.
"""

import argparse
import base64
import os
import re
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console

CONSOLE = Console(markup=False, highlight=False, soft_wrap=True)
LARGEST = 64 * 1024
COUNT = re.compile(r"^stat::number_of_executed_units:\s*(\d+)", re.MULTILINE)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="default: all of fuzz.readers.TARGETS")
    parser.add_argument("--runs", type=int, default=20_000, help="of each target, at most")
    parser.add_argument("--seconds", type=int, default=60, help="for each target, at most")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(words)
    from fuzz import readers

    for name in options.targets:
        if name not in readers.TARGETS:
            parser.error(f"{name} is none of {', '.join(readers.TARGETS)}")
    found: dict[str, tuple[int, int]] = {}
    for name in options.targets or readers.TARGETS:
        found[name] = fuzzed(name, options)
        CONSOLE.print(f"{name:<20}{found[name][0]:>8,} runs, {found[name][1]} failures")
    runs, failures = (sum(each[at] for each in found.values()) for at in range(2))
    CONSOLE.print(f"{'all':<20}{runs:>8,} runs, {failures} failures")
    return 1 if failures else 0


def fuzzed(name: str, options: Any) -> tuple[int, int]:
    """Runs and failures of a target, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        limits = [f"-runs={options.runs}", f"-max_total_time={options.seconds}", f"-seed={options.seed}"]
        ended = subprocess.run(
            [sys.executable, "-c", f"from fuzz import guided; guided.child({name!r})", *limits, f"-max_len={LARGEST}",
             "-timeout=30", "-rss_limit_mb=4096", "-print_final_stats=1", "-artifact_prefix=found-", "seeds"],
            cwd=folder, capture_output=True, text=True, errors="replace", check=False,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(each or os.getcwd() for each in sys.path)},
        )  # fmt: skip
        kept = [each.read_bytes() for each in Path(folder).glob("found-*")]
    said = ended.stdout + ended.stderr
    runs = int(count[1]) if (count := COUNT.search(said)) else 0
    if not kept and not ended.returncode and runs:
        return runs, 0
    CONSOLE.print(f"{name} ended with status {ended.returncode}:\n{said[-3000:]}")
    for data in kept:
        CONSOLE.print(f'    ("{name}", "{base64.b64encode(data).decode()}"),')
    return runs, 1


def child(name: str) -> None:
    """Fuzz one target in this process, with libFuzzer's options, beginning with the files it makes in ``seeds``."""
    import atheris

    with atheris.instrument_imports(include=["zonal"]):
        from fuzz import readers
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    Path("seeds").mkdir()
    for at, data in enumerate(readers.seeds(name)):
        Path("seeds", str(at)).write_bytes(data)
        readers.check(name, data)

    def mutated(data: bytes, largest: int, number: int) -> bytes:
        made = readers.changed(name, data, number) if number % 2 else None
        return atheris.Mutate(data, largest) if made is None or len(made) > largest else made

    atheris.Setup(sys.argv, lambda data: readers.check(name, data), custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
