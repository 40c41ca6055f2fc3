"""The compiled kernels for ridge and Koopman read-outs: against the float64 definition, with memories before and after,
and torch's machinery.
"""

import copy
import functools
import itertools
from collections.abc import Callable

import pytest
import torch
from kernels import general
from kernels.general import everything, sample
from matrix import CASES, Case, Inputs, inputs, randomised, tied
from torch import Tensor

import zonal
from zonal import Memory, Operator, anchor, link, prior, score
from zonal import mechanisms as m
from zonal.errors import NonFiniteError
from zonal.execution.call import Call, empty_memory, prepare, resumed
from zonal.execution.paths import ridge as ridge_path
from zonal.execution.paths.steps.ridge import RidgeSteps, ridge_refusal
from zonal.kernels import native as native_kernels
from zonal.kernels.op import encode
from zonal.kernels.ridge import RidgeInputs, RidgeSpec, ridge
from zonal.memory import RidgeStatistics
from zonal.memory.ridge import REMAKE
from zonal.models import ModelConfig

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")

# blocks that are not whole, inverses made again on the way, and keys that no query stands between
LARGE = {
    "causal 333": Case(batch=1, queries=333, keys=333, key_dim=6, value_dim=7),
    "a block": Case(queries=16, keys=16, key_dim=8, value_dim=8),
    "queries of a quarter": Case(batch=1, heads=8, kv_heads=2, queries=290, keys=290, key_dim=5, value_dim=16),
    "late queries": Case(batch=1, queries=60, keys=555, key_dim=5, value_dim=33, kv_heads=2),
    "early queries": Case(batch=1, queries=400, keys=300, key_dim=5, value_dim=17),
    "left padding": Case(padding="left", queries=210, keys=210, key_dim=4, value_dim=11),
    "random padding": Case(padding="random", queries=210, keys=210, key_dim=4, value_dim=11, kv_heads=1),
    "documents": Case(batch=1, packed=(0, 1, 40, 200, 211, 350), queries=350, keys=350, key_dim=4, value_dim=8),
    "strided": Case(batch=1, strided=True, queries=300, keys=300, key_dim=8, value_dim=12),
    "made again": Case(batch=1, heads=1, kv_heads=1, queries=1100, keys=1100, key_dim=24, value_dim=20),
}
KINDS: dict[str, Callable[[], Operator]] = {
    "ridge": m.ridge,
    "ridge-constant": lambda: m.ridge(learn_ridge=False),
    "ska-0": lambda: m.ska(power=0),
    "ska-1": lambda: m.ska(power=1),
    "ska-2": lambda: m.ska(power=2),
    "mixed": lambda: m.ska(power=(0, 2, 1, 1)),
    "unlimited": lambda: m.ska(power=1, key_limit=None, eps=1.0),
    "limited": lambda: Operator(score.Dot(scale=1.0, key_limit=1.5), link.Identity(), anchor.Koopman(power=1)),
    "mapped": lambda: Operator(score.Dot(scale=1.0, map="silu", key_limit=1.0), link.Identity(), anchor.Ridge()),
    "with itself": lambda: m.ska(power=1).replace(prior=prior.Causal(include_self=True)),
    "short chunks": lambda: m.ska(power=1, chunk=24),
    "long chunks": lambda: m.ska(power=2, chunk=200),
}


def call_of(operator: Operator, data: Inputs) -> Call:
    return prepare(
        operator,
        data.q,
        data.k,
        data.v,
        causal=data.causal,
        key_padding_mask=data.key_padding_mask,
        cu_seqlens=data.cu_seqlens,
    )


ROUNDINGS = {"short chunks": 2 * 24 * 10}
"""How many roundings of a result's largest entry are allowed, where more than 64.

The first rows already see a chunk of n = 24 keys with |k| <= 1. There P, about 1 / (rho + n), is a difference of
numbers of size 1 / rho = 10, and each of the power + 1 = 2 products with P loses up to n / rho roundings. Without
chunks the largest rows see a few keys.
"""


