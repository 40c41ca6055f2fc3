import math

import pytest
import torch
from torch import nn
from training.training_doubles import tiny_config, tiny_model

from zonal.errors import ArgumentError
from zonal.models import ModelConfig, build
from zonal.training import TrainConfig
from zonal.training.config import first_difference
from zonal.training.optimiser import adamw, decay_groups, set_learning_rate
from zonal.training.schedule import learning_rate

SHAPE = {"steps": 100, "peak": 2.0, "warmup_ratio": 0.1, "min_ratio": 0.1}


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 2.0 / 11),
        (9, 2.0 * 10 / 11),
        (10, 2.0),
        (55, 2.0 * (0.1 + 0.9 * 0.5)),
        (99, 2.0 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 89 / 90)))),
        (100, 0.2),
        (10**9, 0.2),
    ],
)
def test_learning_rate_values(step, expected):
    assert learning_rate(step, **SHAPE) == pytest.approx(expected, rel=1e-12)


def test_learning_rate_rises_then_falls():
    rates = [learning_rate(step, **SHAPE) for step in range(101)]
    assert rates[:11] == sorted(rates[:11])
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert max(rates) == 2.0


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_short_runs_move(steps):
    assert all(learning_rate(step, steps=steps, peak=1.0, warmup_ratio=0.5, min_ratio=0.0) > 0 for step in range(steps))


def test_negative_step_is_refused():
    with pytest.raises(ArgumentError, match="step must be at least 0"):
        learning_rate(-1, **SHAPE)


def test_what_decays():
    model = tiny_model("sko(degrees=(2.0, 3.0))")
    decaying, constant = decay_groups(model)
    assert set(decaying) | set(constant) == {name for name, _ in model.named_parameters()}
    assert decaying
    assert all(
        parameter.ndim >= 2 and "operator" not in name and "embedding" not in name
        for name, parameter in decaying.items()
    )
    # degrees have a row a head, so their shape alone would let them decay
    assert any("operator" in name and parameter.ndim >= 2 for name, parameter in constant.items())
    assert "embedding.weight" in constant
    assert all(name in constant for name, parameter in model.named_parameters() if parameter.ndim < 2)


@pytest.mark.parametrize(
    ("layer", "names"),
    [("mamba3(head_dim=8)", {"key_bias", "query_bias"}), ("mesanet(head_dim=8)", {"raw_ridge"})],
)
def test_numbers_of_a_layers_own_do_not_decay(layer, names):
    _, constant = decay_groups(build(ModelConfig(7, 16, (layer,), heads=2), seed=0))
    kept = {name.rpartition(".")[2]: parameter for name, parameter in constant.items()}
    assert names <= set(kept)
    assert all(kept[name].ndim >= 2 for name in names)


def test_gates_of_a_dense_skip_do_not_decay():
    model = build(ModelConfig(7, 8, ("softmax",) * 2, heads=2, residual="dense", mlp="experts", experts=2), seed=0)
    decaying, constant = decay_groups(model)
    assert {name for name in constant if "history" in name} == {
        "blocks.0.history.weight",
        "blocks.1.history.weight",
        "history.weight",
    }
    assert {"blocks.0.mlp.gate", "blocks.0.mlp.router.weight"} <= set(decaying)


def test_tied_and_frozen_parameters():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(5, 3)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.table.weight
            self.middle = nn.Linear(3, 3)
            self.frozen = nn.Linear(3, 3)
            self.frozen.requires_grad_(False)

    decaying, constant = decay_groups(Tied())
    assert set(decaying) == {"middle.weight"}
    assert set(constant) == {"table.weight", "middle.bias"}


def test_decay_is_what_the_group_says():
    model = tiny_model()
    optimiser = adamw(model, weight_decay=0.5, betas=(0.9, 0.95))
    set_learning_rate(optimiser, 0.1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    decaying, _ = decay_groups(model)
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if name in decaying else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_config_survives_json():
    config = tiny_config(betas=(0.8, 0.9), thresholds=(0.5,), clip=None, eval_every=None)
    assert TrainConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0), ("batch_size", 0), ("accumulate", 3), ("learning_rate", 0.0), ("learning_rate", math.nan),
        ("min_lr_ratio", 1.5),
        ("warmup_ratio", 1.0), ("weight_decay", -1.0), ("betas", (0.9, 1.0)), ("clip", 0.0), ("dtype", "float16"),
        ("eval_every", 0),
        ("checkpoint_seconds", -1.0), ("stop_at_accuracy", 2.0), ("thresholds", (0.0,)), ("seed", -1),
    ],
)  # fmt: skip
def test_config_refuses(field, value):
    with pytest.raises(ArgumentError, match=f"TrainConfig: {field} must be"):
        tiny_config(**{field: value})


def test_config_names_a_misspelt_field():
    with pytest.raises(ArgumentError, match="Did you mean 'batch_size'"):
        TrainConfig.from_dict({"batchsize": 3})


def test_files_are_not_part_of_the_trajectory():
    plain, other = (
        tiny_config().trajectory(),
        tiny_config(checkpoint_every=1, tensorboard=True, keep_best=True).trajectory(),
    )
    assert plain == other
    assert plain != tiny_config(clip=0.5).trajectory()


def test_ten_evaluations_unless_told():
    assert tiny_config(steps=95, eval_every=None).evaluation_interval == 10
    assert tiny_config(steps=3, eval_every=None).evaluation_interval == 1
    assert tiny_config(eval_every=7).evaluation_interval == 7


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 2]}}, None),
        ({"a": {"b": [1, 2]}}, {"a": {"b": [1, 3]}}, ("a.b[1]", 2, 3)),
        ({"a": 1}, {"a": 1, "c": 2}, ("c", None, 2)),
        ({"a": [1]}, {"a": [1, 2]}, ("a", [1], [1, 2])),
    ],
)
def test_first_difference(left, right, expected):
    assert first_difference(left, right) == expected
