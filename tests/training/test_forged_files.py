"""Files that are whole by their checksum and yet make no sense, links in a run's folder, and folders that cannot be
written: refused by name.
"""

import copy
import json
import os
import resource

import pytest
import torch
from training.training_doubles import Recall, tiny_config, tiny_model

from zonal import Memory, mechanisms
from zonal.cli.app import main
from zonal.errors import ArgumentError, FileFormatError, FileWriteError
from zonal.store import load_tensors, read_json, save_tensors, write_checked, write_json
from zonal.training import load_model, train
from zonal.training.checkpoint import KIND
from zonal.training.record import RunResult
from zonal.training.spec import read_comparison

FILE = "checkpoint.safetensors"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("forged") / "run"
    train(tiny_model("softmax"), Recall(), tiny_config(), folder)
    return folder


def forged(whole, folder, change):
    """A copy of the run whose checkpoint was changed and given a checksum that is right."""
    folder.mkdir()
    for path in whole.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tensors, header = load_tensors(whole / FILE, KIND)
    tensors, header = dict(tensors), copy.deepcopy(header)
    change(tensors, header)
    save_tensors(folder / FILE, tensors, header)
    return folder


def _drop(name):
    return lambda tensors, header: tensors.pop(name)


def _header(*keys, to):
    def change(tensors, header):
        place = header
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = to

    return change


def _nan(tensors, header):
    tensors["model/embedding.weight"] = tensors["model/embedding.weight"].clone().fill_(float("nan"))


FORGED = {
    "config null": _header("config", to=None),
    "identity null": _header("config", "identity", to=None),
    "model null": _header("config", "identity", "model", to=None),
    "layers 5": _header("config", "identity", "model", "layers", to=5),
    "layers null": _header("config", "identity", "model", "layers", to=[None]),
    "vocabulary": _header("config", "identity", "model", "vocab_size", to=10**12),
    "training null": _header("config", "identity", "training", to=None),
    "weights": _nan,
}
STATES = {
    "progress null": _header("progress", to=None),
    "step text": _header("progress", "step", to="twelve"),
    "step negative": _header("progress", "step", to=-1),
    "losses": _header("progress", "unlogged", to={}),
    "no random state": _drop("random/cpu"),
    "random state": lambda tensors, header: tensors.__setitem__("random/cpu", torch.zeros(3)),
    "weights": _nan,
    "identity null": _header("config", "identity", to=None),
}


@pytest.mark.parametrize("change", FORGED.values(), ids=FORGED)
def test_models(whole, tmp_path, change):
    folder = forged(whole, tmp_path / "run", change)
    with pytest.raises(FileFormatError, match=FILE):
        load_model(folder / FILE)


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_states_of_runs(whole, tmp_path, change):
    folder = forged(whole, tmp_path / "run", change)
    before = torch.get_rng_state()
    with pytest.raises(FileFormatError, match=FILE):
        train(tiny_model("softmax"), Recall(), tiny_config(), folder)
    assert torch.equal(torch.get_rng_state(), before)


def test_files_without_a_checksum_of_the_metrics_go_on(whole, tmp_path):
    folder = forged(whole, tmp_path / "run", lambda tensors, header: header["progress"].pop("metrics_sha256"))
    assert train(tiny_model("softmax"), Recall(), tiny_config(), folder).status == "done"


def test_a_finished_run_keeps_its_metrics(whole, tmp_path):
    folder = forged(whole, tmp_path / "run", lambda tensors, header: None)
    size = (folder / "metrics.jsonl").stat().st_size
    (folder / "metrics.jsonl").write_bytes(b"x" * (size - 1) + b"\n")
    with pytest.raises(FileFormatError, match=r"metrics\.jsonl"):
        train(tiny_model("softmax"), Recall(), tiny_config(), folder)


