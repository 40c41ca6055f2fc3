"""Benchmarks that measure checkpoints of comparisons."""

import json

import numpy as np
import pytest

from benchmarks import held_out, needles
from zonal import tasks
from zonal.errors import ArgumentError
from zonal.evaluation import evaluate
from zonal.models import ModelConfig
from zonal.training import Comparison, ComparisonSpec, TrainConfig, load_model


def test_the_whole_validation_text_is_read_by_checkpoints_of_runs(tmp_path, capsys):
    (tmp_path / "it.txt").write_text("All work and no play makes Jack a dull boy. " * 400)
    text = tasks.Text(tmp_path / "it.txt", "byte", 32, evaluation_bytes=320)
    spec = ComparisonSpec(
        task=text,
        model=ModelConfig(vocab_size=256, dim=16, layers=("linear",), heads=2),
        training=TrainConfig(steps=2, batch_size=2, eval_batch_size=100, tensorboard=False),
        operators=("linear",),
    )
    Comparison(tmp_path / "it", spec).run()
    out, runs = tmp_path / "held_out.json", [str(tmp_path / "it" / run.name) for run in spec.runs()]
    assert held_out.main([*runs, "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    (row,) = record["rows"]
    assert row["tokens"] == 32 * ((text.corpus.count - text.split - 1) // 32)
    model, _ = load_model(tmp_path / "it" / spec.runs()[0].name / "checkpoint.safetensors")
    whole = tasks.from_config({**text.config(), "evaluation_bytes": None})
    assert row["loss"] == pytest.approx(evaluate(model, whole, batch_size=7)["loss"], abs=1e-5)
    assert sum(row["stretches"]) / 10 == pytest.approx(row["loss"], rel=1e-2)
    assert row["places"] == {"0-31": row["loss"]}
    assert record["summary"]["linear, rate 0.003"]["mean"] == pytest.approx(row["loss"], abs=1e-6)
    # in longer windows than those of training
    assert held_out.main([*runs, "--length", "150", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    longer = tasks.from_config({**text.config(), "evaluation_bytes": None, "length": 150})
    assert (row["trained_length"], row["length"], list(row["places"])) == (32, 150, ["0-63", "64-127", "128-149"])
    assert row["loss"] == pytest.approx(evaluate(model, longer, batch_size=2)["loss"], abs=1e-5)
    assert row["loss"] == pytest.approx(np.average(list(row["places"].values()), weights=[64, 64, 22]), abs=1e-5)
    # the first windows alone, fewer than there are stretches
    assert held_out.main([*runs, "--tokens", "100", "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["tokens"], len(row["stretches"])) == (96, 3)
    first = held_out.losses(model, whole)[:3]
    assert row["stretches"] == pytest.approx(first.mean(1).tolist(), abs=1e-5)
    with pytest.raises(ArgumentError, match="--tokens must be at least a window of 32, got 31"):
        held_out.main([*runs, "--tokens", "31", "--out", "-"])
    # the sample of the comparison
    assert held_out.main([*runs, "--quick", "--out", "-"]) == 0
    sample = f"linear, seed 0, rate 0.003: {row['loss_of_the_comparison']:.3f} nats a token of 320"
    assert sample in capsys.readouterr().out


def run_on(task, folder):
    """The folder of a run of one step."""
    spec = ComparisonSpec(
        task=task,
        model=ModelConfig(vocab_size=32, dim=16, layers=("linear",), heads=2),
        training=TrainConfig(steps=1, batch_size=2, eval_batch_size=100, tensorboard=False),
        operators=("linear",),
    )
    Comparison(folder, spec).run()
    return str(folder / spec.runs()[0].name)


def test_only_runs_on_text_have_a_held_out_text(tmp_path):
    run = run_on(needles.task([64], 2, 32), tmp_path / "it")
    with pytest.raises(ArgumentError, match="must be a run on text, and is one on 'retrieval'"):
        held_out.main([run, "--out", "-"])


def test_only_runs_on_retrieval_know_its_words(tmp_path):
    run = run_on(tasks.MQAR(vocab_size=32, length=16, pairs=2, train_examples=8, test_examples=2), tmp_path / "it")
    with pytest.raises(ArgumentError, match="must be a run on retrieval, and is one on 'mqar'"):
        needles.main([run, "--out", "-"])


def test_needles_are_found_in_checkpoints_of_runs(tmp_path, capsys):
    spec = ComparisonSpec(
        task=needles.task([64], 2, 32),
        model=ModelConfig(vocab_size=32, dim=16, layers=("linear",), heads=2),
        training=TrainConfig(steps=2, batch_size=2, eval_batch_size=100, tensorboard=False),
        operators=("linear", "ska(power=0)"),
    )
    Comparison(tmp_path / "it", spec).run()
    out = tmp_path / "needles.json"
    runs = [str(tmp_path / "it" / run.name) for run in spec.runs()]
    assert needles.main([*runs, "--lengths", "100,300", "--examples", "5", "--piece", "64", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [(row["operator"], row["tokens"], row["examples"]) for row in record["rows"]] == [
        (operator, tokens, 5) for operator in spec.operators for tokens in (100, 300)
    ]
    assert all(row["accuracy"] * 5 % 1 == 0 for row in record["rows"])
    assert record["summary"]["linear, rate 0.003, 300 tokens"]["mean"] == record["rows"][1]["accuracy"]
    assert "linear, seed 0, rate 0.003: 300 tokens" in capsys.readouterr().out
