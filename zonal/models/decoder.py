"""Decoding with a model: the decoders of its layers."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from zonal.models.memory import ModelMemory
from zonal.nn.memory import LayerDecoder, Past


class Reader(Protocol):
    """What reads tokens (B, T) after what each layer goes on from: logits (B, T, V), or (B, 1, V) with last_only, and
    the same after them.
    """

    def __call__(
        self, tokens: Tensor, before: Sequence[Past], key_padding_mask: Tensor | None, *, last_only: bool
    ) -> tuple[Tensor, Sequence[Past]]: ...


class ModelDecoder:
    """A model that goes on from a memory token by token, in place: ``logits = decoder.step(tokens)``, ended by
    ``decoder.memory()``.

    Made by ``CausalLM.decoder``.
    """

    def __init__(self, reader: Reader, memory: ModelMemory) -> None:
        self._reader, self._origin = reader, memory.origin
        self._layers: Sequence[Past] = tuple(layer.decoder() for layer in memory.layers)

    @torch.no_grad()
    def step(self, tokens: Tensor, *, key_padding_mask: Tensor | None = None, last_only: bool = False) -> Tensor:
        """Read more tokens (B, T), without gradients: logits (B, T, V), or (B, 1, V) with ``last_only``.
        key_padding_mask: (B, T), True = real token.
        """
        logits, self._layers = self._reader(tokens, self._layers, key_padding_mask, last_only=last_only)
        return logits

    def memory(self) -> ModelMemory:
        """The memory of all tokens so far. Later steps do not change it."""
        layers = (layer.value() if isinstance(layer, LayerDecoder) else layer for layer in self._layers)
        return ModelMemory(tuple(layers), self._origin)

    def gather(self, index: Sequence[int] | Tensor) -> "ModelDecoder":
        """A decoder of the sequences ``index``, in that order; a row may be left out, or come several times.

        This one stays.
        """
        return ModelDecoder(self._reader, self.memory().gather(index))

    def fork(self) -> "ModelDecoder":
        """A second decoder that goes on from here by itself."""
        return ModelDecoder(self._reader, self.memory())


__all__ = ["ModelDecoder"]
