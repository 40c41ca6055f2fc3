"""`zonal search`: its page, its recipe, which `zonal compare` and `zonal train` take, and its errors."""

import json
import math
import shlex

import pytest
from cli.commands import refused, run

from zonal.cli import presets, train
from zonal.cli.app import parse_options
from zonal.cli.options import ModelOptions, TaskOptions, TrainingOptions
from zonal.cli.presets import Preset
from zonal.cli.search import DESCRIPTION, SearchOptions, specification
from zonal.errors import FileFormatError
from zonal.report import search as report
from zonal.store import write_checked
from zonal.training.search import KINDS

SMALL = (
    "--task mqar-demo --vocab-size 64 --length 32 --train-examples 64 --test-examples 8 --layers 1 --dim 16 "
    "--heads 2 --mlp none --batch-size 4 --eval-every 2 --threads 1"
)


def test_a_search_ends_with_a_page_and_a_recipe_that_runs(here, capsys):
    words = (
        f"search {SMALL} --no-tensorboard --steps 2 --rounds 1 --width 2 --rungs 1 --seeds 1 --moves "
        "learning_rate --measure loss --threshold 1"
    )
    code, out, err = run(words, capsys)
    assert (code, err) == (0, "")
    (folder,) = (here / "runs").iterdir()
    assert folder.name.startswith("search-mqar-demo-")
    assert "Round 1 of at most 1, from Softmax, lr 0.003: 2 regimes, 2 steps each" in out
    assert "the search goes there" in out
    assert f"zonal compare --preset {folder.relative_to(here)}/recipe.json" in out
    page, found = (folder / "report.html").read_text(), json.loads((folder / "findings.json").read_text())
    assert len(found["regimes"]) == 3
    for regime in found["regimes"]:
        assert regime["label"].replace("'", "&#39;") in page
    assert "Nothing can be said: no two ways lead" in page
    assert "1 round, 1 accepted; 3 regimes were trained" in (folder / "report.md").read_text()
    drawn = report.picture(found)
    assert len(drawn["nodes"]) == 3
    assert [node["winner"] for node in drawn["nodes"]].count(True) == 1
    assert sum(edge["walked"] for edge in drawn["edges"]) == 1
    # the same command, and --resume, find everything done
    before = (folder / "findings.json").read_text()
    for again in (words, f"search --resume {folder.relative_to(here)}"):
        code, out, _ = run(again, capsys)
        assert code == 0
        assert "begins" not in out
    assert json.loads(before)["winner"] == json.loads((folder / "findings.json").read_text())["winner"]
    refused(f"search --resume {folder.relative_to(here)} --threads 2", capsys, "--threads 2 would change nothing")
    # the winner in one line, with the numbers that the search found
    winner = found["regimes"][found["winner"]]
    code, _, _ = run(f"compare --preset {folder.relative_to(here)}/recipe.json --threads 1 --out again", capsys)
    assert code == 0
    (record,) = (json.loads(path.read_text()) for path in here.glob("again/runs/*/*/run.json"))
    assert record["operator"] == winner["operator"]
    seed, last = str(record["seed"]), winner["rungs"][-1]
    assert {seed: record["final"]["loss"]} == last["reported"]
    assert {seed: record["final"]["validation"]["loss"]} == last["by_seed"] != last["reported"]


