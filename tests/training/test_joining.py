"""Comparisons of the same settings are joined: other operators, seeds and rates become one comparison."""

import json
import shutil
from dataclasses import replace

import pytest
from training.test_comparisons import a_spec

from zonal.cli.app import main
from zonal.errors import ArgumentError, FileFormatError
from zonal.report import load, packing, summarise
from zonal.store import write_checked
from zonal.training import Comparison, join

COMMAND = "zonal compare --task mqar --screening-seeds 1 --operators {} --seeds {} --out runs/x"


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """Softmax with seed 1 at one rate; linear with two seeds at two, packed."""
    place = tmp_path_factory.mktemp("parts")
    first = a_spec(operators=("softmax",), seeds=(1,), title="First", command=COMMAND.format("softmax", "1,"))
    Comparison(place / "softmax", first).run()
    second = a_spec(
        operators=("linear",), labels=("Sums",), seeds=(0, 1), learning_rates=(0.01, 0.02), screening_seeds=1
    )
    Comparison(place / "linear", second).run()
    return place / "softmax", packing.pack(place / "linear", place / "packed")


def test_the_parts_become_one(parts, tmp_path):
    out = join(parts, tmp_path / "it")
    joined, own = Comparison.open(out), [Comparison.open(part) for part in parts]
    ended = [run for run in joined.records() if run.status == "done"]
    assert sorted(ended, key=repr) == sorted((run for part in own for run in part.records()), key=repr)
    assert joined.spec.seeds == (0, 1)
    assert joined.spec.learning_rates == (0.01, 0.02)
    assert (joined.spec.labels, joined.spec.title, joined.spec.screening_seeds) == (("softmax", "Sums"), "First", None)
    assert joined.spec.command == (
        "zonal compare --task mqar --screening-seeds 2 --operators softmax,linear --seeds 0,1, "
        "--learning-rates 0.01,0.02"
    )
    assert {row.label: len(row.runs) for row in summarise(load(out)).rows} == {"Softmax": 1, "Sums": 2}
    # what no part has can be run
    result = joined.run()
    assert (result.status, len(result.runs)) == ("done", 8)


def test_the_commits_of_all_are_named(parts, tmp_path):
    copies = [shutil.copytree(part, tmp_path / part.name) for part in parts]
    for copy, commit in zip(copies, ("a1", "b2"), strict=True):
        stored = json.loads((copy / "comparison.json").read_text())
        del stored["checksum"]
        write_checked(copy / "comparison.json", {**stored, "commit": commit})
    out = join(copies, tmp_path / "it")
    assert load(out).commit == "a1, b2"


def test_by_the_command(parts, tmp_path, capsys):
    assert main(["report", *map(str, parts), "--join", str(tmp_path / "it")]) == 0
    assert str(tmp_path / "it" / "report.html") in capsys.readouterr().out
    assert "Sums" in (tmp_path / "it" / "report.md").read_text()
    assert main(["report", *map(str, parts), "--join", str(tmp_path / "x"), "--pack", str(tmp_path / "y")]) == 2
    assert "Join first" in capsys.readouterr().err


def test_refusals(parts, tmp_path):
    with pytest.raises(ArgumentError, match=r"^join: two folders or more were required, received 1\."):
        join(parts[:1], tmp_path / "it")
    with pytest.raises(FileFormatError, match=r"^join: .*nope holds no comparison .* `zonal compare` wrote"):
        join([parts[0], tmp_path / "nope"], tmp_path / "it")
    with pytest.raises(ArgumentError, match=r"^join: .*packed is there already"):
        join(parts, parts[1])
    with pytest.raises(ArgumentError, match=r"^join: .*softmax has a run that another folder has too, runs/softmax/"):
        join([parts[0], parts[0]], tmp_path / "it")
    other = a_spec(operators=("linear",), seeds=(0,), training=replace(a_spec().training, batch_size=4))
    Comparison(tmp_path / "other", other).run()
    with pytest.raises(
        ArgumentError, match=r"^join: the settings of .*other are not those of the others: training\.batch_size is 4"
    ):
        join([parts[0], tmp_path / "other"], tmp_path / "it")
    stored = json.loads((parts[0] / "comparison.json").read_text())
    del stored["checksum"]
    elsewhere = shutil.copytree(parts[0], tmp_path / "elsewhere")
    write_checked(elsewhere / "comparison.json", {**stored, "device": {**stored["device"], "name": "Another"}})
    with pytest.raises(ArgumentError, match=r"elsewhere are not .* device\.name is 'Another' there and '"):
        join([parts[0], elsewhere], tmp_path / "it")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "other"]


def test_models_of_other_sizes(parts, tmp_path):
    deeper = a_spec(
        operators=("[softmax, linear]",), seeds=(0,), model=replace(a_spec().model, layers=("softmax",) * 2)
    )
    Comparison(tmp_path / "deeper", deeper).run()
    with pytest.raises(ArgumentError, match=r"deeper are not .* model\.layers is .*softmax"):
        join([parts[0], tmp_path / "deeper"], tmp_path / "it")


def test_an_operator_of_another_size(parts, tmp_path):
    """It stays so where the others are those of the first, and is refused where two folders say different ones."""
    wide = replace(a_spec().model, dim=32)
    for name, shapes in {"wide": {"softmax": wide}, "plain": {}}.items():
        Comparison(tmp_path / name, a_spec(operators=("softmax",), seeds=(2,), shapes=shapes)).run()
    joined = Comparison.open(join([parts[1], tmp_path / "wide"], tmp_path / "it")).spec
    assert (joined.model_for("softmax").dim, joined.model_for("linear").dim) == (32, 16)
    with pytest.raises(ArgumentError, match=r"join: .*plain are not .* shapes\.softmax is None there"):
        join([tmp_path / "plain", tmp_path / "wide"], tmp_path / "no")
    with pytest.raises(ArgumentError, match=r"join: .*plain are not .* shapes\.softmax is None there"):
        join([tmp_path / "wide", tmp_path / "plain"], tmp_path / "no")
