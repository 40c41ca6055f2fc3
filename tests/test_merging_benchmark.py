"""`zonal bench merging` on a few invented pictures: it goes on where it was stopped, merges what it says, and its page
has every number.
"""

import dataclasses
import json

import pytest
import torch
from data import idx

import zonal
from benchmarks import common, merging
from zonal.data.images import fashion_mnist
from zonal.errors import FileFormatError

SIZES = merging.QUICK


@pytest.fixture
def data(tmp_path):
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(256, (90, 8, 8), generator=generator)
    return idx.folder(tmp_path, pixels, torch.randint(10, (90,), generator=generator), 50)


def test_a_run_goes_on_where_it_was_stopped(data, tmp_path, capsys):
    learnt, _ = fashion_mnist(data)
    whole, _ = merging.train("merged tokens", learnt, SIZES, tmp_path / "a", every=2)
    (tmp_path / "b").mkdir()
    schedule, seen = merging.SCHEDULES["even"], []

    def stopped(share, layers):
        if len(seen) == 5:
            raise KeyboardInterrupt
        seen.append(share)
        return schedule(share, layers)

    merging.SCHEDULES["even"] = stopped
    try:
        with pytest.raises(KeyboardInterrupt):
            merging.train("merged tokens", learnt, SIZES, tmp_path / "b", every=2)
    finally:
        merging.SCHEDULES["even"] = schedule
    again, progress = merging.train("merged tokens", learnt, SIZES, tmp_path / "b", every=2)
    assert progress.step == SIZES.steps
    assert len(set(seen)) > 1
    assert all(torch.equal(a, b) for a, b in zip(whole.state_dict().values(), again.state_dict().values(), strict=True))
    with pytest.raises(FileFormatError, match=r"belongs to another run: .*steps is 6 there and 7 here"):
        merging.train("merged tokens", learnt, dataclasses.replace(SIZES, steps=7), tmp_path / "b")


def test_every_image_comes_once_before_any_again():
    seen = torch.cat([merging.rows_of(step, SIZES, 48) for step in range(3)])
    assert torch.equal(seen.sort().values, torch.arange(48))
    assert not torch.equal(merging.rows_of(3, SIZES, 48), merging.rows_of(0, SIZES, 48))


def test_the_command_and_its_page(data, tmp_path, capsys):
    assert merging.main(["--quick", "--data", str(data), "--work", str(tmp_path / "work")]) == 0
    printed = capsys.readouterr().out
    assert "speed     early  60%" in printed
    assert "tokens [16, 7]" in printed
    assert printed.count("accuracy  trained on") == 2 * 2 * len(SIZES.shares)
    learnt, tested = fashion_mnist(data)
    model, _ = merging.train("all tokens", learnt, SIZES, tmp_path / "work")
    rows = list(merging.speeds(model, tested, SIZES, torch.device("cpu"), 0.01))
    right = {"all tokens": (0.9, 0.895, 0.7), "merged tokens": (0.88, 0.88, 0.875)}
    rows += [
        {"part": "accuracy", "model": name, "schedule": schedule, "share": share, "accuracy": value}
        for name, values in right.items() for schedule in merging.SCHEDULES for share,
        value in zip(SIZES.shares, values, strict=True)
    ]  # fmt: skip
    summary = {"error": 0.0, "parameters": 5, "images": [40, 50], **merging.summarised(rows)}
    assert summary["trained on all tokens, even"]["share_within_a_point"] == 0.3
    assert summary["trained on merged tokens, early"]["share_within_a_point"] == 0.6
    out = tmp_path / "merging.json"
    for load in (0.5, 4.0):
        common.report(
            str(out),
            "merging",
            "",
            dataclasses.asdict(SIZES),
            rows,
            summary,
            {**common.circumstances(torch.device("cpu")), "load_per_core": load},
        )
        assert merging.main(["--page", "--out", str(out)]) == 0
        text = (tmp_path / "merging.html").read_text()
        assert ("Other work shared the cores (a load of 4 a core" in text) == (load > 1)
    drawn = json.loads(text.partition('id="data">')[2].partition("</script>")[0])
    assert [len(chart["series"]) for chart in drawn] == [4, 2, 4]
    assert drawn[0]["series"][0]["y"] == [0.9, 0.895, 0.7]
    assert drawn[0]["series"][0]["x"] == ["0%", "30%", "60%"]
    assert (
        "Trained on merged tokens, even: 88.00% right with all tokens; within a point of that 60% of the tokens can go"
        in text
    )
    assert "87.50%" in text


def test_a_wrong_merge_is_not_timed(data, tmp_path, monkeypatch):
    learnt, tested = fashion_mnist(data)
    model, _ = merging.train("all tokens", learnt, SIZES, tmp_path / "work")
    assert merging.gate(model, tested, SIZES) < 1e-4
    called = zonal.nn.Block.forward

    def wrong(self, x, *, mass=None, path="auto"):
        return called(self, x, mass=mass, path=path) * (1.001 if path == "auto" else 1)

    monkeypatch.setattr(zonal.nn.Block, "forward", wrong)
    with pytest.raises(common.GateError, match="share 0"):
        merging.gate(model, tested, SIZES)
