"""What `zonal bench recall` counts, in float64 and few draws, and the page that is made of it."""

import dataclasses
import html.parser
import json
import math

import pytest
import torch

from benchmarks import common, recall

SIZES = dataclasses.replace(recall.QUICK, pairs=(8, 64), distances=(1, 15, 40), distractors=(0, 256, 2048))


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    drawn = recall.drawn
    monkeypatch.setattr(recall, "drawn", lambda *a: tuple(x.double() for x in drawn(*a)))
    monkeypatch.setattr(recall, "RANKS", (16,))


def rows_of(part):
    with torch.no_grad():
        return list(part(SIZES))


def test_k_is_the_offset_that_comes_back():
    shares = {(row["operator"], row["offset"]): row["share"] for row in rows_of(recall.which)}
    for power in range(4):
        assert [shares[f"SKA K={power}", offset] for offset in recall.OFFSETS] == [
            float(offset == power) for offset in recall.OFFSETS
        ]
    assert shares["softmax, a cache", 0] == 1


def test_capacity_ends_and_the_memory_stays_as_large():
    found = {(row["operator"], row["pairs"]): row for row in rows_of(recall.capacity)}
    for power in recall.POWERS:
        few, many = found[f"SKA K={power}", 8], found[f"SKA K={power}", 64]
        assert few["recall"] > 0.9
        assert many["recall"] < few["recall"]
        assert few["bytes"] == many["bytes"]
    assert found["softmax, a cache", 64]["recall"] == 1
    assert (
        found["softmax, a cache", 64]["bytes"]
        == 8 * found["softmax, a cache", 8]["bytes"]
        == 2 * found["softmax, a cache", 64]["cache_bytes"]
    )  # float64 here


def test_a_fit_tells_keys_apart_that_a_sum_mixes():
    found = {(row["operator"], row["cosine"]): row["recall"] for row in rows_of(recall.alike)}
    assert found["SKA K=0", 0.0] == found["SKA K=0", 0.9] == found["softmax, a cache", 0.0] == 1
    assert found[recall.SUMS, 0.0] > 0.95
    assert found[recall.SUMS, 0.9] < 0.6


def test_short_distractors_are_hardly_kept():
    found = {(row["operator"], row["length"], row["distractors"]): row["recall"] for row in rows_of(recall.distractors)}
    assert found["SKA K=0", 1.0, 0] == found["SKA K=0", 0.1, 256] == 1
    assert found["SKA K=0", 1.0, 2048] < 0.8
    assert found["softmax, a cache", 1.0, 2048] == 1


def test_chunks_miss_the_nearest_past():
    """A query at t sees keys below the last whole chunk: which share of the questions that leaves is counted here by
    hand.
    """
    for row in rows_of(recall.exactness):
        distance = row["distance"]
        chunk = {"exact to the token": 1, "chunks of 16": 16, "chunks of 64": 64}[row["operator"]]
        visible = [t - distance < t // chunk * chunk for t in range(distance, 128)]
        assert row["recall"] == pytest.approx(sum(visible) / len(visible), abs=1e-6)


class Text(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.data, self.at = {}, ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.at = dict(attrs).get("id") or tag

    def handle_data(self, data):
        self.data[self.at] = self.data.get(self.at, "") + data


def test_the_page_has_every_number(tmp_path):
    rows = [
        row for part in (recall.which, recall.capacity, recall.distractors, recall.exactness) for row in rows_of(part)
    ]
    rows += [
        {"part": "trained", "operator": "SKA K=1", "offset": 1, "seed": seed, "accuracy": value, "seconds": 1.0}
        for seed, value in enumerate((0.9, 1.0))
    ]
    time = dataclasses.asdict(common.Quantiles.of([0.25]))
    rows += [
        {"part": "times", "operator": name, "power": 0, "tokens": 1024, "seconds": time}
        for name in ("softmax", "exact to the token")
    ]
    out = tmp_path / "recall.json"
    common.report(str(out), "recall", "", {}, rows, recall.summarised(rows), common.circumstances(torch.device("cpu")))
    assert recall.main(["--page", "--out", str(out)]) == 0
    text = (tmp_path / "recall.html").read_text()
    charts = json.loads(Text(text).data["data"])
    trained = next(chart for chart in charts if chart["x"] == "offset j that was trained")
    assert trained["series"][0]["y"] == [pytest.approx(0.95)]
    assert trained["series"][0]["sd"] == [pytest.approx(math.sqrt(0.005))]
    for words in (
        "K=1 returns the value 1 after it",
        "0.950 ± 0.071",
        "250 ms",
        "What exactness buys",
        "What exactness costs",
    ):
        assert words in text
    drawn = sum(len(series["y"]) for chart in charts for series in chart["series"])
    # bytes are drawn twice: ours and the cache's
    assert drawn == len(rows) - 1 + 2 * sum(row["part"] == "capacity" and row["operator"] == "SKA K=1" for row in rows)
    assert all(recall.show(row).startswith(row["part"]) for row in rows)
