"""The compiled kernel for ridge and Koopman read-outs whose past fades: against the float64 definition, at rates from 1
to 0.01, with memories before and after.
"""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from matrix import randomised
from torch import Tensor

import zonal
from zonal import Memory, Operator, prior
from zonal import mechanisms as m
from zonal.errors import NonFiniteError
from zonal.execution.call import prepare
from zonal.execution.paths import ridge as ridge_path
from zonal.execution.paths.steps.ridge import RidgeSteps
from zonal.kernels import native as native_kernels
from zonal.memory import FadingStatistics

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")

SHAPES: dict[str, dict[str, Any]] = {
    "odd": {}, "one token": {"tokens": 1}, "two tokens": {"tokens": 2},
    "whole blocks": {"tokens": 48, "r": 16, "p": 16}, "late queries": {"tokens": 9, "keys": 60},
    "far queries": {"tokens": 7, "keys": 300},
    "early queries": {"tokens": 44, "keys": 30}, "padding": {"tokens": 75, "padding": True},
    "documents": {"tokens": 75, "batch": 1, "edges": (0, 1, 8, 9, 75)}, "wide": {"tokens": 150, "r": 24, "p": 33},
}  # fmt: skip
RATES = ("none", "slow", "fast", "strong", "a head", "gates", "bursts")


def rates(kind: str, batch: int, keys: int) -> Tensor:
    """Log decays (batch, 2, keys)."""
    constant = {"none": (1.0, 1.0), "slow": (0.998, 0.98), "fast": (0.9, 0.8), "strong": (0.01, 0.3)}
    if kind in constant:
        return torch.tensor(constant[kind], dtype=torch.float64).log()[None, :, None].expand(batch, 2, keys).clone()
    if kind == "a head":
        return torch.tensor([0.0, -0.05], dtype=torch.float64)[None, :, None].expand(batch, 2, keys).clone()
    if kind == "gates":
        drawn = torch.rand(batch, 2, keys, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        return -0.3 * drawn**3
    bursts = torch.full((batch, 2, keys), -0.01, dtype=torch.float64)
    bursts[:, 0, 5::37] = -4.0
    bursts[:, 1, 7:10] = -1.0
    return bursts


def sample(
    kind: str, tokens: int = 37, keys: int | None = None, batch: int = 2, r: int = 5, p: int = 3, padding: bool = False,
    edges: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32,
) -> tuple[list[Tensor], dict[str, Tensor | None]]:  # fmt: skip
    """q of 4 heads, k and v of 2, log decays; and masks."""
    generator, keys = torch.Generator().manual_seed(0), keys or tokens
    r = 2 if kind == "strong" else r  # with more, the ridge of a direction is gone before it is given back
    shapes = (batch, 4, tokens, r), (batch, 2, keys, r), (batch, 2, keys, p)
    q, k, v = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    mask = torch.rand(batch, keys, generator=generator) > 0.3 if padding else None
    packed = None if edges is None else torch.tensor(edges, dtype=torch.int32)
    return [q, k, v, rates(kind, batch, keys)], {"key_padding_mask": mask, "cu_seqlens": packed}


def everything(operator: Operator, tensors: list[Tensor], masks: dict[str, Any], path: str) -> list[Tensor]:
    """y and the gradients of q, k, v, the log decays and what the operator learns."""
    q, k, v, decay = leaves = [x.detach().clone().requires_grad_() for x in tensors]
    y = zonal.attention(q, k, v, operator, causal=True, log_decay=decay, path=path, **masks)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    # a single token sees nothing, and nothing depends on its rate
    leaves += operator.parameters()
    found = torch.autograd.grad((y.double() * weight).sum(), leaves, allow_unused=True)
    return [y.detach(), *(torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, found, strict=True))]


def exact(operator: Operator, tensors: list[Tensor]) -> tuple[Operator, list[Tensor]]:
    return copy.deepcopy(operator).double(), [x.double() for x in tensors]


def assert_near(got: list[Tensor], truth: list[Tensor], dtype: torch.dtype = torch.float32) -> None:
    """y, the gradients of q, k and v, and others are as near to float64 as float32 products of P, which starts at
    1 / rho = 10, and in gradients as two such products. Other gradients sum over tokens.
    """
    for index, (a, t) in enumerate(zip(got, truth, strict=True)):
        assert torch.isfinite(a).all()
        size, terms = max(1.0, t.abs().max().item()), got[0][..., 0].numel() ** 0.5 if index > 3 else 1
        allowed = (512 if index else 64) * terms * torch.finfo(torch.float32).eps * size
        allowed += 0 if dtype == torch.float32 else 4 * terms * torch.finfo(dtype).eps * size
        error = (a.double() - t).abs().max().item()
        assert error <= allowed, f"item {index}: error {error:.3g}, {allowed:.3g} is allowed, of {size:.3g}"


