"""The generic suite: operator x path x input x dtype against the dense float64 definition, outputs and all
gradients.
"""

import itertools
from collections.abc import Iterator

import pytest
import torch
from matrix import (
    CASES,
    FEATURES,
    OPERATORS,
    PAIRED,
    PATHS,
    RUNS,
    Case,
    Inputs,
    fitted,
    inputs,
    paths,
    possible,
    randomised,
    tied,
)
from pairwise import pairs, pairwise
from torch import Tensor
from torch.autograd import forward_ad

import zonal
from zonal import Operator
from zonal.algebra.link import Gegenbauer, Link
from zonal.errors import ArgumentError, PathError

# relative to the largest entry; float64 leaves room for sums in another order and for solves
TOLERANCE = 1e-9
FADING = 1e-7  # sums are counted in units of a block's start: rounding grows by up to e^MOST_GROWTH


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty hands out NaN: a path that reads what it never wrote is seen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks far smaller than the inputs, so that every loop runs more than once."""
    monkeypatch.setattr("zonal.execution.paths.tiled._QUERIES", 8)
    monkeypatch.setattr("zonal.execution.paths.tiled._KEYS", 6)
    monkeypatch.setattr("zonal.execution.paths.tiled._TILE_ELEMENTS", 1)


def gradients(y: Tensor, case: Inputs, operator: Operator) -> list[Tensor]:
    leaves = [*case.leaves, *operator.parameters()]
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y.dtype)
    found = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def defined(operator: Operator, case: Inputs) -> list[Tensor]:
    """y and all gradients by the definition."""
    y = case.run(operator, "dense")
    return [y, *gradients(y, case, operator)]


def check(operator: Operator, case: Inputs, path: str, expected: list[Tensor], tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError unless ``path`` gives what is expected."""
    y = case.run(operator, path)
    assert torch.isfinite(y).all()
    for index, (a, b) in enumerate(zip([y, *gradients(y, case, operator)], expected, strict=True)):
        scale = 1 + (b.abs().max().item() if b.numel() else 0)
        error = (a - b).abs().max().item() if b.numel() else 0.0
        assert error <= tolerance * scale, (
            f"{path}: item {index} (0 = output, then gradients) is off by {error:.3g} of {scale:.3g}"
        )


# of each kind of operator one that meets every input; the others share them out between them
EVERY = (
    "softmax", "softmax-alibi", "softmax-window", "softmax-count", "softmax-top", "yat-decay", "distance", "rewa",
    "linear", "retention", "sko", "sko-chunk",
    "ridge", "ska-mixed", "ska-fading", "ska-paper", "kernel_ridge", "koopman-exp", "sinkhorn", "sinkhorn-unbalanced",
    "hierarchical",
)  # fmt: skip
SHARES = 4


def selected() -> dict[str, tuple[str, Case]]:
    """By name: an operator, and an input that fits it."""
    found: dict[str, tuple[str, Case]] = {}
    for place, name in enumerate(OPERATORS):
        operator, seen = OPERATORS[name](), set()
        for number, (row, case) in enumerate(
            [*PAIRED.items(), ("no-keys", CASES["no-keys"]), ("no-queries", CASES["no-queries"])]
        ):
            case = fitted(operator, case)
            if case not in seen and (name in EVERY or number % SHARES == place % SHARES or row.startswith("no-")):
                seen.add(case)
                found[f"{name}/{row}"] = name, case
    return found


SELECTED = selected()


@pytest.mark.parametrize("selection", SELECTED)
@pytest.mark.usefixtures("small_blocks")
def test_every_path_equals_the_definition(selection: str) -> None:
    """All paths that must run it, outputs and all gradients, in float64."""
    name, case = SELECTED[selection]
    operator, data = randomised(OPERATORS[name]()), inputs(case)
    expected = defined(operator, data)
    assert paths(name, case) or not tied(operator, case)
    for path in paths(name, case):
        check(operator, data, path, expected)


def test_any_two_features_meet() -> None:
    """In the inputs, and in what the operators that meet every input are given, but for what they have no use for."""
    rows = pairwise(FEATURES, possible)
    met = {frozenset(pair) for row in rows for pair in itertools.combinations(row.items(), 2)}
    assert met == pairs(FEATURES, possible)
    assert len(PAIRED) == len(rows) <= 25
    given = [case for name, case in SELECTED.values() if name == "softmax"]
    assert any(case.packed and case.padding and case.key_bias and case.kv_heads < case.heads for case in given)
    assert any(case.packed and case.shared for case in given)
    assert any(case.strided and case.kv_heads < case.heads for case in given)


