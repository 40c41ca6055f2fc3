"""Train one model on several processes: sequences are split, parameters are sharded by FSDP2, and a checkpoint of any
number of ranks goes on with any other number.

    torchrun --nproc-per-node 4 examples/train_on_several_processes.py --per-sequence 2 --folder runs/several
    python examples/train_on_several_processes.py

The first command holds two sequences at a time, each on two ranks. The losses are those of one process. On GPUs the
same program uses NCCL.
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from zonal.distributed import sequence_parallel
from zonal.models import CausalLM, ModelConfig, build
from zonal.tasks import Text
from zonal.training.optimiser import adamw, set_learning_rate
from zonal.training.schedule import learning_rate

BATCH, LENGTH, RATE, CLIP = 4, 96, 3e-3, 1.0
LAYERS = ("mamba2", "ska(power=1)", "softmax")


def sharded(mesh: DeviceMesh, vocabulary: int) -> CausalLM:
    """The model, whose parameters, gradients and optimiser lie in equal parts on all ranks."""
    model = build(ModelConfig(vocabulary, dim=32, layers=LAYERS, heads=2, rotary=True, conv=4), seed=0)
    model.to(mesh.device_type)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    register_fsdp_forward_method(model, "loss")
    return model


def train(folder: Path, per_sequence: int, steps: int, until: int) -> None:
    """``until``: stop after this many of the steps, with a checkpoint, from which the next call goes on."""
    world, kind = dist.get_world_size(), "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(kind, (world // per_sequence, per_sequence), mesh_dim_names=("data", "sequence"))
    task = Text("novel", tokenizer="byte", length=LENGTH, evaluation_bytes=8192)
    model = sharded(init_device_mesh(kind, (world,)), task.vocab_size)
    optimiser = adamw(model, weight_decay=0.1, betas=(0.9, 0.95))
    first, losses = resumed(folder, model, optimiser)
    for step in range(first, until):
        batch = task.train_batch(step, BATCH, seed=0)  # a function of the step, the same on every rank
        count = int((batch.targets != -100).sum())
        tokens, targets = (
            x.chunk(mesh.size(0))[mesh["data"].get_local_rank()].to(kind) for x in (batch.tokens, batch.targets)
        )
        set_learning_rate(optimiser, learning_rate(step, steps=steps, peak=RATE, warmup_ratio=0.1, min_ratio=0.1))
        with sequence_parallel(mesh["sequence"]) as parallel:
            total, _ = model.loss(parallel.shard(tokens), parallel.shard(targets))
            (total * world / count).backward()  # FSDP takes the mean over ranks of what is a sum here
        norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)  # over the mesh, as gradients are DTensors
        optimiser.step()
        optimiser.zero_grad()
        loss = total.detach().clone()
        dist.all_reduce(loss)
        losses.append(float(loss) / count)
        if dist.get_rank() == 0 and (step + 1) % 50 == 0:
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            print(f"step {step + 1:4d}  loss {losses[-1]:.4f}  {parallel.bytes_sent:,} bytes sent by rank 0 in a step")
    weights, moments = get_state_dict(model, optimiser)
    save({"model": weights, "optimiser": moments}, checkpoint_id=folder / f"step-{until}")
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


def resumed(folder: Path, model: CausalLM, optimiser: torch.optim.Optimizer) -> tuple[int, list[float]]:
    """The step to go on with and the losses so far, after reading the checkpoint in the folder if there is one."""
    if not (folder / "losses.json").exists():
        return 0, []
    losses = json.loads((folder / "losses.json").read_text())  # written after the checkpoint, so that is whole
    weights, moments = get_state_dict(model, optimiser)
    state = {"model": weights, "optimiser": moments}
    load(state, checkpoint_id=folder / f"step-{len(losses)}")  # each rank reads its part of what any ranks wrote
    set_state_dict(model, optimiser, model_state_dict=state["model"], optim_state_dict=state["optimiser"])
    return len(losses), losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="of the checkpoint and the losses; default: one that is removed")
    parser.add_argument("--per-sequence", type=int, default=1, help="ranks that hold one sequence together")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--until", type=int, help="stop after this many of the steps")
    asked = parser.parse_args()
    if "RANK" not in os.environ:  # without torchrun: one process
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group()
    with tempfile.TemporaryDirectory() as spare:
        train(asked.folder or Path(spare), asked.per_sequence, asked.steps, asked.until or asked.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
