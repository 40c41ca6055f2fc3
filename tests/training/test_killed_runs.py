import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from training import kill_and_resume
from training.training_doubles import Recall, lines, tiny_model

from zonal.store import load_tensors
from zonal.training import RunResult, train

HERE = Path(__file__).parent


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the children are forks")
def test_killed_at_random_moments_and_resumed(tmp_path):
    kills = 12
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)]),
        "OMP_NUM_THREADS": "1",
    }
    output = subprocess.run(
        [sys.executable, str(HERE / "kill_and_resume.py"), str(tmp_path / "killed"), str(kills), "7"],
        env=environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert output.returncode == 0, output.stderr
    steps = [int(line) for line in output.stdout.split()]
    assert len(steps) == kills
    assert len(set(steps)) > 3, f"the kills came too early or too late to test anything: {steps}"
    train(
        tiny_model("sko"),
        Recall(),
        kill_and_resume.CONFIG,
        tmp_path / "whole",
        threads=RunResult.read(tmp_path / "killed").threads,
    )
    assert lines(tmp_path / "killed") == lines(tmp_path / "whole")
    ours, theirs = (
        load_tensors(tmp_path / name / "checkpoint.safetensors", "checkpoint")[0] for name in ("killed", "whole")
    )
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    records = [json.loads((tmp_path / name / "run.json").read_text()) for name in ("killed", "whole")]
    for name in ("status", "steps_done", "final", "best", "learned", "learned_before", "steps_to", "message"):
        assert records[0][name] == records[1][name]
    assert not list((tmp_path / "killed").glob(".*.part"))
