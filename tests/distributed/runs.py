"""Runs of ``zonal.training.train`` on several processes, which are compared with one process.

    python runs.py FOLDER NAME...

Each check returns what is wrong, or None. Processes are forked from this one, which has everything imported.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.multiprocessing.spawn import start_processes
from torch.utils._python_dispatch import TorchDispatchMode

from zonal.errors import ZonalError
from zonal.models import ModelConfig, build
from zonal.tasks import Text
from zonal.training import TrainConfig, load_model, several_processes, shards, train
from zonal.training.estimate import GPUS, Setup, estimated
from zonal.training.optimiser import adamw
from zonal.training.processes import OneProcess

LAYERS = ("mamba2(state=8, head_dim=16)", "ska(power=1)", "softmax")
BOUND = 1e-4
"""Of losses, in nats."""


@dataclass(frozen=True)
class Asked:
    """A run of the small model. ranks: 0 is a process without torch.distributed. stop: after so many updates."""

    folder: Path
    ranks: int = 0
    sequence: int = 1
    stop: int | None = None
    recompute: bool = False
    layers: tuple[str, ...] = LAYERS
    length: int = 21
    changes: dict[str, Any] = field(default_factory=dict)
    stalls: bool = False
    """Whether a checkpoint does not get its name: the process makes the file ``stalled``, and waits."""
    slow: bool = False
    """Whether each checkpoint is written some time after its tensors were handed over."""


def _stopping(after: int | None) -> Callable[[], bool]:
    """A wish to stop that comes with the first question after so many updates, on the first process alone."""
    calls = 0

    def wished() -> bool:
        nonlocal calls
        calls += 1
        return after is not None and calls > after and (not dist.is_initialized() or dist.get_rank() == 0)

    return wished


def work(asked: Asked) -> None:
    """The run, in this process."""
    task = Text("novel", tokenizer="byte", length=asked.length, evaluation_bytes=5 * asked.length)
    config = ModelConfig(256, dim=16, layers=asked.layers, heads=2, rotary=True, conv=3, init_std=0.1)
    settings = {"steps": 6, "batch_size": 4, "eval_every": 100, "checkpoint_seconds": None, "tensorboard": False}
    training = TrainConfig(**{**settings, **asked.changes})
    listeners: dict[str, Any] = {"should_stop": _stopping(asked.stop), "threads": 1}
    with contextlib.ExitStack() as held:
        processes: Any = OneProcess(recompute=asked.recompute)
        if asked.ranks:
            processes = held.enter_context(several_processes(sequence=asked.sequence, recompute=asked.recompute))
        train(build(config, seed=0), task, training, asked.folder, processes=processes, **listeners)


_write = HuggingFaceStorageWriter.write_data


def _slow(writer: Any, plan: Any, planner: Any) -> Any:
    time.sleep(0.5)
    return _write(writer, plan, planner)


def _rank(rank: int, asked: Asked, port: int) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(asked.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if asked.slow:
        HuggingFaceStorageWriter.write_data = _slow  # type: ignore[method-assign]
    if asked.stalls:
        shards.os = Stalling(asked.folder / "stalled")  # type: ignore[attr-defined]
    told = asked.folder.with_name(f"{asked.folder.name}-{rank}.error")
    told.unlink(missing_ok=True)
    try:
        work(asked)
    except ZonalError as error:
        told.write_text(str(error))
        time.sleep(0.5)  # the first process holds what the others ask, which torchrun does otherwise
        os._exit(2)


class Stalling:
    """The module ``os``, whose ``replace`` does not come back."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def replace(self, *_: Any) -> None:
        self._marker.touch()
        time.sleep(600)


def _port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _started(asked: Asked) -> Any:
    return start_processes(_rank, (asked, _port()), nprocs=max(asked.ranks, 1), join=False, start_method="fork")


def run(asked: Asked) -> list[dict[str, Any]]:
    """The lines of the run's log without times, once it has ended."""
    context = _started(asked)
    while not context.join():
        pass
    lines = [json.loads(line) for line in (asked.folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in ("seconds", "crc32")} for line in lines]


def refused(asked: Asked) -> set[str]:
    """What the processes of a run that is refused say."""
    context = _started(asked)
    for process in context.processes:
        process.join()
    return {path.read_text() for path in asked.folder.parent.glob(f"{asked.folder.name}-*.error")}


