"""One update's loss and gradient, in equal parts of the batch."""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.models import LanguageModel
from zonal.tasks.task import Batch


class Part(NamedTuple):
    """Rows of a batch on the device that runs them, and how many of their positions are supervised."""

    tokens: Tensor
    targets: Tensor
    count: int


def split(batch: Batch, accumulate: int, device: torch.device) -> list[Part]:
    """The batch in ``accumulate`` equal parts. Raises ArgumentError when no position is supervised."""
    counts = [int((targets != -100).sum()) for targets in batch.targets.chunk(accumulate)]
    if not sum(counts):
        raise ArgumentError(
            "train: the batch has no supervised position (every target is -100), so there is nothing to learn from."
        )
    rows = batch.tokens.shape[0]
    if rows % accumulate:
        raise ArgumentError(f"train: accumulate={accumulate} must divide the rows of the batch, got {rows}.")
    # counted before they are moved: on a GPU each count would wait for the device
    return [
        Part(tokens.to(device), targets.to(device), count)
        for tokens, targets, count in zip(
            batch.tokens.chunk(accumulate), batch.targets.chunk(accumulate), counts, strict=True
        )
    ]


def autocast(device: torch.device, dtype: str) -> contextlib.AbstractContextManager[object]:
    """bfloat16 autocast where ``dtype`` asks for it."""
    return torch.autocast(device.type, torch.bfloat16) if dtype == "bfloat16" else contextlib.nullcontext()


def forward_backward(model: LanguageModel, parts: Sequence[Part], dtype: str) -> float:
    """Gradient of (Σ over parts of summed losses) / (Σ of their counts) into ``.grad``; returns that loss.

    The count of the whole batch divides every part, so the parts together give the gradient of the batch in one piece,
    even where parts have different numbers of supervised positions.
    """
    device = parts[0].tokens.device
    count = sum(part.count for part in parts)
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in parts:
        with autocast(device, dtype):
            loss, _ = model.loss(part.tokens, part.targets)
        scaled = loss / count
        scaled.backward()
        total += scaled.detach()
    return float(total)


def clip_gradient(model: nn.Module, limit: float | None) -> float:
    """Global 2-norm of the gradient; scales it down to ``limit`` when it is larger."""
    if limit is None:
        norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None])
    else:
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    # of a model in shards the norm is one, too
    return float(getattr(norm, "full_tensor", lambda: norm)())
