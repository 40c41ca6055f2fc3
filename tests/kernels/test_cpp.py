"""The compiled CPU kernel: against the float64 definition, and what surrounds it (falling back, torch's machinery)."""

import copy
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from kernels import documented, general
from kernels.cpp_cases import KINDS, LARGE, NAMES, SELECTED, refusal
from kernels.general import everything
from matrix import CASES, DECLARED, fitted, inputs, randomised
from torch import Tensor

import zonal
from zonal import Operator, anchor, link, metric, prior, score
from zonal import mechanisms as m
from zonal.algebra.link import Link
from zonal.execution import plan
from zonal.execution.call import prepare
from zonal.execution.paths import distance
from zonal.execution.paths import tile as tile_path
from zonal.execution.paths.dense import weights
from zonal.formula import FORMULAS
from zonal.kernels import build
from zonal.kernels import native as native_kernels
from zonal.kernels.abi import Arguments
from zonal.kernels.op import decode, encode
from zonal.kernels.tile import FAMILY, TileInputs, TileSpec, tile
from zonal.models import ModelConfig

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")


def test_the_table_says_all() -> None:
    """Of the matrix, no other operator is run."""
    others = [name for name in KINDS if name not in NAMES]
    taken = [name for name in others if refusal(KINDS[name]().float(), fitted(KINDS[name](), CASES["causal"])) is None]  # type: ignore[operator]
    assert not taken, f"the kernel now runs {taken}, too: add them to the table, so that they are tested"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("selection", SELECTED)
def test_kernel_equals_definition(selection: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most four times the error of torch's tiles in the same precision, and a floor of rounding (gradients may
    cancel); outputs and every gradient. Where both lose digits, which of the two rounds better is chance.
    """
    compare(selection, dtype, monkeypatch)


@pytest.mark.parametrize("selection", [name for name in SELECTED if name.partition("/")[2] in LARGE])
def test_kernel_equals_definition_in_float16(selection: str, monkeypatch: pytest.MonkeyPatch) -> None:
    compare(selection, torch.float16, monkeypatch)


def compare(selection: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise AssertionError unless the kernel is as near to the definition in float64 as torch's tiles, within 4."""
    name, case = SELECTED[selection]
    operator = randomised(KINDS[name]()).float()  # type: ignore[operator]
    data = inputs(case).to(dtype)
    exact = data.to(torch.float64)
    double = copy.deepcopy(operator).double()
    truth = everything(double, exact, "dense")
    called: list[str] = []
    monkeypatch.setattr(distance, "refusal", lambda _: "its own tests are in test_distance.py")
    original = tile_path.tile
    monkeypatch.setattr(tile_path, "tile", lambda *given: called.append("kernel") or original(*given))
    got = everything(operator, data, "tiled")
    assert called == ["kernel"]
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    other = everything(operator, data, "tiled")
    assert called == ["kernel"]
    for index, (a, b, t) in enumerate(zip(got, other, truth, strict=True)):
        assert a.dtype == b.dtype
        assert torch.isfinite(a).all()
        if not t.numel():
            continue
        size = max(1.0, t.abs().max().item())
        error, allowed = (a.double() - t).abs().max().item(), (b.double() - t).abs().max().item()
        floor = (
            (64 if index else 16)
            * torch.finfo(torch.float32).eps
            * size
            * (got[0][..., 0].numel() ** 0.5 if index > 3 else 1)
        )
        floor += 0 if dtype == torch.float32 else torch.finfo(dtype).eps * size
        assert error <= 4 * allowed + floor, (
            f"item {index}: error {error:.3g}, torch's tiles {allowed:.3g}, size {size:.3g}"
        )


@pytest.mark.parametrize("selection", SELECTED)
def test_bfloat16_without_gradients(selection: str) -> None:
    """Products in bfloat16 with float32 sums, where the processor has them: within two roundings of the weights of the
    definition.
    """
    name, case = SELECTED[selection]
    operator = randomised(KINDS[name]()).float()  # type: ignore[operator]
    data = inputs(case).to(torch.bfloat16)
    exact, double = data.to(torch.float64), copy.deepcopy(operator).double()
    with torch.no_grad():
        got = data.run(operator, "tiled")
        truth = exact.run(double, "dense")
        # what rounding every weight may change, eps sum_s |W_ts| |v_s|, and the result's own rounding
        call = exact.call(double)
        size = weights(call).abs() @ call.expand(call.v).abs()
    assert got.dtype == torch.bfloat16
    assert torch.isfinite(got).all()
    assert ((got.double() - truth).abs() <= 2 * torch.finfo(torch.bfloat16).eps * (size + 1e-3)).all()


