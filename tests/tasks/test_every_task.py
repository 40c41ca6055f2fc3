"""What training relies on in every task: batches are functions of their number, and calls refuse what is out of range.

One task stands for each type. Those that read files of their own are tested beside their other tests.
"""

import json

import pytest
import torch
from tasks.batches import same

from zonal import tasks
from zonal.errors import ArgumentError
from zonal.tasks import MQAR, Segment

NAMES = ("needle", "mixed", "sort", "sexpr", "hypernyms", "paths", "periodic", "text", "masked-text")
SEGMENTS = [Segment(16, 2, 10), Segment(32, 4, 23)]


@pytest.fixture(scope="module", params=(*NAMES, "mqar"))
def task(request):
    if request.param == "mqar":
        return MQAR(200, train_segments=SEGMENTS, test_segments=SEGMENTS)
    return tasks.resolve(request.param)


def test_batches_are_functions_of_their_number(task):
    again = tasks.from_config(json.loads(json.dumps(task.config())))
    for step in (11, 0, 400, 11):
        batch = task.train_batch(step, 4, seed=1)
        assert same(batch, again.train_batch(step, 4, seed=1))
        assert batch.tokens.dtype == batch.targets.dtype == torch.int64
    assert not torch.equal(task.train_batch(0, 4, 1).tokens, task.train_batch(0, 4, 2).tokens)
    assert all(map(same, task.evaluation_batches(9), again.evaluation_batches(9)))


@pytest.mark.parametrize(("step", "size", "seed"), [(-1, 4, 0), (0, 0, 0), (0, 4, -1)])
def test_a_wrong_batch_names_the_call(task, step, size, seed):
    with pytest.raises(ArgumentError, match=r"\w+\.train_batch: (batch_size must|step and seed)"):
        task.train_batch(step, size, seed)


def test_a_wrong_batch_size_names_the_call(task):
    calls = ["evaluation_batches", "validation_batches"]
    calls += ["transfer_batches"] * (next(task.transfer_batches(1), None) is not None)
    for call in calls:
        with pytest.raises(ArgumentError, match=rf"{type(task).__name__}\.{call}: batch_size must be at least 1"):
            next(getattr(task, call)(0))
    if type(task).examine is not tasks.Task.examine:
        with pytest.raises(ArgumentError, match=rf"{type(task).__name__}\.examine: batch_size must be at least 1"):
            next(task.examine(None, 0))


def test_headings_name_the_task_or_its_text():
    assert tasks.resolve("sort").heading() == "Small programs (sort)"
    half = tasks.resolve("masked-text", tasks.TaskSettings(train_fraction=0.5))
    assert half.heading() == "Masked language modelling of Moby-Dick (embedded), 50% of it"
