"""Triton kernels without a device: in the interpreter against the float64 definition, and compiled ahead of time for two devices."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernels import documented
from kernels.tile_cases import ANCHORS, CASES, LINKS, MASKS

ROOT = Path(__file__).resolve().parents[2]
BROKEN = "polynomial_square-count-strict-float32-broken"
KERNELS = ("forward", "keys", "queries")

# the first test waits for all verdicts, over a minute of one core
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(900),
]


def python(*arguments: str, interpret: bool, cache: Path) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own: whether triton interprets is settled when it is imported."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "TRITON_CACHE_DIR": str(cache), "TRITON_DEFAULT_FP_FUSION": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [environment.get("PYTHONPATH")])])
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=850)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """What is wrong with each case, None if nothing is."""
    done = python(str(ROOT / "tests" / "kernels" / "interpreted.py"), *CASES, BROKEN, interpret=True, cache=tmp_path_factory.mktemp("triton"))
    found = {row["name"]: row["wrong"] for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, done.stderr[-3000:]
    return found


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_definition(name: str, verdicts: dict[str, str | None]) -> None:
    """y and the gradients of q, k, v, scale and coefficients; some cases also run twice for the same bits."""
    assert verdicts[name] is None, verdicts[name]


def test_all_combinations_are_there() -> None:
    assert {f"{link}-{anchor}-{mask}-float32" for link in LINKS for anchor in ANCHORS for mask in MASKS} <= set(CASES)


def test_a_broken_kernel_is_seen(verdicts: dict[str, str | None]) -> None:
    """The comparison can fail: p(x) in the place of p(x)^2."""
    assert "is off by" in (verdicts[BROKEN] or "")


OWN = """
import sys
from kernels import interpreted, tile_cases
from student_t import StudentT
from zonal.execution import native

link = StudentT(sharpness=3.0)
tile_cases.LINKS["student_t"] = link, native.code_of(link), 0
found = [tile_cases.Case("student_t", anchor, mask) for anchor in tile_cases.ANCHORS for mask in ("causal", "padding", "gqa", "decode")]
tile_cases.CASES.update({case.name: case for case in found})
interpreted.main([case.name for case in found])
"""


def test_the_documented_link(tmp_path: Path) -> None:
    """The link that docs/paths.md shows, from a module of its own, in the interpreter: y and all gradients."""
    (tmp_path / "student_t.py").write_text(documented.student_t(), encoding="utf-8")
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    done = python(str(tmp_path / "own.py"), interpret=True, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 12
    assert not [row["wrong"] for row in rows if row["wrong"] is not None]


def test_package_imports_without_triton(tmp_path: Path) -> None:
    code = "import sys; sys.modules['triton'] = None; import zonal.kernels, zonal.kernels.triton, zonal"
    done = python("-c", code, interpret=False, cache=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("device", [80, 90])
def test_kernels_compile_ahead_of_time(device: int, tmp_path: Path) -> None:
    """No loop of a 16-bit kernel spills at D = 128, tiles fit the device's shared memory, and Hopper's matrix instruction is used."""
    out = tmp_path / "report.json"
    kernels = [part for name in KERNELS for part in ("--kernel", name)]
    arguments = ["-m", "zonal.kernels.triton.compile", "--out", str(out), "--device", str(device), "--dtype", "bfloat16", "--dim", "128", "--link", "horner"]
    done = python(*arguments, *kernels, interpret=False, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    rows = {row["kernel"]: row for row in json.loads(out.read_text(encoding="utf-8"))["kernels"]}
    assert set(rows) == set(KERNELS)
    assert all(row["spills"] == 0 for row in rows.values())
    assert all(row["shared"] <= {80: 163, 90: 227}[device] * 1024 for row in rows.values())
    if device == 90:
        assert all(row["wgmma"] for row in rows.values())