def assert_as_good(
    got: list[Tensor],
    other: list[Tensor],
    truth: list[Tensor],
    dtype: torch.dtype = torch.float32,
    roundings: float = 64,
) -> None:
    """At most twice the error of torch's blocks in the same precision, and a floor: P starts at 1 / rho = 10, and sums
    over heads may cancel.
    """
    for index, (a, b, t) in enumerate(zip(got, other, truth, strict=True)):
        assert a.dtype == b.dtype
        assert torch.isfinite(a).all()
        if not t.numel():
            continue
        size = max(1.0, t.abs().max().item())
        error, allowed = (a.double() - t).abs().max().item(), (b.double() - t).abs().max().item()
        terms = got[0][..., 0].numel() ** 0.5 if index > 3 else 1
        floor = roundings * terms * torch.finfo(torch.float32).eps * size
        floor += 0 if dtype == torch.float32 else torch.finfo(dtype).eps * size
        assert error <= 2 * allowed + floor, f"item {index}: error {error:.3g}, torch {allowed:.3g}, size {size:.3g}"


# the definition solves for each token, and takes most of the time: these stand for all kinds in what concerns the
# number type and what is made again
CHOSEN = ("ridge", "ska-2")
CALLS = [
    (name, case_name, dtype)
    for name in KINDS
    for case_name, case in {**CASES, **LARGE}.items()
    for dtype in (torch.float32, torch.bfloat16)
    if not case.key_bias
    and tied(KINDS[name](), case)
    and (name in CHOSEN or (dtype == torch.float32 and case_name != "made again"))
]


