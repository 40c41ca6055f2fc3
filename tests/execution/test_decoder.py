"""Decoders: the same function as attention, in place; their memories are values; a refused step changes nothing."""

import copy
import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import zonal
from zonal import Memory, Operator, anchor, link, prior, score
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.kernels import native as availability

OPERATORS: dict[str, Callable[[], Operator]] = {
    "softmax": m.softmax,
    "window": lambda: m.softmax().replace(prior=prior.Window(6)),
    "squared_affine": m.squared_affine,
    "learned": lambda: Operator(
        score.Cosine(learn_temperature=True), link.SquaredAffine(learn_bias=True), anchor.Row()
    ),
    "chunks": lambda: m.squared_affine().replace(prior=prior.ChunkCausal(4)),
    "retention": m.retention,
    "ridge": m.ridge,
    "ska": lambda: m.ska(power=1),
    "ska-fading": lambda: m.ska(power=1, fading=True),
    "ridge of lifted keys": lambda: m.kernel_ridge("sko(degrees=(2.0,), manifold_dim=5)"),
}
CUTS = (0, 1, 2, 5, 6, 7, 12, 13, 14, 30)


@pytest.fixture(params=OPERATORS)
def operator(request: pytest.FixtureRequest) -> Operator:
    return OPERATORS[request.param]().requires_grad_(False)


