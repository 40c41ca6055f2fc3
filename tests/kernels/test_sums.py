"""The compiled kernel for sums over features: against the float64 definition, with memories before and after, and torch's machinery."""

import copy
import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import CASES, OPERATORS, Case, Inputs, inputs, randomised
from torch import Tensor

import zonal
from zonal import Memory, Operator, anchor, link, prior, score
from zonal import mechanisms as m
from zonal.errors import PathError
from zonal.execution import cost, native, native_sums
from zonal.execution.call import Call, prepare
from zonal.execution.chunked import chunked_refusal
from zonal.execution.constants import DEFAULT_CPU
from zonal.execution.cost_sums import work
from zonal.execution.problem import problem_of
from zonal.features import SymmetricPowers
from zonal.kernels import sums_ops
from zonal.kernels.cpp import build, library, sums_library
from zonal.memory.sums import anchored
from zonal.models import CausalLM, ModelConfig

pytestmark = pytest.mark.skipif(build.compiler() is None, reason="no C++ compiler on this machine")

# long enough for the state to be read, and for blocks that are not whole
LARGE = {
    "causal 333": Case(queries=333, keys=333, key_dim=6, value_dim=7),
    "one head 500": Case(batch=1, heads=1, kv_heads=1, queries=500, keys=500, key_dim=5, value_dim=20),
    "d 32": Case(batch=1, heads=2, kv_heads=2, queries=1500, keys=1500, key_dim=32, value_dim=32),
    "queries of a quarter": Case(heads=8, kv_heads=2, queries=290, keys=290, key_dim=4, value_dim=16),
    "late queries": Case(queries=100, keys=555, key_dim=5, value_dim=33, kv_heads=2),
    "early queries": Case(queries=400, keys=300, key_dim=5, value_dim=17),
    "bidirectional": Case(queries=270, keys=410, key_dim=5, value_dim=15, causal=False),
    "left padding": Case(padding="left", queries=350, keys=350, key_dim=4, value_dim=11),
    "random padding": Case(padding="random", queries=350, keys=350, key_dim=4, value_dim=11, kv_heads=1),
    "documents": Case(batch=1, packed=(0, 1, 40, 300, 311, 650), queries=650, keys=650, key_dim=4, value_dim=8),
    "key bias": Case(key_bias=True, padding="random", queries=310, keys=310, key_dim=4, value_dim=9, kv_heads=2),
    "strided": Case(strided=True, queries=300, keys=300, key_dim=8, value_dim=12),
}
KINDS: dict[str, Callable[[], Operator]] = {
    **OPERATORS,
    "squared_affine-count": lambda: m.squared_affine(learn_bias=True).replace(anchor=anchor.Count()),
    "squared_affine-raw": lambda: m.squared_affine().replace(anchor=anchor.Raw()),
    "squared_affine-strict": lambda: m.squared_affine().replace(prior=prior.Causal(include_self=False)),
    "squared_affine-chunk": lambda: m.squared_affine().replace(prior=prior.ChunkCausal(24)),
    "sko-1": lambda: m.sko(degrees=(1.0,), manifold_dim=4),
    "sko-3": lambda: m.sko(degrees=(3.0, 2.0), manifold_dim=4),
    "degree-6": lambda: Operator(score.Cosine(learn_temperature=True), link.PolynomialSquare((0.2, 0.5, 0.3, 0.4), floor=0.01, learn=True), anchor.Row()),
    "squared_affine-decay": lambda: m.squared_affine(learn_bias=True).replace(prior=prior.Decay((0.9, 0.99))),
    "squared_affine-decay-count": lambda: m.squared_affine().replace(prior=(prior.Decay((0.7,)), prior.Causal(include_self=False)), anchor=anchor.Count()),
    "identity-count": lambda: Operator(score.Dot(), link.Identity(), anchor.Count()),
    "linear-relu": lambda: Operator(score.Dot(map="relu"), link.Identity(), anchor.Row(allow_signed=True)),
}
# features of higher powers grow fast with the dimension, and a dense reference in float64 takes its time
HEAVY = {"sko-3", "degree-6", "sko", "polynomial_square"}