def test_the_headline_says_what_a_search_does_not_show(here, capsys):
    """A winner that is no better than a guess, or than the start by more than the spread."""
    code, _, _ = run(
        f"search {SMALL} --no-tensorboard --steps 2 --rounds 1 --width 2 --rungs 1 --moves learning_rate",
        capsys,
    )
    assert code == 0
    (folder,) = (here / "runs").iterdir()
    search, found = (json.loads((folder / name).read_text()) for name in ("search.json", "findings.json"))
    assert search["guess"] == pytest.approx(0.696, abs=5e-4)
    for winner, words in ((0, "than the start, "), (1, "is the best that was found: ")):
        for regime, costs in zip(found["regimes"], ((0.9, 0.8), (0.8, 0.89), (0.95, 0.99)), strict=True):
            (rung,) = regime["rungs"]
            rung["reported"] = dict(zip("01", costs, strict=True))
        (first, _) = report.headline(search, found | {"winner": winner})
        assert words in first
        assert "That is no better than a guess (0.696 ± " in first
        assert first.endswith("The difference is within the spread over seeds.") == bool(winner)
        assert "guess" not in report.headline(search | {"guess": None}, found | {"winner": winner})[0]
    # a little better than a guess by chance; findings of an earlier version do not say how many answers there were
    (rung,) = found["regimes"][1]["rungs"]
    guess, answers = search["guess"], rung["answers"]
    (record, *_) = (json.loads(path.read_text()) for path in folder.rglob("run.json"))
    assert answers == record["final"]["positions"]
    margin = 2 * math.sqrt(guess * (1 - guess) / answers)
    for cost, told in ((guess - 0.9 * margin, True), (guess - 1.1 * margin, False)):
        rung["reported"] = {"0": cost}
        assert ("no better than a guess" in report.headline(search, found | {"winner": 1})[0]) == told
    rung["reported"] = {"0": guess - 0.9 * margin}
    before = found["regimes"][1] | {"rungs": [{name: rung[name] for name in rung if name != "answers"}]}
    regimes = [found["regimes"][0], before, found["regimes"][2]]
    assert "guess" not in report.headline(search, found | {"winner": 1, "regimes": regimes})[0]
    fair = ", Softmax, lr 0.003, on an evaluation set by which nothing was chosen."
    for costs, end in (((0.5, 0.4), fair), ((0.5,), "cannot show whether that is more than chance.")):
        (rung,) = found["regimes"][1]["rungs"]
        rung["reported"] = dict(zip("01", costs, strict=False))
        assert report.headline(search, found | {"winner": 1})[0].endswith(end)
    # findings of an earlier version, and of a task without a validation set: what was reported chose
    for regime in found["regimes"]:
        (rung,) = regime["rungs"]
        rung["by_seed"], rung["reported"] = rung["reported"], None
    assert report.headline(search, found | {"winner": 1})[0].endswith("more than chance.")
    assert "nothing was chosen" not in report.headline(search, found | {"winner": 1})[0]
    assert "flatters it" in report.context(search, found)["flattered"]
    # a search that was made from Python has no command to show
    for name in ("search.json", "findings.json"):
        value = json.loads((folder / name).read_text()) | ({"command": ""} if name == "search.json" else {})
        write_checked(folder / name, value)
    report.write(folder)
    for name in ("report.html", "report.md"):
        assert "Made from Python; the settings are below." in (folder / name).read_text()


def test_recipes_are_presets(here):
    settings = Preset(
        "about",
        {"Label": "[sko, softmax]"},
        "3,4",
        "0.01",
        TaskOptions(task="mqar-demo", length=64),
        ModelOptions(dim=32),
        TrainingOptions(steps=7),
    )
    presets.write_recipe(here / "recipe.json", settings)
    assert presets.find("recipe.json", "compare") == settings
    assert presets.named(["--preset", "recipe.json"], "train") == ("recipe.json", settings)
    again = train.defaults(["--preset", "recipe.json"])
    assert again is not None
    assert again.seed == 3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{}", "must be a JSON object with schema 1"),
        ('{"schema": 1, "models": {}}', "'about' is missing"),
        (
            '{"schema": 1, "models": {}, "about": "", "seeds": "1", "learning_rates": "1", "task": {"colour": '
            '1}, "model": {}, "training": {}}',
            "colour",
        ),
        ('{"schema": 1, "models": {}, "about": "", "seeds": "1", "learning_rates": "1"}', "at least one operator"),
    ],
)
def test_files_that_are_no_recipe(here, text, message):
    if text is not None:
        (here / "recipe.json").write_text(text)
    with pytest.raises(FileFormatError, match=message):
        presets.find("recipe.json", "compare")


def test_every_run_ends_at_the_target(here):
    spec = specification(
        parse_options(
            SearchOptions,
            "zonal search",
            DESCRIPTION,
            shlex.split(f"{SMALL} --steps 2 --rungs 1 --measure steps --target 0.7"),
        ),
        "",
    )
    assert spec.target == 0.7
    training = spec.comparison(spec.start, 2).training
    assert (training.stop_at_accuracy, training.thresholds) == (0.7, (0.7,))


def test_every_kind_of_move_is_on_by_default():
    options = parse_options(SearchOptions, "zonal search", DESCRIPTION, [])
    assert tuple(options.moves.split(",")) == KINDS
    assert not options.training.tensorboard


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("search", "--task is required"),
        (f"search {SMALL} --moves links", "unknown kind of move 'links'. Did you mean 'link'"),
        (f"search {SMALL} --steps 2 --rungs 3", "few enough that the first has a step"),
        (f"search {SMALL} --operator 'rewa(parts=(3,3,3))' --qk-dim 8", "the start is no model"),
        ("search --resume nowhere", "holds no search"),
        ("search --resume there --rounds 9", "so --rounds would change nothing. Leave it out"),
        ("search --resume there --seeds=2", "so --seeds would change nothing"),
        (f"search {SMALL} --rule always", "invalid choice"),
    ],
)
def test_mistakes_are_one_line(here, capsys, words, message):
    refused(words, capsys, message)
