"""The compiled kernel for steps after a window and sums: against the float64 definition, its memory, and what it leaves
to torch.
"""

import copy
import itertools
import re
from pathlib import Path
from typing import cast

import pytest
import torch
from kernels.decode_cases import PIECES, draw, pieces, taken
from matrix import randomised
from torch import Tensor

import zonal
from zonal import Memory, Operator, score
from zonal import mechanisms as m
from zonal.errors import ArgumentError
from zonal.execution.paths.steps.base import MOST_TOKENS
from zonal.execution.paths.steps.window import WindowSteps
from zonal.kernels import native as native_kernels
from zonal.memory import WindowedSums

pytestmark = pytest.mark.skipif(native_kernels.compiler() is None, reason="no C++ compiler on this machine")

FARS = (
    "hedgehog(size=6)", "hedgehog(size=10, activation='exp')", "performer(draws=7)", "slay(scale='small')",
    "squared_affine(learn_bias=True)", "polynomial_square(degree=4)", "linear",
)  # fmt: skip
# (heads, key heads, key dim, value dim), window, first
SHAPES = {
    "odd": ((4, 4, 5, 3), 4, 0),
    "grouped": ((6, 2, 7, 33), 5, 2),
    "one key head": ((4, 1, 16, 24), 1, 1),
    "long window": ((3, 3, 9, 8), 23, 3),
    "not reached": ((2, 1, 8, 17), 64, 2),
    "one number": ((2, 1, 1, 1), 3, 0),
}
TOKENS = sum(PIECES)


def operator(far: str = FARS[0], shape: str = "grouped") -> Operator:
    (heads, kv_heads, dim, _), window, first = SHAPES[shape]
    made = m.local_global(window, far, weight=0.3, first=first).for_heads(heads, kv_heads, dim=dim)
    return randomised(made).float()


def inputs(shape: str = "grouped", tokens: int = TOKENS) -> list[Tensor]:
    return [x.float() for x in draw(SHAPES[shape][0], tokens)]


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of every call that the kernel took."""
    return taken(monkeypatch, WindowSteps, "step")


def same(found: Memory, expected: Memory, tolerance: float = 2e-5) -> None:
    """Two memories hold the same: kept tokens to the bit, and sums."""
    assert isinstance(found, WindowedSums)
    assert isinstance(expected, WindowedSums)
    assert (found.count, found.kind, found.nbytes) == (expected.count, expected.kind, expected.nbytes)
    assert torch.equal(found.padding, expected.padding)
    for mine, theirs in ((found.tokens, expected.tokens), (found.opening, expected.opening)):
        if mine is None or theirs is None:
            assert mine is theirs
            continue
        assert mine.with_mask().mask.equal(theirs.with_mask().mask)  # type: ignore[union-attr]
        for x, y in zip(mine.silent()[:2], theirs.silent()[:2], strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)
    size = expected.state.abs().max().clamp_min(1)
    assert (found.state - expected.state).abs().max() <= tolerance * size


CASES = [(far, shape, torch.float32) for far in FARS for shape in SHAPES]
CASES += [(far, "grouped", dtype) for far in FARS for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize(("far", "shape", "dtype"), CASES, ids=str)
def test_steps_equal_the_definition(
    far: str, shape: str, dtype: torch.dtype, steps: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs have at most twice the error of torch's steps, and a floor of rounding; the memory left is torch's."""
    op, tensors = operator(far, shape), [x.to(dtype) for x in draw(SHAPES[shape][0], TOKENS)]
    exact = [x.double() for x in tensors]
    with torch.no_grad():
        truth = zonal.attention(*exact, copy.deepcopy(op).double(), causal=True, path="dense")
        y, memory = pieces(op, tensors, PIECES)
        assert steps == list(PIECES)
        monkeypatch.setenv(native_kernels.VARIABLE, "off")
        other, without = pieces(op, tensors, PIECES)
        assert steps == list(PIECES)
    assert y.dtype == dtype
    size = max(1.0, truth.abs().max().item())
    error, allowed = ((x.double() - truth).abs() for x in (y, other))
    assert (error <= 2 * allowed + size * (16 * 2**-23 + torch.finfo(dtype).eps)).all()
    same(memory, without)


