import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from zonal.errors import ArgumentError
from zonal.tasks.mqar import _draw_gaps, _draw_subsets, _gap_probabilities, multiquery_ar, segment_seeds


def sha256(tensor):
    assert tensor.dtype == torch.int64
    return hashlib.sha256(tensor.numpy().astype("<i8").tobytes()).hexdigest()


def test_published_fixture():
    inputs, labels = multiquery_ar(
        vocab_size=64, num_examples=16, input_seq_len=32, num_kv_pairs=4, seed=0, power_a=0.01, random_non_queries=False
    )
    assert sha256(inputs) == "5e473864fdee25fc93c779bbc64b9bc3c5f3c829d26a639fb71fe6169725eec3"
    assert sha256(labels) == "ebb458ffaca9896f4af763e7a9608eb23b3f409f2dbd8dfd6f036c8ef5c38780"


# first 16 digits of SHA-256 of what zoology's own function gives (commit d88d6f5), torch.manual_seed(noise) before each
# call
ZOOLOGY = [
    # vocabulary, examples, length, seed, power_a, pairs, random_non_queries, noise, inputs, labels
    (8192, 50, 64, 843828734, 0.01, 4, True, 843828734, "caab852b5fb4d81c", "69bf95bd67098e80"),
    (8192, 20, 64, 3088727057, 0.01, 16, True, 5, "40c50a08d4d0bd9a", "b56a328f73d6f2c1"),
    (8192, 8, 1024, 3350193721, 0.01, 256, True, 0, "a56ad240aaadebcb", "11b125c64d306ecf"),
    (512, 400, 64, 9, 0.01, 4, True, 77, "98aae9e2cc746a9b", "a23fdde531b86cfa"),
    (70000, 10, 128, 5, 0.5, 8, True, 1, "3452a2f66e8d8669", "8a5344b9905a3992"),
    (33, 50, 32, 4294967295, 1.0, 8, True, 2, "c53a32e9d8be918f", "897644fd76ebddc9"),
    (66, 30, 64, 1, 0.01, 1, False, 0, "00216b7df6720558", "07b5ff13ee8d5a78"),
    (8192, 20, 256, 974319580, 0.01, 64, True, 3, "9fe238e6e08db3c7", "b6c704da28556e60"),
    (300, 40, 256, 8, -1.0, 10, True, 4, "24a12f48f52dc042", "ef1726ed96d40fd5"),
    (5, 7, 4, 0, 0.01, 1, True, 6, "3a795108cc6bd88f", "c9e5e25fd169b370"),
    (200000, 5, 64, 1, 1.7, 4, False, 0, "70633ffbd9983218", "49f6acc5e7e16430"),
    (512, 3000, 16, 77, 0.3, 3, False, 0, "2b6e7faff6d61cb8", "4ebcfa3e9fbc3373"),
]


@pytest.mark.parametrize("setting", ZOOLOGY, ids=lambda setting: f"V{setting[0]}-T{setting[2]}-kv{setting[5]}")
def test_equals_zoology(setting):
    vocab_size, examples, length, seed, power_a, pairs, random_non_queries, noise, inputs_digest, labels_digest = (
        setting
    )
    inputs, labels = multiquery_ar(
        vocab_size,
        examples,
        length,
        seed,
        power_a=power_a,
        num_kv_pairs=pairs,
        random_non_queries=random_non_queries,
        noise_seed=noise,
    )
    assert sha256(labels)[:16] == labels_digest
    assert sha256(inputs)[:16] == inputs_digest


def test_segment_seeds_are_those_of_zoology():
    assert segment_seeds(123, 5, 7) == (
        [843828734, 914636141, 1228959102, 1840268610, 974319580],
        [2967327842, 2367878886, 3088727057, 3090095699, 4256823402, 3964712059, 3350193721],
    )
    train, test = segment_seeds(123, 1, 1)
    assert train == [843828734]
    assert test[0] >= 2**31


@settings(deadline=None)
@given(
    st.integers(1, 70),
    st.integers(0, 20),
    st.integers(1, 60),
    st.sampled_from([0.01, 0.3, 1.0, 2.0, -1.0]),
    st.integers(0, 2**32 - 1),
)
def test_gaps_are_choice_row_by_row(size, more, rows, power_a, seed):
    p = _gap_probabilities(size + more, power_a, "test")
    stream = np.random.RandomState(seed)
    expected = [stream.choice(len(p), size, replace=False, p=p).tolist() for _ in range(rows)]
    assert _draw_gaps(np.random.RandomState(seed), rows, p, size).tolist() == expected


def test_gaps_across_refills_of_the_buffer():
    p = _gap_probabilities(28, 0.01, "test")
    stream = np.random.RandomState(5)
    expected = [stream.choice(28, 4, replace=False, p=p).tolist() for _ in range(4000)]
    assert _draw_gaps(np.random.RandomState(5), 4000, p, 4).tolist() == expected


