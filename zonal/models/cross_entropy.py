"""Cross-entropy from hidden states, without storing all logits."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zonal.errors import ArgumentError
from zonal.nn.norm import accumulation_dtype

# one buffer of logits; a bfloat16 head adds its product and its gradient of half that size each: 64 MiB in all
_CHUNK_BYTES = 32 * 2**20


def chunk_rows(vocab_size: int, dtype: torch.dtype = torch.float32) -> int:
    """How many rows of logits are held at once."""
    return max(1, _CHUNK_BYTES // (vocab_size * dtype.itemsize))


def _chunks(hidden: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """For each chunk of rows its place and its logits, float32 or better, all in one buffer that the caller may
    overwrite.
    """
    dtype = accumulation_dtype(hidden.dtype)
    rows = min(chunk_rows(weight.shape[0], dtype), hidden.shape[0])
    buffer = torch.empty(rows, weight.shape[0], dtype=dtype, device=hidden.device)
    for start in range(0, hidden.shape[0], max(rows, 1)):
        place = slice(start, min(start + rows, hidden.shape[0]))
        logits = buffer[: place.stop - place.start]
        if dtype == hidden.dtype:
            torch.mm(hidden[place], weight.t(), out=logits)
        else:
            logits.copy_(hidden[place] @ weight.t())
        yield place, logits


def _normalise_(logits: Tensor, targets: Tensor) -> Tensor:
    """Turn logits (n, V) into probabilities in place; returns the loss of each row (n,)."""
    top = logits.amax(dim=1, keepdim=True)
    wanted = logits.gather(1, targets[:, None])
    mass = logits.sub_(top).exp_().sum(dim=1, keepdim=True)
    logits.div_(mass)
    return (mass.log() + top - wanted).squeeze(1)


class _CrossEntropySum(torch.autograd.Function):
    """The gradient is (softmax − one-hot), linear in the incoming scalar: it is formed while the logits are there, and
    only scaled later.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        wants_hidden, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        grad_hidden = torch.empty_like(hidden) if wants_hidden else None
        # summed over chunks, hence float32 or better even for a bfloat16 head
        grad_weight = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype)) if wants_weight else None
        total = torch.zeros((), dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
        for place, logits in _chunks(hidden, weight):
            total += _normalise_(logits, targets[place]).sum()
            if grad_hidden is None and grad_weight is None:
                continue
            logits.scatter_add_(1, targets[place, None], logits.new_full((logits.shape[0], 1), -1.0))
            slope = logits.to(hidden.dtype)
            if grad_hidden is not None:
                grad_hidden[place] = slope @ weight
            if grad_weight is not None and slope.dtype == grad_weight.dtype:
                grad_weight.addmm_(slope.t(), hidden[place])
            elif grad_weight is not None:
                grad_weight += slope.t() @ hidden[place]
        ctx.save_for_backward(grad_hidden, None if grad_weight is None else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if torch.is_grad_enabled():
            # with create_graph the second derivative would be silently zero, which once_differentiable does not catch
            raise ArgumentError(
                "cross_entropy_sum: it is differentiable once; create_graph=True needs "
                "torch.nn.functional.cross_entropy on model(tokens)."
            )
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = grad_outputs[0]
        return (
            None if grad_hidden is None else grad_hidden * scale.to(grad_hidden.dtype),
            None if grad_weight is None else grad_weight * scale.to(grad_weight.dtype),
            None,
        )


def cross_entropy_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Σ_n −log softmax(W h_n)[t_n] in nats.

    Logits are computed for one chunk of rows at a time (64 MiB with their gradient, for any N and V), in float32 or
    better. Under autocast the product W h runs in the autocast dtype. Only first derivatives are supported.

    Args:
        hidden: h (N, D).
        weight: W (V, D).
        targets: t (N,), in [0, V).

    Returns: a scalar, float32 or better. N = 0 gives 0.

    Raises:
        ArgumentError: a second derivative is asked for.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    with torch.autocast(kind, enabled=False):
        return _CrossEntropySum.apply(hidden, weight.to(hidden.dtype), targets)


@torch.no_grad()
def predict_rows(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely token and the loss of each row, computed in the same chunks.

    Args: as in ``cross_entropy_sum``.

    Returns: predicted (N,), and loss (N,) in nats, float32 or better.
    """
    predicted = torch.empty_like(targets)
    loss = torch.empty(targets.shape, dtype=accumulation_dtype(hidden.dtype), device=hidden.device)
    for place, logits in _chunks(hidden, weight.to(hidden.dtype)):
        predicted[place] = logits.argmax(dim=1)
        loss[place] = _normalise_(logits, targets[place])
    return predicted, loss