def call_of(operator: Operator, data: Inputs) -> Call:
    return prepare(
        operator, data.q, data.k, data.v, causal=data.causal, key_padding_mask=data.key_padding_mask, cu_seqlens=data.cu_seqlens, key_bias=data.key_bias
    )


def taken(operator: Operator, case: Case) -> bool:
    """Whether the kernel runs this pair in float32."""
    if operator.tags.solves or (operator.tags.decays and not case.causal):
        return False
    call = call_of(operator, inputs(case).to(torch.float32))
    return chunked_refusal(call) is None and native_sums.refusal(call) is None


def everything(operator: Operator, data: Inputs, y: Tensor) -> list[Tensor]:
    leaves = [data.q, data.k, data.v, *([] if data.key_bias is None else [data.key_bias]), *operator.parameters()]
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y.dtype)
    found = torch.autograd.grad((y * weight).sum(), leaves, allow_unused=True)
    return [y.detach(), *(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True))]


def assert_as_good(got: list[Tensor], other: list[Tensor], truth: list[Tensor], dtype: torch.dtype = torch.float32) -> None:
    """At most twice the error of another run in the same precision, and a floor of rounding (gradients may cancel)."""
    for index, (a, b, t) in enumerate(zip(got, other, truth, strict=True)):
        assert a.dtype == b.dtype
        assert torch.isfinite(a).all()
        if not t.numel():
            continue
        size = max(1.0, t.abs().max().item())
        error, allowed = (a.double() - t).abs().max().item(), (b.double() - t).abs().max().item()
        floor = (64 if index else 16) * torch.finfo(torch.float32).eps * size * (got[0][..., 0].numel() ** 0.5 if index > 3 else 1)
        floor += 0 if dtype == torch.float32 else torch.finfo(dtype).eps * size
        assert error <= 2 * allowed + floor, f"item {index}: error {error:.3g}, torch {allowed:.3g}, size {size:.3g}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case_name", [*CASES, *LARGE])