@pytest.mark.parametrize("far", ["hedgehog(size=6)", "squared_affine"])
@pytest.mark.parametrize("size", [0.0, 1e-20, 30.0, 300.0])
@torch.no_grad()
def test_queries_and_keys_of_any_size(size: float, far: str, steps: list[int]) -> None:
    """Scores of some hundreds, where a window without its maximum or sums scaled by it would overflow; zero vectors."""
    op, (q, k, v) = operator(far), inputs()
    k[:, :, 3:9] = 0
    exact = zonal.attention(q.double() * size, k.double(), v.double(), copy.deepcopy(op).double(), causal=True)
    y, _ = pieces(op, [q * size, k, v], (1,) * TOKENS)
    torch.testing.assert_close(y.double(), exact, rtol=1e-3, atol=1e-3)
    assert len(steps) == TOKENS


@torch.no_grad()
def test_what_is_not_a_number_stays_in_its_rows() -> None:
    op, (q, k, v) = operator(), inputs()
    q[0, 1, 5], k[1, 1, 9, 2] = torch.nan, torch.nan
    y, _ = pieces(op, [q, k, v], (1,) * TOKENS)
    assert y[0, 1, 5].isnan().all()
    assert y[0].isnan().sum() == y.shape[-1]
    assert y[1, :3].isfinite().all()
    assert y[1, 3:, 9:].isnan().all()


