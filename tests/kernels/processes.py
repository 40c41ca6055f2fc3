"""Triton in processes of its own, and what several workers of one test run share of their answers."""

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
_MANY = 16
CUDA = torch.cuda.is_available()
no_device = pytest.mark.skipif(
    not CUDA, reason="needs a CUDA device, and torch sees none here (`make test-gpu` where there is one)"
)


def python(*arguments: str, interpret: bool, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: whether triton interprets is settled when it is imported."""
    environment = {
        **os.environ,
        "TRITON_INTERPRET": "1" if interpret else "0",
        "TRITON_CACHE_DIR": str(cache),
        "TRITON_DEFAULT_FP_FUSION": "1",
    }
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(ROOT), str(ROOT / "tests"), *filter(None, [environment.get("PYTHONPATH")])]
    )
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850
    )


def asked(request: pytest.FixtureRequest, test: str) -> list[str]:
    """The cases of a test of the module that asks, by their names, as far as they were selected to be run."""
    return [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.originalname == test and item.path == request.path
    ]


def judged(script: str, names: list[str], factory: pytest.TempPathFactory, *options: str) -> dict[str, str | None]:
    """What is wrong with each case that a script of this folder runs, None if nothing is.

    On a device most of the time is the compiler's: half of the cores compile. Without one, many cases are two parts, so
    that a second worker that needs the answers takes the part that nobody works on. Each part is a process, whose start
    costs as much as a few cases.
    """
    count = max(1, (os.cpu_count() or 1) // 2) if CUDA else 1 + (len(names) > _MANY)
    cache = factory.mktemp("triton")

    def part(index: int) -> list[dict]:
        done = python(
            str(ROOT / "tests" / "kernels" / script), *options, *names[index::count], interpret=not CUDA, cache=cache
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return [json.loads(line) for line in done.stdout.splitlines()]

    def side_by_side() -> list[dict]:
        with ThreadPoolExecutor(count) as pool:
            return [row for found in pool.map(part, range(count)) for row in found]

    parts = [side_by_side] if CUDA else [lambda index=index: part(index) for index in range(count)]
    rows = [row for found in shared("-".join([script, *options]), parts, factory) for row in found]
    assert {row["device"] for row in rows} == {"cuda" if CUDA else "cpu"}
    return {row["name"]: row["wrong"] for row in rows}


def shared(name: str, makes: list[Callable[[], Any]], factory: pytest.TempPathFactory) -> list[Any]:
    """What each of ``makes`` gives, plain values, made once for all workers: first what nobody works on, then what
    others have not finished.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return [make() for make in makes]
    folder = factory.getbasetemp().parent / "shared"
    folder.mkdir(exist_ok=True)
    found: dict[int, Any] = {}
    for wait in (fcntl.LOCK_NB, 0):
        for index, make in enumerate(makes):
            path = folder / f"{name}-{index}.json"
            if index in found:
                continue
            with path.with_suffix(".lock").open("w") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | wait)
                except BlockingIOError:
                    continue
                if not path.exists():
                    path.write_text(json.dumps(make()), encoding="utf-8")
                found[index] = json.loads(path.read_text(encoding="utf-8"))
    return [found[index] for index in range(len(makes))]


def ahead(family: str, wanted: dict[tuple[Any, ...], set[str]], factory: pytest.TempPathFactory) -> list[dict]:
    """What became of a sample of what ``python -m tools.triton_aot`` compiles of a family. wanted: kernels by
    (link, mask, type, size, device).
    """

    def compile_sample() -> list[dict]:
        folder = factory.mktemp("ahead")
        code = (
            "from pathlib import Path; from tools.triton_aot import compiler, __main__ as tool\n"
            f"rows = [row for each, kernels in {wanted}.items() for row in "
            f"tool.FAMILIES[{family!r}].compiled(compiler.Variant(*each), kernels)]\n"
            f"compiler.write(Path({str(folder / 'report.json')!r}), rows)"
        )
        done = python("-c", code, interpret=False, cache=folder / "cache")
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads((folder / "report.json").read_text(encoding="utf-8"))["kernels"]

    return shared(f"{family}-ahead", [compile_sample], factory)[0]


def fitting(compiled: list[dict], variant: tuple[Any, ...], titles: set[str]) -> list[dict]:
    """The rows of a variant: the kernels named, none of which spills or takes more than its device has."""
    rows = {
        row["kernel"]: row
        for row in compiled
        if tuple(row[name] for name in ("link", "mask", "dtype", "dim", "device")) == variant
    }
    assert set(rows) == titles
    for row in rows.values():
        assert row["spills"] == row["stack"] == 0, row
        assert 0 < row["registers"] <= 255, row
        assert row["shared"] <= {80: 163, 90: 227}[row["device"]] * 1024, row
    return list(rows.values())