@pytest.mark.parametrize("name", KINDS)
def test_kernel_equals_definition(name: str, case_name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and every gradient, with at most twice the error of the dense path in the same precision."""
    case = {**CASES, **LARGE}[case_name]
    operator = randomised(KINDS[name]()).float()
    if (name in HEAVY and case_name == "d 32") or not taken(operator, case):
        return
    data = inputs(case).to(dtype)
    exact, double = data.to(torch.float64), copy.deepcopy(operator).double()
    truth = everything(double, exact, exact.run(double, "dense"))
    called: list[str] = []
    original = native_sums.chunked
    monkeypatch.setattr(native_sums, "chunked", lambda *given: called.append("kernel") or original(*given))
    got = everything(operator, data, data.run(operator, "chunked"))
    assert called == ["kernel"]
    assert_as_good(got, everything(operator, data, data.run(operator, "dense")), truth, dtype)


def test_every_polynomial_link_is_met() -> None:
    """The test above runs each of them, and most of its long cases read the state."""
    met = {type(KINDS[name]().link).__name__ for name in KINDS if taken(randomised(KINDS[name]()).float(), CASES["causal"])}
    assert met == {"Gegenbauer", "Identity", "PolynomialSquare", "SquaredAffine"}
    read = {name for name, case in LARGE.items() if not case.packed and work(problem_of(call_of(m.squared_affine(), inputs(case).to(torch.float32)))).reads}
    assert read == {*LARGE} - {"documents"}


@pytest.mark.parametrize(("degree", "lowest", "dim"), [(1, 1, 5), (1, 0, 3), (2, 0, 1), (2, 0, 2), (2, 0, 6), (2, 0, 7), (3, 0, 4), (4, 0, 5), (5, 0, 3), (6, 0, 3)])
def test_features_are_those_of_memories(degree: int, lowest: int, dim: int) -> None:
    """The kernel's products, weighted and put in place, are SymmetricPowers' features; runs are what they say."""
    table = sums_library.tables(degree, lowest, dim)
    x = torch.randn(dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    low = [torch.ones((), dtype=torch.float64), *x]
    for a, b in list(zip(table.low_left.tolist(), table.low_right.tolist(), strict=True))[dim + 1 :]:
        low.append(low[a] * low[b])
    rows = torch.stack(low)
    found = torch.empty(table.left.shape[0], dtype=torch.float64)
    found[table.place.long()] = rows[table.left.long()] * rows[table.right.long()] * table.squares.double().sqrt()
    assert torch.allclose(found, SymmetricPowers(degree, lowest)(x), rtol=1e-13)
    assert torch.allclose(table.roots.double().square(), table.squares.double(), rtol=1e-6)
    assert (table.left.diff() >= 0).all()
    for a, end in enumerate(table.run_end.tolist()):
        assert (table.left[a:end] == table.left[a]).all()
        assert (table.right[a:end] == table.right[a] + torch.arange(end - a)).all()


# -- memories ----------------------------------------------------------------------------------------------------------------


@dataclass
class Fading:
    """A call with padding, a decay for each token and a bias for each key; as leaves, and which of the two the call has."""

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    log_decay: Tensor | None
    key_bias: Tensor | None

    @staticmethod
    def of(tokens: int = 300, what: tuple[str, ...] = (), strength: float = 0.05, queries: int | None = None, padded: bool = True) -> "Fading":
        data = inputs(Case(heads=4, kv_heads=2, queries=queries or tokens, keys=tokens, key_dim=4, value_dim=6, padding="random" if padded else ""))
        generator = torch.Generator().manual_seed(5)
        decay = -strength * torch.rand(2, 2, tokens, generator=generator, dtype=torch.float64).square()
        decay[:, :, 70::90] *= 400  # a sudden forgetting
        bias = torch.randn(2, 2, tokens, generator=generator, dtype=torch.float64)
        return Fading(data.q, data.k, data.v, data.key_padding_mask, decay if "decay" in what else None, bias if "bias" in what else None)

    def to(self, dtype: torch.dtype) -> "Fading":
        q, k, v, decay, bias = (None if x is None else x.detach().to(dtype).requires_grad_() for x in (self.q, self.k, self.v, self.log_decay, self.key_bias))
        assert q is not None
        assert k is not None
        assert v is not None
        return Fading(q, k, v, self.mask, decay, bias)

    @property
    def leaves(self) -> list[Tensor]:
        return [x for x in (self.q, self.k, self.v, self.log_decay, self.key_bias) if x is not None]

    def part(self, start: int, stop: int) -> dict[str, Any]:
        """Arguments of attention for some of the tokens."""
        part = slice(start, stop)
        return {
            "q": self.q[:, :, part], "k": self.k[:, :, part], "v": self.v[:, :, part], "key_padding_mask": None if self.mask is None else self.mask[:, part],
            "log_decay": None if self.log_decay is None else self.log_decay[:, :, part], "key_bias": None if self.key_bias is None else self.key_bias[:, :, part],
        }  # fmt: skip

    def run(self, operator: Operator, path: str) -> Tensor:
        call = self.part(0, self.k.shape[2])
        return zonal.attention(**{**call, "q": self.q}, operator=operator, causal=True, path=path)

    def state(self, operator: Operator) -> Tensor:
        """The state after all tokens as torch sums it up."""
        memory = Memory.empty(operator, 2, 2, 4, 6, dtype=self.q.dtype)
        return memory.absorb(self.k, self.v, self.mask, self.log_decay, self.key_bias).state  # type: ignore[attr-defined]


PIECES = {
    "squared_affine": (), "squared_affine-strict": (), "squared_affine-count": ("bias",), "linear": ("decay",), "sko-3": ("decay",),
    "polynomial_square": ("bias",), "squared_affine-decay": ("bias",), "retention": (), "squared_affine-raw": ("decay", "bias"), "squared_affine-chunk": ("bias",),
}  # fmt: skip


@pytest.mark.parametrize("cuts", [(0, 40, 41, 300), (0, 300), (0, 150, 300), (0, 5, 13, 24, 72, 300)])
@pytest.mark.parametrize("name", PIECES)
def test_pieces_over_a_memory_are_the_whole(name: str, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, the memory at the end and all gradients through it: pieces against one call, and against what the memory itself absorbs."""
    operator = randomised(KINDS[name]()).float()
    data = Fading.of(what=PIECES[name]).to(torch.float32)
    exact, double = data.to(torch.float64), copy.deepcopy(operator).double()
    weight = torch.randn(exact.state(double).shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def run(operator: Operator, data: Fading) -> tuple[Tensor, Memory]:
        memory = Memory.empty(operator, 2, 2, 4, 6, dtype=data.q.dtype)
        parts = []
        for start, stop in itertools.pairwise(cuts):
            y, memory = zonal.attention(**data.part(start, stop), operator=operator, causal=True, memory=memory, path="chunked")
            parts.append(y)
        return torch.cat(parts, 2), memory

    def gradients(operator: Operator, data: Fading, y: Tensor, state: Tensor) -> list[Tensor]:
        loss = y.double().square().sum() + (state.double() * weight).sum()
        return [y.detach(), *torch.autograd.grad(loss, [*data.leaves, *operator.parameters()]), state.detach()]

    truth = gradients(double, exact, exact.run(double, "dense"), exact.state(double))
    called: list[int] = []
    original = native_sums.chunked
    monkeypatch.setattr(native_sums, "chunked", lambda call, memory: called.append(call.shape[3]) or original(call, memory))
    y, memory = run(operator, data)
    got = gradients(operator, data, y, memory.state)  # type: ignore[attr-defined]
    assert called == [b - a for a, b in itertools.pairwise(cuts)]
    assert memory.count == 300
    assert data.mask is not None
    assert torch.equal(memory.real, data.mask.sum(1))  # type: ignore[attr-defined]
    monkeypatch.setenv(native.VARIABLE, "off")
    y, by_torch = run(operator, data)
    assert memory.kind == by_torch.kind
    for key, mine in memory.tensors().items():
        assert torch.allclose(mine.double(), by_torch.tensors()[key].double(), rtol=1e-4, atol=1e-4), key
    assert_as_good(got, gradients(operator, data, y, by_torch.state), truth)  # type: ignore[attr-defined]


def test_streaming_goes_on_from_the_kernels_memory() -> None:
    operator = m.squared_affine()
    q, k, v = sample(150)
    with torch.no_grad():
        _, memory = zonal.attention(q[:, :, :149], k[:, :, :149], v[:, :, :149], operator, causal=True, return_memory=True, path="chunked")
        y, _ = zonal.attention(q[:, :, 149:], k[:, :, 149:], v[:, :, 149:], operator, causal=True, memory=memory, path="streaming")
        expected = zonal.attention(q.double(), k.double(), v.double(), operator, causal=True, path="dense")[:, :, 149:]
    assert (y - expected).abs().max() < 1e-4


# -- decays and key biases ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [1e-3, 0.05, 30.0])
@pytest.mark.parametrize("what", [("decay",), ("bias",), ("decay", "bias")], ids="-".join)
@pytest.mark.parametrize("name", ["squared_affine", "squared_affine-strict", "squared_affine-raw", "squared_affine-count", "linear-relu", "sko-3"])
def test_decays_and_biases_of_tokens(name: str, what: tuple[str, ...], strength: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and all gradients, log_decay's and key_bias's among them, from decays that hardly forget to ones that forget all at once."""
    operator = randomised(KINDS[name]()).float()
    # where all a query sees has faded below the smallest float its row is nothing: operators that may give a query's own key nothing are spared that
    data = Fading.of(333, what, min(strength, 0.05) if name in ("squared_affine-strict", "linear-relu") else strength, queries=301).to(torch.float32)
    exact, double = data.to(torch.float64), copy.deepcopy(operator).double()

    def found(operator: Operator, data: Fading, path: str) -> list[Tensor]:
        y = data.run(operator, path)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y)
        return [y.detach(), *torch.autograd.grad((y * weight).sum(), [*data.leaves, *operator.parameters()], allow_unused=False)]

    called: list[str] = []
    original = native_sums.chunked
    monkeypatch.setattr(native_sums, "chunked", lambda *given: called.append("kernel") or original(*given))
    got = found(operator, data, "chunked")
    assert called == ["kernel"]
    assert_as_good(got, found(operator, data, "dense"), found(double, exact, "dense"))


def test_decays_within_documents() -> None:
    """What fades in one document does not in the next."""
    operator, generator = m.squared_affine(), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 400, 4, generator=generator).requires_grad_() for _ in range(3))
    decay = (-0.1 * torch.rand(1, 2, 400, generator=generator)).requires_grad_()
    found = []
    for path, dtype in (("chunked", torch.float32), ("dense", torch.float32), ("dense", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, decay)]
        y = zonal.attention(*leaves[:3], operator, causal=True, cu_seqlens=torch.tensor([0, 3, 120, 400]), log_decay=leaves[3], path=path)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
    assert_as_good(*found)


def test_strong_decays_lose_no_digits() -> None:
    """A hundred nats a token: neighbours still count what they should, and a query that sees only what has vanished gets nothing."""
    operator, generator = m.squared_affine(), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 300, 4, generator=generator) for _ in range(3))
    decay = torch.full((1, 1, 300), -100.0)
    decay[..., 5::7] = -0.5
    y = zonal.attention(q, k, v, operator, causal=True, log_decay=decay, path="chunked")
    expected = zonal.attention(q.double(), k.double(), v.double(), operator, causal=True, log_decay=decay, path="dense")
    assert (y - expected).abs().max() < 2e-6 * expected.abs().max()
    strict = operator.replace(prior=prior.Causal(include_self=False))
    y = zonal.attention(q, k, v, strict, causal=True, log_decay=torch.full_like(decay, -200.0), path="chunked")
    assert (y == 0).all()


# -- rows that cancel --------------------------------------------------------------------------------------------------------


def cancelling(gap: float, tokens: int, duplicates: bool) -> list[Tensor]:
    """Unit queries and keys with q . k = -b (1 + gap) nearly everywhere for the bias b = 0.5: (x + b)^2 is then about (b gap)^2."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 2, 1 if duplicates else tokens, 6, generator=generator, dtype=torch.float64)
    across = torch.nn.functional.normalize(noise, dim=-1).expand(1, 2, tokens, 6)
    x = -0.5 * (1 + gap)
    k = torch.cat([torch.full((1, 2, tokens, 1), x, dtype=torch.float64), math.sqrt(1 - x * x) * across, torch.zeros(1, 2, tokens, 1, dtype=torch.float64)], -1)
    q = torch.zeros(1, 2, tokens, 8, dtype=torch.float64)
    q[..., 0] = 1
    q[:, :, ::3] = torch.randn(1, 2, len(range(0, tokens, 3)), 8, generator=generator, dtype=torch.float64)  # a third are queries like any other
    return [q, k, torch.randn(1, 2, tokens, 5, generator=generator, dtype=torch.float64)]


@pytest.mark.parametrize("duplicates", [False, True], ids=["keys", "one key again and again"])
@pytest.mark.parametrize("gap", [0.3, 0.05, 0.01, 1e-3])
def test_rows_that_cancel_are_summed_directly(gap: float, duplicates: bool) -> None:
    """4096 keys at which (x + b)^2 nearly vanishes: outputs and gradients are as good as the definition's in the same precision.

    One key again and again rounds alike at every addition, and what its gradients are made of cancels; errors of 1e-5, and what l' / l makes of
    them, are then allowed besides.
    """
    operator = Operator(score.Cosine(), link.SquaredAffine(bias=0.5, learn_bias=True), anchor.Row())
    tensors = cancelling(gap, 4096, duplicates)
    found = []
    for path, dtype in (("chunked", torch.float32), ("dense", torch.float32), ("dense", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        y = zonal.attention(*leaves, operator, causal=True, path=path)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [*leaves, *operator.parameters()])])
    if not duplicates:
        return assert_as_good(*found)
    noise = 1e-5 * found[2][0].abs().max()
    for index, (a, b, t) in enumerate(zip(*found, strict=True)):
        allowed = noise * (max(4 / gap, 32) if index else 1) * (64 if index > 1 else 1)  # each key's is a sum over 4096 queries
        assert (a - t).abs().max() <= 2 * (b - t).abs().max() + allowed, index


def test_only_rows_that_cancel_are_summed_directly() -> None:
    q, k, v = (x.float() for x in cancelling(0.01, 1000, False))
    operator = Operator(score.Cosine(), link.SquaredAffine(bias=0.5), anchor.Row())
    seen = prepare(operator, q, k, v, causal=True).visibility
    code = native.code_of(operator.link)
    assert code is not None
    spec = sums_ops.SumsSpec(code, 2, 0, "row", True, positive=True)
    numbers = torch.full((2, 1), 0.5), torch.tensor([[0.25, 1.0, 1.0]]).repeat(2, 1)
    apart = sums_library.forward(q, k, v, torch.ones(2), *numbers, sums_library.places(None, seen.lo, seen.hi, None, 1000), None, None, None, None, spec)[3]
    rows = torch.arange(1000)
    assert apart[0, :, (rows % 3 > 0) & (rows >= 128)].all()
    assert not apart[0, :, rows % 3 == 0].any()


@pytest.mark.parametrize("gap", [0.3, 0.05, 1e-5])
def test_rows_that_cancel_in_a_memory(gap: float) -> None:
    """What a memory brought cannot be summed again: a row is good to what rounding leaves of it, or NaN, and never a wrong number."""
    operator = Operator(score.Cosine(), link.SquaredAffine(bias=0.5), anchor.Row())
    q, k, v = (x.float() for x in cancelling(gap, 600, False))
    with torch.no_grad():
        memory = Memory.empty(operator, 1, 2, 8, 5).absorb(k[:, :, :500], v[:, :, :500])
        y, _ = zonal.attention(q[:, :, 500:], k[:, :, 500:], v[:, :, 500:], operator, causal=True, memory=memory, path="chunked")
        truth = zonal.attention(q.double(), k.double(), v.double(), operator, causal=True, path="dense")[:, :, 500:]
    good = ~y.isnan()
    assert (y - truth)[good].abs().max() < 0.1 * truth.abs().max()
    assert good.all() == (gap > 1e-3)
    usual = torch.arange(500, 600) % 3 == 0
    assert (y - truth)[:, :, usual].abs().max() < 1e-4


def test_negative_sums_of_a_positive_link_are_no_numbers() -> None:
    """Torch's form of the chunked path and a memory's read-out, which see a row's sum only."""
    total = torch.tensor([[[[1.0, 2.0]], [[1.0, -1e-9]], [[0.0, 0.0]]]])
    y = anchored(total, m.squared_affine().bind(3, 3), torch.ones(1))[0, :, 0, 0]
    assert y[0] == 0.5
    assert y[1].isnan()
    assert y[2] == 0
    signed = Operator(score.Dot(), link.Identity(), anchor.Row(allow_signed=True))
    assert not anchored(total, signed.bind(3, 3), torch.ones(1)).isnan().any()


# -- its limits --------------------------------------------------------------------------------------------------------------


def sample(tokens: int = 200, dtype: torch.dtype = torch.float32, heads: int = 2, dim: int = 4, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, heads, tokens, dim, generator=generator).to(dtype).requires_grad_() for _ in range(3)]


def run(operator: Operator, tensors: list[Tensor]) -> list[Tensor]:
    y = zonal.attention(*tensors, operator, causal=True, path="chunked")
    return [y, *torch.autograd.grad(y.square().sum(), [*tensors, *operator.parameters()])]


@pytest.mark.parametrize("where", ["q", "k"])
def test_nan_stays_where_it_is(where: str) -> None:
    """A NaN key poisons the queries that see it, a NaN query itself, and nothing else."""
    q, k, v = (x.detach().clone() for x in sample(300))
    (q if where == "q" else k)[0, 1, 130] = float("nan")
    bad = torch.isnan(zonal.attention(q, k, v, m.squared_affine(), causal=True, path="chunked")).any(-1)
    expected = torch.zeros_like(bad)
    expected[0, 1, slice(130, 131) if where == "q" else slice(130, None)] = True
    assert torch.equal(bad, expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_same_bits_again(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        operator, tensors = m.squared_affine(learn_bias=True).replace(prior=prior.Decay((0.99,))), sample()
        first = run(operator, tensors)
        assert all(torch.equal(a, b) for _ in range(3) for a, b in zip(first, run(operator, tensors), strict=True))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["squared_affine", "sko-3", "identity-count"])
def test_few_heads_are_split_over_values(name: str) -> None:
    """One head on five threads: each has columns of the values, and their parts of dq and dk make the same gradient."""
    operator = randomised(KINDS[name]()).float()
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 1, 400, dim, generator=generator).requires_grad_() for dim in (5, 5, 43)]
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 5):
            torch.set_num_threads(threads)
            found.append(run(operator, tensors))
    finally:
        torch.set_num_threads(before)
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 2e-5 * (1 + b.abs().max())