def apart(found: list[dict[str, Any]], wanted: list[dict[str, Any]], bound: float = BOUND) -> str | None:
    """How far two logs differ where it is too far."""
    if [(line["kind"], line["step"], line["tokens"]) for line in found] != [
        (line["kind"], line["step"], line["tokens"]) for line in wanted
    ]:
        return f"{len(found)} lines, {len(wanted)} were expected"
    names = ("loss", "gradient_norm", "accuracy")
    worst = max(abs(a[name] - b[name]) for a, b in zip(found, wanted, strict=True) for name in names if name in b)
    return None if worst <= bound else f"differs by {worst}"


def equal(folder: Path) -> str | None:
    """Losses, gradient norms, evaluations and weights are those of one process, with batches split, and with sequences
    split in two parts and activations computed again."""
    few: dict[str, Any] = {"steps": 4}
    one = run(Asked(folder / "one", changes=few))
    if wrong := apart(run(Asked(folder / "batches", 2, changes=few)), one):
        return f"batches: {wrong}"
    if wrong := apart(run(Asked(folder / "sequences", 2, 2, recompute=True, changes=few | {"accumulate": 2})), one):
        return f"sequences: {wrong}"
    weights = [load_model(folder / name / "checkpoint.safetensors")[0].state_dict() for name in ("one", "batches")]
    worst = max(float((weights[0][name] - weights[1][name]).abs().max()) for name in weights[0])
    return None if worst < 1e-3 else f"weights differ by {worst}"


def resumed(folder: Path) -> str | None:
    """A run goes on with the same bits from a checkpoint that was written while training went on, and from the one
    before when it is killed while it writes one. Three processes go on with what two have written, and one with what
    three have."""
    every = {"checkpoint_every": 2, "batch_size": 6}
    killed, whole = (
        Asked(folder / "killed", 2, changes=every),
        run(Asked(folder / "whole", 2, changes=every, slow=True)),
    )
    earlier = replace(killed, folder=folder / "earlier")
    shutil.copytree(folder / "whole", earlier.folder)
    shutil.rmtree(earlier.folder / "checkpoints/step-0000000006-evaluated")
    if run(earlier) != whole:
        return "a checkpoint that was written meanwhile does not hold the tensors of its step"
    run(replace(killed, stop=3))
    files = sorted((killed.folder / "checkpoints/step-0000000003").iterdir())
    if [path.suffix for path in files] != [".json", ".safetensors", ".safetensors"]:
        return f"a checkpoint has the files {files}"
    shutil.copytree(killed.folder, folder / "moved")
    context = _started(replace(killed, stalls=True))
    deadline = time.monotonic() + 60
    while not (killed.folder / "stalled").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    for process in context.processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    if not list((killed.folder / "checkpoints").glob(".step-0000000004*.part")):
        return "the checkpoint that was being written is not there"
    if run(killed) != whole:
        return "a killed run goes on with other bits"
    left = sorted(path.name for path in (killed.folder / "checkpoints").iterdir())
    if left != ["step-0000000004", "step-0000000006-evaluated"]:
        return f"these checkpoints are left: {left}"
    run(Asked(folder / "moved", 3, stop=2, changes=every))
    wrong = apart(run(Asked(folder / "moved", 1, changes=every)), whole)
    return f"on other numbers of processes: {wrong}" if wrong else None


def refusals(folder: Path) -> str | None:
    """What cannot be spread, and checkpoints that are damaged or of another run: one sentence, on every process."""
    made = folder / "made"
    run(Asked(made, 2, stop=1))
    (path,) = (made / "checkpoints").iterdir()
    second = sorted(path.glob("shard-00002*"))[0]
    before = second.read_bytes()
    cases: list[tuple[str, Asked, Callable[[], Any]]] = [
        ("--sequence-parallel 3 must divide the number of processes, which is 2", Asked(made, 2, 3), lambda: None),
        ("--batch-size 3 must be a multiple of 2", Asked(made, 2, changes={"batch_size": 3}), lambda: None),
        ("needs as many tokens per sequence, and --length is 1", Asked(made, 2, 2, length=1), lambda: None),
        ("model.layers", Asked(made, 2, layers=LAYERS[:2]), lambda: None),
        ("bytes are not those written", Asked(made, 2), lambda: second.write_bytes(before[:-1] + b"!")),
        ("is missing or cannot be read", Asked(made, 1), second.unlink),
        ("does not match its contents: it was damaged", Asked(made, 2), lambda: _edit(path / shards.INDEX)),
    ]
    for text, asked, damage in cases:
        damage()
        told = refused(asked)
        if not any(text in each for each in told) or any("\n" in each for each in told):
            return f"{text!r} was expected in {told}"
    return None


