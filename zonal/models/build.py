"""Builds a model from its config and a seed, if its weights fit into memory."""

import dataclasses
from collections import Counter

import torch
from torch import nn

from zonal import device_memory
from zonal.models.causal_lm import CausalLM
from zonal.models.config import ModelConfig
from zonal.names import known_names


@known_names
def build(config: ModelConfig, seed: int) -> CausalLM:
    """A model whose initial weights depend only on (config, seed).

    Each weight is drawn from a stream seeded by SHA-256 of (seed, qualified name), so two configs that differ in
    operators share all weights of equal name and shape. Random features of operators follow the seed; other learned
    parameters of operators start at their declared values. torch's global generator is not used.

    Raises:
        ArgumentError: sizes do not fit.
        InsufficientMemoryError: the weights do not fit into memory. It is raised before any memory is allocated.
    """
    with torch.random.fork_rng(devices=[]):
        device_memory.require(
            "build",
            f"the weights of a model of {len(config.layers)} layers of width {config.dim}",
            _weight_bytes(config),
            "cpu",
            "Ask for a smaller model.",
        )
        torch.manual_seed(seed)
        model = CausalLM(config)
    model.reset_parameters(seed)
    return model


def _weight_bytes(config: ModelConfig) -> int:
    """Bytes of all weights, laid out without memory for them, each kind of layer once."""
    kinds = Counter(zip(config.layers, config.conv_widths, strict=True))
    with torch.device("meta"):
        model = CausalLM(
            dataclasses.replace(
                config, layers=tuple(spec for spec, _ in kinds), conv=tuple(width for _, width in kinds)
            )
        )
    layers = sum(times * _bytes(block) for block, times in zip(model.blocks, kinds.values(), strict=True))
    return _bytes(model.embedding) + layers + (0 if model.head is None else _bytes(model.head))


def _bytes(module: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in module.state_dict().values())
