"""What `zonal bench verdicts` counts, on few draws, and the page that is made of it."""

import dataclasses
import functools
import json
import re

import pytest
import torch

from benchmarks import common, verdicts
from zonal import tasks

SIZES = dataclasses.replace(verdicts.QUICK, draws=4, ranks=(16,), loads=(0.25, 0.5, 2.0), contexts=(2,))


@pytest.fixture(scope="module")
def rows():
    with torch.no_grad():
        found = {
            part.__name__: list(part(SIZES))
            for part in (verdicts.separation, verdicts.curves, verdicts.filling, verdicts.claims)
        }
        # a model that has hardly learned is not asked two thousand times how well it has
        with pytest.MonkeyPatch.context() as patch:
            few = functools.partial(tasks.resolve, settings=tasks.TaskSettings(train_examples=200, test_examples=20))
            patch.setattr(verdicts.tasks, "resolve", few)
            found["trained"] = list(verdicts.trained(SIZES, torch.get_num_threads()))
    return found


def test_strangers_are_no_keys_of_their_sequence():
    data = verdicts.drawn(SIZES, 16, 40, 0)
    assert data.keys.shape == data.strangers.shape == (1, 4, 40, 16)
    assert float((data.keys @ data.strangers.mT).max()) < 1 - 1e-6
    assert torch.equal(data.values.abs(), torch.ones_like(data.values))
    assert verdicts.gate() < 1e-4


def test_support_tells_what_was_stored_and_length_does_not(rows):
    found = {(row["evidence"], row["load"]): row["auroc"] for row in rows["separation"]}
    assert min(found[verdicts.SUPPORT, load] for load in (0.25, 0.5)) > 0.99
    assert found["ridge: length of the answer", 2.0] < 0.3
    assert found[verdicts.SUMS, 0.25] > 0.98 > 0.7 > found[verdicts.SUMS, 2.0]


def test_risk_ends_at_what_is_wrong_of_all(rows):
    ends = {(row["evidence"], row["pairs"]): row["risk"] for row in rows["curves"] if row["share"] == 1}
    for pairs in (32, 64):
        assert len({round(risk, 9) for (_, count), risk in ends.items() if count == pairs}) == 1
    assert 0.5 <= ends[verdicts.SUPPORT, 32] < 0.52
    half = {row["evidence"]: row["risk"] for row in rows["curves"] if row["share"] == 0.5 and row["pairs"] == 32}
    assert half[verdicts.SUPPORT] - half["the best there could be"] < 0.02


def test_one_criterion_takes_nothing_back_and_another_holds_its_rate(rows):
    found = {(row["criterion"], row["pairs"]): row for row in rows["filling"]}
    assert all(row["taken_back"] == 0 for row in rows["filling"] if row["criterion"] == "one criterion for good")
    assert found["one criterion for good", 128]["strangers"] > 0.9
    assert all(row["strangers"] < 0.05 for row in rows["filling"] if row["criterion"] == "calibrated anew")
    assert sum(row["taken_back"] for row in rows["filling"] if row["criterion"] == "calibrated anew") > 0


def test_claims_meet_their_verdict(rows):
    found = {(row["asked"], row["verdict"]): row["share"] for row in rows["claims"]}
    for asked, verdict in (
        ("the value that was stored", "accepted"), ("the value of another key", "contradicted"),
        ("a value for a key never stored", "undecided"),
        ("no claim, stored once", "accepted"), ("no claim, stored with two values", "contradicted"),
        ("no claim, never stored", "undecided"),
    ):  # fmt: skip
        assert found[asked, verdict] > 0.95


def test_the_page_has_every_number(rows, tmp_path):
    flat = [row for part in rows.values() for row in part]
    out = tmp_path / "verdicts.json"
    common.report(
        str(out), "verdicts", "", {}, flat, verdicts.summarised(flat), common.circumstances(torch.device("cpu"))
    )
    assert verdicts.main(["--page", "--out", str(out)]) == 0
    text = (tmp_path / "verdicts.html").read_text()
    found = re.search(r'id="data">(.*?)</script>', text)
    assert found is not None
    charts = json.loads(found[1])
    drawn = sum(len(series["y"]) for chart in charts for series in chart["series"])
    assert drawn == len(flat) + 2 * len(rows["filling"])  # three numbers a row there
    assert {chart["axis"] for chart in charts} == {"log", "linear", "category"}
    assert "Acceptances taken back while 128 pairs came: 0 under one criterion" in text
    assert all(verdicts.show(row).startswith(row["part"]) for row in flat)
