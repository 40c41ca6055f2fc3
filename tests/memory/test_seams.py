"""Spans taken out of merged ridge statistics, where rows of a batch have spans without a real token: M, first and last
key against the merge of the rest.
"""

import itertools

import pytest
import torch
from memories import close, draw, empty, operator
from torch import Tensor

from zonal.errors import ArgumentError
from zonal.memory import FadingStatistics, Memory, RidgeStatistics

# which of four spans have real tokens, a row each
ROWS = torch.tensor(
    [[1, 1, 1, 1], [1, 0, 1, 1], [0, 1, 0, 1], [1, 0, 0, 1], [0, 0, 1, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]],
    dtype=torch.bool,
)
SIZES = (3, 2, 4, 1)


def spans(name: str) -> tuple[list[Memory], Tensor]:
    op = operator(name)
    made, batch = [], ROWS.shape[0]
    for index, size in enumerate(SIZES):
        mask = ROWS[:, index : index + 1] & (
            torch.rand(batch, size, generator=torch.Generator().manual_seed(index)) > 0.3
        )
        mask[:, -1] |= ROWS[:, index]
        k, v = draw(batch, 2, size, 5, seed=2 * index), draw(batch, 2, size, 3, seed=2 * index + 1)
        k[:, :, 0] = 0 if index == 2 else k[:, :, 0]  # a real token may have a key of zero
        rates = (
            {
                "log_decay": -torch.rand(
                    batch, 2, size, generator=torch.Generator().manual_seed(index), dtype=torch.float64
                )
            }
            if "fading" in name
            else {}
        )
        made.append(Memory.empty(op, batch, 2, 5, 3, torch.float64).absorb(k, v, mask, **rates))
    return made, draw(batch, 4, 3, 5, seed=99)


def merged(parts: list[Memory], shape: str) -> Memory:
    if shape == "left":
        whole = parts[0]
        for part in parts[1:]:
            whole = whole.merge(part)
        return whole
    if shape == "right":
        whole = parts[-1]
        for part in reversed(parts[:-1]):
            whole = part.merge(whole)
        return whole
    half = len(parts) // 2
    return merged(parts[:half], "right").merge(merged(parts[half:], "left")) if half else parts[0]


def assert_same(a: Memory, b: Memory) -> None:
    assert isinstance(a, RidgeStatistics | FadingStatistics)
    assert isinstance(b, RidgeStatistics | FadingStatistics)
    assert a.count == b.count
    for name in ("gram", "cross", "shift", "first", "last"):
        close(getattr(a, name), getattr(b, name), 1e-9)
    assert torch.equal(a.padding, b.padding)


@pytest.mark.parametrize("shape", ["left", "right", "halves"])
@pytest.mark.parametrize("name", ["ska-1", "ska-2"])
def test_any_span_can_go(name: str, shape: str) -> None:
    """And then any other of those that are left."""
    parts, q = spans(name)
    for order in itertools.permutations(range(4), 2):
        left, whole = list(range(4)), merged(parts, shape)
        for gone in order:
            whole = whole.subtract(parts[gone])
            left.remove(gone)
            rest = merged([parts[i] for i in left], "left")
            assert_same(whole, rest)
            close(whole.read(q), rest.read(q), 1e-8)


@pytest.mark.parametrize("shape", ["left", "right", "halves"])
def test_neighbours_go_together(shape: str) -> None:
    parts, _ = spans("ska-1")
    for start, stop in itertools.combinations(range(5), 2):
        if stop - start < 4:
            both = merged(parts[start:stop], "right")
            assert_same(merged(parts, shape).subtract(both), merged([*parts[:start], *parts[stop:]], "left"))


@pytest.mark.parametrize("shape", ["left", "right", "halves"])
def test_the_oldest_of_a_fading_past_go(shape: str) -> None:
    parts, q = spans("ska-fading")
    whole = merged(parts, shape)
    for gone in range(3):
        whole = whole.subtract(parts[gone])
        rest = merged(parts[gone + 1 :], "left")
        assert_same(whole, rest)
        close(whole.read(q), rest.read(q), 1e-7)


def test_a_key_that_no_merge_wrote_down_is_refused() -> None:
    """The second span has no real token, and what follows it was absorbed: the key after the border is unknown."""
    op = operator("ska-1")
    first, tokens = draw(2, 2, 3, 5, seed=1), draw(2, 2, 3, 3, seed=2)
    one, other = (
        empty(op).absorb(first, tokens),
        empty(op).absorb(first, tokens, torch.tensor([[True] * 3, [False] * 3])),
    )
    after = one.merge(other).absorb(first, tokens)
    with pytest.raises(ArgumentError, match="border of these tokens is unknown"):
        after.subtract(one)
    close(one.merge(other).merge(one).subtract(one).gram, other.merge(one).gram)