@pytest.mark.parametrize(("name", "case_name", "dtype"), CALLS)
def test_kernel_equals_definition(
    name: str, case_name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and every gradient, with at most twice the error of torch's blocks in the same precision."""
    case = {**CASES, **LARGE}[case_name]
    operator, data = randomised(KINDS[name]()).float(), inputs(case).to(dtype)
    exact, double = data.to(torch.float64), copy.deepcopy(operator).double()
    truth = everything(double, exact, "dense")
    called: list[str] = []
    original = ridge_path._numbers
    monkeypatch.setattr(ridge_path, "_numbers", lambda *given: called.append("kernel") or original(*given))
    got = everything(operator, data, "chunked")
    assert called == ["kernel"]
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    other = everything(operator, data, "chunked")
    assert_as_good(got, other, truth, dtype, ROUNDINGS.get(name, 64))
    assert called == ["kernel"]


def test_the_comparison_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ridge off by a hundredth is seen."""
    body = ridge.bodies["cpu"]
    original = body.forward
    monkeypatch.setattr(body, "forward", lambda inputs, spec: original(inputs._replace(rho=inputs.rho * 1.01), spec))
    operator, data = m.ska(power=1), inputs(LARGE["causal 333"]).to(torch.float32)
    exact, double = data.to(torch.float64), copy.deepcopy(operator).double()
    truth = everything(double, exact, "dense")
    got = everything(operator, data, "chunked")
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    with pytest.raises(AssertionError, match="item 0"):
        assert_as_good(got, everything(operator, data, "chunked"), truth)


# -- ill-conditioned keys --------------------------------------------------------------------------------------------


def few_directions(tokens: int, dim: int, rank: int, noise: float = 0.0, seed: int = 0) -> list[Tensor]:
    """Queries, keys of norm one along few directions, and values that are linear in them."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(dim, dim, generator=generator, dtype=torch.float64))[0]
    weights = torch.randn(1, 2, tokens, rank, generator=generator, dtype=torch.float64)
    k = weights @ basis[:rank] + noise * torch.randn(1, 2, tokens, dim, generator=generator, dtype=torch.float64)
    k = k / k.norm(dim=-1, keepdim=True)
    q = torch.randn(1, 2, tokens, dim, generator=generator, dtype=torch.float64) / dim**0.5
    v = k @ torch.randn(dim, 8, generator=generator, dtype=torch.float64) + 0.1 * torch.randn(
        1, 2, tokens, 8, generator=generator, dtype=torch.float64
    )
    return [q.float(), k.float(), v.float()]


def doubled(operator: Operator, tensors: list[Tensor]) -> Tensor:
    call = prepare(operator, *tensors, causal=True)
    seen, heads = call.visibility, tensors[0].shape[1]
    rho = call.bound.anchor.ridge(call.bound.anchor_params, heads)  # type: ignore[attr-defined]
    inputs = RidgeInputs(*tensors, torch.ones(heads), rho, lo=seen.lo, hi=seen.hi)
    return ridge(inputs, RidgeSpec((0,) * heads))[1]


@pytest.mark.parametrize(("rank", "noise", "eps"), [(5, 0.0, 0.1), (5, 0.0, 1e-4), (5, 1e-3, 1e-3), (24, 0.0, 1e-4)])
@pytest.mark.parametrize("power", [0, 1])
def test_few_directions_lose_no_digits(rank: int, noise: float, eps: float, power: int) -> None:
    """Rank-deficient keys with a small ridge: as near to the float64 definition as torch's blocks, outputs and
    gradients.
    """
    tensors = few_directions(2100, 24, rank, noise)
    operator = m.ska(power=power, eps=eps, key_limit=None).requires_grad_(False)

    def run(tensors: list[Tensor], path: str) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        y = zonal.attention(*leaves, operator, causal=True, path=path)
        return [y.detach(), *torch.autograd.grad(y.square().sum(), leaves)]

    truth = run([x.double() for x in tensors], "chunked")
    got = run(tensors, "chunked")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(native_kernels.VARIABLE, "off")
        other = run(tensors, "chunked")
    for a, b, t in zip(got, other, truth, strict=True):
        size = t.abs().max().clamp_min(1.0)
        assert (a.double() - t).abs().max() <= 2 * (b.double() - t).abs().max() + 1e-5 * size


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("path", ["chunked", "auto"])
@pytest.mark.parametrize(
    ("tokens", "dim", "eps", "power"),
    [(2, 80, 1e-3, 0), (9, 80, 1e-3, 0), (70, 80, 1e-3, 0), (2, 80, 0.1, 0), (6, 80, 1e-3, 1)],
)
def test_long_keys_over_a_small_ridge_lose_no_digits(
    tokens: int, dim: int, eps: float, power: int, path: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What cancels in P z, from 1 / rho down to 1 / (rho + z.z), is kept, in outputs and twice over in gradients of
    keys.
    """
    monkeypatch.setenv(native_kernels.VARIABLE, kernels)
    draw = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, tokens, dim, generator=draw, dtype=torch.float64).float() for _ in range(4)]
    operator = m.ridge(eps=eps, key_limit=None) if power == 0 else m.ska(power=power, eps=eps, key_limit=None)

    def run(dtype: torch.dtype, path: str) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in tensors[:3]]
        y = zonal.attention(*leaves, operator.to(dtype), causal=True, path=path)
        return [y.detach(), *torch.autograd.grad((y * tensors[3].to(dtype)).sum(), leaves)]

    truth = run(torch.float64, "dense")
    for index, (a, t) in enumerate(zip(run(torch.float32, path), truth, strict=True)):
        error = float((a.double() - t).abs().max() / t.abs().max())
        assert error < 1e-3, f"item {index} is off by {error:.3g} of its largest entry"


def test_float64_takes_over_where_float32_loses_digits() -> None:
    """And says so: a condition of 1e7 runs in float64, one of 1e3 does not; each head on its own."""
    bad, good = few_directions(2100, 24, 5), few_directions(2100, 24, 24)
    operator = m.ridge(eps=1e-4, key_limit=None)
    assert doubled(operator, bad).all()
    assert not doubled(m.ridge(key_limit=None), good).any()
    mixed = [torch.cat([a[:, :1], b[:, 1:]], 1) for a, b in zip(bad, few_directions(2100, 24, 24, seed=1), strict=True)]
    assert doubled(m.ridge(eps=2e-2, key_limit=None), mixed).flatten().tolist() == [True, False]


def test_a_million_tokens_along_few_directions() -> None:
    """Against the sums of all tokens in float64: what is read at the end has not drifted."""
    tokens, dim = 1 << 20, 8
    generator = torch.Generator().manual_seed(0)
    k = torch.nn.functional.pad(
        torch.nn.functional.normalize(torch.randn(1, 1, tokens, 3, generator=generator), dim=-1), (0, dim - 3)
    )
    v, q = (
        torch.randn(1, 1, tokens, 4, generator=generator) + k[..., :1],
        torch.randn(1, 1, 16, dim, generator=generator),
    )
    operator = m.ska(power=1, key_limit=None)
    every = torch.cat([torch.zeros(1, 1, tokens - 16, dim), q], 2)
    with torch.no_grad():
        y = zonal.attention(every, k, v, operator, causal=True, path="chunked")[:, :, -1:]
        memory = Memory.empty(operator, 1, 1, dim, 4, dtype=torch.float64).absorb(
            k[:, :, :-1].double(), v[:, :, :-1].double()
        )
        expected = memory.read(q[:, :, -1:].double())
    assert (y - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("limit", [None, 1.0])
def test_keys_that_are_not_finite_are_an_error(number: float, limit: float | None) -> None:
    q, k, v = (x.detach().clone() for x in sample(100))
    k[1, 0, 50, 2] = number
    with pytest.raises(NonFiniteError, match="not positive definite"):
        zonal.attention(q, k, v, m.ska(power=1, key_limit=limit), causal=True, path="chunked")


@pytest.mark.parametrize("where", ["q", "v"])
def test_nan_stays_where_it_is(where: str) -> None:
    """A NaN query spoils its own row, a NaN value one column of the rows that see it, and nothing else."""
    q, k, v = (x.detach().clone() for x in sample(300))
    (q if where == "q" else v)[0, 1, 130] = float("nan")
    bad = torch.isnan(zonal.attention(q, k, v, m.ska(power=1), causal=True, path="chunked")).any(-1)
    expected = torch.zeros_like(bad)
    expected[0, 1, slice(130, 131) if where == "q" else slice(131, None)] = True
    assert torch.equal(bad, expected)


# -- memories --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [(0, 40, 41, 160), (0, 160), (0, 80, 160)])
@pytest.mark.parametrize("name", ["ridge", "ska-0", "ska-1", "ska-2", "with itself"])
def test_pieces_over_a_memory_are_the_whole(name: str, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, the memory at the end and all gradients through it."""
    operator = randomised(KINDS[name]()).float()
    data = inputs(Case(heads=4, kv_heads=2, queries=160, keys=160, key_dim=4, value_dim=6, padding="random")).to(
        torch.float32
    )
    exact, double = data.to(torch.float64), copy.deepcopy(operator).double()

    def run(operator: Operator, data: Inputs) -> tuple[Tensor, RidgeStatistics]:
        memory: Memory = Memory.empty(operator, 2, 2, 4, 6, dtype=data.q.dtype)
        parts = []
        assert data.key_padding_mask is not None
        for start, stop in itertools.pairwise(cuts):
            part = slice(start, stop)
            y, memory = zonal.attention(
                data.q[:, :, part], data.k[:, :, part], data.v[:, :, part], operator, causal=True,
                key_padding_mask=data.key_padding_mask[:, part],
                memory=memory, path="chunked",
            )  # fmt: skip
            parts.append(y)
        assert isinstance(memory, RidgeStatistics)
        return torch.cat(parts, 2), memory

    def gradients(operator: Operator, data: Inputs, y: Tensor, memory: RidgeStatistics) -> list[Tensor]:
        leaves = [data.q, data.k, data.v, *operator.parameters()]
        loss = y.double().square().sum() + memory.gram.sin().sum() + memory.cross.cos().sum()
        return [y.detach(), *torch.autograd.grad(loss, leaves), memory.gram.detach(), memory.cross.detach()]

    truth = gradients(double, exact, exact.run(double, "dense"), run(double, exact)[1])
    called: list[int] = []
    original = ridge_path._numbers
    monkeypatch.setattr(
        ridge_path, "_numbers", lambda call, *rest: called.append(call.shape.keys) or original(call, *rest)
    )
    y, memory = run(operator, data)
    got = gradients(operator, data, y, memory)
    assert called == [b - a for a, b in itertools.pairwise(cuts)]
    assert memory.count == cuts[-1]
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    y, memory = run(operator, data)
    assert_as_good(got, gradients(operator, data, y, memory), truth)


# -- a decoder's steps -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [tuple(range(41)), (0, 7, 23, 24, 40)])
@pytest.mark.parametrize(
    "name",
    ["ridge", "ridge-constant", "ska-0", "ska-1", "ska-2", "mixed", "unlimited", "limited", "mapped", "with itself"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_equal_the_definition(
    name: str, cuts: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token and a few at once, from an empty memory; the memory given is not changed, and the one left is
    torch's.
    """
    operator = randomised(KINDS[name]()).float()
    data = inputs(Case(heads=4, kv_heads=2, queries=40, keys=40, key_dim=5, value_dim=6, strided=True)).to(dtype)
    exact = data.to(torch.float64)
    called: list[int] = []
    original = RidgeSteps.run
    monkeypatch.setattr(RidgeSteps, "run", lambda *given: called.append(given[1].shape[2]) or original(*given))
    memory: Memory = Memory.empty(operator, 2, 2, 5, 6, dtype=dtype)
    parts, memories = [], [memory]
    with torch.no_grad():
        expected = exact.run(copy.deepcopy(operator).double(), "dense")
        for start, stop in itertools.pairwise(cuts):
            part = slice(start, stop)
            y, memory = zonal.attention(
                data.q[:, :, part],
                data.k[:, :, part],
                data.v[:, :, part],
                operator,
                causal=True,
                memory=memory,
                path="streaming",
            )
            parts.append(y)
            memories.append(memory)
        assert called == [b - a for a, b in itertools.pairwise(cuts)]
        y = torch.cat(parts, 2)
        assert y.dtype == dtype
        assert (y.double() - expected).abs().max() <= (2e-6 if dtype == torch.float32 else 1e-2) * expected.abs().max()
        absorbed = Memory.empty(operator, 2, 2, 5, 6, dtype=dtype).absorb(data.k, data.v)
        assert memory.count == 40
        assert isinstance(memory, RidgeStatistics)
        assert memory.inverse is not None
        assert memory.inverse.age == 40
        for key, value in absorbed.tensors().items():
            assert torch.allclose(memory.tensors()[key].double(), value.double(), rtol=1e-6, atol=1e-6), key
        again = memories[len(memories) // 2].tensors()
        middle = Memory.empty(operator, 2, 2, 5, 6, dtype=dtype).absorb(
            data.k[:, :, : cuts[len(memories) // 2]], data.v[:, :, : cuts[len(memories) // 2]]
        )
        for key, value in middle.tensors().items():
            assert torch.allclose(again[key].double(), value.double(), rtol=1e-6, atol=1e-6), key


def test_an_old_inverse_is_made_again_and_does_not_drift() -> None:
    """Past REMAKE tokens along few directions, steps still read what all tokens' sums give."""
    operator = m.ska(power=1, eps=1e-3).requires_grad_(False)
    q, k, v = few_directions(REMAKE + 300, 12, 3)
    memory: Memory = Memory.empty(operator, 1, 2, 12, 8)
    ages = []
    for t in range(q.shape[2]):
        y, memory = zonal.attention(
            *(x[:, :, t : t + 1] for x in (q, k, v)), operator, causal=True, memory=memory, path="streaming"
        )
        ages.append(memory.inverse.age)  # type: ignore[attr-defined]
    assert max(ages) == REMAKE
    assert ages[-1] == 300
    expected = zonal.attention(q.double(), k.double(), v.double(), operator, causal=True, path="chunked")[:, :, -1:]
    assert (y - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_learned_ridge_that_changed_is_seen_by_the_next_step() -> None:
    operator = m.ska(power=1)
    q, k, v = (x.detach() for x in sample(30))
    memory: Memory = Memory.empty(operator, 2, 2, 4, 4)
    with torch.no_grad():
        _, memory = zonal.attention(q[:, :, :28], k[:, :, :28], v[:, :, :28], operator, causal=True, memory=memory)
        _, memory = zonal.attention(
            q[:, :, 28:29], k[:, :, 28:29], v[:, :, 28:29], operator, causal=True, memory=memory, path="streaming"
        )
        for parameter in operator.parameters():
            parameter.add_(0.5)
        y, _ = zonal.attention(
            q[:, :, 29:], k[:, :, 29:], v[:, :, 29:], operator, causal=True, memory=memory, path="streaming"
        )
        expected = zonal.attention(
            q.double(), k.double(), v.double(), copy.deepcopy(operator).double(), causal=True, path="dense"
        )[:, :, 29:]
    assert (y - expected).abs().max() < 1e-5 * expected.abs().max()


def test_which_steps_are_refused() -> None:
    q, k, v = (x[:, :, :1] for x in sample(4))
    operator = m.ska(power=1)

    def why(operator: Operator, *tensors: Tensor) -> str:
        return str(ridge_refusal(prepare(operator, *tensors, causal=True)))

    with torch.no_grad():
        assert why(operator, q, k, v) == "None"
        assert "whole chunks" in why(m.ska(chunk=4), q, k, v)
        assert "follows the keys" in why(m.ska(chunk=4, running_max=True), q, k, v)
        assert "float64" in why(operator, q.double(), k.double(), v.double())
        assert "kind 'features'" in why(m.linear(), q, k, v)
        assert "1 to 16" in why(operator, *(x.detach() for x in sample(17)))
    assert "no gradients" in why(operator, q, k, v)


# -- its limits ------------------------------------------------------------------------------------------------------


run = functools.partial(general.run, path="chunked")


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_bits_again(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        operator, tensors = m.ska(power=1), sample(heads=4, dim=24)
        first = run(operator, tensors)
        assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, run(operator, tensors), strict=True))
    finally:
        torch.set_num_threads(before)


def test_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = sample(20)
    call = prepare(m.ska(power=1), q, k, v, causal=True)
    assert ridge_path.refusal(call) is None
    assert ridge_path.refusal(resumed(call, empty_memory(call))) is None
    assert "one solve serves" in str(ridge_path.refusal(prepare(m.ska(), q, k, v, causal=False)))
    assert "follows the keys" in str(
        ridge_path.refusal(prepare(m.ska(chunk=4, running_max=True), q, k, v, causal=True))
    )
    chunks = prepare(m.ska(chunk=4), q, k, v, causal=True)
    assert ridge_path.refusal(chunks) is None
    assert "whole chunks" in str(ridge_path.refusal(resumed(chunks, empty_memory(chunks))))
    assert "float64" in str(ridge_path.refusal(prepare(m.ska(), q.double(), k.double(), v.double(), causal=True)))
    assert "anchor Row" in str(ridge_path.refusal(prepare(m.linear(), q, k, v, causal=True)))
    assert zonal.explain(m.ska(), (1, 8, 4096, 32), causal=True).ridge == "a compiled kernel"
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    assert "ZONAL_KERNELS=off" in str(ridge_path.refusal(call))
    assert "ZONAL_KERNELS=off" in zonal.explain(m.ska(), (1, 8, 4096, 32), causal=True).ridge


# -- torch's machinery -----------------------------------------------------------------------------------------------


def arguments(learned: bool = True, memory: bool = True, power: int = 1, fading: bool = False) -> tuple:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (x.detach().requires_grad_(learned) for x in sample(23))
    seen = prepare(m.ska(), q, k, v, causal=True).visibility
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[0, :3] = False
    before = torch.randn(2, 2, 5, 4, generator=generator, dtype=torch.float64)
    parts = [before.mT @ before, before.mT @ before, before.mT @ before.roll(1, 2), before[:, :, -1]]
    parts = [x.detach().clone().requires_grad_(learned) for x in parts] if memory else [None] * 4
    scale, rho = (
        torch.full((2,), 0.7, dtype=torch.float64, requires_grad=learned),
        torch.full((2,), 0.3, dtype=torch.float64, requires_grad=learned),
    )
    inputs = RidgeInputs(q, k, v, scale, rho, *parts, key_mask=mask, lo=seen.lo, hi=seen.hi)
    if fading:
        level = torch.rand(2, 2, 4, generator=generator, dtype=torch.float64).requires_grad_(learned)
        decay = (-0.1 * mask[:, None] * torch.rand(2, 2, 23, dtype=torch.float64)).requires_grad_(learned)
        inputs = inputs._replace(level=level if memory else None, log_decay=decay, passed=torch.tensor([5, 3]))
    return *inputs, encode(RidgeSpec((power, power // 2), 1.0))


def test_opcheck() -> None:
    torch.library.opcheck(ridge.operator, arguments())
    torch.library.opcheck(ridge.operator, arguments(learned=False))
    torch.library.opcheck(ridge.operator, arguments(memory=False, power=0))
    torch.library.opcheck(ridge.operator, arguments(fading=True))
    torch.library.opcheck(ridge.operator, arguments(fading=True, memory=False, learned=False))


def test_second_derivatives_are_refused() -> None:
    general.check_second_derivatives(m.ska(power=1), sample(20), "chunked")


def test_checkpointing_autocast_and_inference_mode() -> None:
    general.check_modes(m.ska(power=1), sample(), "chunked")


def test_a_training_step_compiles_without_a_break() -> None:
    general.check_compiled_training_step(ModelConfig(50, 32, ("ska(power=1)", "ska"), 2, conv=4), 140)


# -- the planner -----------------------------------------------------------------------------------------------------


def test_long_sequences_cost_twice_as_much_when_twice_as_long() -> None:
    times = [
        zonal.explain(m.ska(power=1), (1, 8, n, 56), causal=True).plan.estimates[0].seconds
        for n in (8192, 16384, 32768)
    ]
    assert 1.9 < times[1] / times[0] < 2.05
    assert 1.9 < times[2] / times[1] < 2.05


def test_the_kernel_is_priced_below_torchs_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds() -> float:
        return zonal.explain(m.ska(power=1), (1, 8, 4096, 56), causal=True).plan.estimates[0].seconds

    fast = seconds()
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    assert fast < seconds()
