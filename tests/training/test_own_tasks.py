"""Tasks that a user declares: comparisons of them go on, and what cannot be done with them is refused."""

import pytest
import torch
from training.training_doubles import Recall

from zonal.errors import ArgumentError, FileFormatError
from zonal.evaluation.metrics import Accumulator
from zonal.models import ModelConfig
from zonal.training import Comparison, ComparisonSpec, TrainConfig


def a_spec(task: Recall) -> ComparisonSpec:
    return ComparisonSpec(
        task=task,
        model=ModelConfig(vocab_size=16, dim=8, layers=("softmax",), heads=2, mlp="none", conv=2),
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