@pytest.mark.parametrize("dim", [8, 7])
def test_bfloat16_products_run_both_ways(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a set has them, even widths run in pairs, forward and backward; odd ones in float32. A scale of zero still
    gets its gradient.
    """
    code = tile_path.code_of(link.Identity())
    assert code is not None
    ran: list[str] = []
    original = Arguments.run
    monkeypatch.setattr(
        Arguments, "run", lambda call, function: ran.append(function._zonal) or original(call, function)
    )
    sets = {dtype: FAMILY.isa(code, dtype) for dtype in (torch.float32, torch.bfloat16)}
    for isa in sets.values():
        kernel = native_kernels.load(code, "tile", isa)
        for name in ("zonal_forward", "zonal_backward"):
            getattr(kernel, name)._zonal = isa.name
    q, k, v = (
        torch.randn(1, 2, 40, dim, generator=torch.Generator().manual_seed(i)).bfloat16().requires_grad_()
        for i in range(3)
    )
    spec = TileSpec(code, "raw")
    for factor in (0.5, 0.0):
        ran.clear()
        scale = torch.full((2,), factor, requires_grad=True)
        y, _, rest = tile(TileInputs(q, k, v, scale, torch.empty(2, 0)), spec)
        assert rest.shape == y.shape
        (got,) = torch.autograd.grad(y.float().sum(), scale)
        exact = (q.double() @ k.double().mT).tril() @ v.double()
        expected = exact.sum((0, 2, 3))
        assert (got.double() - expected).abs().max() <= 2e-2 * exact.abs().sum((0, 2, 3)).max()
        assert ran == [sets[torch.bfloat16 if dim == 8 else torch.float32].name] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("where", ["q", "k"])
@pytest.mark.parametrize(
    "name",
    [
        "softmax",
        "cosine",
        "sko",
        "yat",
        "squared_affine",
        "polynomial_square",
        "softmax-count",
        "yat-raw",
        "identity-count",
        "distance",
        "distance-squared",
    ],
)
def test_nan_stays_where_it_is(name: str, where: str, dtype: torch.dtype) -> None:
    """A NaN key poisons the queries that see it, a NaN query itself, and nothing else; with and without gradients."""
    operator = randomised(KINDS[name]()).float()  # type: ignore[operator]
    q, k, v = (x.detach()[:, :, :50].clone() for x in sample(dtype=dtype))
    (q if where == "q" else k)[0, 1, 30] = float("nan")
    for tracked in (False, True):
        y = zonal.attention(q, k, v.requires_grad_(tracked), operator, causal=True, path="tiled")
        bad = torch.isnan(y).any(-1)
        expected = torch.zeros_like(bad)
        expected[0, 1, slice(30, 31) if where == "q" else slice(30, None)] = True
        assert torch.equal(bad, expected)


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("name", ["distance", "distance-squared", "distance-count"])
def test_coincident_points(name: str, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Queries on their keys, keys on each other: every gradient is finite, and off by no more than twice what the
    definition in float32 is.
    """
    monkeypatch.setenv(native_kernels.VARIABLE, kernels)
    operator = KINDS[name]()  # type: ignore[operator]
    q, _, v = (x.detach() for x in sample(60))
    q[:, :, 30:] = q[:, :, :30]
    found = []
    for function, dtype in ((run, torch.float32), (dense, torch.float32), (dense, torch.float64)):
        found.append(function(operator, [x.to(dtype, copy=True).requires_grad_() for x in (q, q, v)]))
    for got, reference, truth in zip(*found, strict=True):
        assert torch.isfinite(got).all()
        error, allowed = (got - truth).abs().max(), (reference - truth).abs().max()
        assert error <= 2 * allowed + 1e-5 * (1 + truth.abs().max())


@pytest.mark.parametrize("name", ["distance", "distance-squared"])
def test_points_far_from_the_origin(name: str) -> None:
    """Distances do not change when everything is moved, nor does their precision by much."""
    operator, tensors = KINDS[name](), sample(100)  # type: ignore[operator]
    q, k, v = (x.detach() for x in tensors)
    found = []
    for shift in (0.0, 64.0):  # a power of two, so that moving is nearly exact
        moved = [(q + shift).requires_grad_(), (k + shift).requires_grad_(), v.clone().requires_grad_()]
        found.append([x.double() for x in run(operator, moved)])
        exact = dense(operator, [x.detach().double().requires_grad_() for x in moved])
        for a, b in zip(found[-1], exact, strict=True):
            assert (a - b).abs().max() < 2e-5 * (1 + b.abs().max())


def test_every_link_with_a_formula_is_met() -> None:
    """The test above runs each of them: none is refused for want of a case."""
    met = {type(KINDS[name]().link).__name__ for name in NAMES}  # type: ignore[operator]
    assert {kind.__name__ for kind in DECLARED.values() if kind.slot == "link" and kind().formula is not None} - {
        "Identity"
    } <= met


def sample(tokens: int = 200, dtype: torch.dtype = torch.float32, heads: int = 4, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, tokens, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


run = functools.partial(general.run, path="tiled")


def dense(operator: Operator, tensors: list[Tensor]) -> list[Tensor]:
    y = zonal.attention(*tensors, operator, causal=True, path="dense")
    return [y, *torch.autograd.grad(y.square().sum(), tensors)]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_bits_again(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        operator, tensors = m.sko(degrees=(2.0, 3.0)), sample()
        assert all(
            torch.equal(a, b)
            for _ in range(3)
            for a, b in zip(run(operator, tensors), run(operator, tensors), strict=True)
        )
    finally:
        torch.set_num_threads(before)


def test_few_heads_are_split_over_queries() -> None:
    """One head on five threads: five partial sums of dk and dv make the same gradient."""
    operator = m.sko(degrees=(3.0,))
    q, k, v = (x[:1, :1].detach().requires_grad_() for x in sample(400))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            found.append(run(operator, [q, k, v]))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 2e-5 * (1 + b.abs().max())


def test_a_broken_kernel_is_seen() -> None:
    """The comparison above can fail: a link with a wrong derivative, compiled, gives a wrong gradient and the right
    output.
    """
    operator, (q, k, v) = m.yat(eps=0.5), sample(40)
    good = tile_path.code_of(operator.link)
    assert good is not None
    bad = replace(good, name="broken", cpp_derivative=f"1.01f * ({good.cpp_derivative})")
    found = []
    for code in (good, bad):
        spec = TileSpec(code, "row", True)
        constants = torch.tensor(code.constants).expand(4, -1)
        y, *_ = tile(TileInputs(q, k, v, torch.ones(4), constants), spec)
        found.append((y.detach(), torch.autograd.grad(y.square().sum(), k)[0]))
    assert torch.equal(found[0][0], found[1][0])
    assert (found[0][1] - found[1][1]).abs().max() > 1e-3 * found[0][1].abs().max()


# -- torch's machinery -----------------------------------------------------------------------------------------------


def arguments(learned: bool = True) -> tuple:
    operator, (q, k, v) = m.sko(degrees=(2.0, 3.0), manifold_dim=4), sample(23)
    call = prepare(operator, q, k, v, causal=True)
    code = tile_path.code_of(operator.link)
    assert code is not None
    spec = TileSpec(code, "count", True, learned=call.coefficients.shape[0])
    coefficients = call.coefficients.detach().flatten(1).T.expand(4, -1).contiguous().requires_grad_(learned)
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[0, :3] = False
    scale = torch.full((4,), 0.7, requires_grad=learned)
    row = torch.linspace(0, -1, 23, dtype=torch.float64).expand(1, 4, 23).contiguous().requires_grad_(learned)
    col = torch.linspace(0, 1, 23, dtype=torch.float64).expand(2, 4, 23).contiguous().requires_grad_(learned)
    return q, k, v, scale, coefficients, mask, None, row, col, torch.full((4,), 0.1), encode(spec)


def test_opcheck() -> None:
    torch.library.opcheck(tile.operator, arguments())
    torch.library.opcheck(tile.operator, arguments(learned=False))


def test_second_derivatives_are_refused() -> None:
    general.check_second_derivatives(m.yat(eps=0.1), sample(20), "tiled")


def test_checkpointing_autocast_and_inference_mode() -> None:
    general.check_modes(m.sko(degrees=(2.0,)), sample(), "tiled")


@pytest.mark.parametrize("link_name", ["softmax", "yat"])
@pytest.mark.parametrize("hidden", ["some", "all"])
def test_infinite_biases_hide_keys(link_name: str, hidden: str) -> None:
    """As padding would; where every key is hidden the row is zero, and so are its gradients."""
    operator, (q, k, v) = KINDS[link_name]().float(), sample(70)  # type: ignore[operator]
    bias, there = torch.zeros(2, 4, 70), torch.ones(2, 70, dtype=torch.bool)
    there[1, 0 if hidden == "all" else 1 :: 3] = False
    if hidden == "all":
        there[1, :20] = False
    bias.masked_fill_(~there[:, None], float("-inf"))
    found = []
    for given in ({"key_bias": bias}, {"key_padding_mask": there}):
        y = zonal.attention(q, k, v, operator, causal=True, path="tiled", **given)
        found.append([y, *torch.autograd.grad(y.square().sum(), (q, k, v))])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 1e-5 * (1 + b.abs().max())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["exp", "identity"])
def test_a_prior_that_is_not_finite_stays_with_the_queries_that_see_its_key(name: str, value: float) -> None:
    (q, k, v), col = (x.detach() for x in sample(50)), torch.zeros(2, 4, 50, dtype=torch.float64)
    inputs = TileInputs(q, k, v, torch.ones(4), torch.empty(4, 0), col=col)
    spec = TileSpec(FORMULAS[name], "row" if name == "exp" else "raw")
    expected = tile(inputs, spec)[0]
    col[..., 30] = value
    y = tile(inputs, spec)[0]
    assert torch.equal(y[:, :, :30], expected[:, :, :30])
    assert value == float("inf") or y[:, :, 30:].isnan().all()


def test_a_series_of_any_length_is_learned() -> None:
    count, (q, k, v) = 48, (torch.nn.functional.normalize(x.detach(), dim=-1) for x in sample(70, heads=2))
    c = (0.5 ** torch.arange(count)).expand(2, -1).clone().requires_grad_()
    spec = TileSpec(FORMULAS["polynomial"], "raw", learned=count)
    (found,) = torch.autograd.grad(tile(TileInputs(q, k, v, torch.ones(2), c), spec)[0].sum(), c)
    score = q.double() @ k.double().mT
    terms = torch.stack([(score**i).tril().unsqueeze(-1) * v.double().unsqueeze(2) for i in range(count)])
    expected, size = (x.sum((1, 3, 4, 5)).mT for x in (terms, terms.abs()))
    assert ((found - expected).abs() <= 4e-6 * size).all()  # float32: powers of up to 47, sums that cancel


@pytest.mark.parametrize(
    ("name", "path"), [("softmax", "tiled"), ("rewa", "tiled"), ("linear", "chunked"), ("ska", "chunked")]
)
def test_a_sign_that_is_not_in_memory_counts(name: str, path: str) -> None:
    """As of torch's imag of a conjugate, which is a view of the numbers with the other sign."""
    tensors = [x.detach() for x in sample(40)]
    y, expected = (
        zonal.attention(*(negated(x) for x in tensors), name, causal=True, path=path)
        for negated in (torch._neg_view, torch.neg)
    )
    assert torch.equal(y, expected)


def test_decay_of_a_long_sequence_keeps_its_digits() -> None:
    """Running sums of ten thousand steps are taken off from each other in float64."""
    operator = m.softmax(prior=prior.Decay(rates=(0.5, 0.9), learn=False)).replace(anchor=anchor.Raw()).float()
    q, k, v = (torch.randn(1, 2, 4000, 4, generator=torch.Generator().manual_seed(i)) for i in range(3))
    got = zonal.attention(q, k, v, operator, causal=True, path="tiled")
    last = zonal.attention(*(x[:, :, -300:].double() for x in (q, k, v)), operator.double(), causal=True, path="dense")
    assert (got[:, :, -50:] - last[:, :, -50:]).abs().max() <= 1e-5 * last.abs().max()


@pytest.mark.parametrize("spec", ["sko(degrees=(2.,3.))", "softmax", "yat", "regime(prior=('alibi', 'decay'))"])
def test_a_training_step_compiles_without_a_break(spec: str) -> None:
    general.check_compiled_training_step(ModelConfig(50, 32, (spec, spec), 2, conv=4, rotary=True), 40)


def test_export() -> None:
    """An exported layer carries the kernel as one operator and gives the same numbers for other inputs."""
    layer = zonal.nn.Attention(16, heads=2, operator=m.yat()).eval()
    x, other = torch.randn(2, 1, 20, 16).unbind(0)
    program = torch.export.export(layer, (x,))
    graphs = [module.graph for module in program.graph_module.modules() if isinstance(module, torch.fx.GraphModule)]
    assert any("zonal.tile" in str(node.target) for graph in graphs for node in graph.nodes)
    assert torch.allclose(program.module()(other), layer(other), atol=1e-6)


@dataclass(frozen=True)
class Angle(metric.Metric):
    """A metric without a formula."""


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: prepare(m.sko(degrees=(16.0,), manifold_dim=1), *sample(9), causal=True), "no formula"),
        (lambda: prepare(m.yat(), *sample(9, torch.float64), causal=True), "float64"),
        (
            lambda: prepare(m.yat(), *(torch.randn(1, 1, 4, 300) for _ in range(3)), causal=True),
            "1 to 256, this call has 300 and 300",
        ),
        (
            lambda: prepare(
                Operator(score.NegativeDistance(Angle()), link.Exp(), anchor.Row()), *sample(9), causal=True
            ),
            "no dot product",
        ),
        (
            lambda: prepare(
                Operator(score.NegativeDistance(), link.PolynomialSquare(), anchor.Row()), *sample(9), causal=True
            ),
            "with score NegativeDistance",
        ),
        (
            lambda: prepare(
                Operator(score.NegativeDistance(metric.SquaredEuclidean()), link.Exp(), anchor.Row()),
                *(torch.randn(1, 1, 4, 255) for _ in range(3)),
                causal=True,
            ),
            "must be 1 to 254 and 1 to 256",
        ),
        (
            lambda: prepare(Operator(score.NegativeDistance(), link.Exp(), anchor.Row()), *sample(9), causal=True),
            "squares of such points cancel",
        ),
    ],
)
def test_refusals_say_why(call, reason: str) -> None:
    assert reason in (tile_path.refusal(call()) or "")