def _edit(path: Path) -> None:
    path.write_text(path.read_text().replace('"step": 1', '"step": 2'))


def mixed(folder: Path) -> str | None:
    """bfloat16: parameters are gathered in it, and stay in float32 with their gradients and the optimiser."""
    one = run(Asked(folder / "one", changes={"dtype": "bfloat16"}))
    found = run(Asked(folder / "two", 2, changes={"dtype": "bfloat16"}))
    return apart(found, one, bound=0.05)


class Counted(TorchDispatchMode):
    """Counts what this rank would send in a ring, by the tensors that collectives are given."""

    def __init__(self) -> None:
        super().__init__()
        self.parameters, self.gradients = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        others = dist.get_world_size() - 1
        if "_allgather_base_" in func.name():
            self.parameters += args[1].nbytes * others
        elif "_reduce_scatter_base_" in func.name():
            self.gradients += args[0].nbytes * others
        return func(*args, **(kwargs or {}))


def _measured(rank: int, asked: Asked, port: int) -> None:
    """One update, with its messages counted and its tensors measured, beside the estimate."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(asked.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    with several_processes(sequence=asked.sequence) as processes:
        task = Text("novel", tokenizer="byte", length=64, evaluation_bytes=512)
        config = ModelConfig(256, dim=32, layers=(*LAYERS, "softmax"), heads=4, rotary=True, conv=3)
        training, model = TrainConfig(batch_size=4, **asked.changes), build(config, seed=0)
        processes.prepare(model, task, training)
        optimiser = adamw(model, weight_decay=0.1, betas=(0.9, 0.95))
        with Counted() as counted:
            processes.gradient(model, task.train_batch(0, 4, seed=0), training)
        optimiser.step()
        setup = Setup(asked.ranks, asked.sequence, 4, 64, training.dtype, 1, False, GPUS["h100"], 8, 0.4)
        found, sent = estimated(config, setup), torch.tensor(processes.bytes_sent)
        dist.all_reduce(sent, dist.ReduceOp.MAX)
        moments = [state[name] for state in optimiser.state.values() for name in ("exp_avg", "exp_avg_sq")]
        exact = {
            "parameters": (processes.bytes(model), found.memory["parameters"]),
            "gradients": (sum(_nbytes(x.grad) for x in model.parameters()), found.memory["gradients"]),
            "optimiser": (sum(map(_nbytes, moments)), found.memory["optimiser"]),
            "gathered": (counted.parameters, found.traffic["parameters"]),
            "scattered": (counted.gradients, found.traffic["gradients"]),
        }
    wrong = {name: pair for name, pair in exact.items() if pair[0] > pair[1] or (rank == 0 and pair[0] != pair[1])}
    between = found.traffic["between parts of a sequence"]
    if not 0.75 * between <= int(sent) <= 1.25 * between:
        wrong["between"] = int(sent), between
    asked.folder.with_name(f"{asked.folder.name}-{rank}.json").write_text(json.dumps(wrong))


def _nbytes(x: Any) -> int:
    return x.to_local().nbytes


def counted(folder: Path) -> str | None:
    """``zonal explain --gpus`` says the bytes that processes hold and send: exactly, but for those between the parts of
    a sequence, to a quarter."""
    runs = [(1, 1, "float32"), (2, 1, "bfloat16"), (2, 2, "float32"), (4, 2, "float32"), (4, 4, "float32")]
    for ranks, sequence, dtype in runs:
        asked = Asked(folder / f"{ranks}-{sequence}", ranks, sequence, changes={"dtype": dtype})
        start_processes(_measured, (asked, _port()), nprocs=ranks, start_method="fork")
        for path in sorted(folder.glob(f"{asked.folder.name}-*.json")):
            if wrong := json.loads(path.read_text()):
                return f"{path.name}: counted and estimated {wrong}"
    return None


CHECKS: dict[str, Callable[[Path], str | None]] = {
    "equal": equal,
    "resumed": resumed,
    "refusals": refusals,
    "mixed": mixed,
    "counted": counted,
}

if __name__ == "__main__":
    place, *names = sys.argv[1:]
    torch.set_num_threads(1)
    # what a first run imports and works out, so that forked processes have it
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_port()))
    work(Asked(Path(place) / "first", 1, changes={"steps": 1}))
    wrong = {}
    for name in names or CHECKS:
        (Path(place) / name).mkdir()
        wrong[name] = CHECKS[name](Path(place) / name)
    (Path(place) / "wrong.json").write_text(json.dumps(wrong))
