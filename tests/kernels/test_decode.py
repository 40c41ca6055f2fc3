"""The compiled kernel for a decoder's steps: token by token and a few at once against the float64 definition, and what
it leaves to torch.
"""

import copy
import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
import torch
from kernels.decode_cases import PIECES, draw, pieces, taken
from matrix import randomised
from torch import Tensor

import zonal
from zonal import Memory, Operator, anchor, link, prior, score
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.execution import plan
from zonal.execution.call import prepare, resumed
from zonal.execution.machine import TYPICAL_CPU
from zonal.execution.paths.steps.base import MOST_TOKENS
from zonal.execution.paths.steps.sums import SumsSteps, sums_refusal
from zonal.features import SymmetricPowers
from zonal.kernels import native as native_kernels
from zonal.kernels.decode import FAMILY, Decoder, DecodeSpec
from zonal.memory.sums import Sums
from zonal.models import ModelConfig
from zonal.models import build as build_model

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")

KINDS: dict[str, Callable[[], Operator]] = {
    "squared_affine": m.squared_affine,
    "squared_affine-learned": lambda: m.squared_affine(learn_bias=True),
    "squared_affine-count": lambda: m.squared_affine().replace(anchor=anchor.Count()),
    "squared_affine-raw": lambda: m.squared_affine().replace(anchor=anchor.Raw()),
    "squared_affine-strict": lambda: m.squared_affine().replace(prior=prior.Causal(include_self=False)),
    "strict-count": lambda: m.squared_affine().replace(prior=prior.Causal(include_self=False), anchor=anchor.Count()),
    "polynomial_square": lambda: m.polynomial_square(degree=4, d_qk=8),
    "sko-2": lambda: m.sko(degrees=(2.0,)),
    "sko-3": lambda: m.sko(degrees=(3.0, 2.0), manifold_dim=4),
    "degree-6": lambda: Operator(
        score.Cosine(learn_temperature=True),
        link.PolynomialSquare((0.2, 0.5, 0.3, 0.4), floor=0.01, learn=True),
        anchor.Row(),
    ),
    "linear": m.linear,
    "linear-relu": lambda: m.linear().replace(score=score.Dot(map="relu")),
    "linear-silu-count": lambda: Operator(score.Dot(map="silu"), link.Identity(), anchor.Count()),
    "linear squared": lambda: m.linear().replace(link=link.SquaredAffine(bias=0.3)),
    "identity-count": lambda: Operator(score.Dot(), link.Identity(), anchor.Count()),
    "retention": m.retention,
    "retention-strict": lambda: m.retention().replace(
        prior=(prior.Decay((0.8, 0.95)), prior.Causal(include_self=False))
    ),
    "squared_affine-decay": lambda: m.squared_affine().replace(prior=prior.Decay((0.7, 0.9))),
    "slay": lambda: m.slay(scale="small"),
    "hedgehog": lambda: m.hedgehog(size=6),
    "performer": lambda: m.performer(draws=7),
}
# (heads, key heads, key dim, value dim): grouped queries, odd sizes, and values that fill vectors
SHAPES = {
    "odd": (4, 4, 5, 3),
    "grouped": (6, 2, 7, 33),
    "one key head": (4, 1, 8, 24),
    "two numbers": (2, 2, 2, 8),
    "one number": (2, 1, 1, 1),
}