# -- a link of one's own ---------------------------------------------------------------------------------------------


@pytest.fixture
def student_t(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Link]:
    """The link of docs/declare.md, from a module that holds what the page shows and nothing else."""
    pytest.importorskip("triton", reason="the page's module imports triton")
    (tmp_path / "student_t.py").write_text(documented.student_t(), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("student_t").StudentT(sharpness=3.0)
    del sys.modules["student_t"]


def test_a_new_link_is_short() -> None:
    lines = [line for line in documented.student_t().splitlines() if line.strip()]
    assert len(lines) <= 35
    text = "\n".join(lines)
    assert all(part in text for part in ("@triton.jit", "Formula(", "def value", "def derivative"))


@pytest.mark.parametrize("ends", [(-1, 1), (0.0, float("inf"))])
def test_every_domain_is_numbers_of_c(student_t: Link, ends: tuple[float, float]) -> None:
    """Whole numbers and infinity are none, with the suffix of a float behind them."""
    code = tile_path.code_of(type("Other", (type(student_t),), {"domain": ends})())
    assert code is not None
    numbers = re.findall(r"ZONAL_(?:LOW|HIGH) (.*)f\n", build.defines(code))
    assert all(re.fullmatch(r"-?\d+(\.\d+|e\+\d+)", number) for number in numbers), numbers
    assert decode(type(code), encode(code)) == code


@pytest.mark.parametrize("tiles", ["kernel", "torch"])
def test_a_new_link_runs(student_t: Link, tiles: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiled kernel and by torch's tiles, outputs and gradients; the Triton functions run in
    test_triton.py.
    """
    monkeypatch.setenv(native_kernels.VARIABLE, "on" if tiles == "kernel" else "off")
    operator, tensors = Operator(score.Cosine(), student_t, anchor.Row()), sample(100)
    assert (tile_path.refusal(prepare(operator, *tensors, causal=True)) is None) == (tiles == "kernel")
    expected = dense(operator, [x.detach().double().requires_grad_() for x in tensors])
    for a, b in zip(run(operator, tensors), expected, strict=True):
        assert (a - b).abs().max() < 1e-5 * (1 + b.abs().max())


def test_the_planner_counts_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    operator, tensors = m.yat(), sample(2000, heads=8)
    call = prepare(operator, *tensors, causal=True)
    fast = plan.choose(call)
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    slow = plan.choose(call)
    times = [next(e.seconds for e in p.estimates if e.path == "tiled") for p in (fast, slow)]
    assert fast.path == "tiled"
    assert times[0] < 0.8 * times[1]
