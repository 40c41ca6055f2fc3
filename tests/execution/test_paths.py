"""The generic suite: operator x path x input x dtype against the dense float64 definition, outputs and all gradients."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from matrix import CASES, OPERATORS, Case, Inputs, admissible, inputs, randomised
from torch import Tensor

import zonal
from zonal import Operator
from zonal.algebra.link import Gegenbauer, Link
from zonal.errors import ArgumentError, PathError

PATHS = ("tiled", "chunked", "streaming")
# relative to the largest entry; float64 leaves room for sums in another order and for solves
TOLERANCE = 1e-9


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """torch.empty hands out NaN: a path that reads what it never wrote is seen."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks far smaller than the inputs, so that every loop runs more than once."""
    monkeypatch.setattr("zonal.execution.tiled._QUERIES", 8)
    monkeypatch.setattr("zonal.execution.tiled._KEYS", 6)
    monkeypatch.setattr("zonal.execution.tiled._TILE_ELEMENTS", 1)


def gradients(y: Tensor, case: Inputs, operator: Operator) -> list[Tensor]:
    leaves = [x for x in (case.q, case.k, case.v, case.key_bias) if x is not None] + list(operator.parameters())
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y.dtype)
    found = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True)]


def check(operator: Operator, case: Inputs, path: str, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError unless ``path`` equals the definition."""
    expected = case.run(operator, "dense")
    got = case.run(operator, path)
    assert torch.isfinite(got).all()
    pairs = [(got, expected), *zip(gradients(got, case, operator), gradients(expected, case, operator), strict=True)]
    for index, (a, b) in enumerate(pairs):
        scale = 1 + (b.abs().max().item() if b.numel() else 0)
        error = (a - b).abs().max().item() if b.numel() else 0.0
        assert error <= tolerance * scale, f"{path}: item {index} (0 = output, then gradients) is off by {error:.3g} of {scale:.3g}"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("name", OPERATORS)
def test_path_equals_definition(name: str, case_name: str, path: str) -> None:
    operator, case = randomised(OPERATORS[name]()), CASES[case_name]
    data = inputs(case)
    if not admissible(operator, case):
        with pytest.raises(ArgumentError, match="attention: operator"):
            data.run(operator, "dense")
        return
    refused = refusal(operator, data, path)
    if refused is None:
        check(operator, data, path)
    else:
        # a refusal must name the path and say what would do
        assert f"path '{path}'" in refused
        assert "path='" in refused


def refusal(operator: Operator, data: Inputs, path: str) -> str | None:
    """What the path says when it cannot run this, or None."""
    try:
        data.run(operator, path)
    except PathError as error:
        return str(error)
    return None


MUST_RUN = {
    "tiled": ["softmax", "cosine", "linear", "retention", "sko", "yat", "squared_affine", "polynomial_square", "softmax-alibi", "softmax-window", "softmax-top", "yat-top", "rewa-top", "distance", "distance-squared", "rewa", "rewa-dot", "rewa_operator", "rewa_operator-path", "rewa_operator-chosen", "rewa_functional", "rewa_functional-linear", "rewa_oscillatory", "sinkhorn", "sinkhorn-unbalanced", "sinkhorn-bounded", "sinkhorn-window", "sinkhorn-distance", "hierarchical"],
    "chunked": ["linear", "retention", "squared_affine", "polynomial_square", "sko-fractional", "ridge", "ska-0", "ska-1", "ska-2", "ridge-chunk", "ska-paper", "rewa_functional-linear", "ska-fading", "ska-mixed", "ska-relative"],
    "streaming": ["softmax", "softmax-top", "linear", "retention", "squared_affine", "ridge", "ska-0", "ska-1", "ska-2", "yat", "rewa", "rewa_operator", "ska-fading", "ska-mixed"],
}


@pytest.mark.parametrize(("path", "name"), [(path, name) for path, names in MUST_RUN.items() for name in names])
def test_path_is_offered(path: str, name: str) -> None:
    """A refusal is no way out: these must run."""
    operator = randomised(OPERATORS[name]())
    check(operator, inputs(CASES["random-padding" if operator.tags.couples else "causal"]), path)


BUDGET = ["softmax", "linear", "sko", "yat", "squared_affine", "ridge", "ska-1", "retention", "distance", "distance-squared", "rewa"]
KINDS = {"random": 1.0, "tiny": 1e-4, "huge": 30.0}


@torch.no_grad()
def condition(operator: Operator, exact: Inputs, path: str) -> float:
    """How much a path must magnify rounding, whoever writes it: the condition number of what it computes, up to a small factor."""
    if operator.tags.log_space:  # exp turns an absolute error of a score into a relative one
        score, params = operator.score, operator.bind(4, 4).score_params
        return max(1.0, score.pair(score.prepare_query(exact.q, params, None), score.prepare_key(exact.k, params)).abs().max().item() / 8)
    if path == "tiled":
        return 1.0
    keys = exact.k.shape[2]
    if operator.tags.solves:  # of G + rho I, keys of norm <= 1
        return (1 + keys / 0.1 / 16) ** (1 + operator.anchor.shifts)
    if operator.tags.degree is None or not operator.tags.normalises or operator.tags.degree == 1:
        return 1.0
    # sums of features are of order one where the kernel itself, and with it the denominator, may be small
    x = F.normalize(exact.q, dim=-1) @ F.normalize(exact.k, dim=-1).mT
    kernel = operator.link.value(x, operator.bind(4, 4).coefficients).tril().sum(-1)
    return max(1.0, (torch.arange(1, keys + 1) / kernel).max().item() / 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [*KINDS, "clustered", "duplicate"])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BUDGET)
def test_error_budget(name: str, path: str, kind: str, dtype: torch.dtype) -> None:
    """In low precision: at most twice the error of the same-precision definition, for the output and every gradient."""
    operator64 = randomised(OPERATORS[name]())
    operator = randomised(OPERATORS[name]()).float()
    exact = inputs(Case(queries=40, keys=40, key_dim=8), scale=KINDS.get(kind, 1.0))
    with torch.no_grad():
        if kind == "clustered":
            exact.k.copy_(exact.k[:, :, :1] + 0.1 * exact.k)
        if kind == "duplicate":
            exact.k.copy_(exact.k[:, :, :1].expand_as(exact.k))
    low = exact.to(dtype)
    exact = low.to(torch.float64)
    try:
        got = low.run(operator, path)
    except PathError:
        assert name not in MUST_RUN[path]
        return
    assert got.dtype == dtype
    reference = low.run(operator, "dense")
    truth = exact.run(operator64, "dense")
    compute = torch.promote_types(dtype, torch.float32)
    magnified = condition(operator64, exact, path)
    triples = [(got, reference, truth)]
    triples += zip(gradients(got, low, operator), gradients(reference, low, operator), gradients(truth, exact, operator64), strict=True)
    for index, (a, b, t) in enumerate(triples):
        size = max(1.0, t.abs().max().item())  # inputs are of order one: a gradient that cancels to zero still rounds at that scale
        error, allowed = (a.double() - t).abs().max().item(), (b.double() - t).abs().max().item()
        # the floor: rounding of the result, and of scores whose exponential magnifies it, which the reference may win by luck
        # a gradient of a parameter is a sum over all rows, whose rounding grows with the root of their number
        terms = got[..., 0].numel() ** 0.5 if index > 3 else 1.0
        # the derivative of a quotient or an inverse has it twice
        grown = magnified if index == 0 else magnified**2
        floor = (16 if index < 4 else 32) * terms * torch.finfo(compute).eps * size * grown + (0 if dtype == compute else 2 * torch.finfo(dtype).eps * size)
        assert error <= 2 * allowed + floor + 1e-30, f"item {index}: error {error:.3g}, reference {allowed:.3g}, size {size:.3g}"


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["softmax", "sko", "squared_affine", "linear", "ridge", "ska-1", "retention", "softmax-window", "yat", "rewa"])
def test_future_does_not_leak(name: str, path: str) -> None:
    """Changing tokens >= t, to large ones too, leaves outputs < t unchanged to the bit or to rounding."""
    operator, data, t = randomised(OPERATORS[name]()), inputs(CASES["causal"]), 9
    try:
        before = data.run(operator, path)
    except PathError:
        assert name not in MUST_RUN[path]
        return
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
        ("tiled", "yat", "zonal.algebra.link.Yat.derivative_into", lambda self, x, c, out: 2 * x * (2 + 0.1 - x) / (2 + 0.1 - 2 * x).square() * (1 + 1e-6)),
        ("tiled", "sko", "zonal.algebra.link.Gegenbauer.coefficient_vjp_into", lambda self, x, g, c, spare: torch.zeros_like(c, dtype=torch.float64)),
        ("tiled", "softmax", "zonal.execution.tiled._add_product", lambda total, a, b, scratch: total.add_(a @ b, alpha=1 + 1e-6)),
    ],
)
def test_suite_sees_a_broken_kernel(path: str, name: str, target: str, wrong: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite itself can fail: a kernel wrong in the sixth digit is caught."""
    check(randomised(OPERATORS[name]()), inputs(CASES["causal"]), path)
    monkeypatch.setattr(target, wrong)
    with pytest.raises(AssertionError, match="is off by"):
        check(randomised(OPERATORS[name]()), inputs(CASES["causal"]), path)


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


def test_fractional_degree_moves() -> None:
    """A learned degree gets a gradient, and an integer degree is the series up to it."""
    whole = Gegenbauer(degrees=(2.0,), manifold_dim=4, learn_weights=False)
    half = Gegenbauer(degrees=(2.5,), manifold_dim=4, learn_weights=False)
    x = torch.linspace(-1, 1, 9, dtype=torch.float64).view(1, 1, 1, -1)
    third = Gegenbauer(degrees=(3.0,), manifold_dim=4, learn_weights=False)
    middle = (whole.value(x, whole.coefficients({})) + third.value(x, third.coefficients({}))) / 2
    assert torch.allclose(half.value(x, half.coefficients({})), middle)
