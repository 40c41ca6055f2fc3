import math

import numpy as np
import pytest
import torch

from zonal import tasks
from zonal.tasks import IGNORED, MaskedText, Text
from zonal.tasks.masked import ASKED, HIDDEN, REPLACED

MASK = 256


@pytest.fixture(scope="module")
def task():
    return MaskedText(length=50, evaluation_bytes=4000)


def test_what_is_hidden(task):
    """The shares of BERT, and targets that are the text."""
    text = Text(length=50)
    asked = hidden = kept = total = 0
    for step in range(60):
        batch, plain = task.train_batch(step, 16, seed=3), text.train_batch(step, 16, seed=3).tokens
        places = batch.targets != IGNORED
        assert torch.equal(batch.targets[places], plain[places])
        assert torch.equal(batch.tokens[~places], plain[~places])
        assert bool(places.any(1).all())
        asked, total = asked + int(places.sum()), total + places.numel()
        hidden += int((batch.tokens[places] == MASK).sum())
        kept += int((batch.tokens[places] == plain[places]).sum())
        assert int(batch.tokens.max()) <= MASK == task.vocab_size - 1
    # one token a row is asked in any case
    assert asked / total == pytest.approx(ASKED + (1 - ASKED) / 50, abs=0.005)
    assert hidden / asked == pytest.approx(HIDDEN, abs=0.015)
    # a random byte may be the one that stood there
    assert kept / asked == pytest.approx(1 - HIDDEN - REPLACED, abs=0.015)


def test_rates_are_chosen_by_other_windows(task):
    plain = Text(length=50, evaluation_bytes=4000)
    for masked, text in zip(task.validation_batches(9), plain.validation_batches(9), strict=True):
        places = masked.targets != IGNORED
        assert bool(places.any(1).all())
        assert torch.equal(masked.targets[places], text.tokens[places])
        assert torch.equal(masked.tokens[~places], text.tokens[~places])
    again = torch.cat([batch.tokens for batch in task.validation_batches(4)])
    assert torch.equal(again, torch.cat([batch.tokens for batch in task.validation_batches(9)]))


def test_training_hides_other_tokens_when_it_comes_back(task):
    again = tasks.from_config(task.config())
    first = task.train_batch(5, 4, seed=0)
    assert torch.equal(again.train_batch(5, 4, seed=0).tokens, first.tokens)
    places = [task._hidden(torch.zeros(1, 50).long(), [(0, number, 0)]).targets for number in range(2)]
    assert not torch.equal(*places)


@pytest.mark.parametrize("size", [1, 7, 64])
def test_evaluation_does_not_depend_on_the_batch(task, size):
    def whole(size):
        batches = list(task.evaluation_batches(size))
        return [torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "targets")]

    assert all(torch.equal(*pair) for pair in zip(whole(size), whole(5), strict=True))


def test_a_guess_by_frequencies(task):
    counts = np.bincount(task.corpus.read(0, task.split), minlength=257) + 1.0
    asked = torch.cat([batch.targets[batch.targets != IGNORED] for batch in task.evaluation_batches(9)]).numpy()
    expected = -np.log(counts / counts.sum())[asked].mean()
    assert task.guess().value == pytest.approx(expected, rel=1e-6)
    assert task.bytes_per_token is None
    assert task.guess().value < math.log(257)


def test_words(task):
    assert task.decode([72, MASK, 105]) == "H▢i"
    assert task.decode("ä".encode()) == "ä"
    assert task.decode([*"ä".encode(), MASK, MASK, *"é".encode()]) == "ä▢▢é"
    assert "Hidden tokens (15% and one a sequence)" in task.describe()
