"""The curriculum of geometries: what is closed stays, what has just opened goes a tenth of the way, and a run that
stops goes on as if it had not.
"""

import copy
import json

import pytest
import torch
from training.training_doubles import Recall, lines, tiny_config, tiny_model

from zonal.algebra.metric import Euclidean, Hyperbolic, LeCam, Product, Sphere
from zonal.cli import parse
from zonal.errors import ArgumentError, FileFormatError
from zonal.models import ModelConfig, build
from zonal.store import load_tensors
from zonal.training import ComparisonSpec, TrainConfig, events, train
from zonal.training.curriculum import NEWLY_OPENED, Curriculum, _places, gated
from zonal.training.optimiser import adamw, set_learning_rate

GATED = "rewa(gates=(0.5, 1.0, 0.5), parts=(3, 2, 3))"
STARTS = (0.25, 0.5, 0.75)


def model_of(operator: str = GATED, seed: int = 0):
    return build(ModelConfig(16, 16, (operator,), 2, mlp="none", conv=2, init_std=0.3), seed)


def loss_of(model):
    batch = Recall().train_batch(0, 8, 0)
    total, count = model.loss(batch.tokens, batch.targets)
    return total / count


def pieces(model):
    """Gate, weight and rows of queries by distance: plane, sphere, hyperbolic space, of both heads."""
    layer = model.blocks[0].attention
    rows = layer.query.weight.detach().unflatten(0, (2, 8)).split((3, 2, 3), 1)
    learned = layer.operator.learned_parts
    return [
        (learned["score_gate"][:, i].detach().clone(), learned["score_weight"][:, i].detach().clone(), rows[i].clone())
        for i in range(3)
    ]


def moved(before, after):
    """Which distances have moved: in nothing, or in everything."""
    found = []
    for one, other in zip(before, after, strict=True):
        changed = {not torch.equal(a, b) for a, b in zip(one, other, strict=True)}
        assert len(changed) == 1
        found.append(changed.pop())
    return found


def test_stages_are_a_function_of_the_step():
    found = [Curriculum(model_of(), STARTS, 10).stage(step) for step in range(10)]
    assert found == [1, 1, 2, 2, 2, 3, 3, 3, 4, 4]
    assert [Curriculum(model_of(), (0.0, 0.0, 1.0), 3).stage(step) for step in range(3)] == [3, 3, 3]


@pytest.mark.parametrize(
    ("step", "open_"), [(0, [False, True, False]), (3, [True, True, False]), (6, [True, True, True])]
)
def test_what_is_closed_does_not_move(step, open_):
    """Sphere, then plane, then hyperbolic space; to the bit, with weight decay, and with nothing left in the
    optimiser.
    """
    model = model_of()
    curriculum = Curriculum(model, STARTS, 10)
    optimiser = adamw(model, weight_decay=0.1, betas=(0.9, 0.95))
    set_learning_rate(optimiser, 0.01)
    before = pieces(model)
    for _ in range(3):
        model.zero_grad()
        loss_of(model).backward()
        curriculum.hold(step)
        with curriculum.paced(step):
            optimiser.step()
    assert moved(before, pieces(model)) == open_
    gate = model.blocks[0].attention.operator.learned_parts["score_gate"]
    assert [bool(value) for value in (optimiser.state[gate]["exp_avg"] != 0).all(0)] == open_


def test_what_has_opened_goes_a_tenth_of_the_way():
    """Beside a step of plain AdamW on the same gradient; in the last stage there is no other step."""
    for step, rates in ((3, (NEWLY_OPENED, 1.0, 0.0)), (6, (1.0, 1.0, NEWLY_OPENED)), (9, (1.0, 1.0, 1.0))):
        plain, staged = model_of(), model_of()
        steps = []
        for model in (plain, staged):
            optimiser = adamw(model, weight_decay=0.1, betas=(0.9, 0.95))
            set_learning_rate(optimiser, 0.01)
            before = pieces(model)
            loss_of(model).backward()
            curriculum = Curriculum(model, STARTS, 10)
            if model is staged:
                curriculum.hold(step)
                with curriculum.paced(step):
                    optimiser.step()
            else:
                optimiser.step()
            steps.append(
                [
                    [b - a for a, b in zip(one, other, strict=True)]
                    for one, other in zip(before, pieces(model), strict=True)
                ]
            )
        for rate, whole, part in zip(rates, *steps, strict=True):
            for a, b in zip(whole, part, strict=True):
                assert torch.allclose(b, rate * a, atol=1e-7)
                assert a.abs().max() > 1e-4
        # what belongs to no distance learns as ever
        assert torch.equal(plain.blocks[0].attention.value.weight, staged.blocks[0].attention.value.weight)


def test_a_run_opens_one_after_another_and_says_so(tmp_path):
    model, seen = model_of(), []
    result = train(
        model, Recall(), tiny_config(steps=16, curriculum=STARTS, tensorboard=True), tmp_path, on_event=seen.append
    )
    assert result.status == "done"
    logged = [
        line
        for line in map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == "train"
    ]
    assert [line["stage"] for line in logged] == [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4
    gates = {name: [line["gates"][name] for line in logged] for name in ("sphere", "euclidean", "hyperbolic")}
    assert gates["euclidean"][:4] == [0.0] * 4  # closed at the start, whatever was declared
    assert gates["hyperbolic"][:8] == [0.0] * 8
    assert gates["sphere"][0] != gates["sphere"][3] > 0
    assert max(gates["euclidean"] + gates["hyperbolic"]) > 0  # something opened
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator").EventAccumulator(
        str(tmp_path)
    )
    accumulator.Reload()
    assert {"train/stage", "gates/sphere", "gates/euclidean", "gates/hyperbolic"} <= set(accumulator.Tags()["scalars"])
    assert seen[0].notes == ()


