"""Training on several processes: as one process does it, stopped, killed, resumed, refused, and estimated."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from distributed.test_sequence import ROOT

FOLDERS = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
ENVIRONMENT = {**os.environ, "PYTHONPATH": FOLDERS, "OMP_NUM_THREADS": "1"}
RECIPE = [
    *("--task", "text", "--length", "96", "--evaluation-bytes", "8192", "--batch-size", "4", "--threads", "1"),
    *("--operator", "mamba2,ska(power=1),softmax", "--dim", "32", "--heads", "2", "--rotary", "--no-tensorboard"),
]


def wrong(folder: Path, *names: str) -> dict[str, str]:
    """What is wrong with checks of runs.py, and nothing for those that are right."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("runs.py")), str(folder), *names], env=ENVIRONMENT,
        capture_output=True, text=True, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "wrong.json").read_text())
    assert found.keys() == set(names)
    return {name: reason for name, reason in found.items() if reason}


@pytest.mark.timeout(600)  # for busy machines
def test_two_processes_train_as_one(tmp_path: Path) -> None:
    assert wrong(tmp_path, "equal") == {}


@pytest.mark.timeout(600)  # for busy machines
def test_killed_moved_refused_mixed_and_counted(tmp_path: Path) -> None:
    assert wrong(tmp_path, "resumed", "refusals", "mixed", "counted") == {}


def train(folder: Path, ranks: int, *words: str, steps: int = 200) -> subprocess.CompletedProcess[str]:
    """``zonal train``, under torchrun where ranks is not 0."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks else []
    command = [sys.executable, "-m", *launcher, "zonal", "train", *RECIPE, "--steps", str(steps), "--out", str(folder)]
    return subprocess.run([*command, *words], env=ENVIRONMENT, capture_output=True, text=True, timeout=580)


def losses(folder: Path) -> list[float]:
    lines: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines]


@pytest.mark.timeout(2400)  # for busy machines
def test_two_hundred_steps_on_two_and_four_processes(tmp_path: Path) -> None:
    """By the command line, as docs/scale.md says."""
    assert train(tmp_path / "one", 0).returncode == 0
    one = losses(tmp_path / "one")
    assert one[-1] < one[0] - 2
    for ranks, words in ((2, []), (4, ["--sequence-parallel", "2", "--recompute", "--checkpoint-every", "50"])):
        done = train(tmp_path / str(ranks), ranks, *words)
        assert done.returncode == 0, done.stderr
        assert f"Model: {tmp_path / str(ranks) / 'checkpoint.safetensors'}" in done.stdout
        found = losses(tmp_path / str(ranks))
        assert max(abs(a - b) for a, b in zip(found, one, strict=True)) < 1e-4


@pytest.mark.timeout(300)
def test_a_mistake_is_told_once(tmp_path: Path) -> None:
    done = train(tmp_path, 2, "--sequence-parallel", "3")
    told = [line for line in done.stderr.splitlines() if line.startswith("zonal: ")]
    assert done.returncode != 0
    assert told == [
        "zonal: train: --sequence-parallel 3 must divide the number of processes, which is 2. Start a multiple of it "
        "with torchrun, or choose a divisor."
    ]
