"""Comparisons of models in which every token sees the whole sequence."""

from dataclasses import replace

import pytest
import torch

from zonal import report
from zonal.errors import ArgumentError
from zonal.models import CausalLM, ModelConfig, TextEncoder, build, language_model
from zonal.tasks import MaskedText, Text
from zonal.training import Comparison, ComparisonSpec, TrainConfig, load_model, train

OPERATORS = ("softmax", "hierarchical(sizes=(4,))")


def specification(task=None, **changes):
    task = MaskedText(length=24, evaluation_bytes=500) if task is None else task
    shape = {"vocab_size": task.vocab_size, "dim": 16, "layers": ("softmax",), "heads": 2, "causal": task.causal}
    model = ModelConfig(**{**shape, **changes})
    training = TrainConfig(steps=4, batch_size=4, eval_every=2, tensorboard=False)
    return ComparisonSpec(task, model, training, OPERATORS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("encoders") / "runs"
    Comparison(path, specification()).run()
    return path


def test_encoders_are_compared(folder):
    results = Comparison.open(folder).run().runs
    assert [run.status for run in results] == ["done", "done"]
    assert all(run.memory_bytes == {} and run.final["loss"] < 7 for run in results)
    assert "bits_per_byte" not in results[0].final
    paths = report.write(folder)
    assert "Hidden tokens (15% and one a sequence)" in paths.markdown.read_text()
    assert 'data-chart="state"' not in paths.html.read_text()
    assert all("Memory at 1k" not in path.read_text() for path in (paths.html, paths.markdown))


def test_a_trained_encoder_is_read_again(folder):
    (path,) = (folder / "runs/softmax").glob("*/checkpoint.safetensors")
    model, _ = load_model(path)
    assert isinstance(model, TextEncoder)
    tokens = torch.randint(257, (2, 9))
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 257
    with torch.no_grad():
        assert not torch.allclose(model(tokens)[:, 0], model(changed)[:, 0])


def test_models_of_both_kinds():
    config = ModelConfig(11, 8, ("softmax",), heads=2)
    assert isinstance(language_model(config, 0), CausalLM)
    encoder = ModelConfig(11, 8, ("softmax",), heads=2, causal=False)
    made = language_model(encoder, 0)
    assert isinstance(made, TextEncoder)
    assert all(
        torch.equal(a, b) for a, b in zip(made.parameters(), language_model(encoder, 0).parameters(), strict=True)
    )
    assert ModelConfig.from_dict(encoder.to_dict()) == encoder
    assert "causal" not in config.to_dict()
    # as before this field was there
    assert TextEncoder(config).config == encoder
    with pytest.raises(ArgumentError, match="causal=True is required"):
        build(encoder, 0)
    with pytest.raises(ArgumentError, match=r"TextEncoder takes causal=False"):
        CausalLM(encoder)
    with pytest.raises(ArgumentError, match="every token sees the whole text"):
        made.predict(torch.zeros(1, 4).long(), torch.zeros(1, 4).long(), piece=2)


def test_task_and_model_agree(tmp_path):
    with pytest.raises(ArgumentError, match=r"model.causal must be that of the task \(False\), got True"):
        specification(causal=True)
    with pytest.raises(ArgumentError, match=r"must be that of the task \(True\), got False"):
        specification(Text(length=24), causal=False)
    for task, causal in ((Text(length=24), False), (MaskedText(length=24), True)):
        model = language_model(replace(specification(task).model, causal=causal), 0)
        with pytest.raises(
            ArgumentError, match=f"causal={task.causal} is required, as the task says, got causal={causal}"
        ):
            train(model, task, TrainConfig(steps=1), tmp_path)
    assert not list(tmp_path.iterdir())
