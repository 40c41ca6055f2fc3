import math
from typing import NamedTuple

import pytest
import torch
from torch import nn

from zonal.errors import ArgumentError
from zonal.evaluation import Accumulator, evaluate


class Batch(NamedTuple):
    tokens: torch.Tensor
    targets: torch.Tensor
    slices: dict


class Fixed(nn.Module):
    """Predicts each token's own id; the loss of a position is a tenth of its token."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))
        self.modes = []

    def predict(self, tokens, targets):
        self.modes.append(self.training)
        row, column = (targets != -100).nonzero(as_tuple=True)
        return tokens[row, column], targets[row, column], row, tokens[row, column] / 10


class Task:
    def __init__(self, tokens, targets, slices, bytes_per_token=None):
        self.all = tokens, targets, slices
        self.bytes_per_token = bytes_per_token

    def evaluation_batches(self, batch_size):
        tokens, targets, slices = self.all
        for start in range(0, len(tokens), batch_size):
            part = slice(start, start + batch_size)
            yield Batch(tokens[part], targets[part], {name: values[part] for name, values in slices.items()})


TOKENS = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8], [1, 1, 1, 1], [2, 2, 2, 2]])
TARGETS = torch.tensor([[1, 2, 3, 9], [9, -100, -100, -100], [-100, -100, 1, 9], [-100, -100, -100, -100]])
TASK = Task(TOKENS, TARGETS, {"pairs": [4, 8, 4, 8], "length": [16, 16, 128, 2]})


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_accuracy_is_by_example_then_over_examples(batch_size):
    got = evaluate(Fixed(), TASK, batch_size=batch_size)
    assert got["accuracy"] == pytest.approx((3 / 4 + 0 + 1 / 2) / 3)  # by position it would be 4/7
    assert got["loss"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.4 + 0.5 + 0.1 + 0.1) / 7)
    assert (got["positions"], got["examples"]) == (7, 3)
    assert got["slices"]["pairs"] == {"4": pytest.approx((3 / 4 + 1 / 2) / 2), "8": 0.0}
    assert list(got["slices"]["length"]) == [
        "16",
        "128",
    ]  # by number, and the example without a question is in no slice
    assert "bits_per_byte" not in got


def test_bits_per_byte():
    got = evaluate(Fixed(), Task(TOKENS, TARGETS, {}, bytes_per_token=4.0), batch_size=2)
    assert got["bits_per_byte"] == pytest.approx(got["loss"] / math.log(2) / 4)


@pytest.mark.parametrize("mode", [True, False])
def test_the_mode_is_put_back(mode):
    model = Fixed().train(mode)
    evaluate(model, TASK, batch_size=4)
    assert model.training is mode
    assert model.modes == [False]


def test_nothing_supervised_is_an_error():
    empty = Task(TOKENS, torch.full_like(TOKENS, -100), {})
    with pytest.raises(ArgumentError, match="no supervised position"):
        evaluate(Fixed(), empty, batch_size=2)


def test_slices_need_one_value_an_example():
    with pytest.raises(ArgumentError, match="'pairs' needs one value an example"):
        Accumulator().add(
            torch.tensor([1]), torch.tensor([1]), torch.tensor([0]), torch.tensor([0.5]), 2, {"pairs": [1]}
        )


@pytest.mark.parametrize("row", [-1, 2])
def test_rows_outside_of_the_batch_are_refused(row):
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=r"rows must lie in 0\.\.1"):
        Accumulator().add(one, one, row * one, one.double(), 2, {})
