"""Warnings for calls that can be run, and most likely mean something else: another library's mask or order of axes."""

import warnings

import torch
from torch import Tensor

from zonal.kernels import transforms

# no published model has more in one layer
_MOST_HEADS = 128
_CALLER = 4  # frames above: advise, attention, the check of names


def advise(q: Tensor, k: Tensor, key_padding_mask: Tensor | None, *, from_start: bool) -> None:
    """Warn when a mask hides every key of a sequence, and when the head and token axes look swapped.

    from_start: no memory precedes the call, and no masses of queries are given. Nothing is checked inside a graph or on
    a GPU, where the check would have to wait for the device. After a memory, a sequence may have no new keys while
    others of its batch continue, so nothing is said then. Axes look swapped when there are more than 128 heads, two
    tokens or more, and at least four heads per token.
    """
    if not from_start or torch.compiler.is_compiling() or transforms.active() or q.ndim != 4 or k.ndim != 4:
        return
    heads, tokens = q.shape[1], q.shape[2]
    if heads > _MOST_HEADS and heads >= 4 * tokens > 4 and k.shape[1] > _MOST_HEADS:
        warnings.warn(
            f"attention: q has {heads} heads of {tokens} tokens each, as its axes are (batch, heads, tokens, dim). "
            "For tensors of (batch, tokens, heads, dim) "
            "pass q.transpose(1, 2), and k and v likewise.",
            stacklevel=_CALLER,
        )
    mask = key_padding_mask
    if (
        mask is not None
        and mask.device.type == "cpu"
        and mask.dtype == torch.bool
        and mask.ndim == 2
        and tokens
        and mask.numel()
    ):
        hidden = int((~mask.any(1)).sum())
        if hidden:
            warnings.warn(
                f"attention: key_padding_mask hides every key of {hidden} of {len(mask)} sequences, "
                "whose output is zero. True marks real tokens here; torch's "
                "key_padding_mask marks padding with True: pass its opposite, ~key_padding_mask.",
                stacklevel=_CALLER,
            )


__all__ = ["advise"]
