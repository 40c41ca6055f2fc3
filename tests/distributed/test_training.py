"""The example that trains on several processes: losses as in one, and checkpoints for another number of processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "train_on_several_processes.py"
STEPS = 200


def losses(folder: Path, ranks: int, per_sequence: int, until: int = STEPS) -> list[float]:
    """Train with ``ranks`` processes, of which ``per_sequence`` hold a sequence together."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    options = ["--folder", folder, "--per-sequence", per_sequence, "--steps", STEPS, "--until", until]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, str(EXAMPLE), *map(str, options)], env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "losses.json").read_text())


def farthest(a: list[float], b: list[float]) -> float:
    assert len(a) == len(b)
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_losses_are_those_of_one_process_and_go_on_with_other_ranks(tmp_path: Path) -> None:
    one = losses(tmp_path / "one", 1, 1)
    assert one[-1] < one[0] - 2
    assert farthest(losses(tmp_path / "two", 2, 2), one) < 1e-4
    losses(tmp_path / "several", 4, 2, until=STEPS // 2)
    assert farthest(losses(tmp_path / "several", 2, 1), one) < 1e-4
