import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from zonal import tasks
from zonal.data import pretokenise, tokenizers, write_corpus
from zonal.data.tokenizers import GPT2Tokenizer
from zonal.errors import ArgumentError, FileFormatError
from zonal.tasks import Text


class Counting(GPT2Tokenizer):
    """Encodes "n" as 0, 1, …, n-1, so that a token is its own position in the stream."""

    def encode(self, text):
        return np.arange(int(text))


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """A folder of corpora of given sizes whose tokens are their positions."""
    root = tmp_path_factory.mktemp("counted")
    tokenizer = Counting()

    def make(size):
        folder = root / str(size)
        if not folder.exists():
            write_corpus(folder, [[str(size)]], tokenizer, source=f"{size} numbers", shard_tokens=1000)
        return folder.as_posix()

    return make


@settings(max_examples=40, deadline=None)
@given(
    size=st.sampled_from([600, 1001, 2500]),
    length=st.integers(1, 60),
    fraction=st.floats(0.15, 0.7),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 2**40),
)
def test_no_token_of_validation_is_trained_on(counted, size, length, fraction, batch_size, seed):
    split = Text(counted(size), length=1, validation_fraction=fraction).split
    assume(length < min(split, size - split))  # shorter parts are refused, which has its own test
    task = Text(counted(size), length=length, validation_fraction=fraction, evaluation_bytes=None)
    trained, validated = set(), set()
    for step in [*range(min(30, size // length // batch_size + 2)), 12345]:
        batch = task.train_batch(step, batch_size, seed)
        trained |= set(batch.tokens.flatten().tolist()) | set(batch.targets.flatten().tolist())
        assert torch.equal(batch.targets, batch.tokens + 1)
        assert tuple(batch.tokens.shape) == (batch_size, length)
    for batch in task.evaluation_batches(batch_size):
        validated |= set(batch.tokens.flatten().tolist()) | set(batch.targets.flatten().tolist())
    assert max(trained) < task.split <= min(validated)
    assert validated == set(range(task.split, max(validated) + 1))


@settings(max_examples=40, deadline=None)
@given(size=st.sampled_from([600, 2500]), length=st.integers(1, 60), most=st.integers(1, 6000) | st.none())
def test_rates_are_chosen_by_windows_that_are_not_reported(counted, size, length, most):
    task = Text(counted(size), length=length, validation_fraction=0.5, evaluation_bytes=most)
    reported, chosen = (
        [tuple(row) for batch in batches for row in batch.targets.tolist()]
        for batches in (task.evaluation_batches(7), task.validation_batches(7))
    )
    fitting = (size - task.split - 1) // length
    assert len(chosen) == min(len(reported), fitting - len(reported))
    tokens = [token for row in (*reported, *chosen) for token in row]
    assert len(set(tokens)) == len(tokens)
    assert min(tokens) > task.split


@pytest.mark.parametrize("windows", [1, 1.3, 1.7, 2, 2.5, 3])
def test_a_short_training_part_is_used_to_its_last_token_and_not_beyond(counted, windows):
    split = Text(counted(600), length=1, validation_fraction=0.75).split
    length = int((split - 1) / windows)
    task = Text(counted(600), length=length, validation_fraction=0.75)
    assert task.split == split
    ends = np.concatenate([task.train_starts(step, 8, seed=1) for step in range(400)]) + length
    assert ends.max() == split - 1 if windows < 2 else split - length <= ends.max() <= split - 1


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.5, 0.93])
@pytest.mark.parametrize("block", [7, 64, 1 << 20])
def test_the_split_is_set_in_bytes(counted, monkeypatch, fraction, block):
    monkeypatch.setattr("zonal.tasks.text._BLOCK", block)
    task = Text(counted(2500), length=1, validation_fraction=fraction)
    lengths = tokenizers.resolve("gpt2").token_bytes[:2500]
    wanted = int(lengths.sum() * fraction)
    assert lengths[task.split :].sum() <= wanted < lengths[task.split - 1 :].sum()


def test_tokenizers_are_validated_on_the_same_text():
    parts = []
    for name in ("byte", "gpt2"):
        task = Text("novel", name, 64)
        parts.append(task.decode(task.corpus.read(task.split, task.corpus.count).tolist()))
    # not more than one token apart
    assert parts[0].endswith(parts[1].lstrip("\ufffd"))
    assert len(parts[0]) - len(parts[1]) < 20


def test_an_epoch_reads_windows_once_and_the_next_from_another_phase(counted):
    task = Text(counted(2500), length=10)
    windows = (task.split - 1) // 10 - 1
    epochs = [
        np.concatenate([task.train_starts(epoch * windows + i, 1, seed=4) for i in range(windows)])
        for epoch in range(6)
    ]
    for starts in epochs:
        assert (np.diff(np.sort(starts)) == 10).all()
    assert len({int(starts.min()) % 10 for starts in epochs}) > 1
    assert not np.array_equal(epochs[0] - epochs[0].min(), epochs[1] - epochs[1].min())


def test_a_batch_is_the_rows_of_smaller_batches_in_the_same_order(counted):
    task = Text(counted(1001), length=8)
    rows = torch.cat([task.train_batch(step, 2, 7).tokens for step in (0, 1, 2)])
    assert torch.equal(rows, task.train_batch(0, 6, 7).tokens)


@pytest.mark.parametrize("limit", [1, 100, 300, 2000, 10**6, None])
def test_evaluation_covers_so_many_bytes_of_the_whole_validation_part(counted, limit):
    lengths = tokenizers.resolve("gpt2").token_bytes
    task = Text(counted(2500), length=10, validation_fraction=0.3, evaluation_bytes=limit)
    targets = torch.cat([batch.targets for batch in task.evaluation_batches(7)])
    available = (2500 - task.split - 1) // 10
    window_bytes = 10 * lengths[task.split : 2500].mean()
    asked = available if limit is None else min(available, limit / window_bytes)
    assert len(targets) == 1 if asked < 1 else abs(len(targets) - asked) <= 0.6
    assert (targets - targets[:, :1] == torch.arange(10)).all()  # the corpus counts: its tokens are their places
    places = (targets[:, 0] - 1 - task.split) / 10
    assert places[0] == 0
    assert (places % 1 == 0).all()
    assert places[-1] < available
    gaps = torch.cat([places, torch.tensor([float(available)])]).diff()  # to the end of the part, too
    assert gaps.max() - gaps.min() <= 1
    assert task.bytes_per_token == pytest.approx(lengths[targets.numpy()].mean())


def test_bits_per_byte():
    task = Text("novel", "gpt2", 32)
    assert task.bytes_per_token > 3
    assert task.bits_per_byte(math.log(2) * task.bytes_per_token) == pytest.approx(1.0)
    assert Text("novel", "byte", 32).bits_per_byte(math.log(256)) == pytest.approx(8.0)


def test_novel_by_default():
    task = Text()
    assert (task.vocab_size, task.length, task.metric, task.corpus.count) == (256, 256, "loss", 1_204_997)
    batch = task.train_batch(0, 2, 0)
    assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
    assert batch.slices == {}
    assert task.decode(batch.tokens[0].tolist()) in task.decode(task.corpus.read(0, task.split).tolist())
    assert task.decode(task.encode("Ahab’s leg")) == "Ahab’s leg"
    assert task.describe() == (
        "Byte-level language modelling of Moby-Dick (embedded): 1,084,498 training tokens, 120,499 validation "
        "tokens (65,536 evaluated), sequences of 256."
    )


def test_a_text_that_has_changed_is_not_resumed_on(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("what was " * 100)
    config = Text(path, length=16).config()
    assert tasks.from_config(config).config() == config
    path.write_text("what is! " * 100)
    with pytest.raises(FileFormatError, match=r"mine\.txt has changed since the run was started"):
        tasks.from_config(config)


def test_relative_paths_are_kept_in_full(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("words " * 100)
    monkeypatch.chdir(tmp_path)
    config = Text("mine.txt", length=16).config()
    monkeypatch.chdir("/")
    assert tasks.from_config(config).config() == config


def test_pretokenised_corpora(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("some words and more " * 100)
    pretokenise(path, tokenizers.resolve("gpt2"), tmp_path / "corpus")
    task = Text(tmp_path / "corpus", length=16)
    fresh = Text(path, "gpt2", 16)
    assert task.tokenizer.name == "gpt2"
    assert torch.equal(task.train_batch(3, 2, 1).tokens, fresh.train_batch(3, 2, 1).tokens)
    with pytest.raises(FileFormatError, match=r"made with another tokenizer \(gpt2\) than byte"):
        Text(tmp_path / "corpus", "byte", 16)
    with pytest.raises(ArgumentError, match="max_bytes limits text that is still to be tokenised"):
        Text(tmp_path / "corpus", length=16, max_bytes=100)


def test_a_tokenizer_whose_file_was_moved(tmp_path):
    """Neither the cache of prepared texts nor a corpus that was carried here needs the folder in which it was made."""
    path = tmp_path / "mine.txt"
    path.write_text("some words and more " * 100)
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    tokenizers.train([path.read_text()], 260, old)
    task = Text(path, str(old), 16)
    pretokenise(path, tokenizers.resolve(str(old)), tmp_path / "corpus")
    old.rename(new)
    again, carried = Text(path, str(new), 16), Text(tmp_path / "corpus", str(new), 16)
    assert again.corpus.folder == task.corpus.folder
    for other in (again, carried, tasks.from_config(carried.config())):
        assert torch.equal(other.train_batch(3, 2, 1).tokens, task.train_batch(3, 2, 1).tokens)
    with pytest.raises(FileFormatError, match=r"old\.json, which is not to be had here\. Give its file"):
        Text(tmp_path / "corpus", length=16)


def test_a_text_shorter_than_a_sequence_says_how_much_is_needed(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("x" * 300)
    with pytest.raises(
        FileFormatError,
        match=(
            r"short\.txt is too short: its validation part has 30 of 300 byte tokens, one sequence of length "
            r"64 takes 65"
        ),
    ) as caught:
        Text(path, length=64)
    enough = int(str(caught.value).split("about ")[1].split(" tokens")[0])
    path.write_text("x" * enough)
    assert len(list(Text(path, length=64).evaluation_batches(1))) == 1
    path.write_text("x")  # both parts are too short; what is told is enough for both
    with pytest.raises(FileFormatError, match=f"1 of 1 byte tokens.*Give about {enough} tokens"):
        Text(path, length=64)
    path.write_text("x" * 300)
    with pytest.raises(FileFormatError, match="its training part has 30 of 300"):
        Text(path, length=64, validation_fraction=0.9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"length": 0}, "length must be at least 1, got 0"),
        ({"validation_fraction": 0.0}, "validation_fraction must lie between 0 and 1, got 0.0"),
        ({"validation_fraction": 1.0}, "validation_fraction must lie between 0 and 1"),
        ({"evaluation_bytes": 0}, "evaluation_bytes must be at least 1 or None"),
        ({"tokenizer": "word"}, "unknown tokenizer 'word'"),
        ({"max_bytes": 0}, "max_bytes must be at least 1"),
    ],
)
def test_bad_arguments(arguments, words):
    with pytest.raises(ArgumentError, match=words):
        Text(**arguments)


def test_tokens_are_told_apart_by_their_first_character():
    task = Text("novel")
    names, group = task.token_groups(torch.tensor(list(b" a\nZ7.\xc3")))
    assert [names[each] for each in group.tolist()] == [
        "space",
        "small letter",
        "space",
        "capital letter",
        "digit",
        "sign",
        "part of a character",
    ]
    task = Text("novel", "gpt2", max_bytes=20_000)
    names, group = task.token_groups(torch.tensor([task.encode(" the Whale 12")]))
    assert [names[each] for each in group[0].tolist()][:2] == ["small letter", "capital letter"]
    assert group.shape == (1, len(task.encode(" the Whale 12")))
    assert task.token_groups(torch.empty(1, 0, dtype=torch.long))[1].shape == (1, 0)


@pytest.mark.parametrize("fraction", [0.1, 0.3, 0.99])
def test_a_fraction_of_the_training_part(counted, fraction):
    whole, part = Text(counted(2500), length=8), Text(counted(2500), length=8, train_fraction=fraction)
    assert part.split == whole.split == whole.train_end
    lengths = tokenizers.resolve("gpt2").token_bytes[:2500]
    # set in bytes, from the start
    assert lengths[: part.train_end].sum() == pytest.approx(
        fraction * lengths[: whole.split].sum(), abs=float(lengths.max()) + 1
    )
    trained = {token for step in range(200) for token in part.train_batch(step, 4, 0).targets.flatten().tolist()}
    assert max(trained) < part.train_end
    assert [batch.tokens.tolist() for batch in part.evaluation_batches(4)] == [
        batch.tokens.tolist() for batch in whole.evaluation_batches(4)
    ]
    assert f"({fraction:.0%} of {whole.split:,})" in part.describe()
    assert tasks.from_config(part.config()).config() == part.config()


def test_a_fraction_that_is_none(counted):
    for fraction in (0.0, 1.1, -0.5):
        with pytest.raises(ArgumentError, match="train_fraction must lie above 0 and be at most 1"):
            Text(counted(600), length=8, train_fraction=fraction)
    with pytest.raises(FileFormatError, match="its training part has"):
        Text(counted(600), length=60, train_fraction=0.05)


def test_long_sequences():
    task = Text("novel", length=32_768)
    batch = task.train_batch(3, 1, seed=0)
    assert tuple(batch.tokens.shape) == (1, 32_768)
    assert [tuple(each.tokens.shape) for each in task.evaluation_batches(1)] == [(1, 32_768)] * 2


def test_code_in_a_folder_or_by_a_pattern(tmp_path):
    for name, code in (
        ("b.py", "import a\n"),
        ("sub/c.py", "x = 1\n"),
        ("a.py", "def f():\n    return 0\n"),
        ("notes.txt", "not code\n"),
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code * 30)
    every, pattern = Text(tmp_path, length=16), Text(tmp_path / "**" / "*.py", length=16)
    texts = [task.decode(task.corpus.read(0, task.corpus.count).tolist()).split("\0") for task in (every, pattern)]
    assert [text.split("\n")[0] for text in texts[0]] == ["def f():", "import a", "not code", "x = 1"]
    assert [text.split("\n")[0] for text in texts[1]] == ["def f():", "import a", "x = 1"]