def test_subsets_are_choice_row_by_row():
    left, right = np.random.RandomState(3), np.random.RandomState(3)
    expected = [left.choice(np.arange(40), 7, replace=False).tolist() for _ in range(50)]
    assert _draw_subsets(right, 50, 40, 7, np.uint16).tolist() == expected
    assert left.randint(2**30) == right.randint(2**30)


def test_the_task_itself():
    inputs, labels = multiquery_ar(100, 200, 32, seed=4, num_kv_pairs=5, random_non_queries=False)
    keys, values = inputs[:, 0:10:2], inputs[:, 1:10:2]
    assert keys.min() >= 1
    assert keys.max() < 50 <= values.min()
    for row in range(200):
        assert len(set(keys[row].tolist())) == len(set(values[row].tolist())) == 5
        answers = dict(zip(keys[row].tolist(), values[row].tolist(), strict=True))
        queried = (labels[row] != -100).nonzero()[:, 0].tolist()
        assert len(queried) == 5
        assert all(place >= 10 and place % 2 == 0 for place in queried)
        assert [labels[row, place].item() for place in queried] == [
            answers[inputs[row, place].item()] for place in queried
        ]
        assert all(inputs[row, place] == 0 for place in range(10, 32) if place not in queried)


def test_noise_fills_only_what_was_zero_and_depends_on_its_seed_alone():
    plain, labels = multiquery_ar(100, 300, 32, seed=4, num_kv_pairs=5, random_non_queries=False)
    noisy, noisy_labels = multiquery_ar(100, 300, 32, seed=4, num_kv_pairs=5, noise_seed=9)
    again, _ = multiquery_ar(100, 300, 32, seed=4, num_kv_pairs=5, noise_seed=10)
    default, _ = multiquery_ar(100, 300, 32, seed=4, num_kv_pairs=5)
    own, _ = multiquery_ar(100, 300, 32, seed=4, num_kv_pairs=5, noise_seed=4)
    assert torch.equal(labels, noisy_labels)
    assert torch.equal(noisy[plain != 0], plain[plain != 0])
    assert not torch.equal(noisy, again)
    assert torch.equal(default, own)
    filled = noisy[plain == 0]
    assert set(filled.tolist()) == set(range(100))


def test_noise_does_not_depend_on_its_blocks(monkeypatch):
    whole = multiquery_ar(100, 50, 32, seed=4)
    monkeypatch.setattr("zonal.tasks.mqar._NOISE_ROWS", 7)
    assert torch.equal(multiquery_ar(100, 50, 32, seed=4)[0], whole[0])


def test_global_states_stay():
    numpy_before, torch_before = np.random.get_state()[1].copy(), torch.get_rng_state()
    multiquery_ar(100, 5, 32, seed=4)
    assert np.array_equal(np.random.get_state()[1], numpy_before)
    assert torch.equal(torch.get_rng_state(), torch_before)


def test_passes_repeat_the_pairs_before_the_queries():
    once, _ = multiquery_ar(100, 20, 40, seed=4, num_kv_pairs=5, random_non_queries=False)
    inputs, labels = multiquery_ar(100, 20, 50, seed=4, num_kv_pairs=5, num_passes=2, random_non_queries=False)
    assert torch.equal(inputs[:, :10], inputs[:, 10:20])
    assert torch.equal(inputs[:, :10], once[:, :10])
    # both leave 30 tokens for queries, so the same gaps are drawn
    assert torch.equal(inputs[:, 20:], once[:, 10:])
    assert int((labels != -100).sum()) == 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_seq_len": 31}, "an even length is required, got 31"),
        ({"vocab_size": 32}, "a vocabulary larger than the length .* required, got vocabulary 32, length 32"),
        ({"num_kv_pairs": 9}, "9 pairs in 1 pass.* take 36 tokens; a length of 36 or more is required, got 32"),
        ({"num_passes": 4, "num_kv_pairs": 4}, "4 pass.* take 40 tokens"),
        ({"num_examples": 0}, "at least 1 example"),
        ({"num_kv_pairs": 0}, "at least 1 key-value pair"),
        ({"num_passes": 0}, "at least 1 pass"),
        ({"power_a": 0.0}, "a finite power_a other than 0"),
        ({"power_a": float("nan")}, "a finite power_a other than 0"),
        ({"power_a": 1e9}, "gives no finite probabilities"),
        ({"power_a": -900.0}, "only .* gaps have a probability above 0"),
        ({"seed": -1}, r"seed must lie in \[0, 2\^32\), got -1"),
        ({"seed": 2**32}, r"seed must lie in \[0, 2\^32\)"),
        ({"noise_seed": -1}, "noise_seed must lie in"),
    ],
)
def test_bad_arguments(change, words):
    arguments = {"vocab_size": 100, "num_examples": 3, "input_seq_len": 32, "seed": 0, "num_kv_pairs": 4} | change
    with pytest.raises(ArgumentError, match=words):
        multiquery_ar(**arguments)
