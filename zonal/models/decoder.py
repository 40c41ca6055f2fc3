"""Decoding with a model: the decoders of its layers."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zonal.models.memory import ModelMemory
from zonal.nn.memory import Past


class Reader(Protocol):
    """A function that reads tokens (B, T) after the pasts of all layers. It returns logits (B, T, V), or (B, 1, V) with
    last_only, and the new pasts.
    """

    def __call__(
        self, tokens: Tensor, before: Sequence[Past], key_padding_mask: Tensor | None, *, last_only: bool
    ) -> tuple[Tensor, Sequence[Past]]: ...


class ModelDecoder:
    """Decodes with a model in place: ``logits = decoder.step(tokens)``, and ``decoder.memory()`` at the end.

    Made by ``CausalLM.decoder``.
    """

    def __init__(self, reader: Reader, memory: ModelMemory) -> None:
        self._reader, self._origin = reader, memory.origin
        self._layers: Sequence[Past] = tuple(layer.decoder() for layer in memory.layers)

    @torch.no_grad()
    def step(self, tokens: Tensor, *, key_padding_mask: Tensor | None = None, last_only: bool = False) -> Tensor:
        """Read tokens (B, T), without gradients. key_padding_mask: bool (B, T), True for a real token.

        Returns: logits (B, T, V), or (B, 1, V) with ``last_only``.
        """
        logits, self._layers = self._reader(tokens, self._layers, key_padding_mask, last_only=last_only)
        return logits

    def memory(self) -> ModelMemory:
        """The memory of all tokens so far. Later steps do not change it."""
        return ModelMemory(tuple(layer.value() for layer in self._layers), self._origin)

    def gather(self, index: Sequence[int] | Tensor) -> "ModelDecoder":
        """A decoder of the sequences ``index``, in this order. Rows may be left out or repeated. This decoder does not
        change.
        """
        return ModelDecoder(self._reader, self.memory().gather(index))

    def fork(self) -> "ModelDecoder":
        """A second decoder with the same past, independent of this one."""
        return ModelDecoder(self._reader, self.memory())


__all__ = ["ModelDecoder"]
