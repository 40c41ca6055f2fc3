"""The wheel: what is in it, with a compiler and without, and that its libraries run where no compiler is.

`make wheel` runs this.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from zonal.formula import FORMULAS
from zonal.kernels import build
from zonal.kernels import native as native_kernels

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = {"CXX": "/nowhere/g++"}

# the first test waits for a wheel: twenty seconds of one core
pytestmark = [pytest.mark.wheel, pytest.mark.timeout(900)]
compiler_needed = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")


def environment(**more: str) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHONPATH"))},
        **more,
    }


def wheel(folder: Path, **variables: str) -> tuple[Path, str]:
    """A wheel of a copy of the sources, and what was said while it was built."""
    source = folder / "source"
    source.mkdir()
    shutil.copytree(ROOT / "zonal", source / "zonal", ignore=shutil.ignore_patterns("__pycache__", "shipped"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-v",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder / "out"),
        str(source),
    ]
    done = subprocess.run(
        command, cwd=folder, env=environment(**variables), capture_output=True, text=True, timeout=800
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    (made,) = (folder / "out").glob("*.whl")
    return made, done.stdout + done.stderr


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a wheel built with the compiler of this machine."""
    folder = tmp_path_factory.mktemp("wheel")
    made, _ = wheel(folder)
    assert made.name.split("-")[2:4] == ["py3", "none"]
    assert not made.name.endswith("-any.whl")
    zipfile.ZipFile(made).extractall(folder / "unpacked")
    return folder / "unpacked"


@compiler_needed
def test_every_library_is_in_and_whole(unpacked: Path) -> None:
    shipped = unpacked / build.SHIPPED.relative_to(ROOT)
    jobs = [
        (formula, source, isa)
        for formula in FORMULAS.values()
        for source in build.sources(formula)
        for isa in build.carried(source)
    ]
    assert {file.name for file in shipped.glob("*.so")} == {build.file_name(*job) for job in jobs}
    assert all(build.good(file) for file in shipped.glob("*.so"))


RUN = """
import json, sys, warnings
from pathlib import Path
import torch
import zonal
from zonal import mechanisms as m
from zonal.execution.paths import tile
from zonal.kernels import native as native_kernels
warnings.simplefilter("error")
q, k, v = torch.randn(3, 1, 2, 70, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
errors = {}
for operator in (m.softmax(), m.sko(degrees=(2.0, 3.0)), m.yat(), m.squared_affine(), m.polynomial_square()):
    exact = zonal.attention(q.double(), k.double(), v.double(), operator, causal=True, path="dense")
    tiled = zonal.attention(q, k, v, operator, causal=True, path="tiled")
    errors[type(operator.link).__name__] = (tiled - exact).abs().max().item()

def attend(q):
    return zonal.attention(q, k, v, m.yat(), causal=True, path="tiled")

compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
errors["traced"] = (compiled(q) - attend(q)).abs().max().item()
loaded = native_kernels.load(tile.code_of(zonal.link.Exp()))
threads = []
for count in (1, 3, 2):
    torch.set_num_threads(count)
    threads.append(loaded.omp_get_max_threads())
maps = Path("/proc/self/maps").read_text().splitlines() if sys.platform == "linux" else []
mapped = {line.split()[-1] for line in maps}
print(json.dumps({
    "file": zonal.__file__, "errors": errors, "threads": threads, "mapped": sorted(mapped),
    "tiles": zonal.explain(m.yat(), q.shape, causal=True).tiles,
}))
"""


@compiler_needed
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/maps")
def test_the_kernel_runs_without_a_compiler(unpacked: Path, tmp_path: Path) -> None:
    """Right numbers, by the libraries of the wheel alone, on torch's own threads."""
    clean = environment(**NOWHERE, PATH="/nowhere", ZONAL_CACHE=str(tmp_path / "cache"), PYTHONPATH=str(unpacked))
    done = subprocess.run(
        [sys.executable, "-c", RUN], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["file"].startswith(str(unpacked))
    assert found["tiles"] == "a compiled kernel"
    assert max(found["errors"].values()) < 1e-5
    assert found["threads"] == [1, 3, 2]
    runtimes = {Path(name) for name in found["mapped"] if "omp" in Path(name).name}
    assert len(runtimes) == 1
    assert {
        path.parent
        for path in map(Path, found["mapped"])
        if path.name.split("-")[0] in FORMULAS and path.suffix == ".so"
    } == {unpacked / "zonal/kernels/cpp/shipped"}
    assert not (tmp_path / "cache" / "kernels").exists()


def test_without_a_compiler_the_wheel_is_pure(tmp_path: Path) -> None:
    made, said = wheel(tmp_path, **NOWHERE)
    assert made.name.endswith("-py3-none-any.whl")
    assert "the wheel carries no compiled kernels" in said
    assert "no C++ compiler was found" in said
    names = zipfile.ZipFile(made).namelist()
    assert "zonal/kernels/cpp/tile.cpp" in names
    assert not [name for name in names if "shipped" in name or name.endswith(".so")]
