"""`python -m benchmarks.decoding` runs, and measures nothing where a decoded token is wrong."""

import pytest

from benchmarks import common, decoding
from zonal.models.decoder import ModelDecoder


def test_the_benchmark_of_decoding_runs_and_refuses_wrong_tokens(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert decoding.main(["--quick", "--out", "-"]) == 0
    assert "of Softmax, rotary and convolution  Linear, 64 tokens" in capsys.readouterr().out
    step = ModelDecoder.step
    monkeypatch.setattr(ModelDecoder, "step", lambda self, tokens, **options: 1.01 * step(self, tokens, **options))
    with pytest.raises(common.GateError, match="Linear"):
        decoding.main(["--quick", "--out", "-"])
