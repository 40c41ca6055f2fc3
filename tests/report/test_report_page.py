"""The page says what the files say, in words and in tables, and needs nothing but itself."""

import base64
import gzip
import html.parser
import json
import re
import shutil
import statistics

import pytest
from report.comparison_folder import OPERATORS, PROFILE, SLUGS, compared, drawn, edited, summary_of, write_comparison

from zonal import report, store
from zonal.errors import ArgumentError, FileFormatError
from zonal.report import formats


@pytest.fixture(scope="module")
def mqar(tmp_path_factory):
    return write_comparison(tmp_path_factory.mktemp("mqar"))


@pytest.fixture(scope="module")
def written(mqar):
    return report.write(mqar)


class Elements(html.parser.HTMLParser):
    """Every start tag with its attributes, and the text inside scripts by id."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self._script: str | None = None
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._script = (dict(attrs).get("id") or "code") if tag == "script" else None

    def handle_data(self, data):
        if self._script is not None:
            self.scripts[self._script] = self.scripts.get(self._script, "") + data


def plain(text: str) -> str:
    """The words of a page without its tags, one space apart."""
    text = re.sub(r"<(style|script).*?</\1>", " ", text, flags=re.S)
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def runs_of(folder, spec, rate):
    return [
        json.loads((folder / "runs" / SLUGS[spec] / f"seed-{seed}-lr-{rate:g}" / "run.json").read_text())
        for seed in (0, 1, 2)
    ]


def test_three_files_are_written(mqar, written):
    assert written == report.Paths(mqar / "report.html", mqar / "report.md", mqar / "summary.json")
    assert not list(mqar.glob("*.part"))


def test_means_and_spreads_equal_the_files(mqar, written):
    page, twin = plain(written.html.read_text()), written.markdown.read_text()
    summary = json.loads(written.summary.read_text())["comparisons"][0]
    assert len(summary["operators"]) == len(OPERATORS)
    for row in summary["operators"]:
        runs = runs_of(mqar, row["operator"], 0.001)
        accuracy = [run["final"]["accuracy"] for run in runs]
        assert row["learning_rate"] == 0.001
        assert row["accuracy"]["mean"] == pytest.approx(statistics.mean(accuracy), abs=1e-12)
        assert row["accuracy"]["deviation"] == pytest.approx(statistics.stdev(accuracy), abs=1e-12)
        for text in (
            f"{statistics.mean(accuracy):.3f} ± {statistics.stdev(accuracy):.3f}",
            f"{runs[0]['parameters']:,}",
        ):
            assert text in page
            assert text in twin
        speed = statistics.mean(run["tokens_per_second"] for run in runs)
        assert formats.compact(speed) in page
        assert row["tokens_per_second"]["mean"] == pytest.approx(speed)
        assert row["memory_bytes"] == runs[0]["memory_bytes"]


def test_speed_is_told_relative_to_softmax(written):
    rows = {row["operator"]: row for row in json.loads(written.summary.read_text())["comparisons"][0]["operators"]}
    assert rows["softmax"]["speed_ratio"] == 1.0
    assert rows["linear"]["speed_ratio"] == pytest.approx(66_500 / 52_500)


def test_markdown_twin_has_the_same_table(written):
    def cells(text):
        return re.findall(r'<(?:th scope="(?:row|col)"|td)[^>]*>(.*?)</t[hd]>', text, flags=re.S)

    page, twin = written.html.read_text(), written.markdown.read_text()
    start = twin.index("### Results")
    rows = [
        line
        for line in twin[start : twin.index("### What it costs")].splitlines()
        if line.startswith("|") and "---" not in line
    ]
    assert len(rows) == 1 + len(OPERATORS)
    table = re.search(r'<table class="cards results">.*?</table>', page, flags=re.S)
    assert table
    words = [
        plain(cell)
        for row in re.findall(r"<tr.*?</tr>", table.group(), flags=re.S)
        for cell in cells(row)
        if "<svg" not in cell or "</span>" in cell
    ]
    words = [word for word in words if not word.startswith("Each seed")]
    twin_words = [cell.strip().replace("**", "") for row in rows for cell in row.strip("|").split("|")]
    assert [re.sub(r"[()]", "", word) for word in words] == [re.sub(r"[()]", "", word) for word in twin_words]


def test_page_needs_nothing_from_outside(written):
    elements = Elements(written.html.read_text())
    references = [
        value
        for _, attributes in elements.tags
        for name, value in attributes.items()
        if name in ("src", "href", "srcset", "action", "data", "poster") and value
    ]
    assert references
    assert all(value.startswith(("#", "data:")) for value in references)
    assert not any(tag in ("img", "iframe", "object", "embed") for tag, _ in elements.tags)
    without_plotly = written.html.read_text().replace(elements.scripts["plotly"], "")
    assert not re.search(r"https?://|@import|url\(", without_plotly)
    assert "http" not in written.markdown.read_text()


def test_plotly_unpacks_and_the_page_is_small(written):
    elements = Elements(written.html.read_text())
    code = gzip.decompress(base64.b64decode(elements.scripts["plotly"])).decode()
    assert code.startswith("/**\n* plotly.js")
    assert "</script" not in elements.scripts["code"]
    assert written.html.stat().st_size < 1_200_000


def test_chart_numbers_equal_the_files(mqar, written):
    comparison = drawn(written.html)[0]
    softmax = comparison["operators"][0]
    assert softmax["label"] == "Softmax"
    lines = [
        [
            json.loads(line)
            for line in (mqar / "runs/softmax" / f"seed-{seed}-lr-0.001/metrics.jsonl").read_text().splitlines()
        ]
        for seed in (0, 1, 2)
    ]
    evaluated = [[line for line in each if line["kind"] == "eval"] for each in lines]
    assert softmax["validation"]["steps"] == [line["step"] for line in evaluated[0]]
    for index in range(len(evaluated[0])):
        values = [each[index]["accuracy"] for each in evaluated]
        assert softmax["validation"]["accuracy"]["mean"][index] == pytest.approx(statistics.mean(values), rel=1e-4)
        assert softmax["validation"]["accuracy"]["sd"][index] == pytest.approx(statistics.stdev(values), rel=1e-4)
    # long training curves are averaged in bins: the mean over the whole curve stays
    trained = [line["loss"] for each in lines for line in each if line["kind"] == "train"]
    assert len(softmax["training"]["steps"]) == 200
    assert statistics.mean(softmax["training"]["loss"]["mean"]) == pytest.approx(statistics.mean(trained), rel=0.02)
    assert softmax["memory"] == {"x": [1024, 16384, 131072], "y": [1_048_576, 16_777_216, 134_217_728]}
    assert 'data-chart="state"' in written.html.read_text()
    assert softmax["slices"]["pairs"]["x"] == ["4", "8", "16", "32"]
    assert softmax["sweep"]["chosen"] == 0.001


def test_a_run_that_was_good_enough_holds_its_last_value(tmp_path):
    """The mean goes on to the last step of the longest run, and not to that of the shortest."""
    folder = write_comparison(tmp_path / "x", operators=("softmax",), rates=(0.001,), steps=300)
    short = min(folder.glob("runs/softmax/*"))
    lines = [json.loads(line) for line in (short / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if line["kind"] == "eval"]
    last = evaluated[0]["step"]
    (short / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines if line["step"] <= last))
    with edited(short / "run.json") as record:
        record |= {"steps_done": last, "stopped_early": True}
    found = drawn(report.write(folder).html)[0]["operators"][0]["validation"]
    assert found["steps"] == [line["step"] for line in evaluated]
    assert found["seeds"][0]["accuracy"] == pytest.approx([evaluated[0]["accuracy"]] * len(evaluated), rel=1e-4)
    assert len(set(found["seeds"][1]["accuracy"])) > 1
    assert found["accuracy"]["mean"][-1] == pytest.approx(
        statistics.mean(seed["accuracy"][-1] for seed in found["seeds"]), rel=1e-4
    )


def test_learned_quantities_are_shown(written):
    page = plain(written.html.read_text())
    comparison = drawn(written.html)[0]
    sko = next(operator for operator in comparison["operators"] if operator["label"] == "SKO")
    assert [panel["layer"] for panel in sko["kernels"]] == [1, 2]
    assert sko["kernels"][0]["heads"] != sko["kernels"][0]["before"]
    assert "0.810 1.020 0.640 0.900" in page
    assert "η (output scale)" in page
    assert "0.810  1.020  0.640  0.900" not in page  # the tags are gone, and so are double spaces


def test_a_property_with_one_value_is_not_shown(tmp_path):
    write_comparison(tmp_path, operators=("softmax",), rates=(0.001,), steps=30)
    for path in tmp_path.glob("runs/*/*/run.json"):
        with edited(path) as record:
            record["final"]["slices"]["length"] = {"64": record["final"]["accuracy"]}
    text = report.write(tmp_path).markdown.read_text()
    assert "### Accuracy by number of key-value pairs" in text
    assert "### Accuracy by sequence length" not in text


def test_every_term_of_the_tables_is_explained(written):
    page = plain(written.html.read_text())
    for term in (
        "Seed",
        "Mean ± spread",
        "Within the spread",
        "Loss",
        "Accuracy",
        "Peak memory",
        "Memory a sequence",
        "Kernel curve Φ(x)",
    ):
        assert term in page


def test_commands_remake_the_whole_and_each_row(written):
    summary = json.loads(written.summary.read_text())["comparisons"][0]
    page = written.html.read_text().replace("&#39;", "'")
    assert summary["command"] in page
    assert (
        "zonal compare --task mqar-demo --operators 'softmax,sko,squared_affine,linear,ska(power=0)' --seeds 3 "
        "--steps 300" in page
    )
    for row in summary["operators"]:
        assert row["command"] in page
        assert "--learning-rates 0.001 --steps 300" in row["command"]
        assert "--out" not in row["command"]
        assert "--budget" not in row["command"]


def test_within_the_spread_is_said(tmp_path):
    summary = compared(tmp_path, {"softmax": (0.90, 0.95, 0.93), "sko": (0.94, 0.91, 0.92)})
    assert summary.headline.startswith(
        "No clear winner with 3 seeds: SKO is within the spread of Softmax, which has the best mean"
    )
    (verdict,) = summary.verdicts
    assert verdict.within is True
    report.write(tmp_path)
    for text in ((tmp_path / "report.md").read_text(), plain((tmp_path / "report.html").read_text())):
        assert "within the spread over 3 seeds: these runs do not tell the two apart." in text
        assert "beyond the spread over" not in text


def test_the_headline_counts_the_seeds_that_both_have(tmp_path):
    summary = compared(tmp_path, {"softmax": (0.90, 0.95, 0.93), "sko": (0.94, 0.91, 0.92)}, missing=[("sko", 2)])
    assert summary.headline.startswith("No clear winner with 2 seeds in common: SKO is within the spread of Softmax")


def test_beyond_the_spread_is_said(tmp_path):
    summary = compared(tmp_path, {"softmax": (0.70, 0.72, 0.71), "sko": (0.94, 0.95, 0.945)})
    assert summary.headline == (
        "SKO is ahead in accuracy: 0.945 against 0.710 for Softmax. The difference, 0.23, is larger than the "
        "spread over seeds."
    )
    assert summary.verdicts[0].within is False
    report.write(tmp_path)
    for text in ((tmp_path / "report.md").read_text(), plain((tmp_path / "report.html").read_text())):
        assert "behind SKO in accuracy, beyond the spread over 3 seeds." in text
        assert "within the spread over" not in text


def test_one_seed_decides_nothing(tmp_path):
    summary = compared(tmp_path, {"softmax": (0.70,), "sko": (0.94,)})
    assert summary.verdicts[0].within is None
    assert "One seed cannot show" in summary.headline


@pytest.mark.parametrize(("jitter", "words"), [(0.0, "trains fastest"), (1e6, "within the spread of these runs")])
def test_speeds_are_told_apart_by_their_spread(tmp_path, jitter, words):
    write_comparison(tmp_path, seeds=(0, 1, 2))
    for path in tmp_path.glob("runs/*/*/run.json"):
        with edited(path) as record:
            # the machine was busy in another way each time
            record["tokens_per_second"] += jitter * (
                (3 * ord(path.parent.name[5]) + 5 * ord(path.parent.parent.name[1])) ** 2 % 7
            )
    sentences = " ".join(json.loads(report.write(tmp_path).summary.read_text())["comparisons"][0]["sentences"])
    assert words in sentences


def test_a_note_is_shown(tmp_path):
    write_comparison(tmp_path)
    with edited(tmp_path / "comparison.json") as record:
        record["note"] = "The machine was shared."
    paths = report.write(tmp_path)
    assert "The machine was shared." in paths.html.read_text()
    assert "The machine was shared." in paths.markdown.read_text()


def test_loss_is_better_when_lower(tmp_path):
    write_comparison(tmp_path, name="text", rates=(0.001,), steps=30)
    summary = summary_of(tmp_path)
    means = [summary.row(operator).loss for operator in summary.ranking]
    assert [total.mean for total in means if total] == sorted(total.mean for total in means if total)
    assert "validation loss" in summary.headline
    assert all(verdict.behind > 0 for verdict in summary.verdicts)
    assert "Bits per byte" in page_of(tmp_path)


def page_of(folder):
    return plain(report.write(folder).html.read_text())


def test_close_means_are_written_apart(tmp_path):
    summary = compared(tmp_path, {"softmax": (0.90041, 0.90042), "sko": (0.90011, 0.90012)})
    assert "0.9004 against 0.9001" in summary.headline


def test_failed_runs_are_shown_and_left_out_of_means(tmp_path):
    message = "loss is not finite at step 15 in <layer> 1 | see the log"
    write_comparison(
        tmp_path, operators=("softmax", "linear"), rates=(0.001,), steps=30, failed={("linear", 2): message}
    )
    page = report.write(tmp_path)
    text = page.html.read_text()
    assert "loss is not finite at step 15 in &lt;layer&gt; 1 | see the log" in text
    assert "<layer>" not in text
    assert "loss is not finite at step 15 in \\<layer> 1 \\| see the log" in page.markdown.read_text()
    assert "1 of 6 runs failed" in plain(text)
    row = summary_of(tmp_path).row("linear")
    assert (len(row.runs), row.planned, row.failed) == (2, 3, 1)
    assert row.accuracy is not None
    assert row.accuracy.n == 2


def test_an_operator_that_lacks_seeds_does_not_lead(tmp_path):
    write_comparison(
        tmp_path,
        operators=("softmax", "linear"),
        rates=(0.001,),
        steps=30,
        finals={("linear", 0): 0.999, ("linear", 1): 0.999},
        failed={("linear", 2): "x"},
    )
    assert summary_of(tmp_path).ranking == ("softmax", "linear")


def test_nothing_finished_yet_still_makes_a_page(tmp_path):
    write_comparison(
        tmp_path,
        operators=("softmax",),
        rates=(0.001,),
        steps=30,
        failed=dict.fromkeys([("softmax", seed) for seed in (0, 1, 2)], "stopped by hand"),
    )
    page = page_of(tmp_path)
    assert "Every run failed, so there is nothing to compare." in page
    assert "stopped by hand" in page
    assert "Means are over" not in page
    shutil.rmtree(next(tmp_path.glob("runs/*/*")))
    assert "No run has finished yet, so there is nothing to compare." in page_of(tmp_path)


def test_two_comparisons_share_a_page_and_the_colours(tmp_path):
    write_comparison(tmp_path / "a", rates=(0.001,), steps=30)
    write_comparison(tmp_path / "b", name="text", rates=(0.001,), steps=30, operators=("sko", "softmax"))
    paths = report.write_many([tmp_path / "a", tmp_path / "b"], tmp_path / "out")
    text = paths.html.read_text()
    assert "Five attention operators on two tasks" in text
    assert text.count('class="comparison"') == 2
    first, second = drawn(paths.html)
    keys = [
        {operator["label"]: operator["key"] for operator in comparison["operators"]} for comparison in (first, second)
    ]
    assert keys[1].items() <= keys[0].items()
    assert "Multi-query associative recall" in paths.markdown.read_text()
    assert len(json.loads(paths.summary.read_text())["comparisons"]) == 2


def test_titles_cannot_close_the_script(tmp_path):
    write_comparison(tmp_path, operators=("softmax",), rates=(0.001,), steps=30)
    with edited(tmp_path / "runs/softmax/seed-0-lr-0.001/run.json") as record:
        record["label"] = "</script><b>bold</b>"
    text = report.write(tmp_path).html.read_text()
    assert "<b>bold" not in text
    assert text.count("</script>") == 3


def test_best_value_is_marked(written):
    row = next(line for line in written.markdown.read_text().splitlines() if line.startswith("| Softmax"))
    assert "**0.987 ± 0.004**" in row
    linear = next(
        line for line in written.markdown.read_text().splitlines() if line.startswith("| Linear") and "66.5k" in line
    )
    assert "**66.5k**" in linear


def test_no_folders_is_an_error(tmp_path):
    with pytest.raises(ArgumentError, match="at least one comparison folder"):
        report.write_many([], tmp_path)


def test_profile_covers_every_operator():
    assert set(PROFILE) == set(OPERATORS) == set(SLUGS)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: None, "is not a folder"),
        (lambda folder: folder.mkdir(), "has no comparison.json"),
        (lambda folder: _damage(folder, "comparison.json", "{"), "not valid JSON"),
        (lambda folder: _damage(folder, "comparison.json", "[]"), "must be a JSON object"),
        (lambda folder: _damage(folder, "comparison.json", '{"schema": 99}'), "received schema 99"),
        (lambda folder: _damage(folder, "comparison.json", '{"schema": 1}'), "lacks the key"),
        (lambda folder: _damage(folder, "runs/softmax/seed-0-lr-0.001/run.json", "\x00\x01"), "not valid JSON"),
        (
            lambda folder: _damage(
                folder,
                "runs/softmax/seed-0-lr-0.001/run.json",
                '{"operator": "softmax", "seed": 0, "learning_rate": 1, "status": "dreaming"}',
            ),
            "status must be .*, received 'dreaming'",
        ),
        (
            lambda folder: _damage(folder, "runs/softmax/seed-0-lr-0.001/metrics.jsonl", "{}\n{}\n"),
            "line 1 is not a metrics record",
        ),
    ],
)
def test_missing_and_damaged_folders_are_one_line_errors(tmp_path, damage, message):
    folder = tmp_path / "comparison"
    damage(folder)
    with pytest.raises(FileFormatError, match=message) as caught:
        report.write(folder)
    assert "\n" not in str(caught.value)
    assert not (folder / "report.html").exists()


@pytest.mark.parametrize("stop", ["0.9", [], {}])
def test_an_accuracy_to_stop_at_is_a_number(tmp_path, stop):
    folder = write_comparison(tmp_path / "comparison", operators=("softmax",), seeds=(0,), rates=(0.001,), steps=30)
    with edited(folder / "comparison.json") as record:
        record["training"]["stop_at_accuracy"] = stop
    with pytest.raises(FileFormatError, match=r"stop_at_accuracy must be .*number.*, received"):
        report.write(folder)


def _damage(folder, name, text):
    write_comparison(folder, operators=("softmax",), seeds=(0,), rates=(0.001,), steps=30)
    (folder / name).write_text(text)


def test_a_folder_without_runs_is_an_error(tmp_path):
    write_comparison(tmp_path, seeds=())
    with pytest.raises(FileFormatError, match="has no runs yet"):
        report.load(tmp_path)


def test_a_half_written_last_line_is_dropped(tmp_path):
    write_comparison(tmp_path, operators=("softmax",), seeds=(0,), rates=(0.001,), steps=30)
    path = tmp_path / "runs/softmax/seed-0-lr-0.001/metrics.jsonl"
    before = report.load(tmp_path).runs[0]
    path.write_text(path.read_text() + '{"kind": "train", "step": 31, "lo')
    assert report.load(tmp_path).runs[0] == before


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_log_is_refused(damage, tmp_path):
    """Of a run that has ended: its curve would be drawn shorter, or through another point."""
    write_comparison(tmp_path, operators=("softmax",), seeds=(0,), rates=(0.001,), steps=30)
    path = tmp_path / "runs/softmax/seed-0-lr-0.001/metrics.jsonl"
    lines = [json.dumps(store.summed(json.loads(line))) + "\n" for line in path.read_text().splitlines()]
    path.write_text("".join(lines))
    before = report.load(tmp_path)
    assert before.runs[0].evaluations
    if damage == "changed":
        lines[3] = lines[3].replace('"loss": ', '"loss": 1')
    path.write_text("".join(lines if damage == "changed" else lines[:20]))
    with pytest.raises(FileFormatError, match=r"metrics\.jsonl, line 4 is not" if damage == "changed" else "cut short"):
        report.load(tmp_path)


def test_a_repeated_step_counts_once(tmp_path):
    write_comparison(tmp_path, operators=("softmax",), seeds=(0,), rates=(0.001,), steps=30)
    path = tmp_path / "runs/softmax/seed-0-lr-0.001/metrics.jsonl"
    path.write_text(path.read_text() + '{"kind": "train", "step": 30, "tokens": 1, "seconds": 9.0, "loss": 0.125}\n')
    points = report.load(tmp_path).runs[0].training
    assert [point.step for point in points] == list(range(1, 31))
    assert points[-1].loss == 0.125


def test_signs_of_markdown_in_names_are_shown_as_they_are(tmp_path):
    name = "[mamba2*3, <i>_own_</i> `x`|y]"
    write_comparison(
        tmp_path, operators=("softmax",), seeds=(0,), rates=(0.001,), steps=30,
        changes={"labels": [name], "title": name},
    )  # fmt: skip
    text = report.write(tmp_path).markdown.read_text()
    escaped = r"[mamba2\*3, \<i>\_own\_\</i> \`x\`"
    assert f"## {escaped}|y]" in text
    assert f"| {escaped}\\|y] |" in text
    assert name not in re.sub(r"```.*?```", "", text, flags=re.S)
    assert "Remember which value goes with which key" in text


def test_a_comparison_from_python_has_no_command_to_show(tmp_path):
    write_comparison(tmp_path, failed={("sko", 0): "the loss became nan"}, changes={"command": ""})
    report.write(tmp_path)
    for name in ("report.html", "report.md"):
        text = (tmp_path / name).read_text()
        assert "Made from Python; the settings are below." in text
        assert "when the comparison is run again in its folder." in text
        assert "One command a row" not in text
        assert "with the same command" not in text
        assert "``````" not in text.replace("\n", "")
