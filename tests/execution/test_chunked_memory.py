"""Prefill and decode in any pieces, chunked or streaming, equal one pass; memories in and out, with gradients."""

import itertools

import pytest
import torch
from execution.chunks import BLOCKED, assert_same, call_of, leaves_of, made
from matrix import OPERATORS, Case, Inputs, inputs
from torch import Tensor

import zonal
from zonal import Operator
from zonal import mechanisms as m
from zonal.errors import ArgumentError, PathError
from zonal.execution.call import empty_memory, resumed
from zonal.execution.paths.chunked import chunked, refusal
from zonal.execution.paths.dense import dense
from zonal.execution.paths.streaming import by_torch
from zonal.memory import Memory, RidgeStatistics

CASES = {
    "plain": Case(batch=2, heads=2, kv_heads=2, queries=19, keys=19),
    "gqa-padding": Case(batch=2, heads=4, kv_heads=2, queries=19, keys=19, padding="random"),
    "key-bias": Case(batch=2, heads=2, kv_heads=1, queries=19, keys=19, key_bias=True),
}
PIECES = {"prefill-decode": (0, 15, 16, 17, 18, 19), "empty-first": (0, 0, 1, 9, 9, 19), "multi-token": (0, 6, 13, 19)}


def in_pieces(operator: Operator, data: Inputs, cuts: tuple[int, ...], way: str) -> tuple[Tensor, Memory]:
    memory, rows = None, []
    for index, (start, stop) in enumerate(itertools.pairwise(cuts)):
        call = call_of(operator, data, slice(start, stop))
        call = resumed(call, empty_memory(call) if memory is None else memory)
        y, memory = by_torch(call) if way == "streaming" or (way == "mixed" and index % 2) else chunked(call, block=4)
        rows.append(y)
    assert memory is not None
    return torch.cat(rows, 2), memory


@pytest.mark.parametrize("way", ["chunked", "streaming", "mixed"])
@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize("name", BLOCKED)
def test_pieces_equal_one_pass(name: str, case_name: str, pieces: str, way: str) -> None:
    operator, data = made(name), inputs(CASES[case_name])
    if CASES[case_name].key_bias and operator.tags.solves:
        with pytest.raises(ArgumentError, match="key_bias"):
            call_of(operator, data)
        return
    y, memory = in_pieces(operator, data, PIECES[pieces], way)
    assert_same(y, dense(call_of(operator, data)), leaves_of(operator, data))
    # and what is left is the memory of all tokens
    whole = Memory.empty(operator, 2, data.k.shape[1], 5, 3, torch.float64).absorb(
        data.k, data.v, data.key_padding_mask, key_bias=data.key_bias
    )
    assert (memory.count, memory.kind, memory.nbytes) == (whole.count, whole.kind, whole.nbytes)
    q = torch.randn(2, data.q.shape[1], 2, 5, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert_same(memory.read(q), whole.read(q), [data.k, data.v])


@pytest.mark.parametrize("case_name", CASES)
@pytest.mark.parametrize(
    "name",
    [
        name
        for name in OPERATORS
        if name not in BLOCKED and not name.startswith("sko") and not OPERATORS[name]().tags.couples
    ],
)
def test_streaming_pieces_of_operators_that_keep_keys(name: str, case_name: str) -> None:
    operator, data = made(name), inputs(CASES[case_name])
    if CASES[case_name].key_bias and operator.tags.solves:
        with pytest.raises(ArgumentError, match="key_bias"):
            call_of(operator, data)
        return
    y, memory = in_pieces(operator, data, (0, 9, 10, 19), "streaming")
    # a direction of one number is the same or opposite: there the last digit of a cosine, 1e-16, stands beside eps^2 =
    # 1e-8
    assert_same(
        y, dense(call_of(operator, data)), leaves_of(operator, data), tolerance=3e-8 if name == "rewa-curved" else 1e-9
    )
    assert memory.kind == ("windowed" if operator.tags.window else "keys")
    assert memory.count == 19


@pytest.mark.parametrize("name", BLOCKED)
def test_given_memory_is_not_changed(name: str) -> None:
    operator, data = made(name), inputs(CASES["plain"])
    for run in (chunked, by_torch):
        begin = call_of(operator, data, slice(0, 7))
        _, memory = run(resumed(begin, empty_memory(begin)))
        assert memory is not None
        before = {key: x.clone() for key, x in memory.tensors().items()}
        call = resumed(call_of(operator, data, slice(7, 19)), memory)
        first, after = run(call)
        assert after is not None
        assert after.count == 19
        assert torch.equal(first, run(call)[0])
        assert memory.count == 7
        assert all(torch.equal(x, before[key]) for key, x in memory.tensors().items())


@pytest.mark.parametrize(
    "name", ["squared_affine", "retention", "linear", "ska-0", "ska-1", "ska-2", "ridge-chunk", "ska-paper"]
)
def test_gradient_of_the_initial_memory(name: str) -> None:
    """Backward through a memory that came from elsewhere, into its own tensors."""
    operator, data = made(name), inputs(CASES["plain"])
    with torch.no_grad():
        call = call_of(operator, data, slice(0, 8))
        _, start = chunked(resumed(call, empty_memory(call)))
    assert start is not None
    state = {
        key: x.detach().clone().requires_grad_()
        for key, x in start.tensors().items()
        if x.is_floating_point() and key not in ("first", "peak")
    }
    found = []
    for run in (chunked, by_torch):
        memory = start.fork()
        for key, x in state.items():
            object.__setattr__(memory, key, x)
        if isinstance(memory, RidgeStatistics):
            object.__setattr__(memory, "inverse", None)
        y, after = run(resumed(call_of(operator, data, slice(8, 19)), memory))
        assert after is not None
        loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum() + after.read(
            data.q[:, :, :2]
        ).square().sum()
        found.append(torch.autograd.grad(loss, list(state.values()), allow_unused=True))
    for key, a, b in zip(state, *found, strict=True):
        if key == "total":
            continue  # only carried along
        assert a is not None, key
        assert b is not None, key
        if key == "gram":  # symmetric by construction: only the symmetric part means anything
            a, b = a + a.mT, b + b.mT
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-9), key


