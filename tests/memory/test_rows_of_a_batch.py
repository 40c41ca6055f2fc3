"""A batch of memories: rows gathered, scattered, stacked and taken apart do as each would alone."""

from pathlib import Path

import pytest
import torch
from memories import DIM, KV, NAMES, TOKENS, VALUE, Span, close, draw, empty, operator, queries, span

import zonal
from zonal import mechanisms as m
from zonal import prior
from zonal.errors import ArgumentError
from zonal.memory import FadingStatistics, KeyValues, Memory, RidgeStatistics


def alone(op: zonal.Operator, tokens: int, seed: int, padded: bool = False) -> Memory:
    """One sequence."""
    memory = Memory.empty(op, 1, KV, DIM, VALUE, torch.float64)
    mask = torch.rand(1, tokens, generator=torch.Generator().manual_seed(seed)) > 0.3 if padded else None
    return memory.absorb(draw(1, KV, tokens, DIM, seed=seed), draw(1, KV, tokens, VALUE, seed=seed + 1), mask)


def rows(tokens: Span, *index: int) -> Span:
    picked = list(index)
    return Span(tokens.k[picked], tokens.v[picked], None if tokens.mask is None else tokens.mask[picked])


def into_rows(op: zonal.Operator, tokens: Span) -> Memory:
    return tokens.into(Memory.empty(op, tokens.k.shape[0], KV, DIM, VALUE, torch.float64))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_gather_is_the_memory_of_those_sequences(name: str, padded: bool) -> None:
    op, tokens, more, q = operator(name), span(padded), span(seed=30, tokens=3), queries()
    memory = tokens.into(empty(op))
    memory.read(q)
    for index in ([1, 0], [1], [0, 1, 0, 0]):
        got, expected = memory.gather(index), into_rows(op, rows(tokens, *index))
        close(got.read(q[index]), expected.read(q[index]), 1e-12)
        assert (got.batch, got.count, got.nbytes) == (len(index), expected.count, expected.nbytes)
        close(rows(more, *index).into(got).read(q[index]), rows(more, *index).into(expected).read(q[index]))
    same = memory.gather(torch.tensor([0, 1]))
    assert all(torch.equal(value, memory.contents()[name]) for name, value in same.contents().items())
    # where keys lie in storage decides in which order a product adds up
    assert torch.allclose(same.read(q), memory.read(q), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", NAMES)
def test_scatter_replaces_rows(name: str) -> None:
    op, tokens, q = operator(name), span(), queries()
    memory, newcomer = tokens.into(empty(op)), alone(op, TOKENS, 50)
    changed = memory.scatter([1], newcomer)
    close(changed.read(q)[:1], memory.read(q)[:1], 1e-12)
    close(changed.read(q)[1:], newcomer.read(q[1:]), 1e-12)
    assert changed.count == TOKENS
    # two rows at once, the first of them into the second place
    both = Memory.stack([newcomer, alone(op, TOKENS, 51)])
    close(memory.scatter([1, 0], both).read(q), both.gather([1, 0]).read(q), 1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_stack_steps_as_each_alone(name: str, padded: bool) -> None:
    """Continuous batching: users of unequal pasts are stacked, step once, and part again."""
    op, q = operator(name), draw(3, KV, 2, DIM, seed=8)
    users = [alone(op, count, 60 + count, padded) for count in (8, 4, 16)]
    stacked = Memory.stack(users)
    assert (stacked.batch, stacked.count) == (3, 16)
    close(stacked.read(q), torch.cat([user.read(q[i : i + 1]) for i, user in enumerate(users)]), 1e-12)
    k, v = draw(3, KV, 2, DIM, seed=5), draw(3, KV, 2, VALUE, seed=6)
    y, after = zonal.attention(q, k, v, op, causal=True, memory=stacked)
    for i, (user, left) in enumerate(zip(users, after.unbind(), strict=True)):
        one = slice(i, i + 1)
        expected, later = zonal.attention(q[one], k[one], v[one], op, causal=True, memory=user)
        close(y[one], expected)
        close(left.read(q[one]), later.read(q[one]))
        if not padded and user.chunk is None:
            assert left.nbytes == later.nbytes
            assert left.count == later.count


@pytest.mark.parametrize("name", NAMES)
def test_unbind_undoes_stack(name: str) -> None:
    op = operator(name)
    users = [alone(op, count, 60 + count) for count in (8, 4, 16)]
    again = Memory.stack(user for user in Memory.stack(users).unbind())  # any iterable
    q = draw(3, KV, 2, DIM, seed=8)
    assert torch.equal(again.read(q), Memory.stack(users).read(q))


@pytest.mark.parametrize("name", ["softmax", "squared_affine", "retention", "ska-1", "ska-paper", "ska-fading"])
def test_rows_keep_their_spans(name: str) -> None:
    op, q = operator(name), draw(2, KV, 2, DIM, seed=8)
    lengths = ((8, 8), (4, 4)) if name in ("softmax", "ska-paper") else ((8, 12), (4, 20))
    users = []
    for i in (0, 1):
        memory = Memory.empty(op, 1, KV, DIM, VALUE, torch.float64)
        for j, found in enumerate(lengths):
            memory = memory.absorb(
                draw(1, KV, found[i], DIM, seed=10 * i + j),
                draw(1, KV, found[i], VALUE, seed=10 * i + j + 5),
                span=f"s{j}",
            )
        users.append(memory)
    stacked = Memory.stack(users)
    assert stacked.count == sum(max(found) for found in lengths) == sum(s.count for s in stacked.spans())
    close(stacked.read(q), torch.cat([user.read(q[i : i + 1]) for i, user in enumerate(users)]))
    for gone in ("s0", "s1"):
        expected = torch.cat([user.forget(gone).read(q[i : i + 1]) for i, user in enumerate(users)])
        close(stacked.forget(gone).read(q), expected)
        close(stacked.gather([1, 0]).forget(gone).read(q.flip(0)), expected.flip(0))
        close(stacked.unbind()[1].forget(gone).read(q[1:]), expected[1:])
    with pytest.raises(
        ArgumentError, match=r"same spans in the same order, received \['s0', 's1'\]; \['s1'\]. Call unnamed\(\)"
    ):
        Memory.stack([users[0], users[1].forget("s0")])
    assert Memory.stack([users[0].unnamed(), users[1].unnamed()]).spans() == ()


def test_kept_keys_with_spans_of_unequal_length_are_refused() -> None:
    op = operator("softmax")
    users = [alone(op, 4, 1).merge(alone(op, n, 2), span="x") for n in (2, 3)]
    with pytest.raises(ArgumentError, match="spans in the same places in all rows"):
        Memory.stack(users)


def test_masks_and_decays_that_only_some_rows_have() -> None:
    op = m.linear().double()
    plain, masked = (
        Memory.empty(op, 1, KV, DIM, VALUE, torch.float64, kind="keys"),
        Memory.empty(op, 1, KV, DIM, VALUE, torch.float64, kind="keys"),
    )
    k, v = draw(1, KV, 4, DIM, seed=1), draw(1, KV, 4, VALUE, seed=2)
    plain = plain.absorb(k, v)
    masked = masked.absorb(k, v, torch.tensor([[True, False, True, True]]), -torch.ones(1, KV, 4), torch.ones(1, KV, 4))
    q = draw(2, KV, 2, DIM, seed=3)
    stacked = Memory.stack([plain, masked])
    close(stacked.read(q), torch.cat([plain.read(q[:1]), masked.read(q[1:])]), 1e-12)


def test_unbind_takes_no_more_than_it_must() -> None:
    """Padding that stack gave is gone: the short user does not pay for the long one."""
    op = operator("softmax")
    short, long = alone(op, 3, 1), alone(op, 200, 2)
    left = Memory.stack([short, long]).unbind()
    assert [one.nbytes for one in left] == [short.nbytes, long.nbytes]
    assert isinstance(left[0], KeyValues)
    assert left[0].tokens[2] is None


@pytest.mark.parametrize("name", ["softmax", "softmax-window", "softmax-alibi", "ridge-window"])
def test_unbind_keeps_the_padding_that_was_absorbed(name: str) -> None:
    """Tokens merged in front of it are as far away as before."""
    op, q, before = operator(name), queries()[:1], alone(operator(name), 4, 3)
    mask = torch.arange(6)[None] >= 2
    user = empty(op).gather([0]).absorb(draw(1, KV, 6, DIM, seed=1), draw(1, KV, 6, VALUE, seed=2), mask)
    for others in ([], [alone(op, 9, 5)]):
        left = Memory.stack([user, *others]).unbind()[0]
        assert (left.count, left.nbytes) == (user.count, user.nbytes)
        assert torch.equal(before.merge(left).read(q), before.merge(user).read(q))


@pytest.mark.parametrize("name", ["softmax", "softmax-window", "softmax-alibi", "ridge-window", "local_global"])
def test_tokens_before_stacked_rows_are_as_near_as_before_each_row(name: str, tmp_path: Path) -> None:
    """The padding that stack gave the shorter rows does not come between, whichever way the memory went."""
    op, q = operator(name), draw(2, KV, 2, DIM, seed=8)
    users = [alone(op, count, 60 + count) for count in (2, 9)]
    first = span(tokens=4).into(empty(op))
    each = [first.gather([i]).merge(user) for i, user in enumerate(users)]
    expected = torch.cat([one.read(q[i : i + 1]) for i, one in enumerate(each)])
    stacked = Memory.stack(users)
    stacked.save(tmp_path / "memory")
    for one in (stacked, Memory.load(tmp_path / "memory", op), stacked.to("cpu"), stacked.fork()):
        merged = first.merge(one)
        close(merged.read(q), expected, 1e-12)
        close(first.merge(merged).read(q), first.merge(Memory.stack(each)).read(q), 1e-12)


def test_padding_between_named_spans_is_refused_where_distances_count() -> None:
    op = operator("softmax-alibi")
    first, stacked = span(tokens=4).into(empty(op)), Memory.stack([alone(op, 2, 1), alone(op, 5, 2)])
    with pytest.raises(ArgumentError, match=r"stack put \[3, 0\] tokens of padding .* without named spans"):
        first.merge(stacked, span="x")
    assert first.merge(Memory.stack([alone(op, 5, 1), alone(op, 5, 2)]), span="x").count == 9


def test_the_inverse_comes_along() -> None:
    op = operator("ska-1")
    with torch.no_grad():
        users = [alone(op, 8, 1), alone(op, 8, 2)]
        for user in users:
            user.read(draw(1, KV, 1, DIM, seed=3))
        stacked = Memory.stack(users)
        assert isinstance(stacked, RidgeStatistics)
        assert stacked.inverse is not None
        picked = stacked.gather([1])
        assert isinstance(picked, RidgeStatistics)
        assert picked.inverse is not None
        assert torch.equal(picked.inverse.matrix, stacked.inverse.matrix[1:])


@pytest.mark.parametrize("n", [1, 3, 7])
def test_padding_in_front_gives_no_ridge_back(n: int) -> None:
    """The direction whose ridge a token gives back is counted by real tokens, so that padding moves none."""
    op, q = operator("ska-fading"), draw(1, KV, 2, DIM, seed=8)
    one, more = alone(op, 4, 1), Span(draw(1, KV, 3, DIM, seed=4), draw(1, KV, 3, VALUE, seed=5), None)
    expected, got = more.into(one), more.into(one.preceded(n))
    assert isinstance(expected, FadingStatistics)
    assert isinstance(got, FadingStatistics)
    assert torch.equal(got.level, expected.level)
    assert expected.level.unique().numel() > 2  # else no direction could be told from another
    assert torch.equal(got.read(q), expected.read(q))
    assert (got.count, got.trimmed().count) == (7 + n, 7)
    # merged before or behind others as well
    other = alone(op, 6, 2)
    for joint, plain in (
        (other.merge(one.preceded(n)), other.merge(one)),
        (one.preceded(n).merge(other), one.merge(other)),
    ):
        assert torch.equal(joint.read(q), plain.read(q))


def test_gradients_reach_the_rows() -> None:
    op = operator("squared_affine")
    tokens = span()
    k = tokens.k.requires_grad_()
    loss = tokens.into(empty(op)).gather([1]).read(queries()[1:]).square().sum()
    (grad,) = torch.autograd.grad(loss, k)
    assert not grad[0].any()
    assert grad[1].any()


BAD = {
    "no rows": (lambda a: a.gather([]), "whole numbers"),
    "no such row": (lambda a: a.gather([0, 2]), r"rows must lie in \[0, 2\), received \[0, 2\]"),
    "negative": (lambda a: a.gather([-1]), "rows must lie in"),
    "fractions": (lambda a: a.gather(torch.tensor([0.5])), "whole numbers"),
    "twice": (lambda a: a.scatter([0, 0], a), "each row can be replaced once"),
    "too many": (lambda a: a.scatter([0], a), "holds 2 sequences for 1 rows"),
    "kinds": (
        lambda a: Memory.stack([a, Memory.empty(a.operator, 2, KV, DIM, VALUE, torch.float64, kind="keys")]),
        "of one kind, received 'ridge' and 'keys'",
    ),
    "forms": (
        lambda a: Memory.stack([a, Memory.empty(a.operator, 2, KV, DIM, VALUE + 1, torch.float64)]),
        "one form but for the batch",
    ),
    "operators": (
        lambda a: Memory.stack([a, Memory.empty(m.ska(power=2), 2, KV, DIM, VALUE, torch.float64)]),
        "belong to one operator",
    ),
    "nothing": (lambda a: Memory.stack([]), "at least one Memory is required"),
    "something else": (lambda a: Memory.stack([a, "b"]), "at least one Memory is required"),
}


@pytest.mark.parametrize("what", BAD)
def test_refusals(what: str) -> None:
    memory = span().into(empty(operator("ska-1")))
    before = memory.read(queries())
    act, words = BAD[what]
    with pytest.raises(ArgumentError, match=words):
        act(memory)
    assert torch.equal(memory.read(queries()), before)


@pytest.mark.parametrize("name", ["sko-chunk", "ridge-chunk", "softmax"])
def test_chunks_that_do_not_end_together(name: str) -> None:
    op = operator(name).replace(prior=(prior.ChunkCausal(4),))
    for verb, act in (("stack", lambda a, b: Memory.stack([a, b])), ("scatter", lambda a, b: a.scatter([0], b))):
        with pytest.raises(ArgumentError, match=f"{verb}: 2 tokens of padding would move the borders of chunks of 4"):
            act(alone(op, 6, 1), alone(op, 8, 2))


def test_padding_inside_a_sequence_has_its_place_behind_a_window() -> None:
    """The window has let go of real tokens before it; ``stack`` may have put more before these."""
    op, tokens = operator("softmax").replace(prior=(prior.Window(3),)), span(tokens=10)
    mask = torch.ones(2, 10, dtype=torch.bool)
    mask[:, 6:8] = False
    memory = Span(tokens.k, tokens.v, mask).into(empty(op)).gather([0])
    before, q = alone(op, 5, 1), queries()[:1]
    for left in (memory.unbind()[0], Memory.stack([memory, alone(op, 16, 2)]).unbind()[0]):
        assert left.count == 10
        assert torch.equal(before.merge(left).read(q), before.merge(memory).read(q))


def test_a_window_forgets_the_padding_of_stack() -> None:
    """Also where it has let go of some."""
    op, q = operator("softmax").replace(prior=(prior.Window(3),)), queries()[:1]
    before, short = alone(op, 5, 1), alone(op, 1, 3)
    left = Memory.stack([short, alone(op, 16, 2)]).fork().gather([1, 0]).unbind()[1]
    assert (left.count, left.nbytes) == (1, short.nbytes)
    assert torch.equal(before.merge(left).read(q), before.merge(short).read(q))


def test_what_keeps_the_first_tokens_is_stacked_after_a_merge() -> None:
    op, q = operator("local_global-first"), draw(2, KV, 2, DIM, seed=8)
    start = Memory.empty(op, 1, KV, DIM, VALUE, torch.float64)
    one, other = start.merge(alone(op, 1, 1)), alone(op, 1, 2)
    close(Memory.stack([one, other]).read(q), torch.cat([one.read(q[:1]), other.read(q[1:])]), 1e-12)
    assert one.nbytes == other.nbytes


@pytest.mark.parametrize(("tokens", "size"), [(10_001, 1), (40_005, 9)])
@pytest.mark.parametrize("name", ["squared_affine", "retention"])
def test_drift_of_long_streams_in_single_precision(name: str, tokens: int, size: int) -> None:
    """No number of the sums is further from its float64 value than the stated bound."""
    from zonal.memory import Tokens

    single, double = m.resolve(name), m.resolve(name).double()
    k, v = (torch.rand(1, 1, tokens, 3, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    decay = None if name == "squared_affine" else torch.full((1, 1, tokens), -1e-4, dtype=torch.float64)
    stream = Memory.empty(single, 1, 1, 3, 3)
    whole = Tokens(k, v, None, decay)
    for start in range(0, tokens, size):
        stream = stream.extended(whole.span(start, min(start + size, tokens)))
    start = Memory.empty(double, 1, 1, 3, 3, torch.float64)
    exact = start.extended(Tokens(k.double(), v.double(), None, decay)).tensors()["state"]
    # all terms are positive here, so that the sum of their absolute values is the sum
    error = ((stream.tensors()["state"].double() - exact).abs() / exact.abs()).max()
    assert 0 < error <= stream.drift
    assert stream.drift == {"squared_affine": 1, "retention": 4}[name] * (tokens + 8) * 2**-24
    assert Memory.empty(m.softmax(), 1, 1, 3, 3).drift == 0.0
    assert Memory.empty(m.ridge(), 1, 1, 3, 3).drift == 8 * 2**-53


def test_unlike_memories_are_refused_without_counting_them() -> None:
    one, other = (Memory.empty("softmax", 1, 2, 4, size) for size in (4, 5))
    with pytest.raises(ArgumentError, match=r"Memory\.stack: memories must have one form but for the batch"):
        Memory.stack([one, one, other])
