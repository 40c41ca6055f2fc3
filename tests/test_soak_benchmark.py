"""The soak of memories runs, and what it measures is small where little was streamed."""

import json
from pathlib import Path

from benchmarks import soak


def test_a_short_soak(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    assert soak.main(["--tokens", "40", "--merges", "3", "--threads", "1", "--out", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert {row["memory"] for row in rows if row["part"] == "stream"} == set(soak.OPERATORS)
    assert {row["memory"] for row in rows if row["part"] == "merges"} == set(soak.OPERATORS) - {"keys"}
    assert all(row["drift"] < 1e-4 for row in rows)
    assert all(row["bytes"] == row["bytes_at_first"] for row in rows if row["part"] == "stream")
