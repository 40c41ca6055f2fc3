"""Cross-entropy from hidden states, without ever holding all logits."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zonal.nn.norm import accumulation_dtype

# one chunk of logits and its softmax gradient live side by side: 64 MiB in all
_CHUNK_BYTES = 32 * 2**20


def chunk_rows(vocab_size: int, dtype: torch.dtype = torch.float32) -> int:
    """How many rows of logits are held at once."""
    return max(1, _CHUNK_BYTES // (vocab_size * dtype.itemsize))


def _logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """hidden (n, D), weight (V, D) -> logits (n, V), float32 or better."""
    return (hidden @ weight.t()).to(accumulation_dtype(hidden.dtype))


def _chunks(hidden: Tensor, weight: Tensor, targets: Tensor) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """For each chunk of rows: its place, logits, log of their sum of exponentials, and the logits of the targets."""
    rows = chunk_rows(weight.shape[0], accumulation_dtype(hidden.dtype))
    for start in range(0, hidden.shape[0], rows):
        place = slice(start, min(start + rows, hidden.shape[0]))
        logits = _logits(hidden[place], weight)
        yield place, logits, logits.logsumexp(dim=1), logits.gather(1, targets[place, None]).squeeze(1)


class _CrossEntropySum(torch.autograd.Function):
    """The gradient is (softmax − one-hot), linear in the incoming scalar: it is formed while the logits are there, and only scaled later."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # summed over chunks, hence float32 or better even for a bfloat16 head
        grad_weight = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype)) if wants_weight else None
        total = torch.zeros((), dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
        for place, logits, log_sum, target_logits in _chunks(hidden, weight, targets):
            total += (log_sum - target_logits).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            slope = logits.sub_(log_sum[:, None]).exp_()
            slope.scatter_add_(1, targets[place, None], slope.new_full((slope.shape[0], 1), -1.0))
            slope = slope.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[place] = slope @ weight
            if grad_weight is not None:
                grad_weight += slope.t() @ hidden[place]
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]
        return (
            None if grad_hidden is None else grad_hidden * scale.to(grad_hidden.dtype),
            None if grad_weight is None else grad_weight * scale.to(grad_weight.dtype),
            None,
        )


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Σ_n −log softmax(W h_n)[t_n].

    Logits exist for one chunk of rows at a time (64 MiB with their gradient, whatever N and V), in float32 or better. Under
    autocast the product W h runs in the autocast dtype. Differentiable once.

    Args:
        hidden: (N, D).
        weight: (V, D).
        targets: (N,), all in [0, V).

    Returns: a scalar, float32 or better. N = 0 gives 0.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(kind, enabled=False):
        result = _CrossEntropySum.apply(hidden, weight.to(hidden.dtype), targets)
    assert isinstance(result, Tensor)
    return result


@torch.no_grad()
def predict_rows(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token and the loss of each row, by the same chunks.

    Args: as ``cross_entropy_sum``.

    Returns: predicted (N,) and loss (N,), float32 or better.
    """
    predicted = torch.empty_like(targets)
    loss = torch.empty(targets.shape, dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
    for place, logits, log_sum, target_logits in _chunks(hidden, weight.to(hidden.dtype), targets):
        predicted[place] = logits.argmax(dim=1)
        loss[place] = log_sum - target_logits
    return predicted, loss
