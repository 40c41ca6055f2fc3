"""Train a model of a program of your own on several processes. `zonal train` does the same under torchrun.

    torchrun --nproc-per-node 4 examples/train_on_several_processes.py --per-sequence 2
    python examples/train_on_several_processes.py

The first command holds two sequences at a time, each on two processes. The losses are those of the second, which runs
in one process. A run that was stopped goes on with any number of processes. On GPUs the same program uses NCCL.
"""

import argparse
import os
from pathlib import Path

import torch

from zonal.models import ModelConfig, build
from zonal.tasks import Text
from zonal.training import TrainConfig, interruptible, several_processes, train

LAYERS = ("mamba2", "ska(power=1)", "softmax")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/several"), help="of all files, for all processes")
    parser.add_argument("--per-sequence", type=int, default=1, help="processes that hold one sequence together")
    parser.add_argument("--steps", type=int, default=50)
    asked = parser.parse_args()
    if "RANK" not in os.environ:  # without torchrun: one process
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    task = Text("novel", tokenizer="byte", length=96, evaluation_bytes=8192)
    model = build(ModelConfig(task.vocab_size, dim=32, layers=LAYERS, heads=2, rotary=True, conv=4), seed=0)
    config = TrainConfig(steps=asked.steps, batch_size=4, checkpoint_every=25, tensorboard=False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with several_processes(sequence=asked.per_sequence, device=device) as processes, interruptible() as stopped:
        result = train(model, task, config, asked.folder, should_stop=stopped, processes=processes)
        if processes.writes and result.final is not None:
            print(f"{processes.size} processes: loss {result.final['loss']:.4f} after {result.steps_done} steps")
            print(f"{processes.bytes_sent:,} bytes sent by this one to others that hold the same sequence")


if __name__ == "__main__":
    main()
