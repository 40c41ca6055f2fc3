"""Weights on keys, z_t <- w_t z_t: which tokens are stored at all (an action mask), and how strongly (a gate)."""

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.errors import ArgumentError
from zonal.typed import check_tensors


def weighs_keys(operator: Operator) -> bool:
    """Whether the operator has keys that a gate or an action mask can weigh: a ridge read-out of the plain product."""
    return operator.anchor.solves and operator.score.plain and operator.link.linear


def check_weights(
    call: str,
    operator: Operator,
    shape: tuple[int, int, int],
    action_mask: Tensor | None,
    key_gate: Tensor | None,
    real: Tensor | None,
    whole: bool,
) -> None:
    """Raise ArgumentError, beginning with ``call``, unless the weights fit keys of (batch, key heads, tokens).

    real: the padding mask. whole: these are all tokens of the sequences; of several at least one must be stored. A
    piece of a longer text may store none.
    """
    batch, _, tokens = shape
    check_tensors(call, {"action_mask": action_mask, "key_gate": key_gate}, optional=True)
    for name, given in (("action_mask", action_mask), ("key_gate", key_gate)):
        if given is not None and not weighs_keys(operator):
            raise ArgumentError(
                f"{call}: {name} weighs the keys of ridge and Koopman read-outs of the plain product "
                f"(mechanisms.ridge, ska), and operator {operator.name!r} "
                f"is none; leave it out, or hide tokens with key_padding_mask."
            )
    if key_gate is not None and (tuple(key_gate.shape) != shape or not key_gate.dtype.is_floating_point):
        raise ArgumentError(
            f"{call}: key_gate must be floating, of shape (batch, key heads, tokens) = {shape}, received "
            f"{key_gate.dtype} of shape {tuple(key_gate.shape)}."
        )
    if action_mask is None:
        return
    if action_mask.dtype != torch.bool or tuple(action_mask.shape) != (batch, tokens):
        raise ArgumentError(
            f"{call}: action_mask must be bool of shape (batch, tokens) = {(batch, tokens)} with True for tokens that "
            f"are stored, received {action_mask.dtype} of shape {tuple(action_mask.shape)}."
        )
    if not whole or tokens < 2 or torch.compiler.is_compiling():  # a graph has no answers that depend on values
        return
    stored = (action_mask if real is None else action_mask & real).any(-1)
    if not bool(stored.all()):
        row = int((~stored).nonzero()[0])
        raise ArgumentError(
            f"{call}: action_mask stores no token of sequence {row}, so every read-out of it is zero. Store at least "
            "one, or leave the mask out."
        )


def weighed(k: Tensor, v: Tensor, action_mask: Tensor | None, key_gate: Tensor | None) -> tuple[Tensor, Tensor]:
    """Prepared keys with their weights, and values without what is not stored, whatever it holds."""
    if key_gate is not None:
        k = k * key_gate.to(k.dtype).unsqueeze(-1)
    if action_mask is not None:
        silent = ~action_mask[:, None, :, None]
        k, v = k.masked_fill(silent, 0), v.masked_fill(silent, 0)
    return k, v


__all__ = ["check_weights", "weighed", "weighs_keys"]
