import pytest
import torch

from zonal import tasks
from zonal.data.wordnet import Definition, definitions
from zonal.errors import ArgumentError, FileFormatError
from zonal.tasks import IGNORED, Glosses, TaskSettings

LICENCE = "  1 This software and database is being provided to you, the LICENSEE, by  \n"
NOUNS = 30


def line(number, noun, gloss):
    return f"{number:08} 03 n 02 {noun} 0 second_name 0 001 @ 00001740 n 0000 | {gloss}  \n"


def gloss(number):
    """Twelve words: eleven that all have in another order, one of its own."""
    words = [f"w{(number + place) % 11}" for place in range(11)]
    return " ".join([*words, f"only{number}"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("wordnet")
    few = line(NOUNS, "short", "three words only")
    text = "".join(line(number, f"noun_{number}", gloss(number)) for number in range(NOUNS))
    (where / "data.noun").write_text(LICENCE + text + few)
    return where


def test_definitions_are_read_without_examples(tmp_path):
    example = 'an Animal\'s x-ray (of 2), seen; "he took an x-ray"; "a use"'
    (tmp_path / "data.noun").write_text(LICENCE + line(1740, "x_ray", example))
    assert definitions(tmp_path) == [Definition("x_ray", ("an", "animal's", "x-ray", "of", "2", "seen"))]


def test_runs_go_on_from_any_working_folder(folder, monkeypatch):
    monkeypatch.chdir(folder.parent)
    assert Glosses(folder.name, labels=20, test_examples=20).config()["folder"] == str(folder)


def test_a_sequence_is_half_of_a_definition(folder):
    task = Glosses(folder, 14, labels=20, test_examples=20)
    assert (task.vocab_size, task.causal) == (3 + 11 + 20, False)
    known = {f"noun_{number}": gloss(number).split() for number in range(NOUNS)}
    shown = []
    for step in range(40):
        batch = task.train_batch(step, 25, seed=1)
        assert (batch.targets[:, :-1] == IGNORED).all()
        for row, target in zip(batch.tokens, batch.targets[:, -1:], strict=True):
            words = task.decode(row.tolist()).split()
            assert words[-1] == "?"
            seen = [word for word in words[:-1] if word != "·"]
            assert words == ["·"] * (13 - len(seen)) + seen + ["?"]
            rest = iter("◌" if word.startswith("only") else word for word in known[task.decode(target.tolist())])
            assert all(word in rest for word in seen)  # in the order of the definition
            shown.append(len(seen))
    assert torch.tensor(shown).double().mean() == pytest.approx(6, abs=0.25)


def test_a_pass_shows_every_label_once_and_another_half_each_time(folder):
    task = Glosses(folder, labels=20, test_examples=20)
    batches = [task.train_batch(step, 10, seed=0) for step in range(4)]
    first, second = (torch.cat([batch.targets[:, -1] for batch in pair]) for pair in (batches[:2], batches[2:]))
    assert first.unique().numel() == second.unique().numel() == 20
    assert not torch.equal(first, second)
    tested = {tuple(row) for batch in task.evaluation_batches(7) for row in batch.tokens.tolist()}
    again = {tuple(row) for batch in task.evaluation_batches(20) for row in batch.tokens.tolist()}
    assert tested == again
    trained = {tuple(row) for batch in batches for row in batch.tokens.tolist()}
    assert len(trained) > 30  # the same label, other words
    assert len(tested - trained) > 15


@pytest.mark.parametrize(("tested", "left"), [(4, range(4, 8)), (12, range(12, 20)), (20, range(20))])
def test_rates_are_chosen_by_other_labels_or_other_halves(folder, tested, left):
    task = Glosses(folder, labels=20, test_examples=tested)
    chosen = [batch for size in (3, 20) for batch in task.validation_batches(size)]
    named = [target - len(task._words) for batch in chosen for target in batch.targets[:, -1].tolist()]
    assert named == [*left, *left]
    reported = {tuple(row) for batch in task.evaluation_batches(20) for row in batch.tokens.tolist()}
    assert len(reported & {tuple(row) for batch in chosen for row in batch.tokens.tolist()}) <= 2  # halves may agree


def test_what_does_not_fit_is_cut_at_the_end(folder):
    long, short = (Glosses(folder, length, labels=20, test_examples=20) for length in (14, 4))
    for whole, part in zip(long.evaluation_batches(1), short.evaluation_batches(1), strict=True):
        words = [token for token in whole.tokens[0, :-1].tolist() if token]
        assert [token for token in part.tokens[0, :-1].tolist() if token] == words[:3]


def test_by_name_and_from_json(folder):
    with pytest.raises(ArgumentError, match=r"2 to 30 labels .* got length=24, labels=20480"):
        tasks.resolve("glosses", TaskSettings(data=str(folder)))
    task = Glosses(folder, labels=20, test_examples=6)
    assert tasks.from_config(task.config()).config() == task.config()
    assert task.guess().value == 1 / 20
    assert sum(len(batch.tokens) for batch in task.evaluation_batches(4)) == 6


def test_what_does_not_fit(folder, tmp_path):
    with pytest.raises(ArgumentError, match="1 to as many test examples"):
        Glosses(folder, labels=5, test_examples=6)
    with pytest.raises(FileFormatError, match="have changed since the run was started"):
        tasks.from_config({**Glosses(folder, labels=20, test_examples=6).config(), "content": "0" * 64})
    with pytest.raises(FileFormatError, match="It comes with the Debian package wordnet-base"):
        Glosses(tmp_path / "nowhere")
    for text in ("no definition", line(1, "verb", "a b").replace(" n ", " v ", 1), "| x"):
        (tmp_path / "data.noun").write_text(LICENCE + text)
        with pytest.raises(FileFormatError, match=r"line 2 of .* must be a noun as in WordNet's data.noun"):
            definitions(tmp_path)
    (tmp_path / "data.noun").write_bytes(b"\xff\xfe")
    with pytest.raises(FileFormatError, match="cannot be read"):
        definitions(tmp_path)
