"""What a finished run says of its memories, and what the report reads of it."""

import json

import pytest
import torch
from training.training_doubles import Recall, tiny_config

from zonal.memory import RidgeStatistics
from zonal.models import ModelConfig, build
from zonal.report import diagnostics, key_embeddings
from zonal.training import train
from zonal.training.inspect import ROWS, geometry


@pytest.mark.parametrize("layers", ["ska(power=1)", "softmax, ska(power=(0, 2))", "ska(power=1, fading=True)", "ridge"])
def test_a_finished_run_says_what_is_in_its_memories(layers, tmp_path):
    """The file against the sums that the layer's memory holds after the same tokens."""
    task, model = Recall(), build(ModelConfig(vocab_size=Recall().vocab_size, dim=16, layers=layers, heads=2), seed=0)
    result = train(model, task, tiny_config(), tmp_path)
    assert result.status == "done"
    found = diagnostics.load(tmp_path)
    assert found is not None
    solving = [index for index, spec in enumerate(model.config.layers) if spec != "softmax"]
    assert {(head.layer, head.head) for head in found} == {
        (index + 1, head + 1) for index in solving for head in range(2)
    }
    tokens = next(iter(task.evaluation_batches(ROWS))).tokens
    model.eval()
    after = {index: layer(x, return_memory=True)[1].memory for index, layer, x in model.layer_inputs(tokens)}
    for head in found:
        memory = after[head.layer - 1]
        regular = (
            memory.regularised(memory.operator.bind(2, 2))
            if not isinstance(memory, RidgeStatistics)
            else torch.linalg.inv(memory.made(memory.operator.bind(2, 2)))
        )
        eigenvalues = torch.linalg.eigvalsh(regular[:, head.head - 1])
        assert head.numbers["smallest_eigenvalue"] == pytest.approx(eigenvalues[:, 0].mean().item(), rel=1e-4)
        assert head.numbers["condition"] == pytest.approx(
            (eigenvalues[:, -1] / eigenvalues[:, 0]).mean().item(), rel=1e-4
        )
        assert head.stored[-1] == tokens.shape[1]
        assert sorted(head.estimate) == list(head.estimate)  # more keys fill a state that does not fade
        assert len(head.leverage) == tokens.numel()
        assert bool(head.spectrum) == (layers != "ridge")
        assert all(abs(complex(*each)) < 1 for each in head.spectrum)


def test_other_runs_write_none(tmp_path):
    train(
        build(ModelConfig(vocab_size=Recall().vocab_size, dim=16, layers="softmax", heads=2), seed=0),
        Recall(),
        tiny_config(),
        tmp_path,
    )
    assert diagnostics.load(tmp_path) is None


def test_an_unfinished_run_writes_none(tmp_path):
    model = build(ModelConfig(vocab_size=Recall().vocab_size, dim=16, layers="ska(power=1)", heads=2), seed=0)
    seen = []
    result = train(model, Recall(), tiny_config(), tmp_path, on_event=seen.append, should_stop=lambda: len(seen) > 6)
    assert result.status == "stopped"
    assert diagnostics.load(tmp_path) is None
    assert train(model, Recall(), tiny_config(), tmp_path).status == "done"
    assert diagnostics.load(tmp_path) is not None


def test_a_finished_run_says_where_its_keys_lie_and_what_its_heads_made_of_distances(tmp_path):
    task, model = (
        Recall(),
        build(ModelConfig(vocab_size=Recall().vocab_size, dim=24, layers="softmax, rewa", heads=2), seed=0),
    )
    train(model, task, tiny_config(), tmp_path)
    found = key_embeddings.load(tmp_path)
    assert {(space.layer, space.head, space.name) for space in found.spaces} == {
        (2, head, name) for head in (1, 2) for name in ("Euclidean", "Sphere", "Hyperbolic")
    }
    tokens = next(iter(task.evaluation_batches(ROWS))).tokens
    assert len(found.tokens) == min(500, tokens.numel())
    assert diagnostics.load(tmp_path) is None
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    at = [line["geometry"] for line in lines if line["kind"] == "eval"]
    assert at[-1] == geometry(model)
    assert at[-1] != at[0]
    assert at[-1][0]["layer"] == 1
    assert all("geometry" not in line for line in lines if line["kind"] == "train")
