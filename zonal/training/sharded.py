"""A run on the ranks of torchrun. Batches are split over a data mesh and sequences over a sequence mesh; parameters,
gradients and optimiser lie in equal parts on all ranks (FSDP2).

Losses, gradients and metrics are those of one process, to rounding. A batch is a function of the step and the seed:
each rank makes it and takes its rows and its stretch of them, so the step is the position in the data on any number of
ranks.
"""

import contextlib
import datetime
import functools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

from zonal.distributed import sequence_parallel
from zonal.errors import ArgumentError, FileFormatError, ZonalError
from zonal.evaluation.metrics import Predict
from zonal.models import LanguageModel, language_model
from zonal.models.parts import Predictions
from zonal.tasks import Text
from zonal.tasks.task import IGNORED, Batch, Task
from zonal.training import checkpoint as checkpoints
from zonal.training import shards
from zonal.training.checkpoint import Progress
from zonal.training.config import TrainConfig
from zonal.training.processes import OneProcess, Written, recompute_blocks
from zonal.training.step import autocast, split

_PATIENCE = datetime.timedelta(seconds=5)


class OtherProcessError(ZonalError):
    """Another process of the run has failed, and says why."""


def launched() -> bool:
    """Whether torchrun started this process."""
    return dist.is_available() and dist.is_torchelastic_launched()


def _told_by_first(error: ZonalError) -> bool:
    """Whether the first process tells this error, too."""
    store, key = dist.distributed_c10d._get_default_store(), "zonal error"
    if dist.get_rank() == 0:
        store.set(key, str(error))
        return False
    try:
        store.wait([key], _PATIENCE)
    except RuntimeError:  # it has met none
        return False
    return store.get(key).decode() == str(error)


