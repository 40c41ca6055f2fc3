import pytest
import torch
from tasks.batches import same

from zonal import tasks
from zonal.errors import ArgumentError
from zonal.tasks import Retrieval, Shape, Stage, grid
from zonal.tasks.retrieval import KINDS

EASY = (Shape("system-prompt", 1, 24), Shape("tool-trace", 1, 24))
HARD = (Shape("system-prompt", 2, 24), Shape("tool-trace", 2, 40))
FAR = (Shape("needle", 1, 48), Shape("needle", 1, 24), Shape("two-hop", 2, 24))


@pytest.fixture
def task():
    return Retrieval(
        [Stage(0, EASY), Stage(10, HARD)],
        transfer_shapes=FAR,
        vocab_size=64,
        test_examples=5,
        transfer_examples=7,
        seed=3,
    )


def test_a_sequence_is_a_function_of_its_number(task):
    """Two batches of 4 are one of 8."""
    halves = [task.train_batch(step, 4, seed=1) for step in (6, 7)]
    assert torch.equal(torch.cat([half.tokens for half in halves]), task.train_batch(3, 8, seed=1).tokens)


def test_the_curriculum(task):
    early = [task.train_batch(step, 8, 0) for step in range(10)]
    assert {
        (kind, pairs)
        for batch in early
        for kind, pairs in zip(batch.slices["task"], batch.slices["pairs"], strict=True)
    } == {("system-prompt", 1), ("tool-trace", 1)}
    late = [task.train_batch(step, 8, 0) for step in range(10, 60)]
    lengths = [batch.tokens.shape[1] for batch in late]
    assert set(lengths) == {24, 40}
    assert 10 < lengths.count(24) < 40
    for batch in late:
        assert set(batch.slices["length"]) == {batch.tokens.shape[1]}
        assert set(batch.slices["task"]) == {"system-prompt" if batch.tokens.shape[1] == 24 else "tool-trace"}


def test_evaluation_and_transfer(task):
    tests, far = list(task.evaluation_batches(4)), list(task.transfer_batches(4))
    assert [(tuple(batch.tokens.shape), batch.slices["task"][0]) for batch in tests] == [
        ((4, 24), "system-prompt"), ((1, 24), "system-prompt"), ((4, 40), "tool-trace"), ((1, 40), "tool-trace"),
    ]  # fmt: skip
    assert [tuple(batch.tokens.shape) for batch in far] == [(4, 48), (3, 48), (4, 24), (3, 24), (4, 24), (3, 24)]
    assert all(len(set(values)) == 1 for batch in far for values in batch.slices.values())
    assert all(same(left, right) for left, right in zip(far, task.transfer_batches(4), strict=True))
    seen = {tuple(row) for step in range(50) for row in task.train_batch(step, 8, 0).tokens.tolist()}
    assert not seen & {tuple(row) for batch in (*tests, *far) for row in batch.tokens.tolist()}
    # how many sequences are read at once does not change them
    assert torch.equal(torch.cat([batch.tokens for batch in far[:2]]), next(task.transfer_batches(7)).tokens)


def test_long_sequences_come_in_smaller_batches():
    task = Retrieval([Stage(0, EASY)], transfer_shapes=(Shape("needle", 1, 8192),), transfer_examples=5)
    assert [len(batch.tokens) for batch in task.transfer_batches(64)] == [2, 2, 1]


def test_what_a_task_says_of_itself(task):
    assert task.length == 40
    assert (1 / 2 + 1) / 2 <= task.guess().value < 0.77  # now and then both values are equal
    assert task.describe() == (
        "Retrieval: system-prompt, tool-trace (2 pairs, 24 to 40 tokens), in 2 stages; vocabulary 64; a guess "
        "among the answers of a context is right in 76%; then measured on needle, two-hop (1 to 2 pairs, "
        "24 to 48 tokens)."
    )
    assert task.decode(task.train_batch(0, 1, 0).tokens[0].tolist()).count("?") == 1
    assert (
        list(tasks.resolve("mqar-demo", tasks.TaskSettings(train_examples=10, test_examples=2)).transfer_batches(4))
        == []
    )


