"""`python -m benchmarks.ingest` on few documents."""

import json
from pathlib import Path

import pytest

from benchmarks import ingest


def test_rows_of_few_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest, "QUESTIONS", 40)
    out = tmp_path / "it.json"
    words = ["--documents", "100", "--heads", "16", "--turns", "1", "--threads", "1", "--out", str(out)]
    assert ingest.main([*words, "--workers"]) == 0
    (recall,) = json.loads(out.read_text())["rows"]
    monkeypatch.delattr(ingest, "recalled")  # a row that is there is not measured again
    assert ingest.main([*words, "--workers", "1", "--resume"]) == 0
    kept, speed = json.loads(out.read_text())["rows"]
    assert kept == recall
    assert (recall["part"], recall["documents"], recall["questions"], recall["exact"]) == ("recall", 100, 40, 1)
    assert recall["least_0.6"]["right"] >= 0.99
    assert 0 == recall["least_0.6"]["false"] <= recall["least_0.5"]["false"]
    assert (speed["part"], speed["workers"]) == ("speed", 1)
    assert speed["documents_per_second"] == pytest.approx(100 / speed["seconds"], rel=1e-6)
