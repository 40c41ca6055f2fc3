"""What is inside a run's memories: read from diagnostics.json, drawn on the page, told in its tables; refused where it
makes no sense.
"""

import cmath
import json
import random

import pytest
from report.comparison_folder import SLUGS, drawn, write_comparison

from zonal import report
from zonal.errors import FileFormatError
from zonal.report import diagnostics


def measured(seed=0, layers=2, heads=3, size=16):
    """Numbers such as a trained ridge memory has them, made up."""
    draw = random.Random(seed)

    def head():
        circle = [cmath.rect(draw.random() ** 0.5 * 0.98, draw.uniform(0, 6.28)) for _ in range(size)]
        stored = [4, 8, 16, 32, 64]
        return {
            "smallest_eigenvalue": 0.1 * (1 + draw.random()), "condition": 10 ** draw.uniform(1, 3),
            "effective_rank": size * draw.uniform(0.3, 0.9), "size": size,
            "spectrum": [[z.real, z.imag] for z in circle], "leverage": [draw.betavariate(2, 3) for _ in range(200)],
            "capacity": {"stored": stored, "estimate": [min(n, size * (1 - 0.7 ** (n / 6))) for n in stored]},
        }  # fmt: skip

    return {
        "schema": 1,
        "layers": [{"layer": layer, "heads": [head() for _ in range(heads)]} for layer in range(layers)],
    }


def run_folder(folder, spec, seed=0):
    return folder / "runs" / SLUGS[spec] / f"seed-{seed}-lr-0.001"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = write_comparison(
        tmp_path_factory.mktemp("diagnosed"), operators=("softmax", "ska(power=0)", "linear"), rates=(0.001,), steps=30
    )
    for seed, spec in enumerate(("ska(power=0)", "linear")):
        (run_folder(found, spec, seed) / "diagnostics.json").write_text(json.dumps(measured(seed)))
    report.write(found)
    return found


def test_the_page_has_the_pictures_of_operators_that_were_looked_into(folder):
    operators = {
        operator["label"]: operator["diagnostics"] for operator in drawn(folder / "report.html")[0]["operators"]
    }
    assert operators["Softmax"] is None
    assert operators["Linear"] is not None  # of the one seed that has a file
    ridge, file = operators["Ridge (SKA K=0)"], measured()
    assert [panel["layer"] for panel in ridge["spectra"]] == [1, 2]
    first = file["layers"][0]["heads"][0]
    assert ridge["spectra"][0]["heads"][0]["re"] == pytest.approx([z[0] for z in first["spectrum"]], rel=1e-3)
    assert ridge["bars"]["condition"]["x"] == ["1.1", "1.2", "1.3", "2.1", "2.2", "2.3"]
    assert ridge["bars"]["condition"]["y"] == pytest.approx(
        [head["condition"] for layer in file["layers"] for head in layer["heads"]], rel=1e-3
    )
    assert ridge["bars"]["effective_rank"]["most"] == 16
    assert ridge["capacity"]["x"] == [4, 8, 16, 32, 64]
    assert sum(ridge["leverage"]["y"]) == pytest.approx(1, abs=1e-3)
    page = (folder / "report.html").read_text()
    for chart in (
        "data-spectra",
        'data-quantity="smallest_eigenvalue"',
        'data-quantity="effective_rank"',
        'data-chart="leverage"',
        'data-chart="capacity"',
    ):
        assert chart in page


def test_the_table_has_the_worst_head_of_each_layer(folder):
    lines = [
        line
        for line in (folder / "report.md")
        .read_text()
        .split("### Inside the memories")[1]
        .split("### Every run")[0]
        .splitlines()
        if "Ridge" in line
    ]
    assert len(lines) == 2
    heads = measured()["layers"][1]["heads"]
    assert (
        f"| {min(head['smallest_eigenvalue'] for head in heads):.3g} | {max(head['condition'] for head in heads):.3g} |"
        in lines[1]
    )
    assert "of 64 stored" in lines[1]


def test_a_page_without_diagnostics_has_no_such_part(tmp_path):
    report.write(write_comparison(tmp_path, operators=("softmax",), rates=(0.001,), steps=30))
    for name in ("report.html", "report.md"):
        assert "Inside the memories" not in (tmp_path / name).read_text()


def test_every_part_of_the_file_is_optional(tmp_path):
    write_comparison(tmp_path, operators=("linear",), rates=(0.001,), steps=30)
    (run_folder(tmp_path, "linear") / "diagnostics.json").write_text(
        json.dumps({"schema": 1, "layers": [{"heads": [{"condition": 3.5}, {}]}]})
    )
    (found,) = (operator["diagnostics"] for operator in drawn(report.write(tmp_path).html)[0]["operators"])
    assert found == {
        "spectra": [],
        "bars": {"condition": {"x": ["1.1"], "y": [3.5], "most": None}},
        "leverage": None,
        "capacity": None,
    }
    page = (tmp_path / "report.html").read_text()
    assert 'data-quantity="condition"' in page
    assert '<div class="panels square"' not in page
    assert 'data-chart="leverage"' not in page


def test_a_histogram_counts_both_ends():
    found = diagnostics.histogram([0.0, 0.04, 0.5, 1.0], bins=4)
    assert found == {"x": [0.125, 0.375, 0.625, 0.875], "y": [0.5, 0.0, 0.25, 0.25]}


def test_capacity_is_mean_least_and_most_over_heads():
    heads = [
        diagnostics.Head(1, 1, {}, stored=(8, 4), estimate=(6, 4)),
        diagnostics.Head(1, 2, {}, stored=(4,), estimate=(2,)),
    ]
    assert diagnostics.capacity(heads) == {"x": [4, 8], "mean": [3, 6], "low": [2, 6], "high": [4, 6]}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"schema": 2, "layers": []}, "schema 1"),
        ({"schema": 1}, "layers must be a list"),
        (
            {"schema": 1, "layers": [{"heads": [{"condition": "high"}]}]},
            r"layer 1, head 1: condition must be a finite number, received 'high'",
        ),
        ({"schema": 1, "layers": [{"heads": [{"condition": float("inf")}]}]}, "finite number"),
        ({"schema": 1, "layers": [{"heads": [{"leverage": [0.5, 1.5]}]}]}, r"leverage must lie in \[0, 1\]"),
        ({"schema": 1, "layers": [{"heads": [{"spectrum": [[1.0]]}]}]}, r"spectrum\[0\] must have 2 entries"),
        (
            {"schema": 1, "layers": [{"heads": [{"capacity": {"stored": [1], "estimate": []}}]}]},
            "as many estimates as numbers stored",
        ),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, record, words):
    (tmp_path / "diagnostics.json").write_text(json.dumps(record))
    with pytest.raises(FileFormatError, match=words) as caught:
        diagnostics.load(tmp_path)
    assert "diagnostics.json" in str(caught.value)
