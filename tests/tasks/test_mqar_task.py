import numpy as np
import pytest
import torch

from zonal import tasks
from zonal.errors import ArgumentError
from zonal.tasks import MQAR, Segment, multiquery_ar
from zonal.tasks.task import TEST, TRAIN, VALIDATION


@pytest.fixture
def mixed():
    return MQAR(
        200,
        train_segments=[Segment(16, 2, 10), Segment(32, 4, 23)],
        test_segments=[Segment(16, 2, 5), Segment(64, 8, 7, seed=1)],
        random_non_queries=False,
    )


def rows_of(batch):
    return [tuple(row) for row in batch.tokens.tolist()]


def test_segments_hold_what_the_generator_gives():
    task = MQAR(200, length=32, pairs=4, train_examples=30, test_examples=10, seed=123)
    inputs, labels = multiquery_ar(200, 30, 32, 843828734, num_kv_pairs=4)
    batches = [task.train_batch(step, 10, 0) for step in range(3)]
    drawn = {
        row: target for batch in batches for row, target in zip(rows_of(batch), batch.targets.tolist(), strict=True)
    }
    assert drawn == dict(zip(map(tuple, inputs.tolist()), labels.tolist(), strict=True))


def test_an_epoch_reads_every_row(mixed):
    # 3 batches of the first segment and 6 of the second make an epoch
    for epoch in range(3):
        batches = [mixed.train_batch(9 * epoch + step, 4, seed=0) for step in range(9)]
        assert sorted(batch.tokens.shape[1] for batch in batches) == [16] * 3 + [32] * 6
        assert all(len(batch.tokens) == 4 for batch in batches)
        for length, rows in ((16, 10), (32, 23)):
            assert (
                len({row for batch in batches if batch.tokens.shape[1] == length for row in rows_of(batch)}) >= rows - 4
            )


def test_every_round_of_a_segment_reads_each_row_once_in_a_new_order():
    task = MQAR(200, length=16, pairs=2, train_examples=10, test_examples=1)
    stream = [row for step in range(10) for row in rows_of(task.train_batch(step, 3, seed=5))]
    rounds = [stream[at : at + 10] for at in (0, 10, 20)]
    assert all(len(set(one)) == 10 for one in rounds)
    assert rounds[0] != rounds[1] != rounds[2]
    assert rounds[0] != [row for step in range(4) for row in rows_of(task.train_batch(step, 3, seed=6))][:10]
    # a batch may be larger than the segment
    assert len(rows_of(task.train_batch(0, 25, seed=5))) == 25


def test_batch_order_of_segments_changes_from_epoch_to_epoch(mixed):
    orders = {
        tuple(mixed.train_batch(9 * epoch + step, 4, seed=0).tokens.shape[1] for step in range(9)) for epoch in range(4)
    }
    assert len(orders) > 1


def test_evaluation_is_fixed_and_labelled(mixed):
    batches = list(mixed.evaluation_batches(4))
    assert [tuple(batch.tokens.shape) for batch in batches] == [(4, 16), (1, 16), (4, 64), (3, 64)]
    assert batches[1].slices == {"pairs": [2], "length": [16]}
    assert batches[3].slices == {"pairs": [8] * 3, "length": [64] * 3}
    assert torch.equal(
        torch.cat([batch.tokens for batch in batches[2:]]),
        multiquery_ar(200, 7, 64, 1, num_kv_pairs=8, random_non_queries=False)[0],
    )
    assert all(
        torch.equal(left.tokens, right.tokens) for left, right in zip(batches, mixed.evaluation_batches(4), strict=True)
    )


def test_describe_decode_and_length(mixed):
    assert mixed.describe() == (
        "Multi-query associative recall: 2 pairs in 16 tokens, 4 pairs in 32 tokens; vocabulary 200, blank "
        "fillers; 33 training and 12 test sequences."
    )
    assert mixed.decode([7, 150, 0]) == "k7 v150 ·"
    assert (mixed.length, mixed.metric, mixed.bytes_per_token) == (64, "accuracy", None)


def test_the_size_of_the_demo():
    batch = tasks.resolve("mqar-demo").train_batch(0, 64, 0)
    assert tuple(batch.tokens.shape) == (64, 64)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 32, "train_segments": [Segment(16, 2, 3)], "test_segments": [Segment(16, 2, 3)]}, "not both"),
        ({"train_segments": [Segment(16, 2, 3)]}, "at least one training and one test segment"),
        (
            {"train_segments": [Segment(15, 2, 3)], "test_segments": [Segment(16, 2, 3)]},
            "an even length is required, got 15",
        ),
        ({"seed": -1}, "seed must lie in"),
        ({"train_examples": 0}, "at least 1 example"),
        ({"length": 64.0}, r"whole numbers are required, got .*64\.0"),
        ({"passes": "2"}, "whole numbers are required"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        MQAR(200, **arguments)


def test_numbers_of_numpy_are_sizes():
    examples = {"train_examples": 8, "test_examples": 8}
    made = MQAR(200, length=np.int64(32), pairs=np.int64(2), **examples)
    plain = MQAR(200, length=32, pairs=2, **examples)
    assert torch.equal(made.train_batch(0, 4, 0).tokens, plain.train_batch(0, 4, 0).tokens)


def test_tokens_are_fillers_keys_or_values():
    task = MQAR(64, length=32, pairs=4, train_examples=10, test_examples=10, random_non_queries=False)
    names, group = task.token_groups(torch.tensor([[0, 1, 31, 32, 63]]))
    assert [names[each] for each in group[0].tolist()] == ["filler", "key", "key", "value", "value"]


@pytest.mark.parametrize("seed", [0, 1, 123])
def test_no_test_sequence_is_trained_on(seed):
    """Small enough that equal seeds would make equal rows: no split draws from a seed of another, and no row is in
    two.
    """
    shapes = [Segment(16, 2, 200), Segment(32, 4, 200)]
    task = MQAR(200, train_segments=shapes, test_segments=shapes, seed=seed)
    assert len({seed for seeds in task._seeds.values() for seed in seeds}) == 6
    for number in range(len(shapes)):
        rows = [
            {tuple(row) for row in task.examples(number, part).tensors(slice(None))[0].tolist()}
            for part in (TRAIN, TEST, VALIDATION)
        ]
        assert [len(part) for part in rows] == [200, 200, 200]
        assert len(set.union(*rows)) == 600
