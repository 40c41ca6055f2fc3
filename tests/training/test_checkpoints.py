import errno
import json
import os
import shutil

import pytest
import safetensors.torch
import torch
from training.training_doubles import Recall, lines, tiny_config, tiny_model

from zonal.errors import ArgumentError, FileFormatError, InsufficientSpaceError
from zonal.store import load_tensors, save_tensors, write_checked
from zonal.training import events as kinds
from zonal.training import load_model, train
from zonal.training.environment import folder_lock
from zonal.training.log import MetricsLog
from zonal.training.optimiser import adamw


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(tiny_model("sko"), Recall(), tiny_config(), folder)
    return folder


class StopAfter:
    """Wishes to stop at a step, or in the middle of the evaluation there."""

    def __init__(self, step, in_evaluation=False):
        self.step, self.in_evaluation = step, in_evaluation
        self.wished = False

    def __call__(self):
        return self.wished

    def listen(self, event):
        kind = kinds.EvaluationProgress if self.in_evaluation else kinds.StepDone
        if isinstance(event, kind) and event.step == self.step:
            self.wished = True


def run(folder, *, stop=None, config=None, model=None, task=None):
    return train(
        model or tiny_model("sko"), task or Recall(), config or tiny_config(), folder, should_stop=stop,
        on_event=stop.listen if stop else None
    )  # fmt: skip


@pytest.mark.parametrize(
    "stops",
    [
        [(3, False), (4, False), (8, False)],
        [(12, True)],
        [(n, False) for n in range(1, 12, 2)],
        [(5, True), (10, True)],
    ],
)
def test_stopped_and_resumed_is_bit_identical(whole, tmp_path, stops):
    for step, in_evaluation in stops:
        result = run(tmp_path, stop=StopAfter(step, in_evaluation))
        assert (result.status, result.steps_done) == ("stopped", step)
    assert run(tmp_path).status == "done"
    assert lines(tmp_path) == lines(whole)
    ours, theirs = (load_tensors(folder / "checkpoint.safetensors", "checkpoint")[0] for folder in (tmp_path, whole))
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


class KilledError(Exception):
    """Stands for a kill: nothing after it runs."""


@pytest.mark.parametrize(
    ("step", "torn"),
    [(2, b""), (4, b'{"kind": "train", "step": 5, "lo'), (6, b"\xff\xfe"), (9, b""), (11, b"{" * 100_000)],
)
def test_what_came_after_the_checkpoint_is_cut_and_repeated(whole, tmp_path, step, torn):
    def kill(event):
        if isinstance(event, kinds.StepDone) and event.step == step:
            raise KilledError

    with pytest.raises(KilledError):
        train(tiny_model("sko"), Recall(), tiny_config(), tmp_path, on_event=kill)
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(torn)
    started = []
    train(tiny_model("sko"), Recall(), tiny_config(), tmp_path, on_event=started.append)
    # a kill at the very step of a checkpoint comes before it
    assert started[0].step == (step - 1) // 4 * 4
    assert lines(tmp_path) == lines(whole)


def test_seconds_go_on_from_the_checkpoint(tmp_path):
    run(tmp_path, stop=StopAfter(6))
    before = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["seconds"]
    run(tmp_path)
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert seconds == sorted(seconds)
    assert before in seconds


