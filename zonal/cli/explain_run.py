"""``zonal explain --model … --gpus N``: what a step of a training run on GPUs would take."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import RenderableType
from rich.text import Text

from zonal.cli.console import table
from zonal.cli.generate import checkpoint_in
from zonal.cli.options import shown
from zonal.errors import ArgumentError
from zonal.execution.plan import duration
from zonal.limits import PROCESSES, SHARE, SIZE, TOKENS, Between
from zonal.models import ModelConfig, preset
from zonal.report import formats
from zonal.store import read_header, read_json, understood
from zonal.training.estimate import GPUS, Setup, StepEstimate, estimated

_SPEED = Between(1, 1e18)


@dataclass(frozen=True)
class RunLook:
    """With --model: a step of training it on many GPUs, estimated."""

    gpus: Annotated[int | None, Between(1, 1_000_000), shown("INT", "default: none")] = None
    """Processes, one for each GPU. --model may also be a name, such as echo-50M, or a JSON file of a ModelConfig."""
    sequence_parallel: Annotated[int, PROCESSES] = 1
    """Of these, GPUs that hold each sequence together."""
    batch_size: Annotated[int, Between(1, 10_000_000)] = 64
    """Sequences per step."""
    tokens: Annotated[int, TOKENS] = 4096
    """Tokens per sequence."""
    accumulate: Annotated[int, SIZE] = 1
    """Parts of a batch that each GPU works on one after another."""
    recompute: bool = False
    """Keep only the input of each block for the backward pass."""
    gpu: Literal["h100", "a100"] = "h100"
    """The GPU whose speeds are used where they are not given."""
    gpus_per_machine: Annotated[int, Between(1, 1024)] = 8
    """GPUs of a machine. With more GPUs, messages take the time of the network."""
    peak_flops: Annotated[float | None, _SPEED, shown("FLOP/S", "default: of the GPU")] = None
    """Operations per second in matrix products."""
    memory_bandwidth: Annotated[float | None, _SPEED, shown("B/S", "default: of the GPU")] = None
    """Bytes per second of a GPU's memory."""
    link_speed: Annotated[float | None, _SPEED, shown("B/S", "default: of the GPU")] = None
    """Bytes per second that a GPU sends to others of its machine."""
    network_speed: Annotated[float | None, _SPEED, shown("B/S", "default: of the GPU")] = None
    """Bytes per second that a GPU sends to other machines."""
    efficiency: Annotated[float, SHARE] = 0.4
    """The share of the operations per second that the run reaches. An assumption."""


@dataclass(frozen=True)
class Estimated:
    """A model, a run and what a step of it would take."""

    model: str
    setup: Setup
    gpu: str
    step: StepEstimate

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        about = {"estimate": True, "model": self.model, "gpu_name": self.gpu}
        return {**about, "run": dataclasses.asdict(self.setup), "step": self.step.to_dict()}


def config_of(model: Path, tokens: int) -> ModelConfig:
    """The shape of the model: of a run or a checkpoint, in a JSON file, or by name.

    Raises: FileFormatError, ArgumentError.
    """
    if model.suffix == ".json":
        with understood("explain", model):
            return ModelConfig.from_dict(read_json(model))
    if model.exists() or len(model.parts) > 1:
        path = checkpoint_in(model, "explain")
        with understood("explain", path):
            return ModelConfig.from_dict(read_header(path, "checkpoint")["config"]["identity"]["model"])
    return preset(str(model), max_len=tokens)


