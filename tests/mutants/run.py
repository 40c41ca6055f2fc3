"""`make mutants`: seeded faults, one at a time, in a copy of the tree, each against the tests that should see it.

    python tests/mutants/run.py [--out results/mutants.json] [--resume] [--cache FOLDER] [--named-only] [NAME …]

Only the fast tier is run, which is what `make test` runs. A fault is killed when one of its tests fails that passes
without it. The test that killed it when --out was written is tried first, then all of its own tests. A fault that these
let live is run against the whole fast tier, unless --named-only.
The record is written after each fault. --resume keeps what it holds of faults that were killed and have not changed
since, and runs the others. The exit status is 1 when a fault survives, does not apply, or leaves nothing to run.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from table import Mutant, mutants

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800
FAST = ("-m", "not full and not wheel")
# the tests of the table itself fail where a fault has taken the place of its old text
EVERYTHING = ("tests", "--ignore", "tests/mutants")
# pytest's exit status where a named test is not there, or is not in the fast tier
NOTHING = (4, 5)
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What became of a fault: "killed" by a test, "survived", or "unusable" with the reason.

    commit: of the tree that was tested. digest: of the fault's entry in the table.
    """

    name: str
    commit: str
    digest: str
    says: str
    status: str
    test: str | None
    seconds: float
    reason: str | None = None


def copied(folder: Path) -> Path:
    """A copy of what git knows of the tree and of what it does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout
    for name in listed.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


def pytest(tree: Path, cache: Path, *arguments: str) -> tuple[int, str]:
    """The exit status and the words of pytest in a tree, which ends at the first failure."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    # A file is changed seconds apart, so its time of change tells compiled bytecode with the fault from that without.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", *FAST, "-o", f"cache_dir={cache}", *arguments]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return 1, f"FAILED {arguments[0]}::did-not-end"
    return done.returncode, done.stdout + done.stderr


def judged(
    mutant: Mutant, commit: str, tree: Path, cache: Path, sound: dict[str, bool], groups: Sequence[tuple[str, ...]]
) -> Outcome:
    """Put a fault in, run groups of tests until one fails, and take it out again.

    sound: tests that are known to pass, or not, without any fault.
    """
    started, file = time.perf_counter(), tree / mutant.file
    before = file.read_text(encoding="utf-8")

    def outcome(status: str, test: str | None = None, reason: str | None = None) -> Outcome:
        seconds = round(time.perf_counter() - started, 1)
        return Outcome(mutant.name, commit, mutant.digest, mutant.says, status, test, seconds, reason)

    try:
        after = mutant.applied(tree)
    except ValueError as error:
        return outcome("unusable", reason=str(error))
    for arguments in groups:
        try:
            file.write_text(after, encoding="utf-8")
            code, words = pytest(tree, cache, *arguments)
        finally:
            file.write_text(before, encoding="utf-8")
        if code == 0 or (code in NOTHING and arguments != groups[-1]):
            continue
        found = FAILED.search(words)
        if code != 1 or found is None:
            return outcome("unusable", reason=f"pytest ended with status {code}: {words.strip()[-300:]}")
        test = found.group(1)
        if test not in sound:
            sound[test] = pytest(tree, cache, test)[0] == 0
        return (
            outcome("killed", test)
            if sound[test]
            else outcome("unusable", test, "this test does not pass without the fault")
        )
    return outcome("survived")


def kept(out: Path | None, table: Sequence[Mutant]) -> dict[str, Outcome]:
    """Faults of the table that a record says were killed, by name."""
    if out is None or not out.exists():
        return {}
    now = {mutant.name: mutant.digest for mutant in table}
    found = [Outcome(**each) for each in json.loads(out.read_text(encoding="utf-8"))["outcomes"] if "digest" in each]
    return {each.name: each for each in found if each.status == "killed" and now.get(each.name) == each.digest}


def groups_of(mutant: Mutant, before: Outcome | None, named_only: bool) -> list[tuple[str, ...]]:
    """The tests to run against a fault, in order: the one that killed it before, its own, and all."""
    first = [(before.test,)] if before is not None and before.test is not None else []
    return [*first, mutant.tests, *([] if named_only else [EVERYTHING])]


def write(out: Path, outcomes: Sequence[Outcome]) -> None:
    record = {
        "mutants": len(outcomes),
        "killed": sum(found.status == "killed" for found in outcomes),
        "seconds": round(sum(found.seconds for found in outcomes)),
        "outcomes": [asdict(found) for found in outcomes],
    }
    staged = out.with_suffix(".json.part")
    staged.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    staged.replace(out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="some faults; all of them when none is named")
    parser.add_argument("--out", type=Path, help="write what was found as JSON")
    parser.add_argument("--resume", action="store_true", help="leave out what --out says is killed already")
    parser.add_argument(
        "--cache", type=Path, default=ROOT / ".pytest_cache", help="where compiled kernels are kept between runs"
    )
    parser.add_argument(
        "--named-only", action="store_true", help="do not run the whole fast tier against what its own tests let live"
    )
    chosen = parser.parse_args()
    every = mutants()
    unknown = set(chosen.names) - {mutant.name for mutant in every}
    if unknown:
        parser.error(f"no such mutants: {', '.join(sorted(unknown))}")
    table = [mutant for mutant in every if not chosen.names or mutant.name in chosen.names]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    if chosen.resume and chosen.out is None:
        parser.error("--resume needs the record to go on with: --out FILE")
    console, sound = Console(), {}
    before = kept(chosen.out, every)
    known = dict(before) if chosen.resume else {}
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with tempfile.TemporaryDirectory(prefix="zonal-mutants-") as folder, Progress(*columns, console=console) as bar:
        left = [mutant for mutant in table if mutant.name not in known]
        tree, task = copied(Path(folder)), bar.add_task("", total=len(left))
        for mutant in left:
            bar.update(task, description=mutant.name)
            groups = groups_of(mutant, before.get(mutant.name), chosen.named_only)
            found = judged(mutant, commit, tree, chosen.cache.resolve(), sound, groups)
            known[mutant.name] = found
            if chosen.out is not None:
                write(chosen.out, [known[each.name] for each in every if each.name in known])
            bar.advance(task)
            console.print(
                f"{found.status:9} {found.name} ({found.seconds:.0f} s) {found.test or ''} {found.reason or ''}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    outcomes = [known[mutant.name] for mutant in table]
    killed = sum(found.status == "killed" for found in outcomes)
    console.print(f"{killed} of {len(outcomes)} killed", markup=False, highlight=False)
    for found in outcomes:
        if found.status != "killed":
            console.print(
                f"{found.status}: {found.name}: {found.says}. {found.reason or ''}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )
    return 0 if killed == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
