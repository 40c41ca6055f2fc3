import math

import numpy as np
import pytest
import torch

from zonal import tasks
from zonal.errors import ArgumentError
from zonal.tasks import Periodic


def test_levels_are_the_signals():
    task = Periodic((1, 3), vocab_size=16, length=40)
    for count, reach in ((1, 1.0), (3, 3 / math.sqrt(2))):
        frequencies, phases = task.waves(count, (1, 2, 3))
        for t, token in enumerate(task.levels(frequencies, phases).tolist()):
            value = sum(
                math.cos(2 * math.pi * f * t + p) for f, p in zip(frequencies, phases, strict=True)
            ) / math.sqrt(count)
            assert token == min(15, max(0, math.floor(16 * (1 + value / reach) / 2)))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_the_past_determines_the_next_value(count):
    """A sum of K cosines obeys the linear recurrence whose characteristic roots are e^(±2 pi i f)."""
    frequencies, phases = Periodic().waves(count, (7,))
    signal = np.cos(2 * np.pi * np.arange(60)[:, None] * frequencies + phases).sum(-1)
    roots = np.exp(2j * np.pi * np.concatenate([frequencies, -frequencies]))
    weights = -np.poly(roots).real[1:]
    for t in range(2 * count, 60):
        assert signal[t] == pytest.approx(weights @ signal[t - 2 * count : t][::-1], abs=1e-9)


def test_the_second_half_is_asked():
    task = Periodic(length=32)
    batches = [task.train_batch(step, 6, seed=1) for step in (9, 0, 4)]
    for batch in batches:
        assert torch.equal(batch.targets[:, 16:-1], batch.tokens[:, 17:])
        assert bool((batch.targets[:, :16] == -100).all())
    assert set().union(*(batch.slices["frequencies"] for batch in batches)) == {1, 2, 4, 8}


def test_evaluation():
    task = Periodic((2, 5), length=24, test_examples=7)
    batches = list(task.evaluation_batches(4))
    assert [batch.slices["frequencies"] for batch in batches] == [[2] * 4, [2] * 3, [5] * 4, [5] * 3]
    tested = {tuple(row) for batch in batches for row in batch.tokens.tolist()}
    assert len(tested) == 14
    assert not tested & {tuple(row) for step in range(50) for row in task.train_batch(step, 8, 0).tokens.tolist()}


def test_examination():
    task = Periodic((1,), length=16, test_examples=3)

    class Off:
        """Says the right level and so many more."""

        def __init__(self, by):
            self.by = by

        def parameters(self):
            return iter([torch.zeros(1)])

        def __call__(self, tokens):
            (batch,) = task.evaluation_batches(3)
            assert torch.equal(batch.tokens, tokens)
            said = (batch.targets.clamp_min(0) + self.by).clamp(0, task.vocab_size - 1)
            return torch.nn.functional.one_hot(said, task.vocab_size).float()

    for by, share in ((0, 1.0), (1, 1.0)):
        (found,) = task.examine(Off(by), 8)
        assert found.values == {"within one level": [share] * 3}
        assert found.slices == {"frequencies": [1] * 3}
    (found,) = task.examine(Off(2), 8)
    assert max(found.values["within one level"]) < 1


def test_what_is_told():
    task = tasks.resolve("periodic", tasks.TaskSettings(frequencies=3, vocab_size=8, length=20, test_examples=2))
    assert (task.frequencies, task.vocab_size, task.length) == ((3,), 8, 20)
    assert (
        task.describe()
        == "Periodic signals: the next of 8 levels of a sum of 3 waves without a common period, after 11 to 20 values."
    )
    assert task.decode([3, 0]) == "3 0"


@pytest.mark.parametrize(
    "options",
    [
        {"frequencies": ()},
        {"frequencies": (0,)},
        {"vocab_size": 1},
        {"length": 1},
        {"test_examples": 0},
        {"seed": -1},
    ],
)
def test_bad_arguments(options):
    with pytest.raises(ArgumentError, match="Periodic: numbers of frequencies of at least 1"):
        Periodic(**options)
    with pytest.raises(ArgumentError, match="the first question of 16 tokens comes after 9"):
        Periodic((8,), length=16)
    assert Periodic((8,), length=30).warm_up == 15
