import pytest
import torch
from data import idx

from zonal import tasks
from zonal.errors import ArgumentError, FileFormatError
from zonal.tasks import IGNORED, Pixels, TaskSettings

COUNT, TESTED = 40, 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (COUNT, 4, 4), generator=generator)
    return idx.folder(tmp_path_factory.mktemp("pictures"), pixels, torch.arange(COUNT) % 10, TESTED)


def test_levels_are_means_of_squares(folder):
    task = Pixels(folder, 2, levels=8)
    assert (task.length, task.vocab_size, task.causal) == (5, 19, False)
    (batch,) = task.evaluation_batches(100)
    _, tested = tasks.pixels.fashion_mnist(folder)
    for row, picture in enumerate(tested.pixels.double()):
        squares = [picture[i : i + 2, j : j + 2].mean().item() for i in (0, 2) for j in (0, 2)]
        assert batch.tokens[row].tolist() == [*(int(value * 8 / 256) for value in squares), 8]
        assert batch.targets[row].tolist() == [IGNORED] * 4 + [9 + row % 10]
    assert batch.slices["class"][:2] == ["T-shirt/top", "trouser"]
    assert task.decode([0, 7, 8, 9, 18]) == "0 7 ? T-shirt/top ankle boot"


def test_an_epoch_shows_every_picture_once(folder):
    task = Pixels(folder, 4)
    learnt = COUNT - TESTED
    seen = torch.cat([task.train_batch(step, 5, seed=2).tokens for step in range(2 * learnt // 5)])
    for epoch in seen.split(learnt):
        assert len({tuple(row) for row in epoch.tolist()}) == learnt
    assert not torch.equal(*seen.split(learnt))
    # a batch over the border of two epochs, and the same batch again
    batch = task.train_batch(4, 7, seed=2)
    assert torch.equal(batch.tokens, task.train_batch(4, 7, seed=2).tokens)
    assert torch.equal(batch.tokens[:2], seen[28:30])


@pytest.mark.parametrize(("tested", "left"), [(3, [3, 4, 5]), (7, [7, 8, 9]), (TESTED, [])])
def test_rates_are_chosen_by_test_pictures_that_are_not_evaluated(folder, tested, left):
    whole = next(Pixels(folder, 4).evaluation_batches(TESTED)).tokens.tolist()
    task = Pixels(folder, 4, test_examples=tested)
    assert [row for batch in task.evaluation_batches(2) for row in batch.tokens.tolist()] == whole[:tested]
    chosen = [row for batch in task.validation_batches(2) for row in batch.tokens.tolist()]
    assert chosen == [whole[place] for place in left]


def test_by_name_and_from_json(folder):
    task = tasks.resolve("fashion-pixels", TaskSettings(data=str(folder), length=16, test_examples=6))
    assert isinstance(task, Pixels)
    assert tasks.from_config(task.config()).config() == task.config()
    assert task.guess().value == pytest.approx(1 / 6)
    assert sum(len(batch.tokens) for batch in task.evaluation_batches(4)) == 6


def test_what_does_not_fit(folder, tmp_path):
    with pytest.raises(ArgumentError, match="the square of a side that divides theirs, got 50"):
        tasks.resolve("fashion-pixels", TaskSettings(data=str(folder), length=50))
    with pytest.raises(ArgumentError, match="a side that divides their height"):
        Pixels(folder, 3)
    with pytest.raises(FileFormatError, match="have changed since the run was started"):
        tasks.from_config({**Pixels(folder, 4).config(), "content": "0" * 64})
    strange = idx.folder(tmp_path, torch.zeros(4, 2, 2), torch.tensor([0, 1, 11, 1]), 1)
    with pytest.raises(FileFormatError, match="labels must be below 10"):
        Pixels(strange, 2)
    with pytest.raises(FileFormatError, match="Fashion-MNIST comes with the Debian package"):
        Pixels(tmp_path / "nowhere")