def test_wrong_tables_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above can fail: one feature's weight off by a thousandth changes what comes from the state."""
    operator, tensors = m.squared_affine(), [x.detach() for x in sample(300)]
    good = zonal.attention(*tensors, operator, causal=True, path="chunked")
    original = sums_library.tables

    def broken(degree: int, lowest: int, dim: int) -> sums_library.Tables:
        table = original(degree, lowest, dim)
        squares = table.squares.clone()
        squares[-1] *= 1.001
        return table._replace(squares=squares)

    monkeypatch.setattr(sums_library, "tables", broken)
    bad = zonal.attention(*tensors, operator, causal=True, path="chunked")
    assert torch.equal(good[:, :, :64], bad[:, :, :64])
    assert (good - bad).abs().max() > 1e-5


def test_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = sample(20)
    call = prepare(m.squared_affine(), q, k, v, causal=True)
    assert native_sums.refusal(call) is None
    assert native_sums.refusal(call, "features") is None
    assert native_sums.refusal(call, "decayed") is None
    assert "'keys'" in str(native_sums.refusal(call, "keys"))
    assert native_sums.refusal(prepare(m.retention(), q, k, v, causal=True)) is None
    assert "ALiBi" in str(native_sums.refusal(prepare(m.squared_affine().replace(prior=prior.ALiBi()), q, k, v, causal=True)))
    assert native_sums.refusal(prepare(KINDS["squared_affine-chunk"](), q, k, v, causal=True), "features") is None
    assert "float64" in str(native_sums.refusal(prepare(m.squared_affine(), q.double(), k.double(), v.double(), causal=True)))
    page = zonal.explain(m.squared_affine(), (1, 8, 4096, 32), causal=True)
    assert page.sums == "a compiled kernel"
    monkeypatch.setenv(native.VARIABLE, "off")
    assert "ZONAL_KERNELS=off" in str(native_sums.refusal(call))
    assert "ZONAL_KERNELS=off" in zonal.explain(m.squared_affine(), (1, 8, 4096, 32), causal=True).sums


