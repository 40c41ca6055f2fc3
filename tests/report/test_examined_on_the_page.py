"""What a task found of finished runs, and tokens to a loss, as tables of the page."""

import json

import pytest
from report.comparison_folder import edited, summary_of, write_comparison

from zonal import report
from zonal.errors import FileFormatError
from zonal.report import table


@pytest.fixture
def folder(tmp_path):
    made = write_comparison(tmp_path / "x", operators=("softmax", "sko"), rates=(0.001,), steps=30)
    for path in made.glob("runs/*/*/run.json"):
        with edited(path) as record:
            shift = 0.5 if record["operator"] == "sko" else 0.0
            record["final"]["examined"] = [
                {
                    "slices": {"pairs": "held out", "distance": distance},
                    "values": {"exact match": 0.1 * record["seed"] + shift},
                    "examples": 4,
                }
                for distance in (2, 3)
            ]
            if record["operator"] == "sko":
                record["final"]["examined"].append({"slices": {}, "values": {"parse errors": 0.25}, "examples": 4})
    return made


def test_one_table_a_number(folder):
    (exact_name, exact), (errors_name, errors) = table.examined(summary_of(folder))
    assert (exact_name, errors_name) == ("exact match", "parse errors")
    assert exact.head == ("Operator", "held out, distance 2", "held out, distance 3")
    found = {spec: [cell.text for cell in cells[1:]] for spec, cells in exact.rows}
    assert found == {"softmax": ["0.100 ± 0.100"] * 2, "sko": ["0.600 ± 0.100"] * 2}
    # an operator that was not measured has no row, a cell without its number no column
    assert errors.head == ("Operator", "all")
    assert [(spec, cells[1].text) for spec, cells in errors.rows] == [("sko", "0.250 ± 0.000")]


def test_on_the_page_and_its_twin(folder):
    paths = report.write(folder)
    for path in (paths.html, paths.markdown):
        text = path.read_text()
        assert "Examined when the run had ended: exact match" in text
        assert "held out, distance 3" in text
    other = write_comparison(folder.parent / "y", operators=("sko",), rates=(0.001,), steps=30)
    assert table.examined(summary_of(other)) == []


@pytest.mark.parametrize("cell", [3, {"slices": {}}, {"values": {}}, {"slices": {}, "values": {"exact": "much"}}])
def test_damaged_files(folder, cell):
    with edited(next(folder.glob("runs/*/*/run.json"))) as record:
        record["final"]["examined"] = [cell]
    with pytest.raises(FileFormatError, match="examined"):
        report.load(folder)


def test_tokens_to_a_loss(tmp_path):
    made = write_comparison(
        tmp_path / "x", name="text", operators=("softmax", "sko"), rates=(0.001,), seeds=(0, 1), steps=30
    )
    curves = {
        "softmax": ([(100, 3.0), (200, 2.0)], [(100, 3.0), (200, 2.2)]),
        "sko": ([(100, 2.2), (200, 1.0)], [(100, 3.2), (200, 2.2)]),
    }
    for path in made.glob("runs/*/*/run.json"):
        record = json.loads(path.read_text())
        lines = [
            {"kind": "eval", "step": tokens, "tokens": tokens, "seconds": 1.0, "loss": loss, "accuracy": 0.5}
            for tokens, loss in curves[record["operator"]][record["seed"]]
        ]
        path.with_name("metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    summary = summary_of(made)
    # 2.2 is what every run reached: softmax after 180 and 200 tokens, sko after 100 and 200
    assert table.target_loss(summary) == 2.2
    results = report.results(summary)
    column = results.head.index(
        "Tokens to loss 2.20" if "Tokens to loss 2.20" in results.head else "Tokens to loss 2.200"
    )
    assert {spec: (cells[column].text, cells[column].note) for spec, cells in results.rows} == {
        "softmax": ("190", "1× softmax"),
        "sko": ("150", "0.79× softmax"),
    }
    stored = json.loads(report.write(made).summary.read_text())["comparisons"][0]
    assert stored["target_loss"] == 2.2
    assert {row["operator"]: row["tokens_to_loss"]["mean"] for row in stored["operators"]} == {
        "softmax": pytest.approx(190),
        "sko": pytest.approx(150),
    }


def test_accuracy_has_no_target(folder):
    summary = summary_of(folder)
    assert table.target_loss(summary) is None
    assert not any("Tokens to loss" in title for title in report.results(summary).head)
