"""Diagnostics of ridge and Koopman read-outs, from their memories and from trained layers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.errors import ArgumentError
from zonal.evaluation.ridge_diagnostics import RidgeDiagnostics, diagnose, leverage
from zonal.memory import Memory
from zonal.memory.compact import statistics_of
from zonal.memory.whitened import WhitenedFeatures
from zonal.nn.attention import Attention


@dataclass(frozen=True)
class LayerDiagnostics:
    """The state of a layer after it has read its inputs.

    state: diagnostics of its sums, per sequence and key head, (B, Hkv).
    leverage: (B, Hkv, T), z A^-1 z for the key z of each token. Without fading their sum is ``state.used``; the fading
        that followed a token is not subtracted.
    lengths: (B, Hkv, T), |z| of the keys as they are stored, limited and gated.
    """

    state: RidgeDiagnostics
    leverage: Tensor
    lengths: Tensor


@torch.no_grad()
def of_memory(memory: Memory) -> RidgeDiagnostics:
    """The diagnostics of a memory of ridge statistics, fading or not. Tokens of an unfinished chunk are included.

    Raises:
        ArgumentError: the memory is of another kind.
    """
    gram, regular, shift = _sums(memory)
    return diagnose(gram, regular, shift)


def _sums(memory: Memory) -> tuple[Tensor, Tensor, Tensor | None]:
    """(G, G + the ridge, M)."""
    found = statistics_of(memory)
    if found is None:
        raise ArgumentError(
            "diagnostics: a memory of ridge statistics is required (of mechanisms.ridge or ska), received one "
            f"of kind {memory.kind!r}."
        )
    bound = memory.operator.bind(memory.form.heads, memory.form.heads)
    whole = found.settled()
    gram, _, shift, _ = whole.whitened(bound)
    return gram, whole.regularised(bound), shift


@torch.no_grad()
def of_layer(
    layer: Attention, x: Tensor, *, key_padding_mask: Tensor | None = None, action_mask: Tensor | None = None
) -> LayerDiagnostics:
    """The diagnostics of a layer after inputs x (B, T, dim). The masks are those of the layer.

    Raises:
        ArgumentError: the operator of the layer is not a ridge or Koopman read-out.
    """
    memory = layer(x, return_memory=True, key_padding_mask=key_padding_mask, action_mask=action_mask)[1].memory
    gram, regular, shift = _sums(memory)
    keys = layer.stored_keys(x, key_padding_mask=key_padding_mask, action_mask=action_mask)
    white = WhitenedFeatures.of(memory.operator.bind(memory.form.heads, memory.form.heads), memory.form.key_dim)
    if white is not None:
        keys = white.whitened(keys)
    return LayerDiagnostics(diagnose(gram, regular, shift), leverage(keys, regular), keys.norm(dim=-1))


__all__ = ["LayerDiagnostics", "of_layer", "of_memory"]