def test_without_a_compiler_torch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, tensors = m.squared_affine(), sample(200)
    expected = zonal.attention(*tensors, operator, causal=True, path="dense")
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.allclose(zonal.attention(*tensors, operator, causal=True, path="chunked"), expected, atol=1e-4)


def test_a_compiler_that_fails_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 1 && exit 0\necho 'error: no' >&2\nexit 1\n")
    fails.chmod(0o755)
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(fails))
    library._loaded.cache_clear()
    operator, tensors = m.squared_affine(), sample(200)
    try:
        with pytest.warns(UserWarning, match="in place of the compiled kernel"):
            y = zonal.attention(*tensors, operator, causal=True, path="chunked")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert torch.equal(zonal.attention(*tensors, operator, causal=True, path="chunked"), y)
        assert "could not be had" in str(native_sums.refusal(prepare(operator, *tensors, causal=True)))
    finally:
        library._loaded.cache_clear()
        library._failed.clear()


# -- torch's machinery -------------------------------------------------------------------------------------------------------


def arguments(learned: bool = True, fading: bool = False) -> tuple:
    operator, (q, k, v) = m.squared_affine(learn_bias=True), sample(23)
    call = prepare(operator, q, k, v, causal=True)
    code = native.code_of(operator.link)
    assert code is not None
    spec = sums_ops.SumsSpec(code, 2, 0, "row", True, 1e-12, keeps=True, positive=True)
    coefficients = torch.full((2, 1), 0.1).requires_grad_(learned)
    monomials = torch.tensor([[0.01, 0.2, 1.0]]).repeat(2, 1).requires_grad_(learned)
    mask = torch.ones(2, 23, dtype=torch.bool)
    mask[0, :3] = False
    state = torch.randn(2, 2, 15, 5, generator=torch.Generator().manual_seed(2)).abs().requires_grad_(learned)
    scale = torch.full((2,), 0.7, requires_grad=learned)
    seen = call.visibility
    decay = (-0.1 * mask[:, None] * torch.rand(2, 2, 23, dtype=torch.float64)).requires_grad_(learned) if fading else None
    bias = torch.rand(2, 2, 23).requires_grad_(learned) if fading else None
    before = torch.ones(2, dtype=torch.float64)
    return q, k, v, scale, coefficients, monomials, state, decay, bias, mask, seen.lo, seen.hi, None, before, sums_ops.encode(spec), 1


