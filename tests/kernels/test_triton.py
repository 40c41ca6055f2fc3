"""Triton kernels against the float64 definition: on a CUDA device where there is one, else in the interpreter; and
compiled ahead of time.
"""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from kernels import documented
from kernels.processes import CUDA, ROOT, asked, fitting, judged, no_device, python, shared
from kernels.tile_cases import ANCHORS, CASES, LARGE, LINKS, MASKS, OFF, REST

NAN_KEYS = [
    f"{link}/row/causal/{dtype}/NaN key"
    for link in ("exp", "yat", "squared_affine") for dtype in ("float32", "bfloat16", "float16")
]  # fmt: skip
BROKEN = "polynomial_square/count/strict/float32/broken"
KERNELS = ("forward", "decode", "keys", "queries")

# the first test waits for all verdicts, over a minute of one core
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(900),
]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    return judged(
        "interpreted.py",
        [*asked(request, "test_kernel_equals_definition"), *(REST if CUDA else ()), *NAN_KEYS, BROKEN],
        tmp_path_factory,
    )


@pytest.fixture(scope="module")
def own_verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    """In the tile sizes that calls have."""
    names = [*CASES, *OFF, *LARGE] if CUDA else asked(request, "test_kernel_equals_definition_in_its_own_tiles")
    return judged("interpreted.py", names, tmp_path_factory, "--own")


# of the large cases, what the interpreter has time for
SAMPLE = ("yat/row/long-decode-16/float16", *OFF)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_definition(name: str, verdicts: dict[str, str | None]) -> None:
    """y and the gradients of q, k, v, scale and coefficients; some cases also run twice for the same bits."""
    assert verdicts[name] is None, verdicts[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAN_KEYS)