CALLS = [
    (power, shape, kind, torch.float32)
    for power, shape, kind in itertools.product((0, (2, 0, 1, 1)), SHAPES, RATES)
    if shape in ("odd", "padding") or kind in ("fast", "gates")
]
CALLS += [(power, "odd", kind, torch.bfloat16) for power in (0, 2) for kind in ("slow", "gates", "bursts")]
CALLS += [(1, "odd", "gates", torch.float16)]


@pytest.mark.parametrize(("power", "shape", "kind", "dtype"), CALLS)
def test_kernel_equals_definition(
    power: int | tuple[int, ...], shape: str, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and every gradient."""
    operator = randomised(m.ska(power=power, fading=True)).float()
    tensors, masks = sample(kind, **SHAPES[shape], dtype=dtype)
    truth = everything(*exact(operator, tensors), masks, "dense")
    called: list[str] = []
    original = ridge_path._numbers
    monkeypatch.setattr(ridge_path, "_numbers", lambda *given: called.append("") or original(*given))
    got = everything(operator, tensors, masks, "chunked")
    assert called
    assert_near(got, truth, dtype)


@pytest.mark.parametrize("include_self", [False, True])
def test_declared_rates_are_learned(include_self: bool) -> None:
    """One rate per head, with its gradient."""
    declared = prior.Decay(rates=(0.9, 0.99), learn=True)
    operator = m.ska(power=1).replace(prior=(declared, prior.Causal(include_self=include_self)))
    operator = randomised(operator.for_heads(4, 2)).float()
    tensors, _ = sample("none", tokens=70)

    def run(operator: Operator, tensors: list[Tensor], path: str) -> list[Tensor]:
        q, k, v = leaves = [x.detach().clone().requires_grad_() for x in tensors[:3]]
        y = zonal.attention(q, k, v, operator, causal=True, path=path)
        return [y.detach(), *torch.autograd.grad(y.sin().sum(), [*leaves, *operator.parameters()])]

    assert_near(run(operator, tensors, "chunked"), run(*exact(operator, tensors), "dense"))


@pytest.mark.parametrize("kind", ["slow", "gates", "bursts"])
@pytest.mark.parametrize("power", [0, 1])
def test_pieces_over_a_memory_are_the_whole(power: int, kind: str) -> None:
    """Outputs, the memory at the end, and all gradients through it, those of earlier rates among them."""
    operator, cuts = randomised(m.ska(power=power, fading=True)).float(), (0, 40, 41, 120)
    tensors, masks = sample(kind, tokens=120, padding=True)
    mask = masks["key_padding_mask"]
    assert mask is not None

    def run(operator: Operator, tensors: list[Tensor]) -> list[Tensor]:
        q, k, v, decay = leaves = [x.detach().clone().requires_grad_() for x in tensors]
        memory: Memory = Memory.empty(operator, 2, 2, 5, 3, dtype=q.dtype)
        parts = []
        for start, stop in itertools.pairwise(cuts):
            part = slice(start, stop)
            y, memory = zonal.attention(
                q[:, :, part], k[:, :, part], v[:, :, part], operator, causal=True, log_decay=decay[:, :, part],
                key_padding_mask=mask[:, part], memory=memory, path="chunked",
            )  # fmt: skip
            parts.append(y)
        assert isinstance(memory, FadingStatistics)
        assert memory.level is not None
        kept = memory.gram, memory.cross, memory.level
        loss = torch.cat(parts, 2).double().square().sum() + sum(x.sin().sum() for x in kept)
        found = torch.autograd.grad(loss, [*leaves, *operator.parameters()])
        return [torch.cat(parts, 2).detach(), *found, *(x.detach().float() for x in kept)]

    truth, got = run(*exact(operator, tensors)), run(operator, tensors)
    whole = everything(operator, tensors, masks, "dense")[0]
    assert (got[0] - whole).abs().max() < 1e-5 * whole.abs().max().clamp_min(1)
    assert_near(got, truth)


CUTS = {"one by one": tuple(range(61)), "some at once": (0, 7, 23, 24, 40, 56, 60)}


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize(("power", "kind"), [(0, "slow"), (1, "gates"), (2, "bursts"), (1, "strong"), (0, "none")])
@torch.no_grad()
def test_steps_equal_the_definition(power: int, kind: str, cuts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that hand on a memory, and a decoder's, by the compiled kernel; both leave the memory that torch would."""
    operator, (q, k, v, decay) = randomised(m.ska(power=power, fading=True)).float(), sample(kind, tokens=60)[0]
    double, (a, b, c) = exact(operator, [q, k, v])
    expected = zonal.attention(a, b, c, double, causal=True, log_decay=decay, path="dense")
    called: list[int] = []
    original = RidgeSteps.run
    monkeypatch.setattr(RidgeSteps, "run", lambda *given: called.append(given[1].shape[2]) or original(*given))
    empty = Memory.empty(operator, 2, 2, q.shape[3], 3)
    memory, decoder, parts, steps = empty, empty.decoder(), [], []
    for start, stop in itertools.pairwise(CUTS[cuts]):
        q_, k_, v_, now = (x[:, :, start:stop] for x in (q, k, v, decay))
        y, memory = zonal.attention(
            q_, k_, v_, operator, causal=True, log_decay=now, memory=memory, path="streaming"
        )  # fmt: skip
        parts.append(y)
        steps.append(decoder.step(q_, k_, v_, log_decay=now))
    assert len(called) >= 2 * (len(CUTS[cuts]) - 1)
    for found in (parts, steps):
        assert (torch.cat(found, 2) - expected).abs().max() < 1e-5 * expected.abs().max()
    absorbed = empty.absorb(k, v, log_decay=decay).tensors()
    for left in (memory, decoder.memory()):
        assert left.count == 60
        for name, value in left.tensors().items():
            assert torch.allclose(value.double(), absorbed[name].double(), rtol=1e-5, atol=1e-5), name


@torch.no_grad()
def test_many_steps_do_not_drift() -> None:
    """Hundreds of nats pass, and the inverse is only updated: what is read is what the sums of all tokens give."""
    operator, tokens = m.ska(power=1, fading=True), 900
    (q, k, v, decay), _ = sample("gates", tokens=tokens, batch=1, r=6)
    decay[:, 0] = math.log(0.6)
    decoder = Memory.empty(operator, 1, 2, 6, 3).decoder()
    for t in range(tokens):
        now = slice(t, t + 1)
        y = decoder.step(q[:, :, now], k[:, :, now], v[:, :, now], log_decay=decay[:, :, now])
    a, b, c = (x.double() for x in (q, k, v))
    expected = zonal.attention(a, b, c, copy.deepcopy(operator).double(), causal=True, log_decay=decay, path="chunked")
    assert (y - expected[:, :, -1:]).abs().max() < 1e-5 * expected[:, :, -1:].abs().max()
    assert decoder.memory().inverse.age == tokens  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["none", "slow", "gates"])