def test_memory_that_does_not_fit() -> None:
    operator, data = made("squared_affine"), inputs(CASES["plain"])
    call = call_of(operator, data)
    for run in (chunked, by_torch):
        with pytest.raises(ArgumentError, match=r"the memory holds \(batch, key heads, key dim, value dim\)"):
            run(resumed(call, Memory.empty(operator, 1, 2, 5, 3, torch.float64)))
    keys = Memory.empty(operator, 2, 2, 5, 3, torch.float64, kind="keys")
    with pytest.raises(PathError, match="a memory of keys and values is not carried as sums"):
        zonal.attention(data.q, data.k, data.v, operator, causal=True, memory=keys, path="chunked")
    filled = Memory.empty(operator, 2, 2, 5, 3, torch.float64).absorb(data.k, data.v)
    late = inputs(Case(batch=2, heads=2, kv_heads=2, queries=4, keys=19))
    for run in (chunked, by_torch):
        with pytest.raises(ArgumentError, match="causal queries are the new tokens themselves"):
            run(resumed(call_of(operator, late), filled))
    packed = inputs(Case(batch=1, heads=2, kv_heads=2, queries=19, keys=19, packed=(0, 4, 19)))
    empty = Memory.empty(operator, 1, 2, 5, 3, torch.float64)
    for run in (chunked, by_torch):
        with pytest.raises(ArgumentError, match="neither take nor leave a memory"):
            run(resumed(call_of(operator, packed), empty))


def test_memory_in_double_under_calls_in_single() -> None:
    """Statistics in float64 beneath a float32 model: results in float32, sums in float64."""
    for name in ("squared_affine", "ska-1", "retention"):
        operator, data = made(name).float(), inputs(CASES["plain"]).to(torch.float32)
        start = Memory.empty(operator, 2, 2, 5, 3, torch.float64)
        for run in (chunked, by_torch):
            y, after = run(resumed(call_of(operator, data), start))
            assert y.dtype == torch.float32
            assert after is not None
            assert all(x.dtype == torch.float64 for x in after.tensors().values() if x.is_floating_point())
            assert torch.allclose(y, dense(call_of(operator, data)), atol=1e-4)


def test_bidirectional_queries_see_the_memory_and_all_new_keys() -> None:
    for name in ("squared_affine", "ska-1", "polynomial_square"):
        operator, data = made(name), inputs(Case(batch=2, heads=4, kv_heads=2, queries=9, keys=19, causal=False))
        expected = dense(call_of(operator, data))
        memory = Memory.empty(operator, 2, 2, 5, 3, torch.float64).absorb(data.k[:, :, :8], data.v[:, :, :8])
        rest = Inputs(data.q, data.k[:, :, 8:], data.v[:, :, 8:], False, None, None, None)
        y, after = chunked(resumed(call_of(operator, rest), memory), block=4)
        assert_same(y, expected, leaves_of(operator, data))
        assert after is not None
        assert after.count == 19


@pytest.mark.parametrize("name", ["linear", "squared_affine", "retention", "ska-1"])
def test_constant_memory_while_decoding(name: str) -> None:
    operator = made(name).float()
    data = inputs(Case(batch=1, heads=2, kv_heads=2, queries=64, keys=64)).to(torch.float32)
    sizes, memory = set(), None
    with torch.no_grad():
        for t in range(64):
            call = call_of(operator, data, slice(t, t + 1))
            _, memory = by_torch(resumed(call, empty_memory(call) if memory is None else memory))
            assert memory is not None
            sizes.add(memory.nbytes)
    assert len(sizes) == 1


def test_streaming_needs_time() -> None:
    data = inputs(Case(causal=False))
    with pytest.raises(PathError, match=r"path 'streaming' cannot run.*path='dense'"):
        zonal.attention(data.q, data.k, data.v, made("softmax"), path="streaming")


def test_running_largest_key_streams() -> None:
    """The paper's ridge, token by token: what the chunked path refuses."""
    operator, data = m.ska(power=1, running_max=True, key_limit=None).double(), inputs(CASES["plain"])
    call = call_of(operator, data)
    assert refusal(call) is not None
    assert_same(by_torch(call)[0], dense(call), leaves_of(operator, data))
