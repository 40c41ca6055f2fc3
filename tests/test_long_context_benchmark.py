"""`zonal bench long_context`: local + global attention, the ways a model is put to, and a small run with its page."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from benchmarks import long_context
from zonal.errors import ArgumentError
from zonal.models import CausalLM, ModelConfig, build

SIZES = dataclasses.replace(long_context.QUICK, length=96, exact=64, lengths=(32, 95), window=16, first=3, stretches=2)


def model(spec: str) -> CausalLM:
    made = build(ModelConfig(vocab_size=256, dim=16, layers=(spec, spec), heads=2, conv=4), seed=0)
    with torch.no_grad():
        for value in made.parameters():
            value.mul_(3)
    return made.eval()


@pytest.mark.parametrize(("before", "window", "first"), [(0, 16, 3), (30, 16, 3), (0, 16, 0), (0, 200, 5), (60, 7, 50)])
def test_local_and_global(before: int, window: int, first: int) -> None:
    k, v = torch.randn(2, 1, 3, 61 + before, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).unbind(
        0
    )
    q = torch.randn(1, 3, 61, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    t, s = torch.arange(before, before + 61)[:, None], torch.arange(61 + before)
    wanted = F.scaled_dot_product_attention(q, k, v, attn_mask=(s <= t) & ((t - s < window) | (s < first)))
    assert torch.allclose(long_context.local_global(q, k, v, window, first), wanted, atol=1e-12)


def test_edges() -> None:
    assert long_context.edges(32768) == [512, 1024, 2048, 4096, 8192, 16384, 32768]
    assert long_context.edges(600) == [512, 600]
    assert long_context.edges(96) == [96]


@torch.no_grad()
def test_ways_agree_where_they_meet_the_same_keys() -> None:
    """On so few tokens every way meets all keys; on more, a window meets fewer. What a layer has learned stays."""
    tokens = torch.randint(256, (1, 16), generator=torch.Generator().manual_seed(0))
    long = torch.randint(256, (1, 90), generator=torch.Generator().manual_seed(0))
    for spec in ("softmax", "rewa"):
        subject = long_context.Subject(spec, model(spec), SIZES)
        for value in subject.own[1].parameters():
            value.add_(0.7)
        expected, whole = subject.model(tokens), subject.model(long)
        for way in subject.ways:
            subject.put(way)
            assert torch.allclose(subject.model(tokens, path=subject.path), expected, atol=1e-4), way
            if way in (long_context.NEAR, long_context.BOTH):
                assert not torch.allclose(subject.model(long, path=subject.path), whole, atol=1e-3), way
        assert (long_context.BOTH in subject.ways) == (spec == "softmax")
        assert subject.gate() < 2e-4


def test_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = {spec: model(spec) for spec in ("softmax", "rewa")}
    monkeypatch.setattr(long_context, "Sizes", lambda: SIZES)
    monkeypatch.setattr(long_context, "checkpoint_in", lambda path: path)
    monkeypatch.setattr(
        long_context,
        "load_model",
        lambda path: (
            made[path.name],
            {"operator": path.name, "identity": {"model": made[path.name].config.to_dict()}},
        ),
    )
    out = tmp_path / "long_context.json"
    assert long_context.main(["--model", "softmax", "--model", "rewa", "--out", str(out)]) == 0
    value = json.loads(out.read_text())
    reads = [row for row in value["rows"] if row["part"] == "read"]
    expected = {
        (name, way)
        for name in made
        for way in (long_context.ALL, long_context.NEAR, long_context.LARGEST, long_context.FOUND)
    } | {("softmax", long_context.BOTH)}
    assert {(row["model"], row["way"]) for row in reads} == expected
    assert all(list(row["nats"]) == (["64"] if row["way"] == long_context.LARGEST else ["96"]) for row in reads)
    times = {(row["model"], row["way"], row["tokens"]): row for row in value["rows"] if row["part"] == "time"}
    assert times["softmax", long_context.FUSED, 95]["to_fused"] == 1
    assert times["rewa", long_context.NEAR, 95]["held_bytes"] < times["rewa", long_context.ALL, 95]["held_bytes"]
    assert ("rewa", long_context.LARGEST, 95) not in times
    assert 0 < times["rewa", long_context.FOUND, 32]["mass"] <= 1.0001
    text = out.with_suffix(".md").read_text()
    assert "| rewa | largest, hashed |" in text
    assert "zonal bench long_context --threads 1 --model softmax --model rewa" in text
    assert "mass" in capsys.readouterr().out
    with pytest.raises(ArgumentError, match="a second one of softmax"):
        long_context.main(["--model", "softmax", "--model", "softmax", "--out", str(out)])