def test_a_grid_leaves_out_what_does_not_fit():
    found = grid(("needle", "mqar"), (1, 8), (8, 64))
    assert found == (
        Shape("needle", 1, 8),
        Shape("needle", 1, 64),
        Shape("needle", 8, 64),
        Shape("mqar", 1, 8),
        Shape("mqar", 1, 64),
        Shape("mqar", 8, 64),
    )


def test_the_settings_of_the_paper():
    mixed = tasks.resolve("mixed")
    assert isinstance(mixed, Retrieval)
    assert (mixed.vocab_size, mixed.length) == (128, 64)
    assert {shape.kind for stage in mixed.stages for shape in stage.shapes} == {
        "system-prompt",
        "system-prompt-distractors",
        "tool-trace",
    }
    assert {shape.length for shape in mixed.transfer_shapes if shape.kind == "needle" and shape.pairs == 1} == {
        64 * 2**n for n in range(7)
    }
    assert {shape.kind for shape in mixed.transfer_shapes} == {
        kind for kind in KINDS if kind not in ("economy", "common-value") and not kind.startswith("offset")
    }
    gaps = tasks.resolve("mixed-gaps")
    assert isinstance(gaps, Retrieval)
    assert [sorted({shape.length for shape in stage.shapes}) for stage in gaps.stages] == [[64], [64, 128, 256]]
    assert (gaps.test_shapes, gaps.transfer_shapes) == (mixed.test_shapes, mixed.transfer_shapes)
    hops = tasks.resolve("mixed-hops")
    assert isinstance(hops, Retrieval)
    assert hops.stages[0] == mixed.stages[0]
    first, *later = [{shape.kind for shape in stage.shapes} for stage in hops.stages]
    assert later == [first | {"two-hop-written"}, first | {"two-hop-written", "two-hop"}]
    assert {shape.length for stage in hops.stages for shape in stage.shapes} == {64}
    assert {shape.kind for shape in hops.test_shapes} == {shape.kind for shape in hops.stages[-1].shapes}
    assert hops.transfer_shapes == mixed.transfer_shapes
    cells = tasks.resolve("mqar-grid")
    assert isinstance(cells, Retrieval)
    assert {(shape.pairs, shape.length) for shape in cells.transfer_shapes} >= {
        (pairs, 4096) for pairs in (4, 8, 16, 32)
    }
    assert tasks.resolve("two-hop", tasks.TaskSettings(pairs=3, length=16, vocab_size=40)).length == 16


@pytest.mark.parametrize(
    ("stages", "options", "words"),
    [
        ([], {}, "stages with shapes are required"),
        ([Stage(1, EASY)], {}, "the first from step 0"),
        ([Stage(0, EASY), Stage(0, HARD)], {}, "each later than the one before"),
        ([Stage(0, ())], {}, "stages with shapes"),
        ([Stage(0, (Shape("neddle", 1, 24),))], {}, "unknown kind 'neddle'. Did you mean 'needle'"),
        ([Stage(0, EASY)], {"transfer_shapes": (Shape("mqar", 9, 24),)}, "mqar with 9 pairs takes 44 tokens"),
        ([Stage(0, EASY)], {"test_shapes": ()}, "at least one test shape is required"),
        ([Stage(0, EASY)], {"test_examples": 0}, "at least 1 example"),
        ([Stage(0, EASY)], {"seed": -1}, "a seed of at least 0"),
    ],
)
def test_bad_arguments(stages, options, words):
    with pytest.raises(ArgumentError, match=words):
        Retrieval(stages, **options)


def test_tokens_are_markers_noise_keys_or_values():
    task = tasks.resolve("needle")
    words = task.words
    tokens = torch.tensor(
        [
            0,
            words.noise[0] - 1,
            words.noise[0],
            words.noise[-1],
            words.keys[0],
            words.keys[-1],
            words.values[0],
            words.values[-1],
        ]
    )
    names, group = task.token_groups(tokens)
    assert [names[each] for each in group.tolist()] == [
        "marker",
        "marker",
        "noise",
        "noise",
        "key",
        "key",
        "value",
        "value",
    ]
