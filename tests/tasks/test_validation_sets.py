"""Rates are chosen by sequences that are neither trained on nor reported, where a task has any."""

import pytest

from zonal import tasks
from zonal.tasks import TaskSettings

# tasks with settings of their own, and those that read files, which are tested beside their other tests
LARGE = ("mqar-based-fig2", "mqar-iclr24-fig2", "fashion-pixels", "glosses", "text", "masked-text")
FEW = 12


def rows(batches):
    """(tokens, targets) of each sequence."""
    return [
        (tuple(tokens), tuple(targets))
        for batch in batches
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True)
    ]


def labels(batches):
    return [
        {name: values[row] for name, values in batch.slices.items()}
        for batch in batches
        for row in range(len(batch.tokens))
    ]


@pytest.mark.parametrize("name", [name for name in tasks.names() if name not in LARGE])
def test_they_are_as_many_other_sequences_of_the_same_kinds(name):
    task = tasks.resolve(name, TaskSettings(test_examples=FEW))
    evaluated, chosen = rows(task.evaluation_batches(FEW)), rows(task.validation_batches(FEW))
    assert chosen == rows(task.validation_batches(5))
    assert labels(task.validation_batches(FEW)) == labels(task.evaluation_batches(FEW))
    assert len(evaluated) == len(chosen)
    assert not set(evaluated) & set(chosen)


@pytest.mark.parametrize(("name", "few"), [("parity", 7), ("compression", 2)])
def test_of_few_items_there_are_few_sequences_and_some_come_up_again(name, few):
    task = tasks.resolve(name)
    trained = rows(task.train_batch(step, 64, 0) for step in range(150))
    for batches in (task.evaluation_batches(200), task.validation_batches(200)):
        again = {batch.slices["items"][0] for batch in batches if set(rows([batch])) & set(trained)}
        assert few in again
        assert task.most not in again
