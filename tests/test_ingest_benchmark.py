"""`python -m benchmarks.ingest` on few documents."""

from typing import Any

import pytest

from benchmarks import common, ingest


def test_rows_of_few_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[dict[str, Any]] = []
    monkeypatch.setattr(common.Run, "write", lambda self, rows, *inputs: written.extend(rows))
    words = ["--documents", "100", "--heads", "16", "--workers", "1", "--turns", "1", "--threads", "1"]
    assert ingest.main(words) == 0
    recall, speed = written
    assert (recall["part"], recall["documents"], recall["questions"], recall["exact"]) == ("recall", 100, 100, 1)
    assert recall["right"] >= 0.99
    assert recall["false"] <= 0.05
    assert (speed["part"], speed["workers"]) == ("speed", 1)
    assert speed["documents_per_second"] == 100 / speed["seconds"]
