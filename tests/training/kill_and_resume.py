"""Trains in children that are killed with SIGKILL at random moments, then once to the end.

    python kill_and_resume.py FOLDER KILLS SEED

The children are forks of this process, which has everything imported and has never run a tensor operation: a kill then
costs no start-up. Prints the step each kill found, one a line.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch._dynamo  # noqa: F401, the optimiser imports it lazily; better once than in every child
from training.training_doubles import Recall, tiny_config, tiny_model

from zonal.training import train

CONFIG = tiny_config(steps=120, checkpoint_every=3, eval_every=20)


def main(folder: Path, kills: int, seed: int) -> None:
    moments = random.Random(seed)
    for _ in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            # a byte an event; the first says that the loop has begun
            train(tiny_model("sko"), Recall(), CONFIG, folder, on_event=lambda event, pipe=writer: os.write(pipe, b"x"))
            os._exit(0)
        os.close(writer)  # the child's own is left: without a child, read ends
        for _ in range(moments.randrange(1, 24)):  # events: in a fixed time, a busy machine may do no step
            os.read(reader, 1)
        time.sleep(moments.uniform(0.0, 0.003))  # to somewhere within a step or a write
        os.kill(child, signal.SIGKILL)
        os.close(reader)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), f"the child ended by itself with status {status} before it was killed"
        sys.stdout.write(f"{steps_logged(folder)}\n")
    train(tiny_model("sko"), Recall(), CONFIG, folder)


def steps_logged(folder: Path) -> int:
    step = 0
    for line in (folder / "metrics.jsonl").read_bytes().splitlines() if (folder / "metrics.jsonl").exists() else []:
        with contextlib.suppress(json.JSONDecodeError):
            step = json.loads(line)["step"]
    return step


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