def draw(tokens: int = 30, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((4, 5), (2, 5), (2, 6))
    return [torch.randn(2, heads, tokens, dim, generator=generator).to(dtype) for heads, dim in sizes]


def part(tensors: list[Tensor], start: int, stop: int) -> list[Tensor]:
    return [x[:, :, start:stop] for x in tensors]


def same(a: Memory, b: Memory, tolerance: float = 0.0) -> bool:
    mine, theirs = a.contents(), b.contents()
    return (
        type(a) is type(b)
        and a.count == b.count
        and mine.keys() == theirs.keys()
        and all(torch.allclose(mine[name], theirs[name], rtol=tolerance, atol=tolerance) for name in mine)
    )


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_steps_are_the_definition(operator: Operator, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(availability.VARIABLE, kernels)
    tensors = draw()
    exact = zonal.attention(*(x.double() for x in tensors), copy.deepcopy(operator).double(), causal=True, path="dense")
    decoder = Memory.empty(operator, 2, 2, 5, 6).decoder()
    y = torch.cat([decoder.step(*part(tensors, start, stop)) for start, stop in itertools.pairwise(CUTS)], 2)
    assert y.dtype == torch.float32
    assert (y - exact).abs().max() < 1e-4 * exact.abs().max().clamp_min(1)
    assert same(decoder.memory(), Memory.empty(operator, 2, 2, 5, 6).absorb(*tensors[1:]), 1e-4)


def test_every_memory_is_a_value(operator: Operator) -> None:
    tensors, decoder, kept = draw(), Memory.empty(operator, 2, 2, 5, 6).decoder(), []
    for t in range(12):
        decoder.step(*part(tensors, t, t + 1))
        kept.append((decoder.memory(), decoder.memory().fork()))
    assert all(same(memory, copied) for memory, copied in kept)
    left, right = kept[7][0].decoder(), kept[7][0].decoder().fork()
    other = draw(seed=1)
    for t in range(3):
        left.step(*part(other, t, t + 1))
    again = torch.cat([right.step(*part(tensors, t, t + 1)) for t in range(8, 12)], 2)
    assert same(right.memory(), kept[11][0], 1e-5)
    assert again.isfinite().all()
    assert same(*kept[7])


def test_rows_are_gathered(operator: Operator) -> None:
    tensors, decoder = draw(), Memory.empty(operator, 2, 2, 5, 6).decoder()
    for t in range(8):
        decoder.step(*part(tensors, t, t + 1))
    picked = decoder.gather([1, 1, 0])
    token = part(tensors, 8, 9)
    expected = decoder.step(*token)[[1, 1, 0]]
    assert torch.allclose(picked.step(*(x[[1, 1, 0]] for x in token)), expected, atol=1e-5)


def test_spans_are_recorded(operator: Operator) -> None:
    tensors = draw()
    decoder = Memory.empty(operator, 2, 2, 5, 6).absorb(*(x[:, :, :8] for x in tensors[1:])).open("chat").decoder()
    for t in range(8, 12):
        decoder.step(*part(tensors, t, t + 1))
    memory = decoder.memory().close()
    assert [(span.name, span.count) for span in memory.spans()] == [("chat", 4)]
    if operator.prior and isinstance(operator.prior[0], prior.Window):
        with pytest.raises(ArgumentError, match="the window has let go of 5 tokens before this span's last"):
            memory.forget("chat")
    else:
        before = Memory.empty(operator, 2, 2, 5, 6).absorb(*(x[:, :, :8] for x in tensors[1:]))
        assert same(memory.forget("chat"), before, 1e-5)


def test_a_padded_step_and_the_steps_after_it(operator: Operator) -> None:
    tensors, mask = draw(), torch.tensor([[True], [False]])
    decoder = Memory.empty(operator, 2, 2, 5, 6).decoder()
    decoder.step(*part(tensors, 0, 8))
    memory = decoder.memory()
    rows = [decoder.step(*part(tensors, 8, 9), key_padding_mask=mask)]
    _, memory = zonal.attention(*part(tensors, 8, 9), operator, causal=True, memory=memory, key_padding_mask=mask)
    for t in range(9, 13):
        rows.append(decoder.step(*part(tensors, t, t + 1)))
        expected, memory = zonal.attention(*part(tensors, t, t + 1), operator, causal=True, memory=memory)
        assert torch.allclose(rows[-1], expected, atol=1e-5)


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
        (lambda q, k, v: (torch.cat([q, q], 2), k, v), "each with a query"),
        (lambda q, k, v: (q[:, :, :0], k[:, :, :0], v[:, :, :0]), "at least one token"),
    ],
)
def test_a_refused_step_changes_nothing(operator: Operator, change: Callable, words: str) -> None:
    tensors = draw()
    decoder = Memory.empty(operator, 2, 2, 5, 6).decoder()
    for t in range(4):
        decoder.step(*part(tensors, t, t + 1))
    before = decoder.memory().fork()
    with pytest.raises(ArgumentError, match=words):
        decoder.step(*change(*part(tensors, 4, 5)))
    assert same(decoder.memory(), before)
    whole = zonal.attention(*part(tensors, 0, 5), operator, causal=True)
    assert torch.allclose(decoder.step(*part(tensors, 4, 5)), whole[:, :, 4:], atol=1e-4)


@pytest.mark.parametrize("name", ["learned", "ska"])
def test_learned_numbers_are_read_at_each_step(name: str) -> None:
    operator, tensors = OPERATORS[name](), draw()
    with torch.no_grad():
        decoder = Memory.empty(operator, 2, 2, 5, 6).decoder()
        for t in range(20):
            for parameter in operator.parameters():
                parameter.data += 0.05 * (t % 3)
            y = decoder.step(*part(tensors, t, t + 1))
            expected = zonal.attention(*part(tensors, 0, t + 1), operator, causal=True, path="dense")[:, :, t:]
            assert torch.allclose(y, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["learned", "ska"])
def test_a_learned_part_of_another_shape_is_refused(name: str) -> None:
    operator, tensors = OPERATORS[name](), draw()
    with torch.no_grad():
        decoder = Memory.empty(operator, 2, 2, 5, 6).decoder()
        decoder.step(*part(tensors, 0, 1))
        before, names = decoder.memory(), list(operator.learned_parts)
        first = operator.learned_parts[names[0]]
        operator.learned_parts[names[0]] = torch.nn.Parameter(torch.cat([first, first]))
        with pytest.raises(ArgumentError, match=r"Decoder.step: the learned parts .* had the shapes"):
            decoder.step(*part(tensors, 1, 2))
    assert decoder.memory().count == before.count == 1


