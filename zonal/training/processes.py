"""A run in one process. ``zonal.training.sharded`` has the same methods for the ranks of torchrun; the training loop
calls either.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint as recomputed

from zonal.errors import ArgumentError
from zonal.evaluation.metrics import Predict
from zonal.models import LanguageModel
from zonal.tasks.task import Batch, Task
from zonal.training import checkpoint as checkpoints
from zonal.training.checkpoint import Progress
from zonal.training.config import TrainConfig
from zonal.training.diagnose import locate_non_finite
from zonal.training.step import autocast, forward_backward, split

SHARDS = "checkpoints"
"""The folder of a run with the checkpoints of several processes."""


class Written(NamedTuple):
    """A checkpoint that is in place."""

    step: int
    path: Path


class OneProcess:
    """A run that this process has to itself.

    recompute: compute the activations of each block again in the backward pass. size: the number of processes. writes:
    whether this one writes the log and the records. whole_files: whether a checkpoint is one file with the whole model.
    """

    size, writes, whole_files = 1, True, True

    def __init__(self, *, recompute: bool = False) -> None:
        self._recompute = recompute

    def prepare(self, model: LanguageModel, task: Task, config: TrainConfig) -> torch.device:
        """Make the model ready, before its optimiser is made; returns the device that runs it. Raises: ArgumentError
        for a run that these processes cannot share.
        """
        if self._recompute:
            recompute_blocks(model)
        return next(model.parameters()).device

    def first(self, call: Callable[[], object]) -> None:
        """Run ``call`` on the process that writes. Where it fails, all processes raise."""
        call()

    def any(self, here: bool) -> bool:
        """Whether ``here`` is true on any process."""
        return here

    def warm_up(self, model: LanguageModel, batch: Batch, config: TrainConfig) -> None:
        """One sequence there and back, thrown away: data made lazily, thread pools and libraries' buffers must not
        count as memory of the run that happens to come first.
        """
        device = next(model.parameters()).device
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), autocast(device, config.dtype):
            loss, count = model.loss(batch.tokens[:1].to(device), batch.targets[:1].to(device))
        (loss / max(1, int(count))).backward()
        model.zero_grad(set_to_none=True)

    def gradient(self, model: LanguageModel, batch: Batch, config: TrainConfig) -> float:
        """Gradient of the mean loss of the batch into ``.grad``; returns that loss."""
        parts = split(batch, config.accumulate, next(model.parameters()).device)
        return forward_backward(model, parts, config.dtype)

    def locate(self, model: LanguageModel, batch: Batch, config: TrainConfig, *, backward: bool) -> str:
        """Where NaN or infinity first appears."""
        parts = split(batch, config.accumulate, next(model.parameters()).device)
        return locate_non_finite(model, parts, config.dtype, backward=backward)

    def predictor(self, model: LanguageModel) -> Predict:
        """What predicts whole batches, with the same result on all processes."""
        return model.predict

    def whole(self, model: LanguageModel) -> LanguageModel | None:
        """The model with all of its weights, on the process that writes; None on the others."""
        return model

    def bytes(self, model: LanguageModel) -> int:
        """Bytes of the weights that this process holds."""
        return sum(value.numel() * value.element_size() for value in model.state_dict().values())

    def begun(self, folder: Path) -> bool:
        """Whether there is a checkpoint. Raises: ArgumentError where it is of another kind of run."""
        if (folder / SHARDS).is_dir():
            raise ArgumentError(
                f"train: {folder} holds a run of several processes. Go on with `torchrun --nproc-per-node N -m zonal "
                "train …`, where N may be 1, or choose another folder."
            )
        return (folder / checkpoints.FILE).exists()

    def restore(
        self, folder: Path, model: LanguageModel, optimiser: Optimizer, config: dict[str, Any]
    ) -> tuple[Progress, dict[str, torch.Tensor]]:
        """Read the last checkpoint into model and optimiser; returns what ``load_checkpoint`` does, without random
        states where the run's seed gives them. Raises: FileFormatError.
        """
        return checkpoints.load_checkpoint(folder / checkpoints.FILE, model, optimiser, config)

    def save(
        self, folder: Path, model: LanguageModel, optimiser: Optimizer, progress: Progress, config: dict[str, Any]
    ) -> list[Written]:
        """Write a checkpoint, or begin to; returns those that have come into place."""
        path = folder / checkpoints.FILE
        checkpoints.save_checkpoint(path, model, optimiser, progress, config)
        return [Written(progress.step, path)]

    def settle(self) -> list[Written]:
        """Wait until checkpoints that were begun are in place, and return them."""
        return []


def recompute_blocks(model: LanguageModel) -> None:
    """Keep the input of each block alone for the backward pass, which computes the block again."""
    for block in model.blocks:  # of the instance, so that hooks and names stay as they are
        block.forward = functools.partial(recomputed, block.forward, use_reentrant=False)
