"""Sequences that are split over two, three and four processes: the same outputs and gradients as in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAST = (
    "linear/padded", "retention/packed", "squared_affine/plain", "sko/padded", "ska-2/packed", "ska-fading/padded",
    "local_global-first/packed", "local_global-first/biased", "softmax/packed", "yat-decay/plain",
    "softmax-alibi/padded", "softmax-window/plain", "softmax-top/plain",
    "layer attention/padded", "layer mamba2/packed", "model", "bytes", "scanned", "silent",
    "means", "refusals",
)  # fmt: skip
"""Each kind of memory and of message, each form of input, and a whole model."""


def wrong(ranks: int, folder: Path, *names: str, seconds: int = 280) -> dict[str, str]:
    """What is wrong with cases that ``ranks`` processes run, and nothing for those that are right."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cases.py")), str(ranks), str(folder / "wrong.json"), *names],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=seconds,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "wrong.json").read_text())
    assert found
    return {name: reason for name, reason in found.items() if reason}


def test_three_ranks_equal_one_process(tmp_path: Path) -> None:
    """Three are the fewest of which one continues from what two others have joined."""
    assert wrong(3, tmp_path, *FAST) == {}


@pytest.mark.timeout(900)  # for busy machines
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_operators_on_ranks_equal_one_process(ranks: int, tmp_path: Path) -> None:
    assert wrong(ranks, tmp_path, seconds=850) == {}
