import json

import pytest
import torch

from zonal import tasks
from zonal.errors import ArgumentError, FileFormatError
from zonal.tasks import MQAR, Segment, Task, Text


def test_every_name_resolves_and_survives_json():
    for name in sorted({*tasks.names()} - {"fashion-pixels", "glosses"}):
        task = tasks.resolve(name)
        assert isinstance(task, Task), name
        assert task.name == name
        again = tasks.from_config(json.loads(json.dumps(task.config())))
        assert type(again) is type(task), name
        assert again.config() == task.config(), name


def test_a_task_from_json_describes_itself_alike():
    """What a guess reaches is counted over all that is asked: few sequences, but for tasks that ask a fixed number."""
    fixed = ("text", "masked-text", "mqar-based-fig2", "mqar-iclr24-fig2")
    for name in sorted({*tasks.names()} - {"fashion-pixels", "glosses"}):
        task = tasks.resolve(name, None if name in fixed else tasks.TaskSettings(test_examples=12))
        assert tasks.from_config(json.loads(json.dumps(task.config()))).describe() == task.describe(), name


def test_settings_of_the_papers():
    based = tasks.resolve("mqar-based-fig2")
    assert based.vocab_size == 8192
    assert [(s.length, s.pairs, s.examples) for s in based.train_segments] == [
        (64, 4, 100_000), (128, 8, 20_000), (256, 16, 20_000), (256, 32, 20_000), (256, 64, 20_000),
    ]  # fmt: skip
    assert [(s.length, s.pairs, s.examples) for s in based.test_segments] == [
        (64, 4, 1000), (64, 8, 1000), (64, 16, 1000), (128, 32, 1000), (256, 64, 1000), (512, 128, 1000),
        (1024, 256, 1000),
    ]  # fmt: skip
    assert (based.power_a, based.random_non_queries, based.length) == (0.01, True, 1024)
    for length, pairs in ((64, 4), (128, 8), (256, 16), (512, 64)):
        row = tasks.resolve("mqar-iclr24-fig2", tasks.TaskSettings(length=length))
        assert row.train_segments == (Segment(length, pairs, 100_000, seed=0),)
        assert row.test_segments == (Segment(length, pairs, 3_000, seed=10),)
        assert not row.random_non_queries
    demo, field = tasks.resolve("mqar-demo"), tasks.resolve("mqar-8k")
    assert (demo.vocab_size, demo.length, demo.train_segments[0].pairs) == (512, 64, 4)
    assert (field.vocab_size, field.length, field.train_segments[0].pairs) == (8192, 64, 4)


def test_based_evaluation_is_zoologys_data():
    task = tasks.resolve("mqar-based-fig2")
    batch = next(task.evaluation_batches(1000))
    assert torch.equal(
        batch.targets, tasks.multiquery_ar(8192, 1000, 64, 2967327842, num_kv_pairs=4, random_non_queries=False)[1]
    )


def test_arguments_reach_the_task(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("some words " * 200)
    text = tasks.resolve(
        "text",
        tasks.TaskSettings(
            data=str(path), tokenizer="gpt2", length=16, validation_fraction=0.2, evaluation_bytes=100, max_bytes=1500
        ),
    )
    assert (
        text.config() == Text(path, "gpt2", 16, validation_fraction=0.2, evaluation_bytes=100, max_bytes=1500).config()
    )
    recall = tasks.resolve(
        "mqar",
        tasks.TaskSettings(vocab_size=100, length=32, pairs=3, train_examples=7, test_examples=5),
        power_a=0.5,
        random_non_queries=False,
        seed=9,
    )
    expected = MQAR(
        100, length=32, pairs=3, train_examples=7, test_examples=5, power_a=0.5, random_non_queries=False, seed=9
    )
    assert recall.config() == expected.config()
    assert tasks.resolve("mqar-demo", random_non_queries=True).config()["random_non_queries"] is True


def test_mistakes_are_named():
    with pytest.raises(ArgumentError, match=r"unknown task 'mqar-dem'. Did you mean 'mqar-demo'\?.*text"):
        tasks.resolve("mqar-dem")
    with pytest.raises(ArgumentError, match="the task 'text' takes no pairs; it takes: data, tokenizer, length"):
        tasks.resolve("text", tasks.TaskSettings(pairs=4))
    with pytest.raises(ArgumentError, match="the task 'mqar' takes no data"):
        tasks.resolve("mqar", tasks.TaskSettings(data="x.txt"))
    with pytest.raises(ArgumentError, match="have length 64, 128, 256, 512; got 100"):
        tasks.resolve("mqar-iclr24-fig2", tasks.TaskSettings(length=100))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {},
            "'task' must be one of algorithmic, expressions, glosses, lookup, masked-text, mqar, periodic, pixels, "
            "retrieval, text, got None",
        ),
        ({"task": "vision"}, "got 'vision'"),
        ([], "got None"),
        ({"task": "text"}, r"text task is incomplete or damaged \('name'\)|incomplete or damaged"),
        (
            {"task": "mqar", "vocab_size": 100, "train_segments": [{"size": 3}], "test_segments": []},
            "mqar task is incomplete or damaged",
        ),
    ],
)
def test_damaged_configurations(config, words):
    with pytest.raises(FileFormatError, match=words):
        tasks.from_config(config)