def test_every_operator_is_in_the_table_once() -> None:
    listed = [name for names in RUNS.values() for name in names]
    assert sorted(listed) == sorted(OPERATORS)
    assert {path for found in RUNS for path in found} == set(PATHS)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", OPERATORS)
def test_all_other_paths_refuse(name: str, causal: bool) -> None:
    """The table says all: what is not in it refuses, and names itself and a path that runs."""
    operator = randomised(OPERATORS[name]())
    case = fitted(operator, CASES["causal" if causal else "bidirectional"])
    data = inputs(case)
    for path in set(PATHS) - set(paths(name, case)):
        with pytest.raises(PathError, match=f"path '{path}'.*path='"):
            data.run(operator, path)


@pytest.mark.parametrize("name", OPERATORS)
def test_what_does_not_fit_is_refused(name: str) -> None:
    """A causal plan, a decay without an order, a bias on a kernel that is solved with: the definition has no meaning
    for them.
    """
    operator = randomised(OPERATORS[name]())
    for case in (CASES["causal"], CASES["bidirectional"], CASES["key-bias"]):
        if fitted(operator, case) != case:
            with pytest.raises(ArgumentError, match="attention: operator"):
                inputs(case).run(operator, "dense")


LONG = {
    "long": Case(batch=1, kv_heads=2, queries=300, keys=300, key_dim=9),
    "long-late-strided-padding": Case(kv_heads=1, queries=130, keys=300, key_dim=6, strided=True, padding="left"),
    "long-packed-padding": Case(batch=1, kv_heads=2, queries=300, keys=300, packed=(0, 3, 150, 300), padding="random"),
    "wide": Case(batch=1, heads=2, kv_heads=1, queries=40, keys=40, key_dim=130, value_dim=33),
}
FAR = ("softmax", "yat", "distance", "linear", "retention", "squared_affine", "ridge", "ska-1", "ska-fading")


@pytest.mark.parametrize(
    ("name", "case_name"), [(name, case) for name in FAR for case in LONG if (name, case) != ("squared_affine", "wide")]
)  # which has too many features
def test_long_and_wide(name: str, case_name: str) -> None:
    """Blocks of their own size, whose borders lie within the sequence; token by token is slow and goes a shorter
    way.
    """
    operator, case = randomised(OPERATORS[name]()), LONG[case_name]
    data = inputs(case)
    expected = defined(operator, data)
    for path in paths(name, case):
        if path != "streaming":
            check(operator, data, path, expected, FADING if name == "ska-fading" else TOLERANCE)


# of each family one: a row's sum, a count of keys, a carried sum with and without a decay, two solves, a distance
HALVED = ("softmax", "softmax-count", "linear", "retention", "ridge", "ska-fading", "distance")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("selection", [each for each in SELECTED if each.partition("/")[0] in HALVED])
def test_every_input_in_half_precision(selection: str, dtype: torch.dtype) -> None:
    """No input changes the type, and no path loses much more than the definition does in the same type."""
    name, case = SELECTED[selection]
    double, operator = randomised(OPERATORS[name]()), randomised(OPERATORS[name]()).float()
    low = inputs(case).to(dtype)
    truth, reference = defined(double, low.to(torch.float64)), defined(operator, low)
    for path in paths(name, case):
        y = low.run(operator, path)
        assert y.dtype == dtype
        for index, (got, same, t) in enumerate(zip([y, *gradients(y, low, operator)], reference, truth, strict=True)):
            if t.numel():
                size, lost = t.abs().max().item(), (same.double() - t).abs().max().item()
                error = (got.double() - t).abs().max().item()
                # a gradient that is exactly zero is a sum in float32 of terms that have a size
                budget = 2 * lost + 4 * torch.finfo(dtype).eps * size + 64 * torch.finfo(torch.float32).eps
                assert error <= budget, f"{path}: item {index}: error {error:.3g}, budget {budget:.3g}, size {size:.3g}"


