"""What the compiled kernel for sums over features carries: memories before and after, decays and key biases; and rows
whose sums cancel.
"""

import copy
import itertools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernels.general import sample
from kernels.sums_cases import KINDS, assert_as_good
from matrix import Case, inputs, randomised
from torch import Tensor

import zonal
from zonal import Memory, Operator, anchor, link, prior, score
from zonal import mechanisms as m
from zonal.execution.call import prepare
from zonal.execution.paths import sums as sums_path
from zonal.execution.paths import tile as tile_path
from zonal.formula import FORMULAS
from zonal.kernels import native as native_kernels
from zonal.kernels.sums import SumsInputs, SumsSpec, places, summed, sums
from zonal.memory.sums import anchored
from zonal.nn.recurrence import ssd

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")

# -- memories --------------------------------------------------------------------------------------------------------


@dataclass
class Fading:
    """A call with padding, a decay for each token and a bias for each key; as leaves, and which of the two the call
    has.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    log_decay: Tensor | None
    key_bias: Tensor | None

    @staticmethod
    def of(
        tokens: int = 300,
        what: tuple[str, ...] = (),
        strength: float = 0.05,
        queries: int | None = None,
        padded: bool = True,
    ) -> "Fading":
        data = inputs(
            Case(
                heads=4,
                kv_heads=2,
                queries=queries or tokens,
                keys=tokens,
                key_dim=4,
                value_dim=6,
                padding="random" if padded else "",
            )
        )
        generator = torch.Generator().manual_seed(5)
        decay = -strength * torch.rand(2, 2, tokens, generator=generator, dtype=torch.float64).square()
        decay[:, :, 70::90] *= 400  # a sudden forgetting
        bias = torch.randn(2, 2, tokens, generator=generator, dtype=torch.float64)
        return Fading(
            data.q,
            data.k,
            data.v,
            data.key_padding_mask,
            decay if "decay" in what else None,
            bias if "bias" in what else None,
        )

    def to(self, dtype: torch.dtype) -> "Fading":
        q, k, v, decay, bias = (
            None if x is None else x.detach().to(dtype).requires_grad_()
            for x in (self.q, self.k, self.v, self.log_decay, self.key_bias)
        )
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
            "q": self.q[:, :, part], "k": self.k[:, :, part], "v": self.v[:, :, part],
            "key_padding_mask": None if self.mask is None else self.mask[:, part],
            "log_decay": None if self.log_decay is None else self.log_decay[:, :, part],
            "key_bias": None if self.key_bias is None else self.key_bias[:, :, part],
        }  # fmt: skip

    def run(self, operator: Operator, path: str) -> Tensor:
        call = self.part(0, self.k.shape[2])
        return zonal.attention(**{**call, "q": self.q}, operator=operator, causal=True, path=path)

    def state(self, operator: Operator) -> Tensor:
        """The state after all tokens as torch sums it up."""
        memory = Memory.empty(operator, 2, 2, 4, 6, dtype=self.q.dtype)
        return memory.absorb(self.k, self.v, self.mask, self.log_decay, self.key_bias).state  # type: ignore[attr-defined]


PIECES = {
    "squared_affine": (), "squared_affine-strict": (), "squared_affine-count": ("bias",), "linear": ("decay",),
    "sko-3": ("decay",),
    "polynomial_square": ("bias",), "squared_affine-decay": ("bias",), "retention": (),
    "squared_affine-raw": ("decay", "bias"), "squared_affine-chunk": ("bias",),
}  # fmt: skip


@pytest.mark.parametrize("cuts", [(0, 40, 41, 300), (0, 300), (0, 150, 300), (0, 5, 13, 24, 72, 300)])
@pytest.mark.parametrize("name", PIECES)
def test_pieces_over_a_memory_are_the_whole(name: str, cuts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, the memory at the end and all gradients through it: pieces against one call, and against what the memory
    itself absorbs.
    """
    operator = randomised(KINDS[name]()).float()
    data = Fading.of(what=PIECES[name]).to(torch.float32)
    exact, double = data.to(torch.float64), copy.deepcopy(operator).double()
    weight = torch.randn(exact.state(double).shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def run(operator: Operator, data: Fading) -> tuple[Tensor, Memory]:
        memory = Memory.empty(operator, 2, 2, 4, 6, dtype=data.q.dtype)
        parts = []
        for start, stop in itertools.pairwise(cuts):
            y, memory = zonal.attention(
                **data.part(start, stop), operator=operator, causal=True, memory=memory, path="chunked"
            )
            parts.append(y)
        return torch.cat(parts, 2), memory

    def gradients(operator: Operator, data: Fading, y: Tensor, state: Tensor) -> list[Tensor]:
        loss = y.double().square().sum() + (state.double() * weight).sum()
        return [y.detach(), *torch.autograd.grad(loss, [*data.leaves, *operator.parameters()]), state.detach()]

    truth = gradients(double, exact, exact.run(double, "dense"), exact.state(double))
    called: list[int] = []
    original = sums_path._run
    monkeypatch.setattr(
        sums_path, "_run", lambda call, *rest: called.append(call.shape.queries) or original(call, *rest)
    )
    y, memory = run(operator, data)
    got = gradients(operator, data, y, memory.state)  # type: ignore[attr-defined]
    assert called == [b - a for a, b in itertools.pairwise(cuts)]
    assert memory.count == 300
    assert data.mask is not None
    assert torch.equal(memory.real, data.mask.sum(1))  # type: ignore[attr-defined]
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    y, by_torch = run(operator, data)
    assert memory.kind == by_torch.kind
    for key, mine in memory.tensors().items():
        assert torch.allclose(mine.double(), by_torch.tensors()[key].double(), rtol=1e-4, atol=1e-4), key
    assert_as_good(got, gradients(operator, data, y, by_torch.state), truth)  # type: ignore[attr-defined]


def test_streaming_goes_on_from_the_kernels_memory() -> None:
    operator = m.squared_affine()
    q, k, v = sample(150)
    with torch.no_grad():
        _, memory = zonal.attention(
            q[:, :, :149], k[:, :, :149], v[:, :, :149], operator, causal=True, return_memory=True, path="chunked"
        )
        y, _ = zonal.attention(
            q[:, :, 149:], k[:, :, 149:], v[:, :, 149:], operator, causal=True, memory=memory, path="streaming"
        )
        expected = zonal.attention(q.double(), k.double(), v.double(), operator, causal=True, path="dense")[:, :, 149:]
    assert (y - expected).abs().max() < 1e-4


# -- decays and key biases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", [1e-3, 0.05, 30.0])
@pytest.mark.parametrize("what", [("decay",), ("bias",), ("decay", "bias")], ids="-".join)
@pytest.mark.parametrize(
    "name",
    ["squared_affine", "squared_affine-strict", "squared_affine-raw", "squared_affine-count", "linear-relu", "sko-3"],
)
def test_decays_and_biases_of_tokens(
    name: str, what: tuple[str, ...], strength: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and all gradients, log_decay's and key_bias's among them, from decays that hardly forget to ones that
    forget all at once.
    """
    operator = randomised(KINDS[name]()).float()
    # where all a query sees has faded below the smallest float its row is nothing: operators that may give a query's
    # own key nothing are spared that
    data = Fading.of(
        333, what, min(strength, 0.05) if name in ("squared_affine-strict", "linear-relu") else strength, queries=301
    ).to(torch.float32)
    exact, double = data.to(torch.float64), copy.deepcopy(operator).double()

    def found(operator: Operator, data: Fading, path: str) -> list[Tensor]:
        y = data.run(operator, path)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y)
        return [
            y.detach(),
            *torch.autograd.grad((y * weight).sum(), [*data.leaves, *operator.parameters()], allow_unused=False),
        ]

    called: list[str] = []
    original = sums_path._run
    monkeypatch.setattr(sums_path, "_run", lambda *given: called.append("kernel") or original(*given))
    got = found(operator, data, "chunked")
    assert called == ["kernel"]
    assert_as_good(got, found(operator, data, "dense"), found(double, exact, "dense"))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("documents", [None, (0, 3, 120, 300)])
@pytest.mark.parametrize("name", ["ssd", "squared_affine", "squared_affine-raw", "degree-6"])
def test_heads_that_share_queries_and_keys(
    name: str, documents: tuple[int, ...] | None, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head of queries and keys for five of values: gradients are sums over the heads, from parts that do not hang
    on the run.
    """
    operator = randomised(ssd() if name == "ssd" else KINDS[name]()).float()
    generator, batch = torch.Generator().manual_seed(3), 2 if documents is None else 1
    q, k = (torch.randn(batch, 1, 300, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    v, bias = (
        torch.randn(batch, 5, 300, 6, generator=generator, dtype=torch.float64),
        torch.randn(batch, 5, 300, generator=generator, dtype=torch.float64),
    )
    mask = torch.rand(batch, 300, generator=generator) > 0.2 if documents is None else None
    data = Fading(q, k, v, mask, -0.1 * torch.rand(batch, 5, 300, generator=generator, dtype=torch.float64), bias).to(
        torch.float32
    )
    borders = None if documents is None else torch.tensor(documents)

    def found(operator: Operator, data: Fading, path: str, spread: bool) -> list[Tensor]:
        call = data.part(0, 300)
        if spread:
            call |= {"q": data.q.expand(-1, 5, -1, -1), "k": data.k.expand(-1, 5, -1, -1)}
        y = zonal.attention(**call, operator=operator, causal=True, path=path, cu_seqlens=borders)
        weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(y)
        return [y.detach(), *torch.autograd.grad((y * weight).sum(), [*data.leaves, *operator.parameters()])]

    shapes: list[tuple[int, ...]] = []
    body = sums.bodies["cpu"]
    original = body.backward
    monkeypatch.setattr(body, "backward", lambda *given: shapes.append(tuple(given[1].q.shape)) or original(*given))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        got = found(operator, data, "chunked", False)
        assert all(torch.equal(a, b) for a, b in zip(got, found(operator, data, "chunked", False), strict=True))
    finally:
        torch.set_num_threads(before)
    # a scale that is learned a head has a gradient a head
    assert shapes == [(batch, 5 if name == "degree-6" else 1, 300, 4)] * 2
    exact, double = data.to(torch.float64), copy.deepcopy(operator).double()
    assert_as_good(got, found(operator, data, "dense", True), found(double, exact, "dense", True))


def test_heads_that_share_go_on_from_a_memory() -> None:
    """In pieces, and by every path, as when each head is given its own."""
    operator, generator = ssd(), torch.Generator().manual_seed(4)
    q, k = (torch.randn(1, 1, 150, 4, generator=generator) for _ in range(2))
    v, decay = torch.randn(1, 5, 150, 6, generator=generator), -0.1 * torch.rand(1, 5, 150, generator=generator)
    expected = zonal.attention(
        q.expand(-1, 5, -1, -1), k.expand(-1, 5, -1, -1), v, operator, causal=True, log_decay=decay, path="dense"
    )
    for path in ("dense", "tiled", "chunked", "streaming"):
        assert torch.allclose(
            zonal.attention(q, k, v, operator, causal=True, log_decay=decay, path=path), expected, atol=1e-4
        )
    memory, parts = Memory.empty(operator, 1, 5, 4, 6, kind="decayed"), []
    for start, stop in itertools.pairwise((0, 70, 71, 150)):
        at = slice(start, stop)
        y, memory = zonal.attention(
            q[:, :, at], k[:, :, at], v[:, :, at], operator, causal=True, log_decay=decay[:, :, at], memory=memory
        )
        parts.append(y)
    assert torch.allclose(torch.cat(parts, 2), expected, atol=1e-4)


def test_decays_within_documents() -> None:
    """What fades in one document does not in the next."""
    operator, generator = m.squared_affine(), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 400, 4, generator=generator).requires_grad_() for _ in range(3))
    decay = (-0.1 * torch.rand(1, 2, 400, generator=generator)).requires_grad_()
    found = []
    for path, dtype in (("chunked", torch.float32), ("dense", torch.float32), ("dense", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v, decay)]
        y = zonal.attention(
            *leaves[:3],
            operator,
            causal=True,
            cu_seqlens=torch.tensor([0, 3, 120, 400]),
            log_decay=leaves[3],
            path=path,
        )
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
    assert_as_good(*found)


def test_strong_decays_lose_no_digits() -> None:
    """A hundred nats a token: neighbours still count what they should, and a query that sees only what has vanished
    gets nothing.
    """
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


# -- rows that cancel ------------------------------------------------------------------------------------------------


def cancelling(gap: float, tokens: int, duplicates: bool) -> list[Tensor]:
    """Unit queries and keys with q . k = -b (1 + gap) nearly everywhere for the bias b = 0.5: (x + b)^2 is then about
    (b gap)^2.
    """
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 2, 1 if duplicates else tokens, 6, generator=generator, dtype=torch.float64)
    across = torch.nn.functional.normalize(noise, dim=-1).expand(1, 2, tokens, 6)
    x = -0.5 * (1 + gap)
    k = torch.cat(
        [
            torch.full((1, 2, tokens, 1), x, dtype=torch.float64),
            math.sqrt(1 - x * x) * across,
            torch.zeros(1, 2, tokens, 1, dtype=torch.float64),
        ],
        -1,
    )
    q = torch.zeros(1, 2, tokens, 8, dtype=torch.float64)
    q[..., 0] = 1
    q[:, :, ::3] = torch.randn(
        1, 2, len(range(0, tokens, 3)), 8, generator=generator, dtype=torch.float64
    )  # a third are queries like any other
    return [q, k, torch.randn(1, 2, tokens, 5, generator=generator, dtype=torch.float64)]


@pytest.mark.parametrize("duplicates", [False, True], ids=["keys", "one key again and again"])
@pytest.mark.parametrize("gap", [0.3, 0.05, 0.01, 1e-3])
def test_rows_that_cancel_are_summed_directly(gap: float, duplicates: bool) -> None:
    """2048 keys at which (x + b)^2 nearly vanishes: outputs and gradients are as good as the definition's in the same
    precision.

    One key again and again rounds alike at every addition, and what its gradients are made of cancels; errors of 1e-5,
    and what l' / l makes of them, are then allowed besides.
    """
    operator = Operator(score.Cosine(), link.SquaredAffine(bias=0.5, learn_bias=True), anchor.Row())
    tensors = cancelling(gap, 2048, duplicates)
    found = []
    for path, dtype in (("chunked", torch.float32), ("dense", torch.float32), ("dense", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        y = zonal.attention(*leaves, operator, causal=True, path=path)
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), [*leaves, *operator.parameters()])])
    if not duplicates:
        return assert_as_good(*found)
    noise = 1e-5 * found[2][0].abs().max()
    for index, (a, b, t) in enumerate(zip(*found, strict=True)):
        allowed = (
            noise * (max(4 / gap, 32) if index else 1) * (64 if index > 1 else 1)
        )  # each key's is a sum over 2048 queries
        assert (a - t).abs().max() <= 2 * (b - t).abs().max() + allowed, index


