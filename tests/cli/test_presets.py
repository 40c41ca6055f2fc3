import functools
import hashlib
import json
import shlex
from dataclasses import asdict

import pytest
import torch
from data import idx

from zonal import report
from zonal.cli import compare, presets, train
from zonal.cli.app import main, parse_options
from zonal.errors import ArgumentError, FileFormatError
from zonal.models.presets import num_parameters
from zonal.report.published import Published
from zonal.typed import made


def options(words, command=compare):
    split = shlex.split(words)
    kind = command.Compare if command is compare else command.Train
    return parse_options(kind, "zonal x", "", split, command.defaults(split))


@functools.cache
def whole(name):
    """The comparison that a preset stands for."""
    return compare.specification(options(f"--preset {name}"), f"zonal compare --preset {name}")


# these need files that do not come with the package
HERE = [name for name in presets.names() if name not in ("fashion-pixels", "glosses")]
# SHA-256 of what each preset expands to: the settings in comparison.json, and the model that `zonal train` takes
EXPANDED = {
    "echo-mqar": "18ef048c2f19eba9",
    "echo-table2": "dad244f4b47b34e0",
    "echo-table3": "0e757f6773004c1f",
    "lifted-keys": "dc6bf25d40964d05",
    "new-operators": "f84ed2259fbdeb0d",
    "rewa-ablation-components": "ee70041ee3aec75e",
    "rewa-ablation-split": "4a8fa8e1245d9cdc",
    "rewa-ablation-temperature": "30e41999f790d267",
    "rewa-hypernyms": "512f0df945248490",
    "rewa-interpretability": "aa20faee12299982",
    "rewa-paths": "536933ef55fb0124",
    "rewa-periodic": "78525c653a3bc85c",
    "rewa-sample-efficiency": "106fad8a8f2a6e5e",
    "rewa-sexpr": "2f908e373d19224a",
    "slay-tasks": "87e8d00c3889e6c2",
    "sko-table1": "e5e766fbca15712c",
    "text-contest": "490a758582b1a8c2",
    "echo-1m": "a31e5ef19dc8bdb0",
    "echo-1m-form": "8d5d4b6a7f169517",
    "mqar-memory": "c36a16f4c2d541ce",
    "mqar-based": "7a2dc6eec8670304",
    "echo-tools": "2b44b8662ea27c85",
    "encoders-text": "2b507e6f78df387c",
    "rewa-forms": "54a47eb78b2038f5",
    "two-hops": "b48582f92b7c9d55",
}


@pytest.mark.parametrize("name", HERE)
def test_presets_stay_what_they_are(name):
    """A folder of runs goes on only with the settings it was begun with."""
    split = ["--preset", name]
    spec = whole(name)
    first = parse_options(train.Train, "zonal x", "", split, train.defaults(split))
    settings = {key: value for key, value in spec.to_dict().items() if key != "task_description"}
    value = {"spec": settings, "train": [first.operator, first.learning_rate, first.seed]}
    assert hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16] == EXPANDED[name]


@pytest.mark.parametrize("name", HERE)
def test_one_model_is_trained_in_the_shape_in_which_it_is_compared(name):
    spec = whole(name)
    for operator in {*spec.operators[:2], *spec.shapes}:  # with the preset's shape, and with shapes of their own
        alone = options(f"--preset {name} --operator {shlex.quote(operator.strip('[]'))}", train)
        assert train.model_of(alone, spec.task, "") == spec.model_for(operator)


@pytest.mark.parametrize("name", HERE)
def test_rates_are_chosen_by_data_that_are_not_evaluated(name):
    spec = whole(name)
    if len(spec.learning_rates) > 1 and name != "text-contest":  # all that is held out of the novel is evaluated there
        assert next(iter(spec.task.validation_batches(2))).tokens.shape[0] == 2


def test_other_spaces_and_quotation_marks_are_the_same_model():
    spec = whole("text-contest")
    for operator, label in zip(spec.operators, spec.labels, strict=True):
        other = operator.replace("'", '"').replace(", ", " ,")
        again = compare.specification(options(f"--preset text-contest --operators {shlex.quote(other)}"), "")
        assert (again.labels, again.shapes == {}) == ((label,), operator not in spec.shapes)
        if again.shapes:
            (shape,) = again.shapes.values()
            assert shape.mlp_ratio == spec.shapes[operator].mlp_ratio


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("--mlp-ratio 1", (1.0, True)),
        ("--no_rotary", (1.92, False)),
        ("--mlp_ratio=2 --no-rotary", (2.0, False)),
        ("", (1.92, True)),
    ],
)
def test_what_is_given_goes_before_the_shape_of_a_model(given, found):
    """In `zonal compare` as in `zonal train`."""
    words = f"--preset text-contest {given}"
    spec = compare.specification(options(f"{words} --operators 'Mamba-2 and three windows'"), words)
    (operator,) = spec.operators
    alone = options(f"{words} --operator 'Mamba-2 and three windows'", train)
    for model in (spec.model_for(operator), train.model_of(alone, spec.task, words)):
        assert (model.mlp_ratio, model.rotary) == found


