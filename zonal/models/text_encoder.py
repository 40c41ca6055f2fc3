"""An encoder of text, in which every layer sees the whole text, so anchors may couple queries, as plans do."""

import dataclasses

import torch
from torch import Tensor

from zonal.errors import ArgumentError
from zonal.models.config import ModelConfig
from zonal.models.layers import operators_in
from zonal.models.parts import LanguageModel
from zonal.names import known_names


@known_names
class TextEncoder(LanguageModel):
    """Embedding, residual blocks of bidirectional attention, norm, and an output head, tied to the embedding by
    default.

    Args:
        config: as of ``CausalLM``; ``causal`` becomes False. Layers must be operators, because recurrences and short
            convolutions read in one direction.
        seed: seed of the initial weights, each drawn from a stream named by its qualified name. None: torch's global
            generator.

    Raises:
        ArgumentError: a layer reads in one direction.
    """

    def __init__(self, config: ModelConfig, seed: int | None = None) -> None:
        one_way = [spec for spec in config.layers if operators_in(spec) != (spec,)]
        if one_way or any(config.conv_widths):
            raise ArgumentError(
                "TextEncoder: layers must see both ways, which "
                f"{one_way[0] if one_way else f'conv={config.conv}'} does not. Use operators such as 'softmax' "
                "or 'sinkhorn' in layers, and conv=0."
            )
        if config.silent_tokens:
            raise ArgumentError(
                "TextEncoder: silent_tokens are for causal models, whose memories they are kept out of. Leave them out."
            )
        super().__init__(dataclasses.replace(config, causal=False))
        self.reset_parameters(seed)

    def pooled(self, tokens: Tensor, *, key_padding_mask: Tensor | None = None, path: str = "auto") -> Tensor:
        """tokens (B, T) -> the mean over real tokens, (B, dim)."""
        x = self.hidden(tokens, key_padding_mask=key_padding_mask, path=path)
        if key_padding_mask is None:
            return x.mean(1)
        real = key_padding_mask[..., None]
        return torch.where(real, x, 0).sum(1) / real.sum(1).clamp_min(1)


__all__ = ["TextEncoder"]