BUDGET = (
    "softmax",
    "linear",
    "sko",
    "yat",
    "squared_affine",
    "ridge",
    "ska-1",
    "ska-fading",
    "retention",
    "distance",
    "distance-squared",
    "rewa",
)
KINDS = {"random": 1.0, "tiny": 1e-4, "huge": 30.0, "clustered": 1.0, "duplicate": 1.0}
# no budget may be more than this part of the largest entry: a wider one would test nothing
CAP = {torch.float32: 0.01, torch.bfloat16: 0.1, torch.float16: 0.02}
# what float16 can neither hold nor tell from zero is left out for it
HALF = ("random", "clustered", "duplicate")
# a gradient that is exactly zero has no size; its terms are of order one
NOTHING = 1e-12


def nudged(data: Inputs, seed: int) -> Inputs:
    """The inputs, each number off by up to one rounding of float32."""
    generator = torch.Generator().manual_seed(seed)
    found = data.to(torch.float64)
    with torch.no_grad():
        for x in found.leaves:
            x.mul_(
                1
                + torch.finfo(torch.float32).eps
                * (2 * torch.rand(x.shape, generator=generator, dtype=torch.float64) - 1)
            )
    return found


@torch.no_grad()
def magnified(operator: Operator, exact: Inputs) -> float:
    """Roundings of the result that a path may add of itself: twice the largest score where it keeps the logarithm of a
    row's sum, and for a solve four times its condition number.
    """
    score, params = operator.score, operator.bind(4, 4).score_params
    q, k = score.prepare_query(exact.q, params, None), score.prepare_key(exact.k, params)
    if operator.tags.log_space:
        return 2 * score.pair(q, k).abs().max().item()
    if operator.tags.solves:
        return 4 * (1 + torch.linalg.matrix_norm(k.mT @ k, 2).max().item() / operator.anchor.eps)
    return 0.0


@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, dtype) for dtype in CAP for kind in (HALF if dtype == torch.float16 else KINDS)], ids=str
)
@pytest.mark.parametrize("name", BUDGET)
def test_error_budget(name: str, kind: str, dtype: torch.dtype) -> None:
    """In low precision, output and every gradient: four times what the definition loses in the same type, or by inputs
    one rounding off, and some roundings.
    """
    double, operator = randomised(OPERATORS[name]()), randomised(OPERATORS[name]()).float()
    case = Case(queries=40, keys=40, key_dim=8)
    exact = inputs(case, scale=KINDS[kind])
    with torch.no_grad():
        if kind == "clustered":
            exact.k.copy_(exact.k[:, :, :1] + 0.1 * exact.k)
        if kind == "duplicate":
            exact.k.copy_(exact.k[:, :, :1].expand_as(exact.k))
    low = exact.to(dtype)
    exact = low.to(torch.float64)
    truth, reference, moved = (
        defined(double, exact),
        defined(operator, low),
        [defined(double, nudged(exact, seed)) for seed in range(2)],
    )
    eps, stored = torch.finfo(torch.float32).eps, 0.0 if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    for path in paths(name, case):
        y = low.run(operator, path)
        assert y.dtype == dtype
        for index, (got, t) in enumerate(zip([y, *gradients(y, low, operator)], truth, strict=True)):
            size = t.abs().max().item()
            lost = max((x[index] - t).abs().max().item() for x in (reference, *moved))
            budget = 4 * lost + ((16 + magnified(double, exact)) * eps + stored) * (1.0 if size < NOTHING else size)
            assert budget <= CAP[dtype] * size or size < NOTHING, (
                f"{path}: item {index}: a budget of {budget:.3g} for numbers of {size:.3g}"
            )
            error = (got.double() - t).abs().max().item()
            assert error <= budget, f"{path}: item {index}: error {error:.3g}, budget {budget:.3g}, size {size:.3g}"


LEAK = ("softmax", "sko", "squared_affine", "linear", "ridge", "ska-1", "retention", "softmax-window", "yat", "rewa")


@pytest.mark.parametrize(("name", "path"), [(name, path) for name in LEAK for path in ("dense", *paths(name, Case()))])
@pytest.mark.usefixtures("small_blocks")
def test_future_does_not_leak(name: str, path: str) -> None:
    """Changing tokens >= t, to large ones too, leaves outputs < t unchanged to the bit or to rounding."""
    operator, data, t = randomised(OPERATORS[name]()), inputs(CASES["causal"]), 9
    before = data.run(operator, path)
    with torch.no_grad():
        for x in (data.q, data.k, data.v):
            x[:, :, t:] = 50 * torch.randn(x[:, :, t:].shape, dtype=x.dtype, generator=torch.Generator().manual_seed(3))
    after = data.run(operator, path)
    assert torch.allclose(before[:, :, :t], after[:, :, :t], rtol=0, atol=1e-12)
    assert not torch.allclose(before[:, :, t + 1 :], after[:, :, t + 1 :], rtol=0, atol=1e-3)