def estimate(model: Path, options: RunLook, dtype: str) -> Estimated:
    """The estimate for the options. Raises: ArgumentError, FileFormatError."""
    assert options.gpus is not None
    if dtype not in ("float32", "bfloat16"):
        raise ArgumentError(f"explain: --gpus is for --dtype float32 or bfloat16, received {dtype}.")
    if not options.efficiency:
        raise ArgumentError("explain: --efficiency must be above 0.")
    given = {
        "flops": None if options.peak_flops is None else {dtype: options.peak_flops},
        "bandwidth": options.memory_bandwidth, "link": options.link_speed, "network": options.network_speed,
    }  # fmt: skip
    gpu = dataclasses.replace(GPUS[options.gpu], **{name: value for name, value in given.items() if value is not None})
    setup = Setup(
        options.gpus, options.sequence_parallel, options.batch_size, options.tokens, dtype, options.accumulate,
        options.recompute, gpu, options.gpus_per_machine, options.efficiency,
    )  # fmt: skip
    step = estimated(config_of(model, options.tokens), setup)
    return Estimated(str(model), setup, options.gpu if gpu == GPUS[options.gpu] else f"{options.gpu}, changed", step)


def _rows(parts: dict[str, float], unit: str) -> list[tuple[str, str]]:
    return [(name, _shown(value, unit)) for name, value in {**parts, "together": sum(parts.values())}.items()]


def _shown(value: float, unit: str) -> str:
    return formats.bytes_(int(value)) if unit == "B" else f"{value / 1e12:,.3g} T{unit}"


def tables(found: Estimated) -> list[RenderableType]:
    """The estimate as tables for the terminal."""
    setup, step, gpu = found.setup, found.step, found.setup.gpu
    where = f"{-(-setup.gpus // setup.per_machine):,} machines" if setup.gpus > setup.per_machine else "one machine"
    rows = setup.rows * setup.sequence // setup.gpus
    need, tokens = sum(step.memory.values()), setup.rows * setup.tokens
    fits = "fits into" if need <= gpu.memory else "does not fit into"
    speed = "the network" if setup.gpus > setup.per_machine else "the link"
    lines = [
        f"Estimate, not measured: a step of {found.model}, {formats.count(step.parameters)} parameters, on "
        f"{setup.gpus:,} GPUs ({found.gpu}) in {where}",
        f"Each GPU: {rows:,} sequences of {setup.tokens // setup.sequence:,} tokens, in {setup.accumulate} parts; a "
        f"sequence on {setup.sequence} GPUs; {setup.dtype}; blocks "
        f"{'are computed again for' if setup.recompute else 'keep their activations for'} the backward pass",
    ]
    constants = (
        f"Constants: {gpu.flops[setup.dtype] / 1e12:,.4g} TFLOP/s in products, of which {setup.efficiency:.0%} are "
        f"reached (an assumption); memory of {gpu.memory / 1e9:,.4g} GB at {gpu.bandwidth / 1e9:,.4g} GB/s; "
        f"{gpu.link / 1e9:,.4g} GB/s to GPUs of the same machine, {gpu.network / 1e9:,.4g} GB/s to other machines"
    )
    timed = [(name, duration(value)) for name, value in step.seconds.items()]
    between = f"{duration(step.fastest)} to {duration(step.slowest)}"
    rate = f"{formats.count(round(tokens / step.slowest))} to {formats.count(round(tokens / step.fastest))} tokens/s"
    verdict = f"{formats.bytes_(int(need))} {fits} a GPU of {formats.bytes_(int(gpu.memory))}"
    return [
        *(Text(line) for line in lines), Text(),
        table("Memory of a GPU", ("part", "bytes"), _rows(step.memory, "B")), Text(verdict, style="bold"), Text(),
        table("Operations of a GPU in a step", ("part", "FLOP"), _rows(step.operations, "FLOP")), Text(),
        table("Sent by a GPU in a step", ("part", "bytes"), _rows(step.traffic, "B")), Text(),
        table("Time of a step", ("part", "seconds"), timed),
        Text(f"{between}: with messages by {speed} during operations, or after them; {rate}", style="bold"), Text(),
        *(Text(line, style="dim") for line in (constants, *step.notes)),
    ]  # fmt: skip


__all__ = ["Estimated", "RunLook", "estimate", "tables"]