def test_opcheck() -> None:
    torch.library.opcheck(sums_ops.feature_sums, arguments())
    torch.library.opcheck(sums_ops.feature_sums, arguments(learned=False))
    torch.library.opcheck(sums_ops.feature_sums, arguments(fading=True))


def test_second_derivatives_are_refused() -> None:
    operator, tensors = m.squared_affine(), sample(20)
    y = zonal.attention(*tensors, operator, causal=True, path="chunked")
    with pytest.raises(PathError, match="no second derivative"):
        torch.autograd.grad(y.sum(), tensors, create_graph=True)


def test_checkpointing_autocast_and_inference_mode() -> None:
    operator, tensors = m.squared_affine(learn_bias=True), sample()
    plain = run(operator, tensors)

    def block(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zonal.attention(q, k, v, operator, causal=True, path="chunked")

    y = torch.utils.checkpoint.checkpoint(block, *tensors, use_reentrant=False)
    again = [y, *torch.autograd.grad(y.square().sum(), [*tensors, *operator.parameters()])]
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(block(*tensors), plain[0])
    with torch.inference_mode():
        assert torch.equal(block(*tensors), plain[0])


def test_a_call_compiles_without_a_break() -> None:
    operator, tensors = m.squared_affine(learn_bias=True), sample(150)
    compiled = torch.compile(run, fullgraph=False, backend="aot_eager")
    attended = torch.compile(lambda *x: zonal.attention(*x, operator, causal=True, path="chunked"), fullgraph=True, backend="aot_eager")
    assert torch.allclose(attended(*tensors), run(operator, tensors)[0], atol=1e-6)
    for a, b in zip(run(operator, tensors), compiled(operator, tensors), strict=True):
        assert (a - b).abs().max() < 1e-5 * (1 + b.abs().max())


def test_a_training_step_compiles_without_a_break(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tile kernel refused a traced model takes this one."""
    monkeypatch.setattr(native, "refusal", lambda call: "asked for")
    torch.manual_seed(0)
    model = CausalLM(ModelConfig(50, 32, ("sq", "sq"), 2, conv=4, rotary=True))
    tokens = torch.randint(0, 50, (2, 140))

    def step(tokens: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    found = []
    for once in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        loss = once(tokens)
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters()))])
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() < 1e-5


# -- the planner -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case_name", ["causal 333", "queries of a quarter", "bidirectional", "left padding"])
def test_the_planner_counts_what_the_kernel_does(case_name: str) -> None:
    """Linear in the tokens where the state is read; and never more than all pairs."""
    problem = problem_of(call_of(m.squared_affine(), inputs(LARGE[case_name]).to(torch.float32)))
    done = work(problem)
    assert 0 < done.absorbed <= problem.S
    assert done.reads <= (problem.T + 15) * problem.groups
    assert done.pairs < 0.6 * problem.T * problem.groups * problem.S


def test_long_sequences_cost_twice_as_much_when_twice_as_long() -> None:
    times = [cost.MODELS["chunked"](zonal.explain(m.squared_affine(), (1, 8, n, 16), causal=True).problem, DEFAULT_CPU).seconds for n in (8192, 16384, 32768)]
    assert 1.9 < times[1] / times[0] < 2.05
    assert 1.9 < times[2] / times[1] < 2.05
