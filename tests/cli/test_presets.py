import json
import shlex

import pytest

from zonal import report
from zonal.cli import compare, presets, train
from zonal.cli.app import main, parse_options
from zonal.models import build
from zonal.report.published import Published


def options(words, command=compare):
    split = shlex.split(words)
    kind = command.Compare if command is compare else command.Train
    return parse_options(kind, "zonal x", "", split, command.defaults(split))


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_preset_is_a_comparison(name):
    spec = compare.specification(options(f"--preset {name}"), f"zonal compare --preset {name}")
    preset = presets.PRESETS[name]
    assert spec.published is preset.published
    assert list(spec.labels) == list(preset.models)
    assert len(spec.operators) == len(preset.models)
    for operator in spec.operators:
        assert build(spec.model_for(operator), 0).num_parameters() <= 1_100_000
    if preset.published is None:  # no paper has these
        assert name in ("new-operators", "lifted-keys")
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
    assert Published.from_dict(json.loads(json.dumps(preset.published.to_dict())), None) == preset.published


def test_numbers_of_the_paper():
    needle, tasks = (presets.PRESETS[name].published.tables[0] for name in ("echo-table2", "echo-table3"))
    assert [row.values[2] for row in needle.rows] == [0.945, 0.894, 0.933, 0.956, 0.864, 0.812, 0.651]
    printed = [row.values for row in tasks.rows if row.values[0] is not None]
    assert [100 * sum(column) / len(column) for column in zip(*printed, strict=True)] == pytest.approx(
        [53.3, 75.7, 80.5], abs=0.051
    )


def test_the_long_needles_are_no_part_of_table_3():
    row = next(row for row in presets.PRESETS["echo-table3"].published.tables[0].rows if row.label.startswith("Needle"))
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
    assert trained.operator == next(iter(presets.PRESETS["echo-table2"].models.values()))


@pytest.mark.parametrize("command", ["compare", "train"])
@pytest.mark.parametrize(
    ("words", "message"),
    [("--preset echo-table4", "Did you mean 'echo-table"), ("--preset", "--preset requires a name")],
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
    assert data.published == presets.PRESETS["echo-table2"].published
    assert main(["compare", "--resume", "x"]) == 0
    assert report.load("x").published == data.published
