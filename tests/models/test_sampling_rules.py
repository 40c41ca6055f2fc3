"""How the next token is drawn and when a row stops."""

import math

import pytest
import torch

from zonal.errors import ArgumentError, NonFiniteError
from zonal.models.sampling import Sampler, StopRule

LOGITS = torch.tensor([[math.log(p) for p in (0.4, 0.3, 0.2, 0.1)], [math.log(p) for p in (0.1, 0.2, 0.3, 0.4)]])


def test_zero_temperature_is_argmax():
    assert Sampler(0).draw(LOGITS, None).tolist() == [0, 3]


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (Sampler(), [0.4, 0.3, 0.2, 0.1]),
        (Sampler(temperature=0.5), [0.16 / 0.30, 0.09 / 0.30, 0.04 / 0.30, 0.01 / 0.30]),
        (Sampler(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Sampler(top_k=9), [0.4, 0.3, 0.2, 0.1]),
        (Sampler(top_p=0.39), [1, 0, 0, 0]),
        (Sampler(top_p=0.41), [4 / 7, 3 / 7, 0, 0]),
        (Sampler(top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampler(top_p=1e-9), [1, 0, 0, 0]),
        (Sampler(top_p=1.0), [0.4, 0.3, 0.2, 0.1]),
        (Sampler(top_k=3, top_p=0.7), [4 / 7, 3 / 7, 0, 0]),
    ],
)
def test_probabilities(sampler, expected):
    both = sampler.probabilities(LOGITS.double())
    torch.testing.assert_close(both[0], torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(both[1], both[0].flip(0), rtol=1e-6, atol=1e-9)


def test_top_p_is_reached_and_not_passed():
    """0.5 is reached by the first token alone; exact in binary, so the boundary itself is tested."""
    logits = torch.tensor([[math.log(2), 0.0, 0.0]], dtype=torch.float64)
    assert Sampler(top_p=0.5).probabilities(logits).tolist() == [[1.0, 0.0, 0.0]]


def test_top_k_admits_no_more_than_k_when_tied():
    assert (Sampler(top_k=2).probabilities(torch.zeros(1, 5)) > 0).sum() == 2


def test_draws_follow_the_probabilities():
    generator = torch.Generator().manual_seed(0)
    drawn = Sampler(top_k=3).draw(LOGITS[:1].expand(20000, 4), generator)
    frequency = torch.bincount(drawn, minlength=4) / 20000
    expected = torch.tensor([4 / 9, 3 / 9, 2 / 9, 0])
    # four standard deviations of a binomial proportion; a forbidden token never appears
    assert bool(((frequency - expected).abs() <= 4 * (expected * (1 - expected) / 20000).sqrt()).all())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": math.nan}, "temperature"),
        ({"temperature": math.inf}, "temperature"),
        ({"top_k": 0}, "top_k"),
        ({"top_k": 2.5}, "top_k must be a whole number"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
    ],
)
def test_ranges(options, words):
    with pytest.raises(ArgumentError, match=words):
        Sampler(**options)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(temperature, value):
    with pytest.raises(NonFiniteError, match="logits"):
        Sampler(temperature).draw(torch.tensor([[0.0, value]]), None)
    forbidden = torch.tensor([[0.0, -math.inf]])
    assert Sampler(temperature).draw(forbidden, None).tolist() == [0]


def test_stop_tokens_and_sequences_row_by_row():
    rule = StopRule([9, (1, 2, 3)], batch=3)
    seen = [rule.update(column) for column in ([1, 9, 1], [2, 1, 1], [3, 2, 2], [0, 3, 3])]
    assert seen == [[False, True, False], [False, False, False], [True, False, False], [False, True, True]]


def test_no_stop_never_stops_and_an_empty_one_is_refused():
    assert StopRule((), 2).update([1, 2]) == [False, False]
    with pytest.raises(ArgumentError, match="empty sequence"):
        StopRule([()], 1)


@pytest.mark.parametrize("stop", [5, "5", ["5"], [3, "end"], [(1, 2.5)]])
def test_a_stop_that_is_no_list_of_tokens_is_refused(stop):
    with pytest.raises(ArgumentError, match="stop must be a list of token ids, or of sequences of token ids"):
        StopRule(stop, 1)


def test_a_stop_may_be_made_of_arrays():
    assert StopRule(torch.tensor([[1, 2], [3, 4]]), 1).sequences == [(1, 2), (3, 4)]