def test_models_of_a_preset_go_by_their_names():
    contest = whole("text-contest")
    for operator, label in zip(contest.operators, contest.labels, strict=True):
        quoted = shlex.quote(f'yat,"{label}"')
        spec = compare.specification(options(f"--preset text-contest --operators {quoted}"), "")
        assert (spec.operators, spec.labels) == (("yat", operator), ("Yat", label))
        alone = options(f"--preset text-contest --operator {shlex.quote(label)}", train)
        assert train.model_of(alone, spec.task, "") == spec.model_for(operator)
    with pytest.raises(ArgumentError, match=r"'Mamba 3' cannot be read .*Models of this preset: Softmax, rotary and"):
        compare.specification(options("--preset text-contest --operators 'Mamba 3'"), "")


OWN = """
about = "a baseline with a model of its own"
seeds = "1"
learning_rates = "1e-2"

[operators]
"Softmax" = "softmax"
"Linear, wider" = { spec = "linear", layers = 2, dim = 32 }

[task]
task = "mqar-demo"
vocab_size = 64
length = 32
train_examples = 64
test_examples = 8

[model]
layers = 1
dim = 16
heads = 2
mlp = "none"

[training]
steps = 2
batch_size = 4
tensorboard = false
"""


def test_the_last_of_two_presets_counts():
    found = options("--preset echo-mqar --preset=sko-table1")
    assert found == options("--preset sko-table1")