@contextlib.contextmanager
def several_processes(
    *, sequence: int = 1, device: str = "cpu", recompute: bool = False
) -> Iterator["SeveralProcesses"]:
    """The ranks of torchrun, for ``train(processes=…)``.

    sequence: ranks that hold one sequence together, neighbours in rank; a divisor of their number. device: cpu (gloo)
    or cuda (NCCL, a GPU for each rank of a machine). recompute: compute the activations of each block again in the
    backward pass.

    Raises: ArgumentError where the number of processes or the devices do not fit. OtherProcessError on all
    processes but the first, where that fails with the same words.
    """
    local, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    on_gpu = device == "cuda" and local < count
    if on_gpu:
        torch.cuda.set_device(local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        if not on_gpu and device != "cpu":
            raise ArgumentError(
                "train: several processes run on --device cpu, or on --device cuda with a GPU for each; received "
                f"{device!r}, and this machine offers {count} GPUs."
            )
        with contextlib.closing(SeveralProcesses(sequence, torch.device(device), recompute)) as processes:
            yield processes
    except ZonalError as error:
        if not isinstance(error, OtherProcessError) and _told_by_first(error):
            raise OtherProcessError(f"train: the first process has failed: {error}") from error
        raise
    finally:
        dist.destroy_process_group()


class SeveralProcesses:
    """The methods of ``OneProcess``, which describes them. data: parts of a batch. sequence: parts of a sequence."""

    whole_files = False

    def __init__(self, sequence: int, device: torch.device, recompute: bool) -> None:
        self.size, self.writes = dist.get_world_size(), dist.get_rank() == 0
        if self.size % sequence:
            raise ArgumentError(
                f"train: --sequence-parallel {sequence} must divide the number of processes, which is {self.size}. "
                "Start a multiple of it with torchrun, or choose a divisor."
            )
        self.data, self.sequence, self._recompute = self.size // sequence, sequence, recompute
        self.device = torch.device(device.type, torch.cuda.current_device()) if device.type == "cuda" else device
        self.mesh = init_device_mesh(device.type, (self.data, sequence), mesh_dim_names=("data", "sequence"))
        self._row = self.mesh["data"].get_local_rank()
        self._everyone = init_device_mesh(device.type, (self.size,))
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        self._files = group
        self._writer: shards.Writer | None = None
        self.bytes_sent = 0
        """Of keys, values and memories, between the ranks of a sequence."""

    def close(self) -> None:
        """Let a checkpoint that was begun end."""
        if self._writer is not None:
            self._writer.close()

    # --- agreement --------------------------------------------------------------------------------------------------

    def any(self, here: bool) -> bool:
        return bool(self._reduced(torch.tensor(here, dtype=torch.int32), dist.ReduceOp.MAX))

    def _reduced(self, x: Tensor, how: Any = dist.ReduceOp.SUM) -> Tensor:
        x = x.to(self.device, copy=True)
        dist.all_reduce(x, how)
        return x

    def first(self, call: Callable[[], object]) -> None:
        self._together(call if self.writes else lambda: None)

    def _together(self, call: Callable[[], object]) -> None:
        """Run ``call``, which sends nothing. Where it fails on one process, all raise."""
        failed = None
        try:
            call()
        except (ZonalError, OSError) as error:
            failed = error
        if self.any(failed is not None):
            raise failed or OtherProcessError("train: another process has failed, and says why.")

    # --- the model --------------------------------------------------------------------------------------------------

    def prepare(self, model: LanguageModel, task: Task, config: TrainConfig) -> torch.device:
        self._check(model, task, config)
        # imported here: it takes most of a second, which other commands should not wait
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

        if self._recompute:
            recompute_blocks(model)
        # blocks are gathered as autocast would round them; what they compute, and the sums of gradients, stay wider
        policy = MixedPrecisionPolicy()
        if config.dtype == "bfloat16":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for block in model.blocks:
            fully_shard(block, mesh=self._everyone, mp_policy=policy)
        fully_shard(model, mesh=self._everyone)
        for name in ("loss", "predict"):
            register_fsdp_forward_method(model, name)
        return self.device

    def _check(self, model: LanguageModel, task: Task, config: TrainConfig) -> None:
        """Raises: ArgumentError for a run that cannot be spread over these processes."""
        parts = self.data * config.accumulate
        if not isinstance(task, Text):
            raise ArgumentError(
                f"train: several processes train on text, and the task of this recipe is {task.name}. Use --task text, "
                "or one process."
            )
        if config.batch_size % parts:
            raise ArgumentError(
                f"train: --batch-size {config.batch_size} must be a multiple of {parts}, the {self.data} parts of a "
                f"batch on {self.size} processes times --accumulate {config.accumulate}. Choose another batch, or "
                "another number of processes."
            )
        if task.length < self.sequence:
            raise ArgumentError(
                f"train: --sequence-parallel {self.sequence} needs as many tokens per sequence, and --length is "
                f"{task.length}. Choose longer sequences, or fewer processes for each."
            )
        if self.sequence > 1 and not model.config.causal:
            raise ArgumentError(
                "train: --sequence-parallel is for models in which tokens see earlier ones, and in this one every "
                "token sees all. Leave it out."
            )
        if config.curriculum is not None:
            raise ArgumentError("train: --curriculum runs in one process. Leave it out, or start without torchrun.")

    def bytes(self, model: LanguageModel) -> int:
        return sum(_local(value).nbytes for value in model.state_dict().values())

    def whole(self, model: LanguageModel) -> LanguageModel | None:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(model, options=options)
        if not self.writes:
            return None
        made = language_model(model.config, seed=0).to(next(model.parameters()).dtype)
        made.load_state_dict(weights)
        return made

    # --- a step -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _sharing(self) -> Iterator[Callable[[Tensor], Tensor]]:
        """A block for calls of the model, and the function that takes this rank's stretch of rows."""
        if self.sequence == 1:
            yield lambda x: x.to(self.device)
            return
        with sequence_parallel(self.mesh["sequence"]) as parallel:
            yield lambda x: parallel.shard(x).to(self.device)
        self.bytes_sent += parallel.bytes_sent

    def warm_up(self, model: LanguageModel, batch: Batch, config: TrainConfig) -> None:
        """Nothing: a sequence may be too long for one rank."""

    def gradient(self, model: LanguageModel, batch: Batch, config: TrainConfig) -> float:
        count = split(batch, 1, batch.tokens.device)[0].count
        model.zero_grad(set_to_none=True)
        own = [x.chunk(self.data)[self._row].chunk(config.accumulate) for x in (batch.tokens, batch.targets)]
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for tokens, targets in zip(*own, strict=True):
            with self._sharing() as share:
                with autocast(self.device, config.dtype):
                    loss, _ = model.loss(share(tokens), share(targets))
                (loss * (self.size / count)).backward()  # FSDP takes the mean over ranks of what is a sum here
            total += loss.detach()
        return float(self._reduced(total)) / count

    def locate(self, model: LanguageModel, batch: Batch, config: TrainConfig, *, backward: bool) -> str:
        return "several processes do not look for the layer"

    def predictor(self, model: LanguageModel) -> Predict:
        return functools.partial(self._predictions, model)

    def _predictions(
        self, model: LanguageModel, tokens: Tensor, targets: Tensor, *, piece: int | None = None
    ) -> Predictions:
        """Those of whole rows, of which each rank predicts a part, whatever ``piece`` is."""
        rows, length = targets.shape
        each = -(-rows // self.data)
        # where rows run out, a rank predicts the last one again, as all must make the same calls
        own = torch.arange(self.data * each).clamp_max(rows - 1).chunk(self.data)[self._row].to(targets.device)
        with self._sharing() as share:
            asked = share(targets[own])
            found = model.predict(share(tokens[own]), asked)
        places = asked != IGNORED
        predicted, loss = torch.zeros_like(asked), torch.zeros_like(asked, dtype=found.loss.dtype)
        predicted[places], loss[places] = found.predicted, found.loss
        wanted = (targets != IGNORED).to(self.device)
        whole = [self._gathered(x, length)[:rows][wanted] for x in (predicted, loss)]
        return Predictions(whole[0], targets.to(self.device)[wanted], wanted.nonzero()[:, 0], whole[1])

    def _gathered(self, x: Tensor, length: int) -> Tensor:
        """Rows of ``length`` from the parts (rows, tokens) of all ranks."""
        sizes = [len(part) for part in torch.arange(length).tensor_split(self.sequence)]
        padded = F.pad(x, (0, sizes[0] - x.shape[1]))
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        grid = torch.stack(parts).unflatten(0, (self.data, self.sequence))
        return torch.cat([grid[:, i, :, :size].flatten(0, 1) for i, size in enumerate(sizes)], 1)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def begun(self, folder: Path) -> bool:
        found = shards.newest(folder)
        step = torch.tensor(-1 if found is None else int(found.name[5:15]), dtype=torch.int64)
        if int(self._reduced(step, dist.ReduceOp.MAX)) != int(self._reduced(step, dist.ReduceOp.MIN)):
            raise ArgumentError(
                f"train: not all processes see the same checkpoints in {folder}. Use a folder that all machines share."
            )
        if found is None and (folder / checkpoints.FILE).exists():
            raise ArgumentError(
                f"train: {folder} holds a run of one process. Go on without torchrun, or choose another folder."
            )
        return found is not None

    def restore(
        self, folder: Path, model: LanguageModel, optimiser: Optimizer, config: dict[str, Any]
    ) -> tuple[Progress, dict[str, Tensor]]:
        path = shards.newest(folder)
        assert path is not None
        progress, files = shards.read_index(path, config)
        self._together(lambda: shards.check(path, files, dist.get_rank(), self.size))
        for parameter in model.parameters():
            if parameter.requires_grad:
                step = torch.zeros((), dtype=torch.float32, device=self.device)
                moments = {name: torch.zeros_like(parameter).detach() for name in ("exp_avg", "exp_avg_sq")}
                optimiser.state[parameter] = {"step": step, **moments}
        state = checkpoints.state_of(model, optimiser)
        shards.load(path, state, self._files)
        if self.any(any(x.is_floating_point() and not bool(_local(x).isfinite().all()) for x in state.values())):
            raise FileFormatError(
                f"train: {path} does not fit: it holds NaN or infinity. Remove it to go on from the one before."
            )
        return progress, {}

    def save(
        self, folder: Path, model: LanguageModel, optimiser: Optimizer, progress: Progress, config: dict[str, Any]
    ) -> list[Written]:
        if self._writer is None:
            self.first(lambda: shards.prepare(folder))
            self._writer = shards.Writer(folder, self._files)
        written = self._writer.settle()
        self._writer.begin(checkpoints.state_of(model, optimiser), progress, config)
        return written

    def settle(self) -> list[Written]:
        return [] if self._writer is None else self._writer.settle()


def _local(x: Tensor) -> Tensor:
    """The part of a tensor that this process holds."""
    from torch.distributed.tensor import DTensor

    return x.to_local() if isinstance(x, DTensor) else x


Processes = OneProcess | SeveralProcesses
"""How a run is spread over processes. All of them make the same calls."""

__all__ = ["OtherProcessError", "Processes", "SeveralProcesses", "launched", "several_processes"]
