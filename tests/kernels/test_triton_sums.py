"""Triton kernels for sums over features against the dense path in float64: on a CUDA device where there is one, else in
the interpreter.
"""

import importlib.util
import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from kernels.processes import CUDA, ROOT, ahead, asked, fitting, judged, no_device, python
from kernels.sums_calls import CASES, DTYPES, LONG, OPERATORS, REST, SHAPES

import zonal
from zonal import mechanisms as m
from zonal.algebra.anchor import Count, Raw, Row
from zonal.execution.call import Call, prepare
from zonal.execution.machine import TYPICAL_GPU
from zonal.execution.paths import sums
from zonal.execution.plan import estimated
from zonal.execution.routes import ROUTES
from zonal.execution.shape import Shape, shape_of

BROKEN = "sq/causal/float32/broken"

# the first test waits for all verdicts, some twenty seconds of one core
pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def verdicts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str | None]:
    return judged(
        "sums_interpreted.py",
        [
            *asked(request, "test_kernel_equals_definition"),
            *(REST if CUDA else ()),
            *asked(request, "test_a_broken_kernel_is_seen"),
        ],
        tmp_path_factory,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_definition(name: str, verdicts: dict[str, str | None]) -> None:
    """y, the memory that is left, and the gradients of both, through memories too; some cases run twice for the same
    bits.
    """
    assert verdicts[name] is None, verdicts[name]


@pytest.mark.gpu
@pytest.mark.parametrize("name", [BROKEN])
def test_a_broken_kernel_is_seen(name: str, verdicts: dict[str, str | None]) -> None:
    """The comparison can fail, and reaches what comes from the sums: one pair of blocks in the place of another."""
    assert "y is off by" in (verdicts[name] or "")


@pytest.mark.gpu
@no_device
def test_long_calls_in_their_own_tiles(tmp_path_factory: pytest.TempPathFactory) -> None:
    found = judged("sums_interpreted.py", list(LONG), tmp_path_factory, "--own")
    assert set(found) == set(LONG)
    assert not [wrong for wrong in found.values() if wrong is not None]


@pytest.mark.gpu
@no_device
def test_the_rest(verdicts: dict[str, str | None]) -> None:
    assert not [verdicts[name] for name in REST if verdicts[name] is not None]


def test_everything_is_there() -> None:
    """Each operator, shape and type in the interpreter, and each anchor with each kind of mask."""
    assert {case.operator for case in CASES.values()} == set(OPERATORS)
    assert {case.shape for case in CASES.values()} == set(SHAPES)
    assert {case.dtype for case in CASES.values()} == set(DTYPES)
    kinds = {"packed": "packed", "padding": "padding", "memory": "cuts", "decay": "decay"}
    found = {
        (type(OPERATORS[case.operator]().anchor), kind)
        for case in CASES.values()
        for kind, name in kinds.items()
        if getattr(case.rules, name)
    }
    assert found == {(anchor, kind) for anchor in (Row, Count, Raw) for kind in kinds}


def test_biases_and_signs_in_the_interpreter(tmp_path: Path) -> None:
    """A bias of -infinity hides a key as a mask does, also in the sums at borders; one of NaN, or one whose exponential
    leaves float32, makes rows that see its key not finite. A sign that is not in memory, as of torch's imag of a
    conjugate, counts.
    """
    done = python("-c", HIDING, interpret=True, cache=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]


HIDING = """
import torch
from kernels.interpreted import mend
from zonal.formula import FORMULAS
from zonal.kernels.sums import SumsInputs, SumsSpec
from zonal.kernels.triton import sums_backward, sums_forward, sums_layout

mend()
sums_layout.chunk_of = lambda *call: 16
torch.manual_seed(0)
x, ends, one, learned = torch.randn(4, 1, 1, 40, 8), torch.arange(41), torch.ones(1), frozenset(("q", "k", "v"))
spec = SumsSpec(FORMULAS["identity"], 1, 1, "raw")
plain = SumsInputs(*x[:3], one, one[:, None][:, :0], torch.tensor([[0.0, 1.0]]), lo=ends[:-1] * 0, hi=ends[1:])

def run(**given):
    inputs = plain._replace(**given)
    results = sums_forward.forward(inputs, spec)
    return results[0], *sums_backward.backward((x[3], None), inputs, results, spec, learned)[:3]

bias, there = torch.zeros(1, 1, 40), torch.ones(1, 40, dtype=torch.bool)
bias[..., 3], there[:, 3] = float("-inf"), False
for a, b in zip(run(key_bias=bias), run(key_mask=there), strict=True):
    torch.testing.assert_close(a, b)
bias[..., 3] = float("nan")
assert torch.equal(run(key_bias=bias)[0].isnan().all(-1)[0, 0], ends[:-1] >= 3)
bias[..., 3] = 95.0
assert torch.equal(run(key_bias=bias)[0].isfinite().any(-1)[0, 0], ends[:-1] < 3)
signs = [run(**{name: negated(getattr(plain, name)) for name in "qkv"}) for negated in (torch._neg_view, torch.neg)]
assert all(map(torch.equal, *signs))
"""


def test_decays_keep_their_digits_behind_a_long_past() -> None:
    """Running sums beyond 2^24, as of thousands of tokens that end the past: the marks of two tokens differ by what
    lies between them.
    """
    state, layout = (pytest.importorskip(f"zonal.kernels.triton.sums_{name}") for name in ("state", "layout"))
    token, log_decay = torch.arange(24000), torch.full((1, 1, 24000), -0.5)
    log_decay[..., :-8] = -1000.0
    found = layout.borders(token * 0, token + 1, None, 24000, 128, False, torch.device("cpu"))
    fade = state.fade_of(log_decay, None, 24000, torch.zeros(1, 1, 24000, 4), found)
    row, keys = fade.rows[0, :, -1], fade.keys[0, :, -8:]
    apart = (row[0] - keys[0]) + (row[1] - keys[1])
    torch.testing.assert_close(apart.exp2(), (-0.5 * torch.arange(7.0, -1.0, -1.0)).exp())


# ---- which calls come here ----


def call_of(operator: zonal.Operator, tokens: int = 4096, dim: int = 16, dtype: torch.dtype = torch.bfloat16) -> Call:
    x = torch.empty(1, 8, tokens, dim, dtype=dtype, device="meta")
    return prepare(operator, x, x, x, causal=True)


@pytest.mark.parametrize(
    ("operator", "dim", "reason"),
    [
        (m.squared_affine(), 16, None),
        (m.linear(), 128, None),
        (m.sko(degrees=(2.0,), manifold_dim=16), 16, None),
        (m.polynomial_square(), 8, "powers of the score up to 2 are in it, link PolynomialSquare has"),
        (m.sko(degrees=(3.0,), manifold_dim=8), 8, "powers of the score up to 2 are in it, link Gegenbauer has 3"),
        (m.linear(), 300, "dimensions must be 1 to 256, this call has 300 and 300"),
    ],
)
def test_who_is_refused_on_cuda(operator: zonal.Operator, dim: int, reason: str | None) -> None:
    found = sums.cuda_refusal(call_of(operator, dim=dim))
    assert found is None if reason is None else reason in str(found)


def test_decays_and_biases_are_not_refused() -> None:
    x, numbers = torch.zeros(1, 2, 8, 16), torch.zeros(1, 2, 8)
    for given in ({"log_decay": numbers}, {"key_bias": numbers}):
        assert sums.cuda_refusal(prepare(m.linear(), x, x, x, causal=True, **given)) is None


def shape(tokens: int, dim: int = 32) -> Shape:
    call = call_of(m.squared_affine(), tokens, dim, torch.float32)
    return shape_of(replace(call, place=torch.device("cuda")))


def test_the_planner_crosses_over() -> None:
    """Tiles for short sequences, sums for long ones, where both kernels run; and sums cost twice as much for twice as
    much.
    """
    routes = {str(route): route for route in ROUTES}
    took = {
        tokens: {
            name: estimated(routes[name], shape(tokens, 64), TYPICAL_GPU).seconds
            for name in ("tiled, Triton", "chunked, Triton sums")
        }
        for tokens in (512, 65536, 131072)
    }
    assert took[512]["tiled, Triton"] < took[512]["chunked, Triton sums"]
    assert took[131072]["chunked, Triton sums"] < took[131072]["tiled, Triton"] / 5
    assert 1.9 < took[131072]["chunked, Triton sums"] / took[65536]["chunked, Triton sums"] < 2.1


# ---- compiled ahead of time ----

# a sample of what `python -m tools.triton_aot sums` compiles: (link, mask, type, head size, device), and
# which kernels of it
AHEAD = {
    ("squared_affine", "packed", "bfloat16", 16, 90): {"absorb keys pairs", "keys_back"},
    ("squared_affine", "decay", "float16", 16, 80): {"read_back"},
    ("gegenbauer", "padding", "bfloat16", 16, 80): {"absorb queries pairs"},
    ("ssd", "decay", "bfloat16", 16, 90): {"read", "read_back"},
}
TITLES = {
    "absorb keys pairs", "absorb keys rest", "absorb queries pairs", "absorb queries rest", "carry forwards",
    "carry backwards", "keys_back", "read",
    "read_back",
}  # fmt: skip


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return ahead("sums", AHEAD, tmp_path_factory)


@pytest.mark.parametrize("variant", AHEAD)
def test_kernels_compile_ahead_of_time(variant: tuple, compiled: list[dict]) -> None:
    """Nothing spills, strips fit the device's shared memory, and Hopper's matrix instruction is used."""
    rows = fitting(compiled, variant, AHEAD[variant])
    if variant[4] == 90:
        assert all(row["wgmma"] for row in rows)


def test_the_committed_report() -> None:
    """Every kernel in each type on both devices, of sums that stay and that fade, and none that spills."""
    report = json.loads((ROOT / "results" / "benchmarks" / "triton_sums_aot.json").read_text(encoding="utf-8"))
    assert report["triton"]
    assert report["fit"]
    rows = report["kernels"]
    names = ("kernel", "link", "mask", "dtype", "dim", "device")
    types, devices = ("bfloat16", "float16", "float32"), (80, 90)
    squares = itertools.product(TITLES, ["squared_affine"], ["packed", "decay"], types, (16, 32, 64), devices)
    linear = itertools.product(
        [title for title in TITLES if "pairs" not in title], ["ssd"], ["decay"], types, (64, 128), devices
    )
    assert {tuple(row[name] for name in names) for row in rows} >= {*squares, *linear}
    assert not [row for row in rows if row["spills"] or row["stack"] or row["registers"] > 255]