def test_only_rows_that_cancel_are_summed_directly() -> None:
    q, k, v = (x.float() for x in cancelling(0.01, 1000, False))
    operator = Operator(score.Cosine(), link.SquaredAffine(bias=0.5), anchor.Row())
    seen = prepare(operator, q, k, v, causal=True).visibility
    code = tile_path.code_of(operator.link)
    assert code is not None
    spec = SumsSpec(code, 2, 0, "row", True, positive=True)
    numbers = torch.full((2, 1), 0.5), torch.tensor([[0.25, 1.0, 1.0]]).repeat(2, 1)
    inputs = SumsInputs(q, k, v, torch.ones(2), *numbers)
    apart = summed(inputs, places(None, seen.lo, seen.hi, None, 1000), spec)[3]
    rows = torch.arange(1000)
    assert apart[0, :, (rows % 3 > 0) & (rows >= 128)].all()
    assert not apart[0, :, rows % 3 == 0].any()


@pytest.mark.parametrize("gap", [0.3, 0.05, 1e-5])
def test_rows_that_cancel_in_a_memory(gap: float) -> None:
    """What a memory brought cannot be summed again: a row is good to what rounding leaves of it, or NaN, and never a
    wrong number.
    """
    operator = Operator(score.Cosine(), link.SquaredAffine(bias=0.5), anchor.Row())
    q, k, v = (x.float() for x in cancelling(gap, 600, False))
    with torch.no_grad():
        memory = Memory.empty(operator, 1, 2, 8, 5).absorb(k[:, :, :500], v[:, :, :500])
        y, _ = zonal.attention(
            q[:, :, 500:], k[:, :, 500:], v[:, :, 500:], operator, causal=True, memory=memory, path="chunked"
        )
        truth = zonal.attention(q.double(), k.double(), v.double(), operator, causal=True, path="dense")[:, :, 500:]
    good = ~y.isnan()
    assert (y - truth)[good].abs().max() < 0.1 * truth.abs().max()
    assert good.all() == (gap > 1e-3)
    usual = torch.arange(500, 600) % 3 == 0
    assert (y - truth)[:, :, usual].abs().max() < 1e-4


