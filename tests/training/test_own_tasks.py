"""Tasks that a user declares: comparisons of them go on, and what cannot be done with them is refused."""

import math

import pytest
import torch
from training.training_doubles import Recall

from zonal import tasks
from zonal.errors import ArgumentError, FileFormatError
from zonal.evaluation.metrics import Accumulator
from zonal.models import ModelConfig, build
from zonal.training import Comparison, ComparisonSpec, TrainConfig, train


def a_spec(task: tasks.Task) -> ComparisonSpec:
    return ComparisonSpec(
        task=task,
        model=ModelConfig(task.vocab_size, dim=8, layers=("softmax",), heads=2, mlp="none", conv=2),
        training=TrainConfig(steps=4, batch_size=4, eval_every=2, tensorboard=False, checkpoint_seconds=None),
        operators=("softmax", "linear"),
    )


def test_a_comparison_goes_on_where_it_stood(tmp_path):
    steps = iter(range(6))
    stopped = Comparison(tmp_path, a_spec(Recall())).run(should_stop=lambda: next(steps, None) is None)
    assert stopped.status == "stopped"
    again = Comparison(tmp_path, a_spec(Recall()))
    assert again.run().status == "done"
    assert Comparison(tmp_path, a_spec(Recall())).run().status == "done"
    with pytest.raises(FileFormatError, match=r"the task of the folder is .*'first_seed': 0.*Use the same task"):
        Comparison(tmp_path, a_spec(Recall(first_seed=7)))


def test_other_processes_do_not_know_it(tmp_path):
    with pytest.raises(FileFormatError, match=r"no task of your own.*jobs=1"):
        Comparison(tmp_path, a_spec(Recall())).run(jobs=2)
    assert not list(tmp_path.iterdir())


class Reversed(tasks.MQAR):
    """Recall with the tokens of each batch turned round, which is no MQAR."""

    def train_batch(self, step: int, batch_size: int, seed: int) -> tasks.Batch:
        batch = super().train_batch(step, batch_size, seed)
        return batch._replace(tokens=batch.tokens.flip(1))


def test_a_type_of_the_library_that_is_changed_has_a_name_of_its_own(tmp_path):
    """Other processes trained MQAR in its place, and gave other numbers than this one."""
    task = Reversed(64, length=16, train_examples=20, test_examples=4)
    refused = r"config\(\) of Reversed has the 'task' 'mqar', of which .* make a MQAR\. Let config\(\) name another"
    with pytest.raises(ArgumentError, match=refused):
        Comparison(tmp_path, a_spec(task)).run(jobs=2)
    with pytest.raises(ArgumentError, match=refused):
        train(build(a_spec(task).model, seed=0), task, a_spec(task).training, tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"task": "mine", "weights": torch.ones(2)}, r"must hold JSON values \(.*Tensor"),
        ({"task": "mine", "rate": math.nan}, r"must hold JSON values \(.*float"),
        (None, r"must be a dict of JSON values, got None"),
    ],
)
def test_a_configuration_is_json(tmp_path, config, message):
    """A run failed with the error of json at its first checkpoint, and what it had trained was lost."""
    task = Recall()
    task.config = lambda: config
    with pytest.raises(ArgumentError, match=rf"train: config\(\) of Recall {message}"):
        train(build(a_spec(task).model, seed=0), task, a_spec(task).training, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_metric_must_be_one_that_is_measured(tmp_path):
    task = Recall()
    task.metric = "perplexity"
    with pytest.raises(ArgumentError, match=r"metric must be 'accuracy' or 'loss', got 'perplexity'"):
        a_spec(task)


@pytest.mark.parametrize("values", [torch.tensor([4, 5]), [1, "1"], [True, False], [1.0, 2.0]])
def test_slices_are_whole_numbers_or_texts(values):
    total = Accumulator(None)
    with pytest.raises(ArgumentError, match=r"slice 'len' must all be of type int or all of type str"):
        total.add(torch.tensor([1, 1]), torch.tensor([1, 0]), torch.tensor([0, 1]), torch.zeros(2), 2, {"len": values})