def test_events_of_tensorboard_after_a_resume(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = tiny_config(tensorboard=True)
    for stop in (StopAfter(3), StopAfter(7), None):
        run(tmp_path, stop=stop, config=config)
    found = EventAccumulator(str(tmp_path))
    found.Reload()
    assert [event.step for event in found.Scalars("train/loss")] == list(range(1, 13))
    assert [event.step for event in found.Scalars("evaluation/loss")] == [5, 10, 12]


def test_bookkeeping_may_change_between_sittings(whole, tmp_path):
    run(tmp_path, stop=StopAfter(6), config=tiny_config(keep_best=True))
    run(tmp_path, config=tiny_config(checkpoint_every=1))
    assert lines(tmp_path) == lines(whole)


def test_random_numbers_go_on(tmp_path):
    """A model that draws while training goes on with the numbers it would have drawn."""

    def dropping():
        model = tiny_model()
        model.blocks[0].attention.register_forward_hook(
            lambda module, inputs, output: torch.nn.functional.dropout(output, 0.2, module.training)
        )  # fmt: skip
        return model

    run(tmp_path / "whole", model=dropping())
    run(tmp_path / "parts", model=dropping(), stop=StopAfter(6))
    torch.rand(7)
    run(tmp_path / "parts", model=dropping())
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    run(tmp_path / "without", model=tiny_model())
    assert lines(tmp_path / "whole") != lines(tmp_path / "without")


def test_threads_stay_as_the_run_began(tmp_path):
    train(
        tiny_model(),
        Recall(),
        tiny_config(),
        tmp_path,
        threads=1,
        should_stop=(stop := StopAfter(4)),
        on_event=stop.listen,
    )
    seen = []
    during = []
    result = train(
        tiny_model(),
        Recall(),
        tiny_config(),
        tmp_path,
        threads=2,
        on_event=lambda event: (seen.append(event), during.append(torch.get_num_threads())),
    )
    assert result.threads == 1
    assert set(during) == {1}
    assert seen[0].notes == ("threads stay 1, as the run began (the process has 2)",)


# files that do not fit


def copied(whole, tmp_path):
    shutil.copytree(whole, tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("keep", [0, 7, 100, 0.5, -1])
def test_truncated(whole, tmp_path, keep):
    folder = copied(whole, tmp_path)
    path = folder / "checkpoint.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(FileFormatError, match=r"checkpoint\.safetensors") as caught:
        run(folder)
    assert "\n" not in str(caught.value)


def test_flipped_byte(whole, tmp_path):
    folder = copied(whole, tmp_path)
    path = folder / "checkpoint.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(FileFormatError, match="checksum"):
        run(folder)


def test_foreign(whole, tmp_path):
    folder = copied(whole, tmp_path)
    safetensors.torch.save_file({"weight": torch.zeros(3)}, folder / "checkpoint.safetensors")
    with pytest.raises(FileFormatError, match="another program"):
        run(folder)
    save_tensors(folder / "checkpoint.safetensors", {"weight": torch.zeros(3)}, {"kind": "memory"})
    with pytest.raises(
        FileFormatError, match=r"a 'checkpoint' was required\. Read it with the load of what saved it\."
    ):
        run(folder)
    with pytest.raises(FileFormatError, match="holds a 'memory', a 'checkpoint' was required"):
        load_model(folder / "checkpoint.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config": tiny_config(batch_size=16)}, "training.batch_size is 8 there and 16 here"),
        ({"config": tiny_config(steps=13)}, "training.steps is 12 there and 13 here"),
        ({"model": "softmax"}, r"model.layers\[0\] is 'sko' there and 'softmax' here"),
        ({"task": 3}, "task.first_seed is 0 there and 3 here"),
    ],
)
def test_another_configuration(whole, tmp_path, changes, message):
    folder = copied(whole, tmp_path)
    model = tiny_model(changes.get("model", "sko"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(FileFormatError, match=message) as caught:
        run(folder, config=changes.get("config"), model=model, task=Recall(first_seed=changes.get("task", 0)))
    assert "\n" not in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_missing_and_unknown_tensors(whole, tmp_path):
    folder = copied(whole, tmp_path)
    path = folder / "checkpoint.safetensors"
    tensors, header = load_tensors(path, "checkpoint")
    for change, message in (
        ("drop", "is missing"),
        ("add", "is unknown"),
        ("shape", r"is \(2, 2\) and should be"),
        ("optimiser", "for other parameters"),
    ):
        altered = dict(tensors)
        if change == "drop":
            del altered["model/embedding.weight"]
        elif change == "add":
            altered["model/extra"] = torch.zeros(1)
        elif change == "shape":
            altered["model/embedding.weight"] = torch.zeros(2, 2)
        else:
            altered["optimiser/extra/exp_avg"] = torch.zeros(1)
        save_tensors(path, altered, header)
        with pytest.raises(FileFormatError, match=message):
            run(folder)


def test_metrics_shortened_or_changed(tmp_path):
    run(tmp_path, stop=StopAfter(6))
    path = tmp_path / "metrics.jsonl"
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    with pytest.raises(FileFormatError, match="was shortened"):
        run(tmp_path)
    path.write_bytes(b"x" * len(data))
    with pytest.raises(FileFormatError, match="was changed"):
        run(tmp_path)


def test_without_resume_a_run_is_not_overwritten(whole, tmp_path):
    folder = copied(whole, tmp_path)
    with pytest.raises(ArgumentError, match="already holds a run"):
        train(tiny_model("sko"), Recall(), tiny_config(), folder, resume=False)
    assert train(tiny_model("sko"), Recall(), tiny_config(), tmp_path / "new", resume=False).status == "done"


def test_one_process_a_folder(tmp_path):
    with folder_lock(tmp_path), pytest.raises(ArgumentError, match="in use by another process"), folder_lock(tmp_path):
        pass
    with folder_lock(tmp_path):
        pass


def test_lost_record_is_written_again(whole, tmp_path):
    folder = copied(whole, tmp_path)
    stored = json.loads((folder / "run.json").read_text())
    write_checked(folder / "run.json", {**stored, "status": "running", "learned": []})
    result = run(folder)
    assert result.peak_memory_method == stored["peak_memory_method"] is not None
    assert (result.status, result.steps_done, result.final) == ("done", 12, stored["final"])
    assert result.learned


# a full disk


@pytest.mark.parametrize("where", ["replace", "fsync", "serialise"])
def test_full_disk_leaves_the_previous_checkpoint(whole, tmp_path, monkeypatch, where):
    run(tmp_path, stop=StopAfter(6))
    before = (tmp_path / "checkpoint.safetensors").read_bytes()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    real = os.replace

    def refuse_replace(source, target):
        if str(target).endswith("checkpoint.safetensors"):
            raise full
        real(source, target)

    def refuse(*arguments, **named):
        raise full

    with monkeypatch.context() as patch:
        if where == "replace":
            patch.setattr(os, "replace", refuse_replace)
        elif where == "fsync":
            patch.setattr(os, "fsync", refuse)
        else:
            patch.setattr(safetensors.torch, "save_file", refuse)
        with pytest.raises(InsufficientSpaceError, match="no space left"):
            run(tmp_path)
    assert (tmp_path / "checkpoint.safetensors").read_bytes() == before
    assert not list(tmp_path.glob(".*.part"))
    run(tmp_path)
    assert lines(tmp_path) == lines(whole)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full exists on Linux only")
def test_full_disk_while_logging(tmp_path):
    with MetricsLog(tmp_path, 0, elapsed=0.0, tensorboard=False) as log:
        log.append({"kind": "train", "step": 1})
        log._file.close()
        log._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115, closed with the log
        with pytest.raises(InsufficientSpaceError, match=r"metrics\.jsonl"):
            log.append({"kind": "train", "step": 2})


def test_a_checkpoint_holds_the_optimiser_state(whole):
    tensors, header = load_tensors(whole / "checkpoint.safetensors", "checkpoint")
    model = tiny_model("sko")
    names = {name for name, _ in model.named_parameters()}
    assert {name.split("/")[1] for name in tensors if name.startswith("optimiser/")} == names
    assert {name.rsplit("/", 1)[1] for name in tensors if name.startswith("optimiser/")} == {
        "step",
        "exp_avg",
        "exp_avg_sq",
    }
    assert any(tensors[f"optimiser/{name}/exp_avg"].any() for name in names)
    assert any(tensors[f"optimiser/{name}/exp_avg_sq"].any() for name in names)
    assert header["progress"]["step"] == 12
    assert len(adamw(model, weight_decay=0.1, betas=(0.9, 0.95)).param_groups) == 2
