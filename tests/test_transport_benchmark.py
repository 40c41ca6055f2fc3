"""The benchmark of plans: what it measures is there, and its memory is that of the call."""

import json
from pathlib import Path

import pytest

from benchmarks import transport

pytest.importorskip("ot", reason="POT is the peer: pip install pot")


def test_the_peak_is_that_of_the_call() -> None:
    """Its four arrays at least, and less than half of one T x T array, which no call by tiles makes."""
    tokens = 4096
    assert 4 * tokens * transport.DIM * 4 <= transport.peak(tokens, "forward") < tokens**2 * 4 / 2


def test_it_measures_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transport, "peak", lambda tokens, what: tokens)
    assert transport.main(["--quick", "--threads", "1", "--out", str(tmp_path / "transport.json")]) == 0
    found = json.loads((tmp_path / "transport.json").read_text())
    row = found["rows"][0]
    assert (row["tokens"], row["peer"] in row["seconds"]) == (128, True)
    assert row["elapsed"].keys() == row["seconds"].keys() == row["off"].keys()
    assert found["summary"]["peak_bytes"] == {"forward 128": 128, "backward 128": 128}
    assert "128" in capsys.readouterr().out