def test_who_sees_a_key_that_is_not_finite_is_nan(name: str, verdicts: dict[str, str | None]) -> None:
    assert verdicts[name] is None, verdicts[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", SAMPLE)
def test_kernel_equals_definition_in_its_own_tiles(name: str, own_verdicts: dict[str, str | None]) -> None:
    assert own_verdicts[name] is None, own_verdicts[name]


@pytest.mark.gpu
@no_device
def test_every_case_in_its_own_tiles(own_verdicts: dict[str, str | None]) -> None:
    assert set(own_verdicts) == {*CASES, *OFF, *LARGE}
    assert not [wrong for wrong in own_verdicts.values() if wrong is not None]


@pytest.mark.gpu
@no_device
def test_every_triple(verdicts: dict[str, str | None]) -> None:
    assert not [verdicts[name] for name in REST if verdicts[name] is not None]


def test_all_combinations_are_there() -> None:
    """Each two of a link, an anchor and a mask in the interpreter, all three on a device."""
    found = {(case.link, case.anchor, case.mask) for case in CASES.values() if case.dtype == torch.float32}
    everything = {(name, kind, mask) for name in LINKS for kind in ANCHORS for mask in MASKS}
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert {(each[one], each[other]) for each in found} == {(each[one], each[other]) for each in everything}
    assert {(case.link, case.anchor, case.mask) for case in (CASES | REST).values()} == everything


@pytest.mark.gpu
def test_a_broken_kernel_is_seen(verdicts: dict[str, str | None]) -> None:
    """The comparison can fail: p(x) in the place of p(x)^2."""
    assert "is off by" in (verdicts[BROKEN] or "")


OWN = """
import sys
from kernels import interpreted, tile_cases
from student_t import StudentT
from zonal.execution.paths import tile

link = StudentT(sharpness=3.0)
tile_cases.LINKS["student_t"] = link, tile.code_of(link), 0
masks = ("causal", "padding", "gqa", "decode")
found = [tile_cases.Case("student_t", anchor, mask) for anchor in tile_cases.ANCHORS for mask in masks]
tile_cases.CASES.update({case.name: case for case in found})
interpreted.main([case.name for case in found])
"""


def test_the_documented_link(tmp_path: Path) -> None:
    """The link that docs/declare.md shows, from a module of its own, in the interpreter: y and all gradients."""
    (tmp_path / "student_t.py").write_text(documented.student_t(), encoding="utf-8")
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    done = python(str(tmp_path / "own.py"), interpret=True, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 12
    assert not [row["wrong"] for row in rows if row["wrong"] is not None]


def test_package_imports_without_triton_and_torchs_compiler(tmp_path: Path) -> None:
    """The planner, which knows the sizes of Triton kernels, among it."""
    modules = (
        "zonal.kernels.triton, zonal.kernels.distance, zonal.kernels.ridge, zonal.kernels.sums, zonal.execution.work"
    )
    # the compiler of torch.compile takes as long to import as torch itself, and most processes have no use for it
    code = (
        f"import sys; sys.modules['triton'] = None; import zonal, zonal.cli.explain, zonal.models, {modules}; "
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = python("-c", code, interpret=False, cache=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize("held", [8, 7])
def test_an_address_outside_the_tensors_is_seen(held: int, tmp_path: Path) -> None:
    """In the interpreter: eight numbers are written, to a tensor that holds so many or one less."""
    code = (
        "import torch\n"
        "from kernels.interpreted import mend\n"
        "from zonal.kernels.triton import tiles\n"
        "mend()\n"
        f"rows, out = tiles.rows_of(torch.ones(1, 1, 8, 16)), torch.empty(8)[:{held}]\n"
        "tiling, widths = tiles.Tiling(256, 0, 4, 1), {'INVERSE_NORM': True, 'ROWS': 256, 'WIDTH': 16}\n"
        "tiles.launch(tiles.row_products_kernel, 1, (rows, rows, out, 1, 8, 16), widths, tiling)"
    )
    done = python("-c", code, interpret=True, cache=tmp_path)
    assert (done.returncode == 0) == (held == 8), done.stderr[-2000:]
    assert ("1 of 8 addresses lie outside the tensors" in done.stderr) == (held == 7)


# a sample of what `python -m tools.triton_aot tile` compiles: (link, mask, type, head size, device)
AHEAD = {
    ("horner", "all", "bfloat16", 128, 80): {"forward", "keys", "queries"},
    ("yat", "causal", "float16", 128, 90): {"forward", "decode", "queries"},
    # an empty loop, whose loads Triton 3.6 left undefined where they divide by 0 steps
    ("exp", "one", "bfloat16", 128, 90): {"keys"},
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return shared("test_triton-ahead", [lambda: compile_sample(tmp_path_factory)], tmp_path_factory)[0]


def compile_sample(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What became of the sample, and last of a kernel in tiles twice as large as registers hold."""
    folder = tmp_path_factory.mktemp("ahead")
    code = (
        "from pathlib import Path\n"
        "from tools.triton_aot import compiler, tile\n"
        "from zonal.kernels.triton import tiles\n"
        f"rows = [row for each, kernels in {AHEAD}.items() for row in "
        "tile.FAMILY.compiled(compiler.Variant(*each), kernels)]\n"
        "tiles.choose = lambda *call: tiles.Tiling(128, 128, 4, 2)\n"
        "rows += tile.FAMILY.compiled(compiler.Variant('exp', 'causal', 'bfloat16', 128, 80), ['forward'])\n"
        "assert compiler.unset('setp.lt.s32 %p1, %r1, 0; @%p1 st.b32 [%rd2+4], %r3;') == {'%r1', '%r3', '%rd2'}\n"
        "assert [row.fits for row in rows] == [True] * (len(rows) - 1) + [False], rows\n"
        f"compiler.write(Path({str(folder / 'report.json')!r}), rows)"
    )
    done = python("-c", code, interpret=False, cache=folder / "cache")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert not report["fit"]
    return report["kernels"]


@pytest.mark.parametrize("variant", AHEAD)
def test_kernels_compile_ahead_of_time(variant: tuple, compiled: list[dict]) -> None:
    """Nothing spills up to D = 128, tiles fit the device's shared memory, every register is set before it is read, and
    Hopper's matrix instruction is used.
    """
    rows = fitting(compiled[:-1], variant, AHEAD[variant])
    if variant[4] == 90:
        assert all(row["wgmma"] for row in rows if row["kernel"] != "decode")


def test_a_kernel_that_spills_is_seen(compiled: list[dict]) -> None:
    """The count can be other than zero."""
    assert compiled[-1]["tiling"]["queries"] == 128
    assert compiled[-1]["stack"] > 0
    assert compiled[-1]["spills"] > 0


def test_the_committed_report() -> None:
    """It holds every kernel, link, mask, type and device it is asked for, and all of them fit."""
    report = json.loads((ROOT / "results" / "benchmarks" / "triton_aot.json").read_text(encoding="utf-8"))
    assert report["triton"]
    assert report["fit"]
    rows = report["kernels"]
    assert {(row["kernel"], row["dtype"], row["dim"], row["device"]) for row in rows} >= {
        (kernel, dtype, dim, device)
        for kernel in KERNELS
        for dtype in ("bfloat16", "float16", "float32")
        for dim in (64, 80, 128)
        for device in (80, 90)
    }
    assert not [row for row in rows if row["spills"] or row["stack"] or row["registers"] > 255]
