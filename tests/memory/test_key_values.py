"""KeyValues: what is shared and what is not, windows, and what the attention entry takes from it."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import zonal
from zonal import mechanisms as m
from zonal import prior
from zonal.errors import ArgumentError, PathError
from zonal.memory import KeyValues, Memory, keys
from zonal.memory.tokens import Tokens


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(memory: Memory, seed: int, tokens: int = 1) -> KeyValues:
    after = memory.absorb(draw(1, 2, tokens, 4, seed=seed), draw(1, 2, tokens, 3, seed=seed + 1000))
    assert isinstance(after, KeyValues)
    return after


def test_appending_copies_seldom() -> None:
    """The newest memory of a line appends where there is room; each value still sees only its own tokens."""
    line: list[KeyValues] = [step(Memory.empty(m.softmax(), 1, 2, 4, 3), 0)]
    for seed in range(1, 300):
        line.append(step(line[-1], seed))
    assert len({memory.buffer.room.k.data_ptr() for memory in line}) <= 5
    assert [memory.count for memory in line] == list(range(1, 301))
    keys = line[-1].tokens[0]
    for memory in line[::37]:
        assert torch.equal(memory.tokens[0], keys[:, :, : memory.count])


def test_a_second_continuation_gets_its_own_room() -> None:
    memory = step(Memory.empty(m.softmax(), 1, 2, 4, 3), 0, 5)
    left, right = step(memory, 1), step(memory, 2)
    again = step(left, 3)
    assert not torch.equal(left.tokens[0], right.tokens[0])
    assert torch.equal(again.tokens[0][:, :, :6], left.tokens[0])
    assert torch.equal(right.tokens[0][:, :, 5:], draw(1, 2, 1, 4, seed=2))


def test_threads_that_go_on_from_one_memory_get_their_own_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both took the same room, so that one read the keys of the other."""
    memory = step(step(Memory.empty(m.softmax(), 1, 2, 4, 3), 0, 5), 1)
    both, write = threading.Barrier(2, timeout=60), keys._write

    def together(place: Tokens, tokens: Tokens) -> None:
        both.wait()
        write(place, tokens)

    with monkeypatch.context() as patch, ThreadPoolExecutor(2) as threads:
        patch.setattr(keys, "_write", together)
        found = list(threads.map(lambda seed: step(memory, seed), (2, 3)))
    for seed, after in zip((2, 3), found, strict=True):
        assert torch.equal(after.tokens[0][:, :, 6:], draw(1, 2, 1, 4, seed=seed))


def test_appending_leaves_graphs_valid() -> None:
    memory, q = step(Memory.empty(m.softmax(), 1, 2, 4, 3), 0, 5), draw(1, 2, 1, 4, seed=9).requires_grad_()
    y = memory.read(q)
    expected = torch.autograd.grad(y.sum(), q, retain_graph=True)[0]
    with torch.no_grad():
        step(memory, 1)
    assert torch.equal(torch.autograd.grad(y.sum(), q)[0], expected)


def test_keys_are_prepared_and_typed() -> None:
    memory = Memory.empty(m.cosine(), 1, 2, 4, 3, torch.bfloat16).absorb(
        draw(1, 2, 5, 4).bfloat16(), draw(1, 2, 5, 3).bfloat16()
    )
    assert isinstance(memory, KeyValues)
    k, v, mask, decay, bias = memory.tokens
    # unit vectors would lose more by rounding than their keys had; keys that the score leaves alone are kept as they
    # came
    assert (k.dtype, v.dtype) == (torch.float32, torch.bfloat16)
    assert torch.allclose(k.norm(dim=-1), torch.ones(1, 2, 5))
    plain = Memory.empty(m.softmax(), 1, 2, 4, 3, torch.bfloat16).absorb(
        draw(1, 2, 5, 4).bfloat16(), draw(1, 2, 5, 3).bfloat16()
    )
    assert isinstance(plain, KeyValues)
    assert plain.tokens[0].dtype == torch.bfloat16
    assert mask is None
    assert decay is None
    assert bias is None