@torch.no_grad()
def test_padding_of_the_past_takes_no_place(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a batch with prompts of different lengths, one of them shorter than the window and the opening."""
    op, (q, k, v) = operator(), inputs()
    mask = torch.ones(2, TOKENS, dtype=torch.bool)
    mask[0, :9], mask[1, 3] = False, False
    truth = zonal.attention(
        q.double(), k.double(), v.double(), copy.deepcopy(op).double(), causal=True, key_padding_mask=mask, path="dense"
    )

    def run(sizes: tuple[int, ...]) -> Memory:
        memory = Memory.empty(op, 2, 2, 7, 33).absorb(k[:, :, :10], v[:, :, :10], mask[:, :10])
        y, memory = pieces(op, [x[:, :, 10:] for x in (q, k, v)], sizes, memory=memory)
        torch.testing.assert_close(y.double(), truth[:, :, 10 : 10 + sum(sizes)], rtol=2e-5, atol=2e-5)
        return memory

    found = [run(sizes) for sizes in ((1,) * (TOKENS - 10), (2, 1, 15, 1, TOKENS - 29), (3,))]
    assert len(steps) == TOKENS - 10 + 6
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    expected = run((1,) * (TOKENS - 10))
    same(found[0], expected)
    same(found[1], expected)
    assert cast(WindowedSums, found[2]).tokens.mask is not None  # one row has four tokens
    same(found[2], run((3,)))


@torch.no_grad()
def test_memories_are_values_that_go_on_and_are_saved(tmp_path: Path, steps: list[int]) -> None:
    """A memory that a decoder has given away stays, whatever it reads next; forks part; files continue."""
    op, (q, k, v) = operator(), inputs(tokens=200)
    whole = zonal.attention(q, k, v, op, causal=True, path="chunked")
    decoder, given = Memory.empty(op, 2, 2, 7, 33).decoder(), []
    for t in range(200):
        if t in (0, 1, 4, 11, 70, 71, 140):
            given.append(
                (t, decoder.memory(), decoder.fork(), [x.clone() for x in decoder.memory().tensors().values()])
            )
        y = decoder.step(*(x[:, :, t : t + 1] for x in (q, k, v)))
        torch.testing.assert_close(y, whole[:, :, t : t + 1], rtol=2e-5, atol=2e-5)
    assert len(steps) == 200
    for t, memory, fork, before in given:
        assert all(map(torch.equal, memory.tensors().values(), before))
        memory.save(tmp_path / "memory.safetensors")
        part = [x[:, :, t : t + 9] for x in (q, k, v)]
        for start in (memory, Memory.load(tmp_path / "memory.safetensors"), fork.memory()):
            again, after = pieces(op, part, (1,) * 8 + (1,), memory=start)
            torch.testing.assert_close(again, whole[:, :, t : t + 9], rtol=2e-5, atol=2e-5)
            assert after.nbytes <= memory.bytes_at(10**6)


@torch.no_grad()
def test_learned_numbers_are_followed(steps: list[int]) -> None:
    op, tensors = operator(), inputs()
    decoder = Memory.empty(op, 2, 2, 7, 33).decoder()
    for t in range(TOKENS):
        if t == 20:
            op.learned_parts["anchor_log_weight"].add_(1.0)
            op.learned_parts["anchor_score_query_weight"].mul_(1.5)
        y = decoder.step(*(x[:, :, t : t + 1] for x in tensors))
    expected = zonal.attention(*(x.double() for x in tensors), copy.deepcopy(op).double(), causal=True)
    torch.testing.assert_close(y.double(), expected[:, :, -1:], rtol=2e-5, atol=2e-5)
    assert len(steps) == TOKENS


@torch.no_grad()
def test_a_step_that_loses_all_features_is_refused_and_changes_nothing(steps: list[int]) -> None:
    """Exponentials of minus a squared length: of the query now, and of a key when it leaves the window."""
    op, (q, k, v) = operator("performer(draws=7)"), inputs()
    decoder = Memory.empty(op, 2, 2, 7, 33).absorb(k[:, :, :12], v[:, :, :12]).decoder()
    decoder.step(*(x[:, :, 12:13] for x in (q, k, v)))
    before = [x.clone() for x in decoder.memory().tensors().values()]
    for _ in range(2):
        with pytest.raises(ArgumentError, match="all features PositiveRandom of some vector are 0"):
            decoder.step(q[:, :, 13:14] * 1e3, *(x[:, :, 13:14] for x in (k, v)))
        assert decoder.count == 13
    assert all(map(torch.equal, decoder.memory().tensors().values(), before))
    y = decoder.step(*(x[:, :, 13:14] for x in (q, k, v)))
    torch.testing.assert_close(y, zonal.attention(q[:, :, :14], k[:, :, :14], v[:, :, :14], op, causal=True)[:, :, -1:])
    decoder.step(q[:, :, 14:15], k[:, :, 14:15] * 1e3, v[:, :, 14:15])
    for t in range(15, 19):
        decoder.step(*(x[:, :, t : t + 1] for x in (q, k, v)))
    with pytest.raises(ArgumentError, match="all features"):
        decoder.step(*(x[:, :, 19:20] for x in (q, k, v)))
    assert decoder.count == 19
    assert len(steps) == 1 + 1 + 1 + 4


def test_who_is_refused(steps: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sentences of ``explain``, and the same answers by torch."""

    def told(op: Operator, tokens: int = 1, dtype: torch.dtype = torch.float32) -> str:
        with torch.no_grad():
            return zonal.explain(op, (2, 6, tokens, 7), (2, 2, tokens, 7), causal=True, dtype=dtype, memory=100).decode

    def missing(op: Operator, **given: Tensor) -> None:
        tensors = inputs(tokens=12)
        whole = zonal.attention(*tensors, op, causal=True, path="dense")
        memory = Memory.empty(op, 2, 2, 7, 33).absorb(*(x[:, :, :11] for x in tensors[1:]))
        y, _ = zonal.attention(
            *(x[:, :, 11:] for x in tensors), op, causal=True, memory=memory, path="streaming", **given
        )
        torch.testing.assert_close(y, whole[:, :, 11:], rtol=2e-5, atol=2e-5)
        assert steps == []

    op, frozen = operator(), m.local_global(5, "squared_affine", learn_weight=False)
    assert told(op) == told(op, MOST_TOKENS) == "a compiled kernel"
    assert "1 to 16 new tokens" in told(op, 17)
    assert "float64" in told(op, dtype=torch.float64)
    missing(op)  # gradients of what it has learned
    with torch.no_grad():
        missing(frozen, key_bias=torch.zeros(2, 2, 1))
        missing(frozen, key_padding_mask=torch.ones(2, 1, dtype=torch.bool))
    unknown = operator("slay(scale='small', fusion='hadamard')")
    assert "neither a dot product nor made of features of one layer" in told(unknown)
    cosine = frozen.replace(score=score.Cosine())
    assert "not the exponential of a plain dot product" in told(cosine)
    with torch.no_grad():
        missing(unknown)
        missing(cosine)
    monkeypatch.setenv(native_kernels.VARIABLE, "off")
    assert "ZONAL_KERNELS=off" in told(op)
    with torch.no_grad():
        missing(op)


@torch.no_grad()
def test_what_a_memory_holds_may_refuse(steps: list[int]) -> None:
    op, (q, k, v) = operator(), inputs(tokens=12)
    empty, last = Memory.empty(op, 2, 2, 7, 33), [x[:, :, 11:] for x in (q, k, v)]
    bias = torch.zeros(2, 2, 11)
    biased = empty.absorb(k[:, :, :11], v[:, :, :11], key_bias=bias)
    halves = Memory.empty(op, 2, 2, 7, 33, torch.bfloat16).absorb(k[:, :, :11].bfloat16(), v[:, :, :11].bfloat16())
    whole = zonal.attention(q, k, v, op, causal=True, path="dense")[:, :, 11:]
    for memory, tolerance in ((biased, 2e-5), (halves, 2e-2)):
        y, _ = zonal.attention(*last, op, causal=True, memory=memory, path="streaming")
        torch.testing.assert_close(y, whole, rtol=tolerance, atol=tolerance)
    with torch.enable_grad():
        memory = empty.absorb(k[:, :, :11].requires_grad_(), v[:, :, :11])
        frozen = copy.deepcopy(op).requires_grad_(False)
        y, _ = zonal.attention(*last, frozen, causal=True, memory=memory, path="streaming")
        assert y.requires_grad
    assert steps == []


def test_the_route_is_told() -> None:
    shape = (1, 9, 1, 64), (1, 3, 1, 64)
    op = m.local_global(window=64, first=4, far="hedgehog", weight=0.02, learn_weight=False)
    with torch.no_grad():
        page = zonal.explain(op, *shape, causal=True, memory=1000)
    assert page.path == "streaming"
    assert re.match(r"C\+\+ window and sums", page.plan.routes[0].name)
    assert page.decode == "a compiled kernel"


@pytest.mark.parametrize("heads", list(itertools.product((1, 2, 9), (1, 3))))
@torch.no_grad()
def test_window_of_the_decoder_of_a_transformer(heads: tuple[int, int]) -> None:
    """Sizes that fill vectors, a batch for several threads, and a window that moves to new places often."""
    batch, kv_heads = heads
    op = m.local_global(window=64, first=4, far="hedgehog(size=128)", weight=0.02).for_heads(9, kv_heads, dim=64)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch, h, 400, 64, generator=generator) for h in (9, kv_heads, kv_heads))
    memory = Memory.empty(op, batch, kv_heads, 64, 64).absorb(k[:, :, :150], v[:, :, :150])
    decoder = memory.decoder()
    y = torch.cat([decoder.step(*(x[:, :, t : t + 1] for x in (q, k, v))) for t in range(150, 400)], 2)
    whole = zonal.attention(q, k, v, op, causal=True, path="chunked")
    torch.testing.assert_close(y, whole[:, :, 150:], rtol=2e-5, atol=2e-5)
