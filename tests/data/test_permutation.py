import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zonal.data import permuted
from zonal.errors import ArgumentError


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**40), st.integers(0, 1000))
def test_every_number_comes_once(count, seed, epoch):
    assert sorted(permuted(np.arange(count), count, (seed, epoch)).tolist()) == list(range(count))


def test_point_by_point_equals_all_at_once():
    whole = permuted(np.arange(1009), 1009, (3, 1))
    assert [int(permuted(np.array(i), 1009, (3, 1))) for i in (0, 5, 1008)] == whole[[0, 5, 1008]].tolist()
    assert permuted(np.arange(6).reshape(2, 3), 1009, (3, 1)).tolist() == whole[:6].reshape(2, 3).tolist()


def test_keys_give_unrelated_orders():
    orders = np.stack([permuted(np.arange(4096), 4096, (seed, epoch)) for seed in range(3) for epoch in range(3)])
    # two random permutations of n agree in one place on average; agreeing in 12 of 4096 has probability below 1e-8
    agreements = [(orders[i] == orders[j]).sum() for i in range(9) for j in range(i)]
    assert max(agreements) < 12


def test_first_places_are_uniform():
    # where does position 0 go? 4000 keys into 40 cells, expected 100 each; chi-squared with 39 degrees of freedom
    images = np.array([int(permuted(np.array([0]), 40, (seed,))[0]) for seed in range(4000)])
    chi = ((np.bincount(images, minlength=40) - 100) ** 2 / 100).sum()
    assert chi < 80


def test_a_huge_range_needs_no_table():
    images = permuted(np.arange(1000), 10**15, (1, 2))
    assert len(set(images.tolist())) == 1000
    assert 0.45 < images.mean() / 10**15 < 0.55


@pytest.mark.parametrize(
    ("positions", "count", "key", "words"),
    [
        ([0], 0, (1,), "count must be at least 1"),
        ([5], 5, (1,), r"\[0, 5\)"),
        ([-1], 5, (1,), r"\[0, 5\)"),
        ([1], 5, (-1,), "negative"),
    ],
)
def test_bad_arguments(positions, count, key, words):
    with pytest.raises(ArgumentError, match=words):
        permuted(np.array(positions), count, key)
