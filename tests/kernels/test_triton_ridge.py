"""Triton kernels for ridge read-outs against the dense path in float64: on a CUDA device where there is one, else in
the interpreter.
"""

import importlib.util
import json
from dataclasses import replace

import pytest
import torch
from kernels.processes import ROOT, ahead, asked, fitting, judged, no_device
from kernels.ridge_calls import CASES, LONG, NAN_KEYS, OPERATORS, SHAPES

import zonal
from zonal import mechanisms as m
from zonal.execution.call import Call, prepare
from zonal.execution.machine import TYPICAL_GPU
from zonal.execution.paths import ridge
from zonal.execution.plan import estimated
from zonal.execution.routes import ROUTES
from zonal.execution.shape import Shape, shape_of
from zonal.execution.work import compiled_ridge

BROKEN = "ska-2/padding/float32/broken"

# the first test waits for all verdicts
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    tests = (
        "test_kernel_equals_definition",
        "test_keys_that_are_not_finite_reach_no_earlier_row",
        "test_a_broken_kernel_is_seen",
    )
    names = [name for test in tests for name in asked(request, test)]
    return judged("ridge_interpreted.py", names, tmp_path_factory)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_definition(name: str, verdicts: dict[str, str | None]) -> None:
    """y and every gradient, through memories, padding and documents too; one case runs twice for the same bits."""
    assert verdicts[name] is None, verdicts[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAN_KEYS)
def test_keys_that_are_not_finite_reach_no_earlier_row(name: str, verdicts: dict[str, str | None]) -> None:
    assert verdicts[name] is None, verdicts[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [BROKEN])
def test_a_broken_kernel_is_seen(name: str, verdicts: dict[str, str | None]) -> None:
    """The comparison can fail: what blocks bring is not carried on."""
    assert "y is off by" in (verdicts[name] or "")


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
    found = ridge.cuda_refusal(call_of(m.ska(power=1), dim=dim))
    assert found is None if reason is None else reason in str(found)


def shape(tokens: int, power: int = 0, dim: int = 32) -> Shape:
    call = call_of(m.ska(power=power).requires_grad_(False), tokens, dim, torch.float32)
    return shape_of(replace(call, place=torch.device("cuda")))


def test_the_planner_counts_what_the_kernels_do() -> None:
    """In proportion to tokens; more for each power."""
    done = compiled_ridge(shape(8192)).multiply_adds
    assert compiled_ridge(shape(16384)).multiply_adds == pytest.approx(2 * done, rel=1e-6)
    assert done < compiled_ridge(shape(8192, 1)).multiply_adds < compiled_ridge(shape(8192, 2)).multiply_adds


def test_the_planner_crosses_over() -> None:
    """Blocks cost twice as much for twice as much, and less than the dense path where tokens are many."""
    routes = {str(route): route for route in ROUTES}
    took = {
        tokens: {
            name: estimated(routes[name], shape(tokens), TYPICAL_GPU).seconds
            for name in ("dense, torch", "chunked, Triton ridge")
        }
        for tokens in (65536, 131072)
    }
    assert 1.8 < took[131072]["chunked, Triton ridge"] / took[65536]["chunked, Triton ridge"] < 2.1
    assert took[131072]["chunked, Triton ridge"] < took[131072]["dense, torch"] / 20


# ---- compiled ahead of time ----

# a sample of what `python -m tools.triton_aot ridge` compiles: (power, mask, type, key size, device), and
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
    return ahead("ridge", AHEAD, tmp_path_factory)


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