def _slightly_wrong(self: Link, x: Tensor, c: Tensor) -> Tensor:
    return x.square() / (2 + 0.1 - 2 * x) + 1e-6


@pytest.mark.parametrize(
    ("path", "name", "target", "wrong"),
    [
        (
            "tiled",
            "yat",
            "zonal.algebra.link.Yat.derivative_into",
            lambda self, x, c, out: 2 * x * (2 + 0.1 - x) / (2 + 0.1 - 2 * x).square() * (1 + 1e-6),
        ),
        (
            "tiled",
            "sko",
            "zonal.algebra.link.Gegenbauer.coefficient_vjp_into",
            lambda self, x, g, c, spare: torch.zeros_like(c, dtype=torch.float64),
        ),
        (
            "tiled",
            "softmax",
            "zonal.execution.paths.tiled._add_product",
            lambda total, a, b, scratch: total.add_(a @ b, alpha=1 + 1e-6),
        ),
    ],
)
def test_suite_sees_a_broken_kernel(
    path: str, name: str, target: str, wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The suite itself can fail: a kernel wrong in the sixth digit is caught."""
    operator, data = randomised(OPERATORS[name]()), inputs(CASES["causal"])
    expected = defined(operator, data)
    check(operator, data, path, expected)
    monkeypatch.setattr(target, wrong)
    with pytest.raises(AssertionError, match="is off by"):
        check(operator, data, path, expected)


def test_double_backward_is_refused() -> None:
    data = inputs(CASES["causal"])
    y = data.run(zonal.mechanisms.softmax(), "tiled")
    with pytest.raises(PathError, match="no second derivative"):
        torch.autograd.grad(y.sum(), data.q, create_graph=True)


def test_dense_has_second_derivatives() -> None:
    small = Case(batch=1, heads=1, kv_heads=1, queries=3, keys=3, key_dim=2, value_dim=2)
    data = inputs(small)
    operator = randomised(OPERATORS["squared_affine"]())

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zonal.attention(q, k, v, operator, causal=True, path="dense")

    assert torch.autograd.gradgradcheck(run, (data.q, data.k, data.v))


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize(
    "spec", ["softmax", "squared_affine", "polynomial_square", "yat", "sko", "ska(power=1)", "sinkhorn"]
)
def test_tangents_go_forward_through_the_path_that_has_them(spec: str, recorded: bool) -> None:
    """The definition carries them; all other paths refuse, kernels that would drop them among these."""
    q, k, v, direction = torch.randn(4, 1, 2, 12, 8, generator=torch.Generator().manual_seed(0)).unbind(0)

    def run(x: Tensor, path: str = "auto") -> Tensor:
        return zonal.attention(x, k.to(x), v.to(x), spec, causal=spec != "sinkhorn", path=path)

    step = 1e-5 * direction.double()
    want = (run(q.double() + step) - run(q.double() - step)) / 2e-5
    with torch.set_grad_enabled(recorded), forward_ad.dual_level():
        dual = forward_ad.make_dual(q, direction)
        got = forward_ad.unpack_dual(run(dual)).tangent
        for path in ("tiled", "chunked", "streaming", "sparse"):
            with pytest.raises(PathError, match=r"it has no forward-mode derivative.*path='dense'"):
                run(dual, path)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-4)


def test_fractional_degree_moves() -> None:
    """A learned degree gets a gradient, and an integer degree is the series up to it."""
    whole = Gegenbauer(degrees=(2.0,), manifold_dim=4, learn_weights=False)
    half = Gegenbauer(degrees=(2.5,), manifold_dim=4, learn_weights=False)
    x = torch.linspace(-1, 1, 9, dtype=torch.float64).view(1, 1, 1, -1)
    third = Gegenbauer(degrees=(3.0,), manifold_dim=4, learn_weights=False)
    middle = (whole.value(x, whole.coefficients({})) + third.value(x, third.coefficients({}))) / 2
    assert torch.allclose(half.value(x, half.coefficients({})), middle)