def test_a_baseline_has_a_model_of_its_own(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(OWN)
    assert main(["compare", "--preset", "own.toml", "--out", "x"]) == 0
    softmax, wider = (next(tmp_path.glob(f"x/runs/{name}/*/run.json")).read_text() for name in ("softmax", "linear"))
    assert json.loads(wider)["parameters"] > 2 * json.loads(softmax)["parameters"]
    assert len(json.loads(wider)["learned"]) == 2
    # the sizes differ, and the report says so
    summary = report.summarise(report.load("x"))
    assert "parameters" in [flag.kind for flag in summary.flags]
    assert "Model of Linear, wider, where it differs" in (tmp_path / "x/report.html").read_text()
    capsys.readouterr()
    assert main(["compare", "--resume", "x"]) == 0
    assert main(["compare", "--preset", "own.toml", "--out", "x"]) == 0
    # the operator alone, and in `zonal train`
    alone = compare.specification(options("--preset own.toml --operators linear"), "")
    assert (alone.model_for("linear").dim, len(alone.model_for("linear").layers)) == (32, 2)
    (tmp_path / "own.toml").write_text(OWN.replace('"Softmax" = "softmax"', ""))
    assert options("--preset own.toml", train).model.dim == 32
    (tmp_path / "own.toml").write_text(OWN.replace("dim = 32", "dim = 48"))
    assert main(["compare", "--preset", "own.toml", "--out", "x"]) == 2
    assert "shapes.linear.dim is 32 there and 48 here" in capsys.readouterr().err


def test_one_seed_of_a_preset_tries_all_rates():
    """The presets that screen do so with one seed."""
    screened = compare.specification(options("--preset echo-1m"), "")
    assert screened.screening_seeds == 1 < len(screened.seeds)
    alone = compare.specification(options("--preset echo-1m --seeds 1"), "")
    assert (alone.screening_seeds, alone.runs_each) == (None, len(screened.learning_rates))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("layers = 2", "colour = 2", "colour"),
        ("layers = 2", "layers = 0", "--layers must be from 1"),
        ("[task]", "[chore]", "unknown key 'chore'"),
        ('"Softmax" = "softmax"', '"Softmax" = 3', "own.toml does not fit"),
        ("[model]", "[model", "not valid TOML"),
        ('about = "a baseline with a model of its own"', "", "'about' is missing"),
        (
            'seeds = "1"',
            'published = {source = "", recipe = [], tables = [{title = "T", columns = ["A"], rows = ['
            '{label = "two", select = {}, values = [0.1, 0.2]}]}]}\nseeds = "1"',
            "'two' has 2",
        ),
    ],
)
def test_files_that_are_no_preset(tmp_path, monkeypatch, old, new, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.toml").write_text(OWN.replace(old, new))
    with pytest.raises(FileFormatError, match=message):
        presets.find("own.toml", "compare")
    with pytest.raises(FileFormatError, match=r"none\.toml"):
        presets.find("none.toml", "compare")


@pytest.mark.parametrize("name", HERE)
def test_every_preset_is_a_comparison(name):
    spec, preset = whole(name), presets.find(name, "compare")
    assert spec.published == preset.published
    assert list(spec.labels) == list(preset.models)
    assert len(spec.operators) == len(preset.models)
    for operator in spec.operators:
        assert num_parameters(spec.model_for(operator)) <= 4_000_000
    if preset.published is None:  # no paper has these, or only names of tasks, or losses
        assert name in (
            "encoders-text", "lifted-keys", "mqar-based", "mqar-memory", "new-operators", "rewa-forms", "slay-tasks",
            "sko-table1", "text-contest", "two-hops",
        )  # fmt: skip
        return
    # a row of the paper stands beside cells that are measured
    slices = [
        {"task": shape.kind, "pairs": shape.pairs, "length": shape.length}
        for shape in getattr(spec.task, "transfer_shapes", ())
    ]
    for table in preset.published.tables:
        for row in table.rows:
            assert len(row.values) == len(table.columns)
            assert any(row.has(cell) for cell in slices), row.label
    assert made(Published, json.loads(json.dumps(asdict(preset.published))), "published") == preset.published


def test_pictures_from_a_folder(tmp_path):
    # half of the 10,000 test pictures are evaluated, the others choose the rate
    where = idx.folder(tmp_path, torch.zeros(6002, 28, 28), torch.arange(6002) % 10, 6000)
    spec = compare.specification(options(f"--preset fashion-pixels --data {where}"), "zonal compare")
    assert (spec.task.length, spec.model.causal, spec.model.conv, len(spec.operators)) == (197, False, 0, 6)
    assert spec.title == "Pictures (fashion-pixels)"
    assert sum(len(batch.tokens) for batch in spec.task.validation_batches(500)) == 1000
    with pytest.raises(FileFormatError, match="Fashion-MNIST comes with the Debian package"):
        compare.specification(options(f"--preset fashion-pixels --data {tmp_path / 'nowhere'}"), "zonal compare")


def test_numbers_of_the_paper():
    needle, tasks = (presets.find(name, "compare").published.tables[0] for name in ("echo-table2", "echo-table3"))
    assert [row.values[2] for row in needle.rows] == [0.945, 0.894, 0.933, 0.956, 0.864, 0.812, 0.651]
    *rows, mean = tasks.rows
    printed = [row.values for row in rows if row.values[0] is not None]
    assert [100 * sum(column) / len(column) for column in zip(*printed, strict=True)] == pytest.approx(
        [53.3, 75.7, 80.5], abs=0.051
    )
    # its mean is printed, and ours is of the same tasks, each of as many cells
    shapes = compare.specification(options("--preset echo-table3"), "").task.transfer_shapes
    assert mean.values == (0.544, 0.762, 0.811)
    cells = [
        sum(row.has({"task": shape.kind, "pairs": shape.pairs, "length": shape.length}) for shape in shapes)
        for row in rows
        if row.values[0] is not None
    ]
    assert mean.select["task"] == [row.select["task"] for row in rows if row.values[0] is not None]
    assert len(set(cells)) == 1


def test_the_long_needles_are_no_part_of_table_3():
    row = next(
        row for row in presets.find("echo-table3", "compare").published.tables[0].rows if row.label.startswith("Needle")
    )
    assert row.has({"task": "needle", "pairs": 1, "length": 512})
    assert not row.has({"task": "needle", "pairs": 1, "length": 1024})
    assert not row.has({"task": "two-hop", "pairs": 1, "length": 512})


def test_what_is_given_goes_first():
    plain, changed = (
        options("--preset echo-table3"),
        options("--seeds 5 --preset=echo-table3 --steps 7 --dim 32 --operators softmax"),
    )
    assert (changed.seeds, changed.training.steps, changed.model.dim, changed.operators) == ("5", 7, 32, "softmax")
    assert changed.model.layers == plain.model.layers > 2
    assert changed.training.batch_size == plain.training.batch_size
    assert options("--task mqar-demo").preset is None
    trained = options("--preset echo-table2 --seed 3", train)
    assert (trained.seed, trained.task.task) == (3, "mixed-needle")
    assert trained.operator == next(iter(presets.find("echo-table2", "compare").models.values()))


@pytest.mark.parametrize("command", ["compare", "train"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--preset echo-table4", "Did you mean 'echo-table"),
        ("--preset", "--preset requires a name"),
        ("--preset --seeds 3", "--preset requires a name"),
    ],
)
def test_presets_that_are_not_there(command, words, message, capsys):
    assert main([command, *shlex.split(words)]) == 2
    assert message in capsys.readouterr().err


def test_a_page_with_the_papers_numbers(tmp_path, monkeypatch, capsys):
    """A preset on a task of one kind and a small model: the page, its twin and a resumed comparison have what the paper
    says.
    """
    monkeypatch.chdir(tmp_path)
    words = (
        "compare --preset echo-table2 --task needle --length 16 --pairs 1 --test-examples 4 --layers 1 --dim "
        "16 --heads 2 --mlp none --operators 'linear,softmax' --steps 2 --batch-size 4 --seeds 1 --out x"
    )
    assert main(shlex.split(words)) == 0
    capsys.readouterr()
    page, twin = (tmp_path / "x/report.html").read_text(), (tmp_path / "x/report.md").read_text()
    for text in ("What the paper says, and what was done here", "width, heads, rank r"):
        assert text in page
        assert text in twin
    data = report.load("x")
    assert data.published == presets.find("echo-table2", "compare").published
    assert main(["compare", "--resume", "x"]) == 0
    assert report.load("x").published == data.published