def test_gradients_flow_through_torch() -> None:
    operator, tensors = m.squared_affine(), draw()
    decoder = Memory.empty(operator, 2, 2, 5, 6).decoder()
    with torch.no_grad():
        decoder.step(*part(tensors, 0, 1))
    leaves = [x.clone().requires_grad_() for x in part(tensors, 1, 2)]
    decoder.step(*leaves)
    y = decoder.step(*part(tensors, 2, 3))
    assert all(bool(x.any()) for x in torch.autograd.grad(y.sum(), leaves[1:]))


def test_a_window_keeps_constant_memory() -> None:
    operator = OPERATORS["window"]()
    decoder = Memory.empty(operator, 2, 2, 5, 6).decoder()
    sizes = set()
    for t in range(200):
        decoder.step(*draw(1, seed=t))
        memory = decoder.memory()
        sizes.add(memory.nbytes)
        assert memory.buffer.room.length <= 128  # type: ignore[attr-defined]
    assert len(sizes) <= 7


def test_lower_precision_and_autocast() -> None:
    operator, tensors = m.squared_affine(), draw(dtype=torch.bfloat16)
    decoder = Memory.empty(operator, 2, 2, 5, 6, torch.bfloat16).decoder()
    other = Memory.empty(operator, 2, 2, 5, 6, torch.bfloat16).decoder()
    for t in range(6):
        y = decoder.step(*part(tensors, t, t + 1))
        assert y.dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(other.step(*(x.float() for x in part(tensors, t, t + 1))), y)


FUSED: dict[str, tuple[Callable[[], Operator], torch.dtype, bool]] = {
    "softmax": (m.softmax, torch.float32, True),
    "softmax of cosines": (m.cosine, torch.float32, True),
    "float64": (m.softmax, torch.float64, False),
    "bfloat16": (m.softmax, torch.bfloat16, False),
    "window": (lambda: m.softmax().replace(prior=prior.Window(6)), torch.float32, False),
    "alibi": (lambda: m.softmax().replace(prior=prior.ALiBi()), torch.float32, False),
    "own key hidden": (lambda: m.softmax().replace(prior=prior.Causal(include_self=False)), torch.float32, False),
    "no normalisation": (lambda: Operator(score.Dot(), link.Exp(), anchor.Count()), torch.float32, False),
    "another link": (m.yat, torch.float32, False),
}


@pytest.mark.parametrize("case", FUSED)
def test_torchs_fused_attention_reads_the_keys_of_softmax(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, dtype, expected = FUSED[case]
    operator, tensors = made().requires_grad_(False), draw(dtype=dtype)
    reads: list[int] = []
    fused = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional,
        "scaled_dot_product_attention",
        lambda *x, **options: reads.append(1) or fused(*x, **options),
    )
    decoder = Memory.empty(operator, 2, 2, 5, 6, dtype).absorb(*part(tensors[1:], 0, 9)).decoder()
    y = torch.cat([decoder.step(*part(tensors, t, t + 1)) for t in range(9, 30)], 2)
    assert bool(reads) is expected
    exact = zonal.attention(*(x.double() for x in tensors), copy.deepcopy(operator).double(), causal=True, path="dense")
    assert (y - exact[:, :, 9:]).abs().max() < {torch.bfloat16: 0.02, torch.float32: 1e-5}.get(dtype, 1e-12)
    biased = decoder.fork()
    biased.step(*part(tensors, 0, 1), key_bias=torch.full((2, 2, 1), -2.0, dtype=dtype))
    before = len(reads)
    biased.step(*part(tensors, 1, 2))  # the memory keeps the bias
    assert len(reads) == before
    assert (decoder.memory().count, biased.memory().count) == (30, 32)