def test_mask_decay_and_bias_appear_when_they_come() -> None:
    memory = step(Memory.empty(m.linear(), 1, 2, 4, 3, kind="keys"), 0, 2)
    mask = torch.tensor([[True, False]])
    decay, bias = -torch.rand(1, 2, 2), torch.rand(1, 2, 2)
    later = memory.absorb(draw(1, 2, 2, 4), draw(1, 2, 2, 3), mask, decay, bias)
    last = later.absorb(draw(1, 2, 1, 4), draw(1, 2, 1, 3))
    assert isinstance(last, KeyValues)
    _, _, held, decays, biases = last.tokens
    assert held is not None
    assert decays is not None
    assert biases is not None
    assert held.tolist() == [[True, True, True, False, True]]
    assert torch.allclose(
        decays, torch.cat([torch.zeros(1, 2, 2), decay * mask[:, None], torch.zeros(1, 2, 1)], -1).double()
    )
    assert torch.allclose(biases, torch.cat([torch.zeros(1, 2, 2), bias * mask[:, None], torch.zeros(1, 2, 1)], -1))


@pytest.mark.parametrize("weights", ["mask", "key_bias", "log_decay"])
def test_equal_keys_are_told_apart_by_what_else_is_known_of_them(weights: str) -> None:
    empty, k, v = Memory.empty(m.linear(), 1, 2, 4, 3, kind="keys"), draw(1, 2, 3, 4), draw(1, 2, 3, 3, seed=1)
    given = {
        "mask": {"key_padding_mask": torch.tensor([[True, True, False]])},
        "key_bias": {"key_bias": torch.full((1, 2, 3), -3.0)},
        "log_decay": {"log_decay": torch.full((1, 2, 3), -0.1)},
    }[weights]
    a, b, q = empty.absorb(k, v, **given), empty.absorb(k, v), draw(1, 2, 2, 4, seed=9)
    assert torch.equal(a.merge(b).subtract(b).read(q), a.read(q))
    with pytest.raises(ArgumentError, match="neither the first nor the last"):
        a.merge(step(empty, 5)).subtract(b)


def test_what_padding_holds_tells_no_tokens_apart() -> None:
    empty, mask = Memory.empty(m.softmax(), 1, 2, 4, 3), torch.tensor([[True, False]])
    nothing = torch.full((1, 2, 2), float("nan")).masked_fill(mask[:, None], 0)
    k, v = (x + nothing.unsqueeze(-1) for x in (draw(1, 2, 2, 4), draw(1, 2, 2, 3, seed=1)))
    padded, more = empty.absorb(k, v, mask, key_bias=nothing), step(empty, 5)
    assert torch.equal(padded.merge(more).subtract(padded).read(draw(1, 2, 1, 4)), more.read(draw(1, 2, 1, 4)))


@pytest.mark.parametrize("operator", [m.softmax(), m.linear(), m.ridge()], ids=lambda operator: operator.name)
def test_what_absorbed_padding_holds_reaches_no_later_call(operator: zonal.Operator) -> None:
    mask, (q, k, v) = torch.tensor([[True, False, True]]), (draw(1, 2, 3, 4, seed=seed).double() for seed in range(3))
    bias = None if operator.tags.solves else draw(1, 2, 3, seed=3).double()

    def after(held: float) -> torch.Tensor:
        """What later tokens read, where padding holds this number."""
        hidden = ~mask[:, None]
        keys, values = (x.masked_fill(hidden[..., None], held) for x in (k, v))
        biases = None if bias is None else bias.masked_fill(hidden, held)
        empty = Memory.empty(operator, 1, 2, 4, 4, torch.float64, kind="keys")
        memory = empty.absorb(keys, values, mask, key_bias=biases)
        return zonal.attention(q, k, v, operator, causal=True, memory=memory.merge(memory))[0]

    assert torch.equal(after(float("nan")), after(0.0))


@pytest.mark.parametrize("operator", [m.yat(), m.linear(), m.ridge()], ids=lambda operator: operator.name)
def test_absorbed_padding_has_no_gradient(operator: zonal.Operator) -> None:
    hidden, nan = torch.tensor([[[False, True, False]]]), float("nan")
    k, v = (draw(1, 2, 3, 4, seed=seed).masked_fill(hidden[..., None], nan).requires_grad_() for seed in range(2))
    weights = draw(1, 2, 3, seed=2).masked_fill(hidden, nan).requires_grad_()
    name = "key_gate" if operator.tags.solves else "key_bias"
    memory = Memory.empty(operator, 1, 2, 4, 4).absorb(k, v, ~hidden[:, 0], **{name: weights})
    memory.read(draw(1, 2, 1, 4, seed=3)).sum().backward()
    for x in (k, v, weights):
        assert x.grad is not None
        assert torch.isfinite(x.grad).all()
        assert not x.grad[:, :, 1].any()