@pytest.mark.parametrize("fading", [False, True], ids=["sums", "fading sums"])
@pytest.mark.parametrize("gap", [0.05, 0.02, 1e-3, 1e-5])
def test_the_chunked_path_loses_the_same_rows_with_and_without_a_kernel(
    gap: float, fading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a memory, rows below 2^-16 of what bounds their terms are NaN in the kernel and in torch, and no others
    are; other rows agree.
    """
    operator = Operator(score.Cosine(), link.SquaredAffine(bias=0.5), anchor.Row())
    q, k, v = (x.float() for x in cancelling(gap, 512, False))
    decay = torch.full((1, 2, 512), -0.01) if fading else None
    memory = Memory.empty(operator, 1, 2, 8, 5).absorb(
        k[:, :, :500], v[:, :, :500], log_decay=None if decay is None else decay[..., :500]
    )
    new, given = [x[:, :, 500:] for x in (q, k, v)], {} if decay is None else {"log_decay": decay[..., 500:]}
    found = []
    for kernels in ("on", "off"):
        if kernels == "off":
            monkeypatch.setenv(native_kernels.VARIABLE, "off")
        with torch.no_grad():
            found.append(zonal.attention(*new, operator, causal=True, memory=memory, path="chunked", **given)[0])
    lost = torch.arange(500, 512).expand(1, 2, -1) % 3 > 0 if gap < 2e-3 else torch.zeros(1, 2, 12, dtype=torch.bool)
    for y in found:
        assert torch.equal(y.isnan().any(-1), lost)
    torch.testing.assert_close(found[0][~lost], found[1][~lost], rtol=0, atol=0.02)


def causal_inputs(dim: int, coefficients: Tensor, **given: Tensor) -> SumsInputs:
    """A causal call of one head with 40 tokens, whose link is a polynomial."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (2 * torch.rand(1, 1, 40, n, generator=generator) - 1 for n in (dim, dim, 3))
    ends = torch.arange(41)
    return SumsInputs(q, k, v, torch.ones(1), coefficients, coefficients, lo=ends[:-1] * 0, hi=ends[1:], **given)


def test_a_log_decay_that_is_no_number_leaves_none() -> None:
    """Of the rows after it, which weigh keys by it."""
    decay = torch.full((1, 1, 40), -0.1, dtype=torch.float64)
    decay[..., 5] = float("nan")
    given = causal_inputs(8, torch.tensor([[0.0, 1.0]]), log_decay=decay)
    y = sums(given, SumsSpec(FORMULAS["polynomial"], 1, 0, "raw"))[0]
    assert torch.equal(y.isnan().any(-1)[0, 0], torch.arange(40) >= 5)


def test_a_series_of_any_length_is_learned() -> None:
    c = (0.5 ** torch.arange(48))[None].requires_grad_()
    given = causal_inputs(1, c)
    (found,) = torch.autograd.grad(sums(given, SumsSpec(FORMULAS["polynomial"], 47, 0, "raw", learned=48))[0].sum(), c)
    score = given.q.double() @ given.k.double().mT
    expected = torch.stack([((score**i).tril() @ given.v.double()).sum() for i in range(48)])
    assert (found - expected).abs().max() < 1e-4


def test_negative_sums_of_a_positive_link_are_no_numbers() -> None:
    """Torch's form of the chunked path and a memory's read-out, which see a row's sum only."""
    total = torch.tensor([[[[1.0, 2.0]], [[1.0, -1e-9]], [[0.0, 0.0]]]])
    y = anchored(total, m.squared_affine().bind(3, 3), torch.ones(1))[0, :, 0, 0]
    assert y[0] == 0.5
    assert y[1].isnan()
    assert y[2] == 0
    signed = Operator(score.Dot(), link.Identity(), anchor.Row(allow_signed=True))
    assert not anchored(total, signed.bind(3, 3), torch.ones(1)).isnan().any()
