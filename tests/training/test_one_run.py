import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from training.training_doubles import Recall, lines, tiny_config, tiny_model

from zonal.errors import ArgumentError, NonFiniteError
from zonal.evaluation import evaluate
from zonal.store import read_header
from zonal.training import RunResult, load_model, loop, train
from zonal.training import events as kinds
from zonal.training.step import forward_backward, split


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 12 updates without interruption, its events, and its model."""
    folder = tmp_path_factory.mktemp("whole")
    model, seen = tiny_model(), []
    result = train(model, Recall(), tiny_config(tensorboard=True), folder, on_event=seen.append)
    return folder, result, seen, model


def test_a_run_learns_and_says_what_it_did(whole):
    folder, result, _, model = whole
    assert RunResult.read(folder) == result
    assert (result.status, result.steps_done, result.operator, result.seed) == ("done", 12, "softmax", 0)
    assert result.parameters == model.num_parameters()
    assert set(result.memory_bytes) == {"1024", "16384", "131072"}
    assert result.memory_bytes["16384"] > result.memory_bytes["1024"] > 0
    assert result.seconds > 0
    assert result.tokens_per_second == pytest.approx(12 * 8 * 8 / result.seconds)
    assert result.peak_memory_bytes >= 4 * result.parameters
    assert result.learned[0]["operator"] == "softmax"
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    train_lines = [line for line in logged if line["kind"] == "train"]
    assert [line["step"] for line in train_lines] == list(range(1, 13))
    assert [line["tokens"] for line in train_lines] == [64 * step for step in range(1, 13)]
    assert [line["step"] for line in logged if line["kind"] == "eval"] == [5, 10, 12]
    assert train_lines[-1]["loss"] < train_lines[0]["loss"] - 0.1
    seconds = [line["seconds"] for line in train_lines]
    assert seconds == sorted(seconds)
    assert result.final == evaluate(model, Recall(), batch_size=8)


def test_events_tell_the_story(whole):
    folder, _, seen, _ = whole
    assert isinstance(seen[0], kinds.RunStarted)
    assert isinstance(seen[-1], kinds.RunFinished)
    assert [event.step for event in seen if isinstance(event, kinds.StepDone)] == list(range(1, 13))
    assert [event.step for event in seen if isinstance(event, kinds.Evaluated)] == [5, 10, 12]
    assert [event.step for event in seen if isinstance(event, kinds.Checkpointed)] == [4, 8, 12]
    assert {event.run for event in seen} == {folder.name}
    for event in seen:
        assert kinds.from_json(json.loads(json.dumps(kinds.to_json(event)))) == event


def test_a_finished_run_is_not_run_again(whole):
    folder, result, _, _ = whole
    seen = []
    again = train(tiny_model(), Recall(), tiny_config(tensorboard=True), folder, on_event=seen.append)
    assert again == result
    assert [type(event) for event in seen] == [kinds.RunFinished]
    assert seen[0].skipped


def test_load_model(whole):
    folder, _, _, model = whole
    loaded, config = load_model(folder / "checkpoint.safetensors")
    assert config["identity"]["task"]["name"] == "recall double"
    tokens = torch.arange(8)[None]
    torch.testing.assert_close(loaded(tokens), model.eval()(tokens), rtol=0, atol=0)


def test_the_caller_keeps_its_state(tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    threads = torch.get_num_threads()
    for _ in range(2):  # a run, and one that goes on from its checkpoint
        train(tiny_model(), Recall(), tiny_config(steps=2), tmp_path, threads=2 if threads == 1 else 1)
    assert torch.equal(torch.rand(3), expected)
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == threads


def test_same_seed_same_bits_other_seed_other_bits(whole, tmp_path):
    folder = whole[0]
    train(tiny_model(), Recall(), tiny_config(), tmp_path / "same")
    train(tiny_model(), Recall(), tiny_config(seed=1), tmp_path / "other")
    assert lines(tmp_path / "same") == lines(folder)
    assert lines(tmp_path / "other") != lines(folder)


@pytest.mark.parametrize("accumulate", [2, 4, 8])
def test_parts_give_the_gradient_of_the_whole(accumulate):
    # rows have different numbers of questions, so a mean of means would differ
    batch = Recall().train_batch(0, 8, 0)
    batch.targets[:3] = -100
    batch.targets[3, 2:] = -100
    batch.targets[3, 1] = 5
    model = tiny_model("sko").double()
    whole = forward_backward(model, split(batch, 1, torch.device("cpu")), "float64")
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    parts = forward_backward(model, split(batch, accumulate, torch.device("cpu")), "float64")
    assert parts == pytest.approx(whole, rel=1e-13)
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-11, atol=1e-14)
    mean_of_means = (
        sum(
            float(model.loss(part.tokens, part.targets)[0].detach()) / max(1, int((part.targets != -100).sum()))
            for part in split(batch, accumulate, torch.device("cpu"))
        )
        / accumulate
    )
    assert abs(mean_of_means - whole) > 1e-3


def test_a_run_in_parts_is_the_run(tmp_path):
    for accumulate in (1, 4):
        train(
            tiny_model(),
            Recall(),
            tiny_config(dtype="float64", accumulate=accumulate, eval_batch_size=8),
            tmp_path / str(accumulate),
        )
    one, four = ([json.loads(line) for line in lines(tmp_path / name)] for name in ("1", "4"))
    assert len(one) == len(four)
    for left, right in zip(one, four, strict=True):
        assert left["loss"] == pytest.approx(right["loss"], rel=1e-9)


def test_bfloat16_runs_near_float32(whole, tmp_path):
    model = tiny_model()
    result = train(model, Recall(), tiny_config(dtype="bfloat16"), tmp_path)
    assert next(model.parameters()).dtype == torch.float32
    assert result.final["loss"] == pytest.approx(whole[1].final["loss"], rel=0.05)
    assert lines(tmp_path) != lines(whole[0])


def test_clipping(tmp_path):
    train(
        tiny_model(),
        Recall(),
        tiny_config(clip=1e-9, weight_decay=0.0, warmup_ratio=0.0, steps=1),
        tmp_path / "clipped",
    )
    train(
        tiny_model(), Recall(), tiny_config(clip=None, weight_decay=0.0, warmup_ratio=0.0, steps=1), tmp_path / "free"
    )
    clipped, free = (json.loads(lines(tmp_path / name)[0]) for name in ("clipped", "free"))
    assert clipped["gradient_norm"] == pytest.approx(free["gradient_norm"])  # logged before it is scaled
    start, small, large = (
        tiny_model(),
        load_model(tmp_path / "clipped/checkpoint.safetensors")[0],
        load_model(tmp_path / "free/checkpoint.safetensors")[0],
    )
    moved = [
        sum(
            float((after - before).detach().abs().sum())
            for after, before in zip(model.parameters(), start.parameters(), strict=True)
        )
        for model in (small, large)
    ]
    assert 0 < moved[0] < 0.5 * moved[1]  # Adam's epsilon is felt where gradients are that small


def test_log_every_writes_means(whole, tmp_path):
    train(tiny_model(), Recall(), tiny_config(log_every=5), tmp_path)
    every = [json.loads(line)["loss"] for line in lines(whole[0]) if '"train"' in line]
    some = [json.loads(line) for line in lines(tmp_path) if '"train"' in line]
    assert [line["step"] for line in some] == [5, 10, 12]
    assert [line["loss"] for line in some] == [
        pytest.approx(sum(part) / len(part)) for part in (every[:5], every[5:10], every[10:])
    ]


def test_thresholds_and_early_stop(tmp_path):
    result = train(
        tiny_model(),
        Recall(),
        tiny_config(steps=400, eval_every=10, thresholds=(0.1, 0.5, 1.0), stop_at_accuracy=0.6),
        tmp_path,
    )
    assert result.stopped_early
    assert result.status == "done"
    assert result.steps_done < 400
    assert result.final["accuracy"] >= 0.6
    curve = {line["step"]: line["accuracy"] for line in map(json.loads, lines(tmp_path)) if line["kind"] == "eval"}
    assert all(value < 0.6 for step, value in curve.items() if step < result.steps_done)
    assert result.steps_to["0.5"] == min(step for step, value in curve.items() if value >= 0.5)
    assert result.steps_to["1"] is None
    near = train(tiny_model(), Recall(), tiny_config(steps=1, thresholds=(0.9999999, 1.0)), tmp_path / "near")
    assert set(near.steps_to) == {"0.9999999", "1"}
    seen = []
    again = train(
        tiny_model(),
        Recall(),
        tiny_config(steps=400, eval_every=10, thresholds=(0.1, 0.5, 1.0), stop_at_accuracy=0.6),
        tmp_path,
        on_event=seen.append,
    )
    assert (again.steps_done, [type(event) for event in seen]) == (result.steps_done, [kinds.RunFinished])


def test_a_run_that_ends_early_logs_all_its_losses(tmp_path):
    """The run ends at an evaluation that is no multiple of log_every."""
    for every in (1, 7):
        config = tiny_config(steps=400, eval_every=10, stop_at_accuracy=0.6, log_every=every)
        result = train(tiny_model(), Recall(), config, tmp_path / str(every))
        assert result.stopped_early
    single, means = (
        [each for each in map(json.loads, lines(tmp_path / name)) if each["kind"] == "train"] for name in ("1", "7")
    )
    assert means[-1]["step"] == result.steps_done
    edges = [0, *(each["step"] for each in means)]
    for (start, end), line in zip(itertools.pairwise(edges), means, strict=True):
        assert line["loss"] == pytest.approx(sum(each["loss"] for each in single[start:end]) / (end - start))


def test_best_weights_are_kept_when_asked(tmp_path):
    result = train(tiny_model(), Recall(), tiny_config(keep_best=True, steps=30), tmp_path)
    best, _ = load_model(tmp_path / "best.safetensors")
    assert evaluate(best, Recall(), batch_size=8)["accuracy"] == result.best["accuracy"]


@pytest.mark.parametrize("stopped", [True, False])
def test_best_weights_that_were_not_kept_are_told(tmp_path, stopped):
    """Of a run that was stopped after its first evaluation, and of a finished one."""
    seen = []

    def stop():
        return stopped and any(isinstance(event, kinds.Evaluated) for event in seen)

    train(tiny_model(), Recall(), tiny_config(), tmp_path, on_event=seen.append, should_stop=stop)
    with pytest.raises(ArgumentError, match=r"keep_best needs .*best\.safetensors, .*step \d+\) were not kept"):
        train(tiny_model(), Recall(), tiny_config(keep_best=True), tmp_path)


def test_best_weights_of_an_earlier_evaluation_are_not_taken_for_the_best(tmp_path):
    """Kept to the first evaluation, not kept to the best evaluation, and asked for again."""
    config, seen = tiny_config(keep_best=True, eval_every=1), []
    train(
        tiny_model(), Recall(), config, tmp_path, on_event=seen.append,
        should_stop=lambda: any(isinstance(event, kinds.Evaluated) for event in seen),
    )  # fmt: skip
    result = train(tiny_model(), Recall(), replace(config, keep_best=False), tmp_path)
    assert result.best["step"] > read_header(tmp_path / "best.safetensors", "checkpoint")["weights_of_step"]
    with pytest.raises(ArgumentError, match=r"went on without it, .*step \d+\) were not kept"):
        train(tiny_model(), Recall(), config, tmp_path)


@pytest.mark.parametrize("noun", ["comparison", "search"])
def test_a_folder_of_several_runs_is_refused(tmp_path, noun):
    (tmp_path / f"{noun}.json").write_text("{}")
    with pytest.raises(
        ArgumentError, match=rf"train: .* holds a {noun}, whose runs have folders of their own. Choose another folder"
    ):
        train(tiny_model(), Recall(), tiny_config(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"{noun}.json"]


def test_tensorboard_has_each_step_once(whole):
    found = EventAccumulator(str(whole[0]))
    found.Reload()
    scalars = found.Scalars("train/loss")
    assert [event.step for event in scalars] == list(range(1, 13))
    expected = [json.loads(line)["loss"] for line in lines(whole[0]) if '"train"' in line]
    assert [event.value for event in scalars] == [pytest.approx(value, rel=1e-6) for value in expected]
    assert [event.step for event in found.Scalars("evaluation/accuracy")] == [5, 10, 12]
    assert "evaluation/accuracy by length/8" in found.Tags()["scalars"]


class Poisoned(Recall):
    """A weight of the second layer becomes NaN just before a step, as a bug in a kernel would make it."""

    def __init__(self, break_it, at):
        super().__init__()
        self.break_it, self.at = break_it, at

    def train_batch(self, step, batch_size, seed):
        if step == self.at:
            self.break_it()
        return super().train_batch(step, batch_size, seed)


def test_nan_in_the_loss_names_step_layer_and_checkpoint(tmp_path):
    model = tiny_model(layers=2)
    attention = model.blocks[1].attention
    task = Poisoned(lambda: attention.register_forward_hook(lambda module, inputs, output: output * math.nan), 6)
    with pytest.raises(NonFiniteError) as caught:
        train(model, task, tiny_config(), tmp_path)
    message = str(caught.value)
    assert "the loss became nan in step 7 of 12" in message
    assert "layer 'blocks.1.attention' (Attention)" in message
    assert f"{tmp_path / 'checkpoint.safetensors'} (step 4)" in message
    assert "\n" not in message
    result = RunResult.read(tmp_path)
    assert (result.status, result.message, result.steps_done) == ("failed", message, 6)
    assert all(math.isfinite(json.loads(line)["loss"]) for line in lines(tmp_path))
    load_model(tmp_path / "checkpoint.safetensors")


def test_nan_in_the_gradient_names_the_layer(tmp_path):
    model = tiny_model(layers=2)

    def spoil(module, inputs, output):
        if output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.inf)
        return output

    task = Poisoned(lambda: model.blocks[0].attention.register_forward_hook(spoil), 2)
    with pytest.raises(
        NonFiniteError, match=r"gradient norm became (nan|inf) .* in step 3 of 12: the gradient .*'blocks\.0\.attention"
    ):
        train(model, task, tiny_config(), tmp_path)
    assert RunResult.read(tmp_path).status == "failed"
    assert "none was written yet" in RunResult.read(tmp_path).message


@pytest.mark.parametrize(("training", "done"), [(True, 6), (False, 10)])
def test_what_a_layer_refuses_names_steps_and_checkpoint(tmp_path, training, done):
    """As a ridge does where its kernel is not positive definite; the message was that of the layer alone."""
    model = tiny_model()

    def refuse(module, inputs):
        if module.training == training:
            raise NonFiniteError("Ridge: kernel + ridge is not positive definite.")

    task = Poisoned(lambda: model.blocks[0].attention.register_forward_pre_hook(refuse), 6)
    step = done // 4 * 4
    told = rf"a layer failed after {done} of 12 steps: Ridge: .* definite\. Last good checkpoint: .* \(step {step}\)"
    with pytest.raises(NonFiniteError, match=told) as caught:
        train(model, task, tiny_config(), tmp_path)
    assert RunResult.read(tmp_path).message == str(caught.value)


def test_nan_in_a_parameter_is_named(tmp_path):
    model = tiny_model()

    def spoil():
        with torch.no_grad():
            model.embedding.weight[3] = math.inf

    with pytest.raises(NonFiniteError, match=r"parameter 'embedding\.weight' is already not finite"):
        train(model, Poisoned(spoil, 1), tiny_config(), tmp_path)


def test_nan_in_evaluation(tmp_path):
    model = tiny_model()

    def spoil():
        model.blocks[0].attention.register_forward_hook(
            lambda module, inputs, output: output if module.training else output * math.nan
        )

    with pytest.raises(
        NonFiniteError, match=r"evaluation loss became nan after step 5: .*layer 'blocks\.0\.attention'"
    ) as caught:
        train(model, Poisoned(spoil, 0), tiny_config(), tmp_path)
    assert "not applied" not in str(caught.value)  # the update before the evaluation was
    assert RunResult.read(tmp_path).status == "failed"


def test_nothing_supervised_is_refused(tmp_path):
    class Silent(Recall):
        def train_batch(self, step, batch_size, seed):
            batch = super().train_batch(step, batch_size, seed)
            return batch._replace(targets=torch.full_like(batch.targets, -100))

    with pytest.raises(ArgumentError, match="no supervised position"):
        train(tiny_model(), Silent(), tiny_config(), tmp_path)


@pytest.mark.parametrize(
    "files",
    [
        {"run.json": '{"mine": true}'},
        {"metrics.jsonl": '{"loss": 1}\n'},
        {"events.out.tfevents.1700000000.mine.1.0": "events"},
    ],
)
def test_files_of_another_program_are_not_overwritten(tmp_path, files):
    files = {**files, ".cache.part": "kept"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ArgumentError, match=r"train: .* would be overwritten"):
        train(tiny_model(), Recall(), tiny_config(), tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path.suffix != ".lock"} == files


def test_a_run_that_was_killed_before_its_record_begins_again(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "events.out.tfevents.1700000000.mine.1.0").touch()
    assert train(tiny_model(), Recall(), tiny_config(), tmp_path).status == "done"


@pytest.mark.parametrize(
    "settings", [{"steps": 1e4}, {"log_every": 2.5}, {"eval_batch_size": 4.0}, {"seed": 1.0}, {"accumulate": "2"}]
)
def test_whole_numbers_are_whole(settings):
    (name,) = settings
    with pytest.raises(ArgumentError, match=rf"TrainConfig: {name} must be a whole number"):
        tiny_config(**settings)


def test_whole_numbers_of_numpy_are_python_s():
    config = tiny_config(steps=np.int64(20), seed=np.uint8(3))
    assert (type(config.steps), type(config.seed)) == (int, int)
    assert config == tiny_config(steps=20, seed=3)


def test_going_on_with_another_commit_is_told(tmp_path, monkeypatch):
    seen, left = [], iter(range(4))
    train(tiny_model(), Recall(), tiny_config(), tmp_path, should_stop=lambda: next(left, None) is None)
    monkeypatch.setattr(loop, "commit", lambda: "another")
    train(tiny_model(), Recall(), tiny_config(), tmp_path, on_event=seen.append)
    (start,) = [event for event in seen if isinstance(event, kinds.RunStarted)]
    assert start.step > 0
    assert [note for note in start.notes if note.startswith("commit ") and note.endswith(" → another")]
