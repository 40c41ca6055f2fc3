"""Sequences that are split over two and four processes: the same outputs and gradients as in one process."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FAST = {
    2: (
        "linear/padded", "squared_affine/plain", "ska-2/packed", "local_global-first/packed", "softmax/padded",
        "yat-decay/plain", "softmax-top/plain", "layer attention/packed", "layer mamba2/padded", "model",
        "transformers", "converted",
    ),
    4: (
        "retention/packed", "sko/padded", "ska-fading/padded", "softmax-alibi/packed", "softmax-window/plain",
        "rewa/plain", "layer ska/packed", "layer mixture/plain", "meshes", "bytes", "refusals",
    ),
}  # fmt: skip
"""Each kind of memory and of message, each form of input, and whole models."""


def wrong(ranks: int, folder: Path, *names: str) -> dict[str, str]:
    """What is wrong with cases that ``ranks`` processes run, and nothing for those that are right."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("cases.py")), str(ranks), str(folder / "wrong.json"), *names],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads((folder / "wrong.json").read_text())
    assert found
    return {name: reason for name, reason in found.items() if reason}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_equal_one_process(ranks: int, tmp_path: Path) -> None:
    assert wrong(ranks, tmp_path, *FAST[ranks]) == {}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_all_operators_on_ranks_equal_one_process(ranks: int, tmp_path: Path) -> None:
    assert wrong(ranks, tmp_path) == {}
