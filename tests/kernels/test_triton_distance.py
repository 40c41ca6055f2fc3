"""Triton kernels for attention by distance against the dense path in float64: on a CUDA device where there is one, else
in the interpreter.
"""

import importlib.util
import itertools
import json

import pytest
import torch
from kernels.distance_calls import CASES, LONG, OPERATORS, SHAPES
from kernels.processes import ROOT, ahead, asked, fitting, judged, no_device

import zonal
from zonal import mechanisms as m
from zonal.execution.call import Call, prepare
from zonal.execution.paths import distance
from zonal.execution.shape import shape_of
from zonal.execution.work import compiled_tiles, distances

BROKEN = "rewa/clustered/float32/broken"

# the first test waits for all verdicts
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    return judged(
        "distance_interpreted.py",
        [*asked(request, "test_kernel_equals_definition"), *asked(request, "test_a_broken_kernel_is_seen")],
        tmp_path_factory,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_definition(name: str, verdicts: dict[str, str | None]) -> None:
    """y and every gradient, of near, opposite and coincident points too; one case runs twice for the same bits."""
    assert verdicts[name] is None, verdicts[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [BROKEN])
def test_a_broken_kernel_is_seen(name: str, verdicts: dict[str, str | None]) -> None:
    """The comparison can fail: products alone, where points are near."""
    assert "is off by" in (verdicts[name] or "")


@pytest.mark.gpu
@no_device
def test_long_calls_in_their_own_tiles(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = judged("distance_interpreted.py", list(LONG), tmp_path_factory, "--own")
    assert set(found) == set(LONG)
    assert not [wrong for wrong in found.values() if wrong is not None]


def test_every_operator_and_shape_is_there() -> None:
    assert {case.operator for case in CASES.values()} == set(OPERATORS)
    assert {case.shape for case in CASES.values()} == set(SHAPES)


# ---- which calls come here ----


def call_of(operator: zonal.Operator, dim: int = 96, dtype: torch.dtype = torch.bfloat16) -> Call:
    x = torch.empty(1, 8, 4096, dim, dtype=dtype, device="meta")
    return prepare(operator, x, x, x, causal=True)


def test_what_it_does_not_take_is_said() -> None:
    assert distance.unfit(call_of(m.rewa())) is None
    assert "dimensions must be 1 to 256" in str(distance.unfit(call_of(m.rewa(), 300)))
    assert "log priors" in str(distance.unfit(call_of(m.rewa(prior=zonal.prior.ALiBi()))))
    assert "float64" in str(distance.refusal(call_of(m.rewa(), dtype=torch.float64)))
    assert distance.cuda_refusal(call_of(m.rewa())) is None
    assert distance.cuda_refusal(call_of(m.rewa(), dtype=torch.float32)) == "on CUDA it is for bfloat16 and float16"
    assert distance.cuda_refusal(call_of(m.rewa_oscillatory())) == "on CUDA oscillating scores are not in it"


def test_the_planner_counts_a_pair_s_distances() -> None:
    """Beside a dot product of as many numbers."""
    plain, curved = (
        shape_of(call_of(operator, dtype=torch.float32)) for operator in (m.softmax(), m.rewa().requires_grad_(False))
    )
    assert 1.2 < distances(curved).multiply_adds / compiled_tiles(plain).multiply_adds < 2


# ---- compiled ahead of time ----

# a sample of what `python -m tools.triton_aot distance` compiles: (kind, mask, type, size, device), and
# which kernels of it
AHEAD = {("rewa", "causal", "bfloat16", 96, 90): {"forward", "values"}}
TITLES = {"notes", "forward", "decode", "combine", "values", "keys", "queries", "row_products"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return ahead("distance", AHEAD, tmp_path_factory)


@pytest.mark.parametrize("variant", AHEAD)
def test_kernels_compile_ahead_of_time(variant: tuple, compiled: list[dict]) -> None:
    """Nothing spills, and tiles fit the device's shared memory."""
    fitting(compiled, variant, AHEAD[variant])


def test_the_committed_report() -> None:
    """Every kernel in 16 bits with every mask, and none that spills: but for gradients of what is more than distances,
    and few numbers of those.
    """
    report = json.loads((ROOT / "results" / "benchmarks" / "triton_distance_aot.json").read_text(encoding="utf-8"))
    assert report["triton"]
    rows = report["kernels"]
    assert {(row["kernel"], row["dtype"], row["dim"]) for row in rows} == set(
        itertools.product(TITLES, ("bfloat16", "float16"), (96, 16))
    )
    assert {row["mask"] for row in rows} == {"causal", "window", "padding", "packed", "gqa", "all"}
    assert {row["link"] for row in rows} == {"rewa", "rewa-dot", "rewa_oscillatory"}
    spilled = [row for row in rows if row["spills"] or row["stack"] or row["registers"] > 255]
    assert {(row["link"], row["kernel"]) for row in spilled} <= set(
        itertools.product(("rewa-dot", "rewa_oscillatory"), ("keys", "queries"))
    )
    assert max(row["stack"] for row in spilled) <= 128  # bytes a thread