def test_a_window_keeps_what_can_be_seen() -> None:
    """One more than the window's left: reading stands at the last token, the next token one later."""
    memory = Memory.empty(m.softmax(prior=prior.Window(5)), 1, 2, 4, 3)
    whole = Memory.empty(m.softmax(), 1, 2, 4, 3)
    q = draw(1, 2, 1, 4, seed=77)
    for seed in range(200):
        memory, whole = step(memory, seed), step(whole, seed)
        k, v = memory.tokens[:2]
        assert k.shape[2] == min(6, seed + 1)
        assert torch.equal(k, whole.tokens[0][:, :, -6:])
        weight = torch.softmax(q @ k.mT / 2, -1)
        assert torch.allclose(memory.read(q), weight @ v, atol=1e-6)
    assert memory.buffer.room.length < 200
    assert memory.count == 200


@pytest.mark.parametrize("spec", ["softmax", "yat", "squared_affine", "rewa", "ska(power=1)"])
def test_query_heads_share_keys_that_are_not_repeated(spec: str) -> None:
    """Steps with 6 query heads and 2 key heads are the rows of one call, for scores that are products and others."""
    torch.manual_seed(0)
    operator = m.resolve(spec).for_heads(6, 2, dim=8)
    q, k, v = torch.randn(2, 6, 9, 8).double(), torch.randn(2, 2, 9, 8).double(), torch.randn(2, 2, 9, 5).double()
    wanted = zonal.attention(q, k, v, operator, causal=True, path="dense")
    decoder = (
        zonal.Memory.empty(operator, 2, 2, 8, 5, torch.float64, kind="keys").absorb(k[:, :, :4], v[:, :, :4]).decoder()
    )
    with torch.no_grad():
        found = [decoder.step(q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1]) for t in range(4, 9)]
    assert torch.allclose(torch.cat(found, 2), wanted[:, :, 4:], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("given", ["key_bias", "log_decay"])
@pytest.mark.parametrize("path", ["auto", "dense", "tiled", "streaming", "sparse"])
@pytest.mark.parametrize("name", ["rewa", "softmax", "hashed"])
def test_a_call_without_biases_goes_on_from_keys_that_have_them(name: str, path: str, given: str) -> None:
    """The path is chosen for the keys of the memory, too."""
    hashed = m.softmax().replace(anchor=zonal.anchor.TopK(8, search=zonal.hashing.LSH()))
    operator = {"rewa": m.rewa(), "softmax": m.softmax(), "hashed": hashed}[name]
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 60, 8).unbind()
    bias = torch.randn(1, 2, 60)
    bias = 2 * bias if given == "key_bias" else -bias.abs()
    bias[..., 20:] = 0
    memory = Memory.empty(operator, 1, 2, 8, 8).absorb(k[:, :, :20], v[:, :, :20], **{given: bias[..., :20]})
    later = [x[:, :, 20:] for x in (q, k, v)]
    try:
        y, _ = zonal.attention(*later, operator, causal=True, memory=memory, path=path)
    except PathError:
        assert path in ("tiled", "streaming", "sparse")
        with pytest.raises(PathError):  # as a call that has the biases itself
            zonal.attention(q, k, v, operator, causal=True, path=path, **{given: bias})
        return
    exact = zonal.attention(q.double(), k.double(), v.double(), operator, causal=True, path="dense", **{given: bias})
    torch.testing.assert_close(y, exact[:, :, 20:].float(), atol=1e-5, rtol=1e-5)


def test_biases_keep_their_digits_after_a_first_one_of_another_type() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 12, 4, dtype=torch.float64).unbind()
    bias = torch.randn(1, 2, 12, dtype=torch.float64)
    bias[..., :4] = 0
    memory = Memory.empty("softmax", 1, 2, 4, 4, torch.float64)
    memory = memory.absorb(k[:, :, :4], v[:, :, :4], key_bias=bias[..., :4].bfloat16())
    y, _ = zonal.attention(
        *(x[:, :, 4:] for x in (q, k, v)), "softmax", causal=True, memory=memory, key_bias=bias[..., 4:]
    )
    exact = zonal.attention(q, k, v, "softmax", causal=True, key_bias=bias)[:, :, 4:]
    torch.testing.assert_close(y, exact, atol=1e-12, rtol=1e-12)