@pytest.mark.parametrize("name", ["metrics.jsonl", "run.json", FILE])
def test_links_in_a_run_are_refused(tmp_path, name):
    target, folder = tmp_path / "target", tmp_path / "run"
    target.write_text("mine\n")
    folder.mkdir()
    (folder / name).symlink_to(target)
    with pytest.raises(ArgumentError, match=name.replace(".", r"\.")):
        train(tiny_model("softmax"), Recall(), tiny_config(), folder)
    assert target.read_text() == "mine\n"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 100_000,
        "9" * 5000,
        '{"schema": 1e999}',
        "NaN",
        "\udcff".encode(errors="surrogateescape"),
    ],
)
def test_json_that_is_none(tmp_path, text):
    path = tmp_path / "comparison.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(FileFormatError, match=r"comparison\.json"):
        read_comparison(tmp_path)
    assert main(["compare", "--resume", str(tmp_path)]) == 2


@pytest.mark.parametrize("field", ["status", "steps_done", "final", "steps_to", "seconds"])
def test_records(whole, tmp_path, field):
    values = read_json(whole / "run.json")
    write_checked(tmp_path / "run.json", {**values, field: [{}]})
    with pytest.raises(FileFormatError, match=r"run\.json"):
        RunResult.read(tmp_path)


def test_comparisons_and_recipes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = (
        "compare --task mqar-demo --train-examples 8 --test-examples 4 --steps 1 --batch-size 2 --dim 8 "
        "--heads 2 --no-tensorboard --operators softmax --out c"
    )
    assert main(words.split()) == 0
    stored = json.loads((tmp_path / "c" / "comparison.json").read_text())
    for key in (
        "task",
        "model",
        "training",
        "operators",
        "seeds",
        "learning_rates",
        "labels",
        "plan",
        "device",
        "requested_steps",
        "steps",
    ):
        for value in (None, 5.5, "x", [None]):
            write_checked(tmp_path / "c" / "comparison.json", {**stored, key: value})
            capsys.readouterr()
            code = main(["compare", "--resume", "c"])
            assert code == 2, (key, value)
            assert capsys.readouterr().err.count("\n") == 1, (key, value)
    recipe = {
        "schema": 1,
        "about": "x",
        "models": {"a": "softmax"},
        "seeds": "1",
        "learning_rates": "1e-3",
        "task": {"task": "mqar-demo"},
        "model": {},
        "training": {"steps": 1},
    }
    for key in ("about", "models", "seeds", "learning_rates", "task", "model", "training"):
        for value in (None, 5, [None], {"dim": "x", "steps": [], "task": 5}):
            write_json(tmp_path / "r.json", {**recipe, key: value})
            capsys.readouterr()
            assert main(["compare", "--preset", "r.json"]) == 2, (key, value)
            assert capsys.readouterr().err.count("\n") == 1, (key, value)


@pytest.mark.parametrize("change", ["batch", "plain", "operator", "parts", "nan", "heads"])
def test_memories(tmp_path, change):
    path = tmp_path / "memory.safetensors"
    Memory.empty(mechanisms.ridge(), 1, 2, 4, 4).absorb(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)).save(path)
    tensors, header = load_tensors(path, "memory")
    if change == "nan":
        tensors = {name: x.clone().fill_(float("nan")) if x.is_floating_point() else x for name, x in tensors.items()}
    else:
        header["about"][change] = 10**12 if change == "heads" else None
    save_tensors(path, tensors, header)
    with pytest.raises(FileFormatError, match=r"memory\.safetensors"):
        Memory.load(path)


def test_a_file_that_may_not_grow_is_one_line(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        with pytest.raises(FileWriteError, match="large"):
            write_json(tmp_path / "big.json", "x" * 10_000)
        with pytest.raises(FileWriteError, match=r"big\.safetensors"):
            save_tensors(tmp_path / "big.safetensors", {"x": torch.zeros(10_000)}, {"kind": "x"})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not os.listdir(tmp_path)


def test_a_folder_without_rights_is_one_line(tmp_path, monkeypatch):
    def refused(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("zonal.store.tempfile.mkdtemp", refused)
    with pytest.raises(FileWriteError, match="Permission denied"):
        write_json(tmp_path / "x.json", 1)
    with pytest.raises(FileWriteError, match="Permission denied"):
        train(tiny_model("softmax"), Recall(), tiny_config(), tmp_path / "run")