def test_long_sequences_do_not_drift(kind: str) -> None:
    """Past several times that the inverse is made again, outputs and gradients have the digits of short calls."""
    operator = m.ska(power=1, fading=True)
    tensors, masks = sample(kind, tokens=2500, batch=1, r=16, p=8)
    got = everything(operator, tensors, masks, "chunked")
    truth = everything(*exact(operator, tensors), masks, "chunked")
    for index, (a, t) in enumerate(zip(got, truth, strict=True)):
        error = float((a.double() - t).abs().max() / t.abs().max())
        assert error < (2e-5 if index < 4 else 1e-4), f"item {index} is off by {error:.3g} of its largest entry"


def test_a_long_gap_before_the_first_query_does_not_overflow() -> None:
    """Thousands of nats pass between the first key and the first query."""
    operator, (q, k, v, _) = m.ska(power=1, fading=True), sample("none", tokens=3, keys=3000)[0]
    decay = torch.full((2, 2, 3000), math.log(0.5), dtype=torch.float64)
    y = zonal.attention(q, k, v, operator, causal=True, log_decay=decay, path="chunked")
    late = [x[:, :, -60:] for x in (k, v, decay)]
    # what is left of older keys is 2^-60; the ridge is given back in the same direction, as 2940 is a multiple of r
    expected = zonal.attention(q, late[0], late[1], operator, causal=True, log_decay=late[2], path="dense")
    assert (y - expected).abs().max() < 1e-4 * expected.abs().max()


def test_a_rate_of_nothing_is_an_error() -> None:
    operator, (q, k, v, decay) = m.ska(power=1, fading=True), sample("none")[0]
    with pytest.raises(NonFiniteError, match="decay more slowly"):
        zonal.attention(q, k, v, operator, causal=True, log_decay=decay - math.inf, path="chunked")


@pytest.mark.parametrize("threads", [1, 2])
def test_the_same_bits_again(threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        operator, (tensors, masks) = m.ska(power=1, fading=True), sample("gates", tokens=200, r=24)
        first = everything(operator, tensors, masks, "chunked")
        again = everything(operator, tensors, masks, "chunked")
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    finally:
        torch.set_num_threads(before)


def test_the_planner_offers_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """``explain`` names it, and a kept plan reads declared rates as a call does."""
    explained = zonal.explain(m.ska(fading=True), (1, 8, 4096, 32), causal=True)
    assert (explained.ridge, str(explained.plan.routes[0])) == ("a compiled kernel", "chunked, C++ ridge")
    q, k, v, _ = sample("none", tokens=300)[0]
    operator = m.ska(power=1).replace(prior=prior.Decay(rates=(0.9, 0.99))).requires_grad_(False)
    plan = zonal.plan(operator, q.shape, k.shape, v.shape, causal=True, path="chunked")
    first, second = plan(q, k, v), plan(q, k, v)
    assert torch.equal(first, second)
    assert torch.equal(first, zonal.attention(q, k, v, operator, causal=True, path="chunked"))
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    assert (first - plan(q, k, v)).abs().max() < 1e-5 * first.abs().max()
    call = prepare(operator, q, k, v, causal=True)
    assert "ZONAL_KERNELS=off" in str(ridge_path.refusal(call))
