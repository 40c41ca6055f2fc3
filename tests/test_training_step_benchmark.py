"""`python -m benchmarks.training_step` runs, and measures nothing where a gradient is wrong."""

import pytest
import torch

from benchmarks import common, training_step


def test_the_benchmark_of_training_steps_runs_and_refuses_a_wrong_gradient(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert training_step.main(["--quick", "--out", "-"]) == 0
    assert "of softmax  linear, demo, T=64" in capsys.readouterr().out
    whole = training_step.forward_backward

    def wrong(model, parts, dtype):
        loss = whole(model, parts, dtype)
        if next(model.parameters()).dtype == torch.float32:
            for x in model.parameters():
                x.grad = None if x.grad is None else x.grad * 1.01
        return loss

    monkeypatch.setattr(training_step, "forward_backward", wrong)
    with pytest.raises(common.GateError, match="linear"):
        training_step.main(["--quick", "--out", "-"])
