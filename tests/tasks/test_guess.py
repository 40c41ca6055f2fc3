"""What a model reaches that has not learned the task: every task says it, and somebody who guesses reaches it."""

import itertools
import math
from collections import Counter

import numpy as np
import pytest
import torch

from zonal import tasks
from zonal.tasks import retrieval
from zonal.tasks.counts import largest
from zonal.tasks.task import IGNORED


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in tasks.names()
        if name not in ("mqar-based-fig2", "mqar-iclr24-fig2", "fashion-pixels", "glosses")
    ],
)
def test_every_task_has_a_guess(name):
    task = tasks.resolve(name)
    guess = task.guess()
    assert guess is not None
    if task.metric == "accuracy":
        assert 1 / task.vocab_size <= guess.value <= 0.8
    else:
        assert 0 < guess.value < math.log(task.vocab_size)


def test_recall_by_naming_a_value_by_the_place_of_the_question():
    task = tasks.resolve("mqar", tasks.TaskSettings(vocab_size=128, length=64, pairs=8, test_examples=2000))
    other = tasks.MQAR(128, length=64, pairs=8, test_examples=6000, seed=1)
    asked = torch.zeros(64, 8)
    (batch,) = other.evaluation_batches(6000)
    for pair in range(8):
        asked[:, pair] = (batch.targets == batch.tokens[:, 2 * pair + 1, None]).sum(0)
    (batch,) = task.evaluation_batches(2000)
    named = batch.tokens[:, 1:16:2].gather(1, asked.argmax(1).expand(2000, -1))
    right = (named == batch.targets)[batch.targets != IGNORED].double().mean()
    guess = task.guess()
    assert float(right) == pytest.approx(guess.value, abs=0.01)
    assert guess.trained is None
    assert guess.value > 1 / 8 + 0.02  # naming any value


def test_recall_is_judged_at_the_pairs_that_were_trained():
    task = tasks.MQAR(
        128,
        train_segments=[tasks.Segment(16, 2, 50), tasks.Segment(32, 4, 50)],
        test_segments=[tasks.Segment(32, 4, 10), tasks.Segment(64, 16, 10)],
    )
    guess = task.guess()
    assert guess.trained == ("pairs", ("4",))
    assert 1 / 4 < guess.value < 1 / 3


def test_text_by_the_frequencies_of_bytes(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("abababac" * 500)
    task = tasks.Text(str(path), length=16)
    share = np.array([0.5, 0.375, 0.125])
    assert task.guess().value == pytest.approx(
        -(share * np.log(share)).sum(), rel=0.01, abs=0.15
    )  # each of 256 bytes counts once more than it stands there


def test_signals_by_one_level():
    task = tasks.resolve("periodic", tasks.TaskSettings(frequencies=1, vocab_size=8, length=32))
    (batch,) = task.evaluation_batches(64)
    asked = batch.targets != IGNORED
    shares = [float(((batch.targets == level) & asked).sum() / asked.sum()) for level in range(8)]
    assert task.guess().value == pytest.approx(max(shares))
    assert max(shares) > 1 / 8
    fine = tasks.resolve("periodic", tasks.TaskSettings(frequencies=8, vocab_size=32, length=128))
    (batch,) = fine.evaluation_batches(64)
    asked = batch.targets != IGNORED
    assert fine.guess().value == pytest.approx(float((batch.tokens == batch.targets)[asked].double().mean()))


def test_lookups_are_judged_on_what_was_trained():
    hypernyms = tasks.resolve("hypernyms", tasks.TaskSettings(subset="carnivore", pairs=4, questions=2))
    assert [cell.size for cell in hypernyms.controls] == [0, 1, 2, 3]  # the word itself is found by equality
    assert hypernyms.guess() == (pytest.approx((1 + 3 / 4) / 4), ("pairs", ("trained",)))
    assert tasks.resolve("paths", tasks.TaskSettings(subset="carnivore", pairs=4, questions=2)).guess() == (
        1 / 4,
        ("composition", ("trained",)),
    )


@pytest.mark.parametrize(("most", "kinds"), [(1, 1), (1, 5), (4, 3), (5, 4)])
def test_the_largest_count_is_that_of_all_sequences(most, kinds):
    found = largest(most, kinds)
    for n in range(most + 1):
        every = [max(Counter(values).values(), default=0) for values in itertools.product(range(kinds), repeat=n)]
        assert found[n] == pytest.approx(sum(every) / len(every), abs=1e-8)


def test_the_largest_of_many_values_is_finite_and_grows():
    found = largest(1400, 4000)
    assert np.isfinite(found).all()
    assert (np.diff(found[1:]) > 0).all()


def test_naming_the_most_frequent_value_that_is_left():
    """What is left after a question is as random as what was there, so the guess is exact."""
    words = retrieval.Words(128)
    drawn, right = np.random.default_rng(0), 0.0
    for _ in range(4000):
        left = drawn.integers(len(words.values), size=6).tolist()
        for _ in range(3):
            most = Counter(left).most_common(1)[0][0]
            right += left.pop(int(drawn.integers(len(left)))) == most
    assert retrieval._guess(6, 3, words) == pytest.approx(right / 12000, abs=0.012)
