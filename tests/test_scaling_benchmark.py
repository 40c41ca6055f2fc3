"""The benchmark of scaling: it runs, refuses what is wrong, leaves out what does not fit, and draws its page."""

import json

import pytest
import torch

from benchmarks import common, pages, scaling


def test_it_runs_and_writes_its_record_and_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scaling.device_memory, "free", lambda device: 10 * 8 * 4 * 128 * 128)
    out = tmp_path / "scaling.json"
    assert scaling.main(["--tokens", "128", "384", "--threads", "1", "--budget", "0.1", "--out", str(out)]) == 0
    assert "yat, matrix, T=384: takes 0 GiB" in capsys.readouterr().out
    record = json.loads(out.read_text())
    rows = {(row["operator"], row["tokens"]): row for row in record["rows"]}
    assert len(rows) == 2 * len(scaling.SUBJECTS)
    assert [name for (name, _), row in rows.items() if "refused" in row] == ["softmax, matrix", "yat, matrix"]
    assert record["summary"]["errors"].keys() == scaling.SUBJECTS.keys()
    for (name, tokens), row in rows.items():
        if "refused" not in row:
            assert row["tokens_per_second"] == pytest.approx(tokens / row["seconds"]["median"], rel=1e-5)
            assert row["decoder_bytes"] == scaling.held(name, tokens)
    assert rows["softmax", 384]["decoder_bytes"] == 3 * rows["softmax", 128]["decoder_bytes"]
    assert rows["slay", 384]["decoder_bytes"] == rows["slay", 128]["decoder_bytes"]
    page = out.with_suffix(".html").read_text()
    assert "where that of fused softmax attention is 1" in page
    out.with_suffix(".html").unlink()
    assert pages.write(tmp_path) == [out.with_suffix(".html")]


def test_the_longest_context_in_a_fixed_memory():
    rows = [
        {"operator": "yat", "tokens": tokens, "input_bytes": tokens * 2**18, "peak_bytes": tokens * 2**18}
        for tokens in (64, 128, 256, 2048, 4096)
    ]
    found = scaling.longest([*rows, {"operator": "yat", "tokens": 8192, "refused": "too large"}])
    assert found["call"]["yat"] == {"64 MiB": 128, "1 GiB": 2048, "16 GiB": 4096}
    # of 8 heads of 32 + 32 numbers a token
    assert found["decoder"]["softmax"] == {"64 MiB": 2**15, "1 GiB": 2**19, "16 GiB": 2**23}
    assert set(found["decoder"]["squared_affine"].values()) == {None}


@pytest.mark.parametrize("name", scaling.SUBJECTS)
def test_a_wrong_subject_is_not_timed(name, monkeypatch):
    subject = scaling.SUBJECTS[name]

    def wrong(q, k, v):
        work = subject.attend(q, k, v)
        return lambda: work() * 1.001

    monkeypatch.setitem(scaling.SUBJECTS, name, scaling.Subject(subject.spec, wrong))
    with pytest.raises(common.GateError, match=f"{name}, T=100"), torch.no_grad():
        scaling.gate(100)


def test_lengths_below_one_are_refused():
    with pytest.raises(scaling.ArgumentError, match="--tokens must be at least 1, received 0"):
        scaling.main(["--tokens", "0", "--out", "-"])