def room(operator: Operator, q: Tensor, k: Tensor) -> Tensor:
    """What a row's rounding is multiplied by, (B, H, T, 1): sums from features cancel where a positive polynomial
    nearly vanishes (docs/paths.md).
    """
    if not operator.tags.normalises or isinstance(operator.link, link.Identity):
        return torch.ones(())
    mean = zonal.attention(
        q, k, torch.ones_like(k[..., :1]), operator.replace(anchor=anchor.Count()), causal=True, path="dense"
    )
    return torch.where(mean > 0, 1 + 1 / mean, 1)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every call that the kernel took."""
    return taken(monkeypatch, SumsSteps, "run")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", KINDS)
def test_steps_equal_the_definition(
    name: str, shape: str, dtype: torch.dtype, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and the state left, with at most twice the error of torch's steps, and a floor of rounding."""
    operator = randomised(KINDS[name]()).float()
    exact = draw(SHAPES[shape], sum(PIECES))
    tensors = [x.to(dtype) for x in exact]
    exact = [x.double() for x in tensors]
    double = copy.deepcopy(operator).double()
    with torch.no_grad():
        truth = zonal.attention(exact[0], exact[1], exact[2], double, causal=True, path="dense")
        state = (
            Memory.empty(double, 2, *(exact[1].shape[i] for i in (1, 3)), exact[2].shape[3], dtype=torch.float64)
            .absorb(exact[1], exact[2])
            .state
        )
        y, memory = pieces(operator, tensors, PIECES)
        assert steps == list(PIECES)
        monkeypatch.setenv(native_kernels.VARIABLE, "off")
        other, without = pieces(operator, tensors, PIECES)
        assert steps == list(PIECES)
    assert y.dtype == dtype
    assert isinstance(memory, Sums)
    assert isinstance(without, Sums)
    assert memory.count == without.count == sum(PIECES)
    cancels = room(double, exact[0], exact[1])
    for got, torchs, true, factor in ((y, other, truth, cancels), (memory.state, without.state, state, torch.ones(()))):
        assert got.shape == true.shape
        size = max(1.0, true.abs().max().item())
        error, allowed = ((x.double() - true).abs() for x in (got, torchs))
        assert (error <= 2 * allowed + size * (16 * 2**-23 * factor + torch.finfo(got.dtype).eps)).all()


