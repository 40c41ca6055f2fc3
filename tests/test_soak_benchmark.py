"""The soak of memories runs, and what it measures is small where little was streamed."""

import json
from pathlib import Path

from benchmarks import soak


def test_a_short_soak(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    assert soak.main(["--tokens", "40", "--merges", "3", "--threads", "1", "--budget", "0.01", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    rows, parts = record["rows"], record["summary"]["parts"]
    assert {row["memory"] for row in rows if row["part"] == "stream"} == set(soak.OPERATORS)
    assert {row["memory"] for row in rows if row["part"] == "merges"} == set(soak.OPERATORS) - {"keys"}
    assert all(row["drift"] < 1e-4 for row in rows if row["part"] != "flat")
    assert all(row["bytes"] == row["bytes_at_first"] for row in rows if row["part"] == "stream")
    timed = [row for row in rows if row["part"] == "flat"]
    assert len(timed) == record["summary"]["ratios of times"] == 3 * 2 * len(soak.OPERATORS)
    assert all(row["bytes"] == row["against_bytes"] and row["ratio"]["median"] > 0 for row in timed)
    # parts that are not named stay
    assert soak.main(["--tokens", "40", "--merges", "3", "--threads", "1", "--out", str(out), "--parts", "merges"]) == 0
    again = json.loads(out.read_text())
    assert [row for row in again["rows"] if row["part"] != "merges"] == [row for row in rows if row["part"] != "merges"]
    assert len(again["rows"]) == len(rows)
    assert again["summary"]["parts"]["flat"] == parts["flat"]