def test_a_run_that_is_stopped_in_every_stage_goes_on_as_one(tmp_path):
    config = tiny_config(steps=16, curriculum=STARTS)
    train(model_of(), Recall(), config, tmp_path / "whole")
    for stop in (2, 4, 7, 8, 11, 13):
        reached = []

        def asked(reached=reached, stop=stop):
            return bool(reached) and reached[-1] >= stop

        def listen(event, reached=reached):
            if isinstance(event, events.StepDone):
                reached.append(event.step)

        assert (
            train(model_of(), Recall(), config, tmp_path / "parts", on_event=listen, should_stop=asked).status
            == "stopped"
        )
    assert train(model_of(), Recall(), config, tmp_path / "parts").status == "done"
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    ours, theirs = (
        load_tensors(tmp_path / name / "checkpoint.safetensors", "checkpoint")[0] for name in ("parts", "whole")
    )
    assert all(torch.equal(ours[name], value) for name, value in theirs.items())
    with pytest.raises(FileFormatError, match="curriculum"):
        train(model_of(), Recall(), tiny_config(steps=16, curriculum=(0.1, 0.5, 0.75)), tmp_path / "parts")


def test_models_without_gates_learn_as_ever(tmp_path):
    """As the baseline of a comparison does; the run says so."""
    seen = []
    train(tiny_model(), Recall(), tiny_config(curriculum=STARTS), tmp_path / "staged", on_event=seen.append)
    train(tiny_model(), Recall(), tiny_config(), tmp_path / "plain")
    assert lines(tmp_path / "staged") == lines(tmp_path / "plain")
    assert seen[0].notes == ("the model has no gates: the curriculum changes nothing",)
    # runs that were begun before there were curricula go on
    assert "curriculum" not in tiny_config().trajectory()
    assert tiny_config(curriculum=STARTS).trajectory()["curriculum"] == list(STARTS)
    assert TrainConfig.from_dict(tiny_config(curriculum=STARTS).to_dict()) == tiny_config(curriculum=STARTS)


def test_places_of_any_product():
    """By kind, not by the place in the product; others come last, and a product of two opens both by stage 2."""
    assert _places(Product((Euclidean(), Sphere(), Hyperbolic()))).tolist() == [1, 0, 2]
    assert _places(Product((Hyperbolic(), Euclidean()))).tolist() == [1, 0]
    assert _places(Product((LeCam(), Euclidean(), Sphere(), Hyperbolic()))).tolist() == [2, 1, 0, 2]


def test_rows_of_every_layer():
    """Logits in front, deaths behind, grouped heads, one map, a lift, and layers within a mixture."""
    line = (
        "mixture(parts=('rewa(gates=(0.0,1.0,0.0),adaptive=True)', "
        "'rewa_topological(neighbours=2,gates=(0.5,1.0))')), rewa(gates=(0.0,1.0,0.0))"
    )
    model = build(ModelConfig(16, 32, line, 4, kv_heads=2, mlp="none"), 0)
    layers = gated(model)
    assert [(layer.heads, layer.kv_heads) for layer in layers] == [(2, 1), (2, 1), (4, 2)]
    curriculum = Curriculum(model, STARTS, 8)
    found = {id(share.parameter): share.place for share in curriculum._shares}
    adaptive, topological, plain = layers
    # of 8 numbers three are logits, three the plane's, which takes what is left over, and one each the others'
    assert found[id(adaptive.query.weight)][:8, 0].tolist() == [-1, -1, -1, 1, 1, 1, 0, 2]
    assert found[id(topological.key.weight)][:, 0].tolist() == [0] * 8
    assert found[id(plain.key.weight)][:, 5].tolist() == [1, 1, 1, 1, 0, 0, 2, 2] * 2


@pytest.mark.parametrize("starts", [(0.5, 0.25, 0.75), (0.1, 0.2), (0.1, 0.2, 1.5), (-0.1, 0.2, 0.3)])
def test_what_is_no_curriculum_is_refused(starts):
    with pytest.raises(ArgumentError, match="curriculum must be three rising parts"):
        tiny_config(curriculum=starts)
    with pytest.raises(ArgumentError, match="three rising parts of the run"):
        parse.parts(",".join(map(str, starts)))


def test_a_comparison_needs_one_operator_with_gates():
    spec = {"task": Recall(), "model": ModelConfig(16, 16, ("softmax",), 2), "training": tiny_config(curriculum=STARTS)}
    assert ComparisonSpec(operators=("softmax", GATED), **spec).training.curriculum == STARTS
    assert ComparisonSpec(operators=("[mamba2(head_dim=8)]", f"mixture(parts=('softmax', '{GATED}'))"), **spec)
    with pytest.raises(ArgumentError, match="a curriculum opens the gates of distances"):
        ComparisonSpec(operators=("softmax", "rewa"), **spec)


def test_a_model_is_not_changed_until_it_runs():
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    curriculum = Curriculum(model, STARTS, 10)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    curriculum.close()
    gate = model.blocks[0].attention.operator.learned_parts["score_gate"]
    assert gate.detach().tolist() == [[0.0, 1.0, 0.0]] * 2