@pytest.mark.parametrize("name", ["squared_affine-raw", "retention", "retention-strict"])
@torch.no_grad()
def test_decays_that_tokens_come_with(name: str, steps: list[int]) -> None:
    """In place of the declared ones; sums without a decay begin to fade with them."""
    operator = randomised(KINDS[name]()).float()
    tensors = draw(SHAPES["grouped"], sum(PIECES))
    decay = -torch.rand(2, 2, sum(PIECES), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    truth = zonal.attention(*tensors, copy.deepcopy(operator).double(), causal=True, log_decay=decay, path="dense")
    decoder = Memory.empty(operator, 2, 2, 7, 33).decoder()
    for start, stop in itertools.pairwise((0, *itertools.accumulate(PIECES))):
        q, k, v = (x[:, :, start:stop].float() for x in tensors)
        y = decoder.step(q, k, v, log_decay=decay[:, :, start:stop].float())
        assert (y - truth[:, :, start:stop]).abs().max() <= 1e-4 * truth.abs().max()
    memory = decoder.memory()
    assert steps == list(PIECES)
    assert memory.kind == "decayed"
    assert torch.allclose(memory.tensors()["total"], decay.sum(-1), rtol=1e-6)


@pytest.mark.parametrize("make", [m.squared_affine, lambda: m.ska(power=1)], ids=["sums", "ridge"])
@torch.no_grad()
def test_a_sign_that_is_not_in_memory_counts(make: Callable[[], Operator]) -> None:
    """As of torch's imag of a conjugate, which is a view of the numbers with the other sign."""
    operator, tensors = make(), [x.float() for x in draw(SHAPES["grouped"], 5)]
    y, expected = (pieces(operator, [f(x) for x in tensors], (1, 4))[0] for f in (torch._neg_view, torch.neg))
    assert torch.equal(y, expected)


@pytest.mark.parametrize("name", ["squared_affine", "squared_affine-count", "linear", "sko-3", "retention"])
def test_steps_are_what_chunked_and_the_verbs_give(name: str) -> None:
    """Two paths and the memory's own absorb and read: one function, and memories that go on from each other."""
    operator = randomised(KINDS[name]()).float()
    tensors = [x.float() for x in draw(SHAPES["grouped"], 40)]
    q, k, v = tensors
    with torch.no_grad():
        y, memory = pieces(operator, tensors, (1,) * 40)
        chunked, after = zonal.attention(q, k, v, operator, causal=True, return_memory=True, path="chunked")
        absorbed = Memory.empty(operator, 2, 2, 7, 33).absorb(k, v)
        allowed = 1e-5 * room(operator, q, k)
        assert ((y - chunked).abs() <= allowed).all()
        assert torch.allclose(y[:, :, -1:], absorbed.read(q[:, :, -1:]), atol=1e-4)
        for other in (after, absorbed):
            assert torch.allclose(memory.state, other.state, atol=1e-4, rtol=1e-5)  # type: ignore[attr-defined]
        more = [x[:, :, :5] for x in tensors]
        assert torch.allclose(
            pieces(operator, more, (5,), memory=after)[0], pieces(operator, more, (1, 4), memory=memory)[0], atol=1e-4
        )


@pytest.mark.parametrize("degree", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("dim", [1, 2, 3, 6, 8])
def test_features_are_those_of_memories(degree: int, dim: int) -> None:
    """The state after one token with the value 1 is its features, in their order."""
    for lowest in (0, 1):
        features = SymmetricPowers(degree, lowest)
        if lowest == 1 and degree > 1:
            continue  # no link leaves the constant out
        x = torch.randn(1, 1, 1, dim, generator=torch.Generator().manual_seed(dim))
        size = features.dimension(dim)
        decoder = Decoder(
            DecodeSpec((1, 1, 1, dim, 1), degree, lowest, "raw", False, True), torch.ones(1), torch.ones(1, size)
        )
        _, state = decoder(
            x, x, torch.ones(1, 1, 1, 1), torch.zeros(1, 1, size, 1), 0, torch.zeros(1, dtype=torch.int64)
        )
        assert torch.allclose(state.flatten(), features(x).flatten(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("name", "allowed"), [("elu1", 1e-6), ("relu", 0.0), ("silu", 1e-6)])
def test_elementwise_features_over_their_range(
    name: Literal["elu1", "relu", "silu"], allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state after one token with the value 1, which torch does not prepare; NaN and infinity as in torch."""
    operator = Operator(score.Dot(map=name), link.Identity(), anchor.Count())
    monkeypatch.setattr(score.Dot, "prepare_key", lambda *_: pytest.fail("prepared by torch"))
    x = torch.cat([torch.linspace(-80, 80, 997), torch.tensor([0.0, -0.0, torch.inf, torch.nan])])
    decoder = Memory.empty(operator, 1, 1, x.shape[0], 1).decoder()
    with torch.no_grad():
        decoder.step(x.view(1, 1, 1, -1), x.view(1, 1, 1, -1), torch.ones(1, 1, 1, 1))
    found, wide = decoder.memory().state.flatten().double(), x.double()  # type: ignore[attr-defined]
    # elu(x) + 1 rounds e^x to a multiple of 1e-16
    exact = wide.clamp(max=0).exp() + wide.relu() if name == "elu1" else getattr(torch.nn.functional, name)(wide)
    assert torch.allclose(found, exact, rtol=allowed, atol=0, equal_nan=True)


@torch.no_grad()
def test_a_step_that_loses_all_features_is_refused_and_changes_nothing(steps: list[int]) -> None:
    """Exponentials of minus a squared length, in one head of one sequence."""
    operator, (q, k, v) = m.performer(draws=7), [x.float() for x in draw((4, 2, 5, 6), 4)]
    decoder = Memory.empty(operator, 2, 2, 5, 6).decoder()
    decoder.step(*(x[:, :, :2] for x in (q, k, v)))
    before = decoder.memory().state.clone()
    lost = k[:, :, 2:3].clone()
    lost[1, 1] *= 1e3
    for _ in range(2):
        with pytest.raises(ArgumentError, match="all features PositiveRandom of some vector are 0"):
            decoder.step(q[:, :, 2:3], lost, v[:, :, 2:3])
        assert decoder.count == 2
        assert torch.equal(decoder.memory().state, before)
    y = decoder.step(*(x[:, :, 2:] for x in (q, k, v)))
    torch.testing.assert_close(y, zonal.attention(q, k, v, operator, causal=True, path="dense")[:, :, 2:])
    assert steps == [2, 2]


def test_a_long_chain_does_not_drift() -> None:
    """Twenty thousand steps: the denominators and all else are still those of float64 sums."""
    operator = m.squared_affine()
    q, k, v = draw((2, 1, 4, 8), 20000, batch=1)
    single = [x.float() for x in (q, k, v)]
    with torch.no_grad():
        memory = Memory.empty(operator, 1, 1, 4, 8)
        for t in range(20000):
            y, memory = zonal.attention(*(x[:, :, t : t + 1] for x in single), operator, causal=True, memory=memory)
        exact = Memory.empty(operator, 1, 1, 4, 8, dtype=torch.float64).absorb(k, v)
    assert memory.count == 20000
    assert (memory.state - exact.state).abs().max() < 2e-5 * exact.state.abs().max()  # type: ignore[attr-defined]
    assert (y - exact.read(q[:, :, -1:])).abs().max() < 2e-5


def test_memory_does_not_grow() -> None:
    operator = m.squared_affine()
    tensors = [x.float() for x in draw((4, 2, 8, 8), 64)]
    with torch.no_grad():
        _, early = pieces(operator, [x[:, :, :1] for x in tensors], (1,))
        _, late = pieces(operator, tensors, (1,) * 64)
    assert early.nbytes == late.nbytes == late.bytes_at(1 << 20)


# -- memories as values ----------------------------------------------------------------------------------------------


def test_the_memory_given_stays_and_forks_part() -> None:
    operator = m.squared_affine()
    tensors = [x.float() for x in draw((4, 2, 5, 6), 30)]
    with torch.no_grad():
        _, memory = pieces(operator, [x[:, :, :20] for x in tensors], (20,))
        before = memory.state.clone()  # type: ignore[attr-defined]
        fork = memory.fork()
        left, after = pieces(operator, [x[:, :, 20:25] for x in tensors], (1,) * 5, memory=memory)
        right, _ = pieces(operator, [x[:, :, 25:] for x in tensors], (1,) * 5, memory=fork)
        assert torch.equal(memory.state, before)  # type: ignore[attr-defined]
        assert memory.count == fork.count == 20
        assert after.count == 25
        again, _ = pieces(operator, [x[:, :, 20:25] for x in tensors], (1,) * 5, memory=memory)
    assert torch.equal(left, again)
    assert not torch.allclose(left, right, atol=1e-3)


@pytest.mark.parametrize("name", ["squared_affine", "degree-6"])
def test_saved_and_loaded_in_the_middle(name: str, tmp_path: Path) -> None:
    operator = randomised(KINDS[name]()).float()
    tensors = [x.float() for x in draw((4, 2, 5, 6), 30)]
    first, rest = [x[:, :, :20] for x in tensors], [x[:, :, 20:] for x in tensors]
    with torch.no_grad():
        _, memory = pieces(operator, first, (1,) * 20)
        expected, _ = pieces(operator, rest, (1,) * 10, memory=memory)
        memory.save(tmp_path / "memory.safetensors")
        for loaded in (
            Memory.load(tmp_path / "memory.safetensors"),
            Memory.load(tmp_path / "memory.safetensors", operator),
        ):
            assert torch.equal(pieces(operator, rest, (1,) * 10, memory=loaded)[0], expected)


def test_padding_of_the_past_counts(steps: list[int]) -> None:
    """Rows of a batch with prompts of different lengths: the mask goes with the prompt, the steps after it are the
    kernel's.
    """
    operator = m.squared_affine().replace(anchor=anchor.Count())
    q, k, v = draw((4, 2, 5, 6), 30)
    mask = torch.ones(2, 30, dtype=torch.bool)
    mask[0, :7] = False
    expected = zonal.attention(q, k, v, operator, causal=True, key_padding_mask=mask, path="dense")[:, :, 20:]
    q, k, v = q.float(), k.float(), v.float()
    with torch.no_grad():
        memory = Memory.empty(operator, 2, 2, 5, 6).absorb(k[:, :, :20], v[:, :, :20], mask[:, :20])
        y, memory = pieces(operator, [x[:, :, 20:] for x in (q, k, v)], (1,) * 10, memory=memory)
    assert len(steps) == 10
    assert (y - expected).abs().max() < 1e-4
    assert memory.real.tolist() == [23, 30]  # type: ignore[attr-defined]


# -- what it leaves to torch -----------------------------------------------------------------------------------------


def test_learned_values_are_followed(steps: list[int]) -> None:
    """A decoder is not kept past the numbers it was made from: link and temperature are looked at in every step."""
    operator = Operator(score.Cosine(learn_temperature=True), link.SquaredAffine(learn_bias=True), anchor.Row())
    tensors = [x.float() for x in draw((4, 2, 5, 6), 3)]
    with torch.no_grad():
        _, memory = pieces(operator, tensors, (1, 1, 1))
        for name in ("link_bias", "score_log_temperature"):
            operator.learned_parts[name].add_(0.5)
            y, _ = pieces(operator, tensors, (1, 1, 1), memory=memory)
            q, k, v = (torch.cat([x, x], 2).double() for x in tensors)
            expected = zonal.attention(q, k, v, copy.deepcopy(operator).double(), causal=True, path="dense")[:, :, 3:]
            assert (y - expected).abs().max() < 1e-5
    assert len(steps) == 9


def test_gradients_go_the_usual_way(steps: list[int]) -> None:
    operator = m.squared_affine(learn_bias=True)
    tensors = [x.float() for x in draw((2, 2, 5, 6), 4)]
    plain, _ = pieces(operator, tensors, (1,) * 4)
    assert plain.requires_grad  # what the link has learned
    frozen = m.squared_affine()
    for index in range(3):
        leaves = [x.clone().requires_grad_(i == index) for i, x in enumerate(tensors)]
        y, memory = pieces(frozen, leaves, (1,) * 4)
        assert torch.autograd.grad(y.sum(), leaves[index])[0].abs().max() > 0
        if memory.state.requires_grad:  # type: ignore[attr-defined]
            again, _ = pieces(frozen, tensors, (4,), memory=memory)
            assert again.requires_grad
    assert steps == []
    pieces(frozen, tensors, (1,) * 4)
    assert steps == [1] * 4


def test_tracers_modes_and_masks_go_the_usual_way(steps: list[int]) -> None:
    operator = m.squared_affine()
    q, k, v = (x.float() for x in draw((2, 2, 5, 6), 1))
    with torch.no_grad():
        _, memory = pieces(operator, [q, k, v], (1,))
        assert steps.pop() == 1
        expected, _ = zonal.attention(q, k, v, operator, causal=True, memory=memory)
        assert steps.pop() == 1
        compiled = torch.compile(
            lambda *x: zonal.attention(*x, operator, causal=True, memory=memory)[0], backend="eager"
        )
        assert torch.allclose(compiled(q, k, v), expected, atol=1e-6)
        mask = torch.ones(2, 1, dtype=torch.bool)
        y, _ = zonal.attention(q, k, v, operator, causal=True, memory=memory, key_padding_mask=mask)
        assert torch.allclose(y, expected, atol=1e-6)
        bias = torch.zeros(2, 2, 1)
        assert torch.allclose(
            zonal.attention(q, k, v, operator, causal=True, memory=memory, key_bias=bias)[0], expected, atol=1e-6
        )
        faded, after = zonal.attention(q, k, v, operator, causal=True, memory=memory, log_decay=bias)
        assert torch.allclose(faded, expected, atol=1e-6)
        assert after.kind == "decayed"
        assert steps == [1]  # a decay is in the kernel
        steps.clear()
        lower, _ = zonal.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), operator, causal=True, memory=memory)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(zonal.attention(q, k, v, operator, causal=True, memory=memory)[0], lower)
        with torch.inference_mode():
            assert torch.equal(zonal.attention(q, k, v, operator, causal=True, memory=memory)[0], expected)
        assert steps == [1, 1, 1]


def test_another_memory_of_the_same_declaration(steps: list[int]) -> None:
    """The call's operator gives the numbers, whoever made the memory."""
    mine, other = m.squared_affine(learn_bias=True), m.squared_affine(learn_bias=True)
    tensors = [x.float() for x in draw((2, 2, 5, 6), 4)]
    with torch.no_grad():
        mine.learned_parts["link_bias"].fill_(0.3)
        expected, _ = pieces(mine, tensors, (1,) * 4)
        y, _ = pieces(mine, tensors, (1,) * 4, memory=Memory.empty(other, 2, 2, 5, 6))
    assert torch.equal(y, expected)
    assert len(steps) == 8


def test_float64_memories_stay_float64(steps: list[int]) -> None:
    operator = m.squared_affine()
    tensors = draw((2, 2, 5, 6), 6)
    with torch.no_grad():
        y, memory = pieces(operator, tensors, (1,) * 6)
        expected = zonal.attention(*tensors, operator, causal=True, path="dense")
        assert (y - expected).abs().max() < 1e-12
        mixed, after = pieces(operator, [x.float() for x in tensors], (1,) * 6, memory=memory)
    assert mixed.dtype == torch.float32
    assert after.state.dtype == torch.float64  # type: ignore[attr-defined]
    assert steps == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda q, k, v: (q[..., :4], k, v), "share the head dimension"),
        (lambda q, k, v: (q[:1], k, v), "batch size"),
        (lambda q, k, v: (q[:, :3], k, v), "multiple of the heads"),
        (lambda q, k, v: (q, k[:, :1], v[:, :1]), "memory holds"),
        (lambda q, k, v: (q, k, v[..., :5]), "memory holds"),
        (lambda q, k, v: (q, k.double(), v), "share one dtype"),
        (lambda q, k, v: (q[0], k, v), "4 axes"),
        (lambda q, k, v: (torch.cat([q, q], 2), k, v), "as many tokens as k"),
    ],
)
def test_bad_input_is_refused_as_ever(change: Callable, words: str, steps: list[int]) -> None:
    """Also after good steps, when nothing is planned any more; and the memory is as it was."""
    operator = m.squared_affine()
    tensors = [x.float() for x in draw((4, 2, 5, 6), 1)]
    with torch.no_grad():
        _, memory = pieces(operator, tensors, (1,))
        before = memory.state.clone()  # type: ignore[attr-defined]
        with pytest.raises(ArgumentError, match=words):
            zonal.attention(*change(*tensors), operator, causal=True, memory=memory)
    assert torch.equal(memory.state, before)  # type: ignore[attr-defined]
    assert steps == [1]


def test_who_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def reason(
        operator: Operator,
        tokens: int = 1,
        kind: str | None = None,
        dtype: torch.dtype = torch.float32,
        **arguments: Tensor,
    ) -> str:
        q, k, v = (x.to(dtype) for x in draw((2, 2, 5, 6), tokens))
        call = prepare(operator, q, k, v, causal=True, **arguments)
        memory = Memory.empty(operator, 2, call.bound.kv_heads, 5, 6, kind=kind)
        return str(sums_refusal(resumed(call, memory)))

    assert reason(m.squared_affine()) == "None"
    assert reason(m.squared_affine(), MOST_TOKENS) == "None"
    assert "1 to 16 new tokens" in reason(m.squared_affine(), MOST_TOKENS + 1)
    assert "float64" in reason(m.squared_affine(), dtype=torch.float64)
    assert "kind 'keys'" in reason(m.softmax())
    with torch.no_grad():
        assert reason(m.retention()) == "None"
    assert "no gradients" in reason(m.retention())  # its rates are learned
    assert "key biases" in reason(m.squared_affine(), key_bias=torch.zeros(2, 2, 1))
    assert "key masks" in reason(m.squared_affine(), key_padding_mask=torch.ones(2, 1, dtype=torch.bool))
    assert "whole chunks" in reason(m.squared_affine().replace(prior=prior.ChunkCausal(4)))
    assert "no gradients" in reason(m.squared_affine(learn_bias=True))
    with torch.no_grad():
        assert reason(m.squared_affine(learn_bias=True)) == "None"
    page = zonal.explain(m.squared_affine(), (1, 8, 1, 32), causal=True, memory=100)
    assert page.path == "streaming"
    assert page.decode == page.to_dict()["decode"] == "a compiled kernel"
    assert "against" in page.why
    assert "1 to 16 new tokens" in zonal.explain(m.squared_affine(), (1, 8, 17, 32), causal=True, memory=100).decode
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    assert "ZONAL_KERNELS=off" in zonal.explain(m.squared_affine(), (1, 8, 1, 32), causal=True, memory=100).decode


def test_a_compiler_that_fails_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fails = tmp_path / "fails"
    fails.write_text("#!/bin/sh\n[ \"$1\" = --version ] && echo 1 && exit 0\necho 'error: no' >&2\nexit 1\n")
    fails.chmod(0o755)
    operator, tensors = m.squared_affine(), [x.float() for x in draw((2, 2, 5, 6), 2)]
    expected = zonal.attention(*tensors, operator, causal=True, path="dense")
    monkeypatch.setenv("ZONAL_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", str(fails))
    native_kernels.forget()
    try:
        with pytest.warns(UserWarning, match="in place of the compiled kernel"):
            first, memory = pieces(operator, [x[:, :, :1] for x in tensors], (1,))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            second, _ = pieces(operator, [x[:, :, 1:] for x in tensors], (1,), memory=memory)
        assert torch.allclose(torch.cat([first, second], 2), expected, atol=1e-6)
        assert native_kernels.failure(FAMILY.code, FAMILY.source) is not None
    finally:
        native_kernels.forget()


def test_wrong_weights_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above can fail: one feature's weight off by a thousandth is more than they allow."""
    operator, tensors = m.squared_affine(), [x.float() for x in draw((2, 2, 5, 6), 9)]
    original = SymmetricPowers.scale

    def broken(self: SymmetricPowers, c: Tensor, dim: int) -> Tensor:
        weights = original(self, c, dim).clone()
        weights[:, -1] *= 1.001
        return weights

    with torch.no_grad():
        good, _ = pieces(operator, tensors, (1,) * 9)
        monkeypatch.setattr(SymmetricPowers, "scale", broken)
        bad, _ = pieces(m.squared_affine(), tensors, (1,) * 9)
    assert (good - bad).abs().max() > 1e-5


# -- those who call it -----------------------------------------------------------------------------------------------


def test_a_model_generates_the_same_with_and_without(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_model(
        ModelConfig(50, 32, ("sq", "linear", "sko(degrees=(2.0,))"), 4, kv_heads=2, conv=3, rotary=True), seed=0
    )
    prompt = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(0))

    def logits() -> Tensor:
        memory, found = model.empty_memory(2), []
        for part in (prompt, *(prompt[:, t : t + n] for t, n in ((0, 1), (1, 1), (2, 3), (5, 1)))):
            y, memory = model.step(part, memory)
            found.append(y)
        return torch.cat(found, 1)

    got, tokens = logits(), torch.stack(list(model.generate(prompt, 8, temperature=0)))
    assert len(steps) == 3 * 4 + 3 * 7
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    assert (got - logits()).abs().max() < 1e-4
    assert torch.equal(tokens, torch.stack(list(model.generate(prompt, 8, temperature=0))))
    assert len(steps) == 3 * 4 + 3 * 7


def test_the_planner_streams_few_tokens_after_sums() -> None:
    """For any number of features, and with an empty memory too; a longer past costs nothing more."""
    for dim, tokens, past in itertools.product((4, 32, 64), (1, 16), (0, 10, 10**6)):
        page = zonal.explain(m.squared_affine(), (1, 8, tokens, dim), causal=True, memory=past)
        assert page.path == page.plan.estimates[0].path == "streaming"
    q, k, v = (x.float() for x in draw((2, 2, 5, 6), 1))
    call = prepare(m.squared_affine(), q, k, v, causal=True)
    short, long = (
        Memory.empty(m.squared_affine(), 2, 2, 5, 6).absorb(k.expand(-1, -1, n, -1), v.expand(-1, -1, n, -1))
        for n in (10, 5000)
    )
    assert (
        plan.choose(resumed(call, short), machine=TYPICAL_CPU).estimates[0]
        == plan.choose(resumed(call, long), machine=TYPICAL_CPU).estimates[0]
    )


@pytest.mark.parametrize("positive", [True, False])
def test_a_negative_sum_of_a_positive_link_is_no_number(positive: bool) -> None:
    """It is rounding, which a link that may be negative cannot say."""
    spec = DecodeSpec((1, 1, 1, 2, 3), 1, 0, "row", positive, False)
    decoder = Decoder(spec, torch.ones(1), torch.ones(1, 3))
    state = torch.full((1, 1, 3, 4), 1.0)
    state[..., -1] = -1.0
    zeros = torch.zeros(1, 1, 1, 2)
    y, _ = decoder(zeros, zeros, torch.zeros(1, 1, 1, 3), state, 5, torch.zeros(1, dtype=torch.int64))
    assert bool(y.isnan().all()) is positive
    assert positive or torch.equal(y, torch.full_like(y, -1.0))
