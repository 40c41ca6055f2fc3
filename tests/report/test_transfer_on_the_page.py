"""Other tasks and lengths on the page: means over cells and seeds, the paper's columns, the charts' numbers."""

from dataclasses import asdict

import pytest
from report.comparison_folder import edited, summary_of, write_comparison

from zonal import report
from zonal.errors import FileFormatError
from zonal.report import page, transfer
from zonal.report.published import Published, PublishedRow, PublishedTable

CELLS = [("needle", 1, 64), ("needle", 1, 128), ("needle", 4, 64), ("two-hop", 4, 64)]
PUBLISHED = Published(
    "Some authors, a paper",
    (
        PublishedTable(
            "Their table 7",
            ("theirs: A", "theirs: B"),
            (
                PublishedRow("Needles", {"task": "needle"}, (0.25, None)),
                PublishedRow("Far", {"task": "needle", "pairs": 1, "length": 128}, (0.5, 0.75)),
                PublishedRow("Nothing", {"task": "mqar"}, (None, None)),
            ),
        ),
    ),
    (("steps", "6000", "60 & fewer"),),
    ("They <say> so.",),
)


def accuracy(seed, index):
    return 0.1 * (index + 1) + 0.02 * seed


@pytest.fixture
def folder(tmp_path):
    made = write_comparison(tmp_path / "x", operators=("softmax", "sko"), rates=(0.001,), steps=30)
    for path in made.glob("runs/*/*/run.json"):
        with edited(path) as record:
            shift = 0.3 if record["operator"] == "sko" else 0.0
            record["final"]["transfer"] = [
                {
                    "task": task,
                    "pairs": pairs,
                    "length": length,
                    "accuracy": accuracy(record["seed"], index) + shift,
                    "loss": 1.0,
                    "examples": 9,
                }
                for index, (task, pairs, length) in enumerate(CELLS)
            ]
    with edited(made / "comparison.json") as record:
        record["task"]["stages"] = [{"start": 0, "shapes": [{"kind": "needle", "pairs": 1, "length": 64}]}]
        record["published"] = asdict(PUBLISHED)
    return made


def test_ours_beside_theirs(folder):
    summary = summary_of(folder)
    ((title, table),) = transfer.tables(summary)
    assert title == "Their table 7"
    assert table.head == ("", "Softmax", "SKO", "theirs: A", "theirs: B")
    cells = {row[0].text: [cell.text for cell in row[1:]] for _, row in table.rows}
    # needles: cells 0, 1 and 2 of three seeds, 0.2 + 0.02 seed
    assert cells["Needles"] == ["0.220 ± 0.020", "0.520 ± 0.020", "0.250", "–"]
    assert cells["Far"] == ["0.220 ± 0.020", "0.520 ± 0.020", "0.500", "0.750"]
    assert cells["Nothing"] == ["–", "–", "–", "–"]
    assert [cell.best for cell in table.rows[0][1][1:3]] == [False, True]
    (softmax,) = [row for row in report.as_json(summary)["operators"] if row["operator"] == "softmax"]
    lines = softmax["published"]["Their table 7"]
    assert {line: total["mean"] for line, total in lines.items()} == pytest.approx({"Needles": 0.22, "Far": 0.22})


def test_what_is_drawn(folder):
    summary = summary_of(folder)
    lines = transfer.lines(summary.row("softmax"))
    assert [(line["task"], line["pairs"], line["x"]) for line in lines] == [
        ("needle", 1, [64, 128]),
        ("needle", 4, [64]),
        ("two-hop", 4, [64]),
    ]
    assert lines[0]["mean"] == pytest.approx([0.12, 0.22])
    assert transfer.trained_length(summary) == 64
    (view,) = page.context([summary])["views"]
    assert view["transfer_pairs"] == (1, 4)
    assert view["transfer_panels"] == [("needle", "needle in a haystack"), ("two-hop", "two hops")]
    written = report.write(folder)
    html, twin = written.html.read_text(), written.markdown.read_text()
    for text in ("Their table 7", "Some authors, a paper.", "0.220 ± 0.020"):
        assert text in html
        assert text in twin
    assert "They &lt;say&gt; so." in html
    assert "60 &amp; fewer" in html
    assert html.count('data-chart="transfer"') == 2


def test_without_a_paper_the_means_stand_by_task(folder):
    with edited(folder / "comparison.json") as record:
        del record["published"]
    ((title, table),) = transfer.tables(summary_of(folder))
    assert title == "Mean accuracy by task"
    assert [[cell.text for cell in row] for _, row in table.rows] == [
        ["needle", "0.220 ± 0.020", "0.520 ± 0.020"],
        ["two-hop", "0.420 ± 0.020", "0.720 ± 0.020"],
    ]


def test_damaged_files(folder):
    with edited(folder / "comparison.json") as record:
        published, record["published"] = record["published"], {"source": "x"}
    with pytest.raises(
        FileFormatError, match=r"comparison.json does not fit: comparison.published lacks the key 'tables'"
    ):
        report.load(folder)
    with edited(folder / "comparison.json") as record:
        record["published"] = published
    run = next(folder.glob("runs/*/*/run.json"))
    with edited(run) as values:
        values["final"]["transfer"][0] = {"task": "needle"}
    with pytest.raises(FileFormatError, match=r"final.transfer\[0\] lacks the key 'accuracy'"):
        report.load(folder)
