"""Triton kernels for ridge read-outs against the dense path in float64: on a CUDA device where there is one, else in
the interpreter.
"""

import importlib.util
import json

import pytest
import torch
from kernels.processes import ROOT, ahead, fitting, judged, no_device
from kernels.ridge_calls import CASES, LONG, OPERATORS, SHAPES

import zonal
from zonal import mechanisms as m
from zonal.execution import cost, native, native_ridge
from zonal.execution.call import Call, prepare
from zonal.execution.constants import DEFAULT_GPU
from zonal.execution.cost_ridge_cuda import operations
from zonal.execution.problem import Problem, problem_of

BROKEN = "ska-2/padding/float32/broken"

# the first test waits for all verdicts
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    return judged("ridge_interpreted.py", [*CASES, BROKEN], tmp_path_factory)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_definition(name: str, verdicts: dict[str, str | None]) -> None:
    """y and every gradient, through memories, padding and documents too; one case runs twice for the same bits."""
    assert verdicts[name] is None, verdicts[name]


@pytest.mark.gpu
def test_a_broken_kernel_is_seen(verdicts: dict[str, str | None]) -> None:
    """The comparison can fail: what blocks bring is not carried on."""
    assert "y is off by" in (verdicts[BROKEN] or "")


@pytest.mark.gpu
@no_device
def test_long_calls_in_their_own_blocks(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = judged("ridge_interpreted.py", list(LONG), tmp_path_factory, "--own")
    assert set(found) == set(LONG)
    assert not [wrong for wrong in found.values() if wrong is not None]


def test_every_operator_and_shape_is_there() -> None:
    assert {case.operator for case in CASES.values()} == set(OPERATORS)
    assert {case.shape for case in CASES.values()} == set(SHAPES)


# ---- which calls come here ----


def call_of(operator: zonal.Operator, tokens: int = 4096, dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Call:
    x = torch.empty(1, 8, tokens, dim, dtype=dtype, device="meta")
    return prepare(operator, x, x, x, causal=True)


@pytest.mark.parametrize(
    ("dim", "reason"), [(24, None), (64, None), (65, "dimensions must be 1 to 64, this call has 65 and 65")]
)
def test_who_is_refused_on_cuda(dim: int, reason: str | None) -> None:
    found = native_ridge.cuda_refusal(call_of(m.ska(power=1), dim=dim))
    assert found is None if reason is None else reason in str(found)


def test_without_triton_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "has_triton", lambda: False)
    assert "pip install triton" in str(native_ridge.cuda_refusal(call_of(m.ska())))


def problem(tokens: int, power: int = 0, dim: int = 64) -> Problem:
    return problem_of(
        call_of(m.ska(power=power).requires_grad_(False), tokens, dim, torch.float32), device=torch.device("cuda")
    )


def test_the_planner_counts_what_the_kernels_do() -> None:
    """In proportion to tokens; more for each power; a query alone needs one block's inverse."""
    forward, backward = operations(problem(8192))
    assert backward == 0
    assert operations(problem(16384))[0] == pytest.approx(2 * forward, rel=1e-6)
    assert forward < operations(problem(8192, 1))[0] < operations(problem(8192, 2))[0]
    q, k = (torch.empty(1, 8, tokens, 64, device="meta", requires_grad=True) for tokens in (1, 8192))
    alone = problem_of(prepare(m.ska(), q, k, k, causal=True), device=torch.device("cuda"))
    # sums are float64, and inverses are most of the rest
    assert 0.1 < operations(alone)[0] / forward < 0.5
    assert operations(alone)[1] > operations(alone)[0]


def test_the_planner_crosses_over() -> None:
    """Blocks cost twice as much for twice as much, and less than the dense path where tokens are many."""
    seconds = {
        tokens: {path: cost.MODELS[path](problem(tokens), DEFAULT_GPU).seconds for path in ("dense", "chunked")}
        for tokens in (65536, 131072)
    }
    assert 1.85 < seconds[131072]["chunked"] / seconds[65536]["chunked"] < 2.1
    assert seconds[131072]["chunked"] < seconds[131072]["dense"] / 20


# ---- compiled ahead of time ----

# a sample of what `python -m zonal.kernels.triton.compile_ridge` compiles: (power, mask, type, key size, device), and
# which kernels of it
AHEAD = {
    ("ridge-2", "causal", "bfloat16", 56, 90): {"inverse", "read"},
    ("ridge-0", "gqa", "float32", 24, 80): {"read", "keys_back"},
}
TITLES = {
    "sums",
    "carry forwards",
    "carry backwards",
    "inverse",
    "factor",
    "read",
    "rows_back",
    "row_sums",
    "keys_back",
    "steps_back",
}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return ahead("compile_ridge", AHEAD, tmp_path_factory)


@pytest.mark.parametrize("variant", AHEAD)
def test_kernels_compile_ahead_of_time(variant: tuple, compiled: list[dict]) -> None:
    """Nothing spills, and tiles fit the device's shared memory."""
    fitting(compiled, variant, AHEAD[variant])


def test_the_committed_report() -> None:
    """Every kernel of every power and key size in bfloat16 on both devices, and none that spills."""
    report = json.loads((ROOT / "results" / "benchmarks" / "triton_ridge_aot.json").read_text(encoding="utf-8"))
    assert report["triton"]
    assert report["fit"]
    rows = report["kernels"]
    assert {(row["kernel"], row["link"], row["dim"], row["device"]) for row in rows} >= {
        (kernel, f"ridge-{power}", dim, device) for kernel in TITLES for power in (0, 1,
        2) if power or kernel != "steps_back"
        for dim in (24, 32, 48, 56, 64) for device in (80, 90)
    }  # fmt: skip
    assert not [row for row in rows if row["spills"] or row["stack"] or row["registers"] > 255]
