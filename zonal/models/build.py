"""Builds a model from its config and a seed, if its weights fit into memory."""

import dataclasses
from collections import Counter
from collections.abc import Callable

import torch
from torch import nn

from zonal import device_memory
from zonal.errors import ArgumentError
from zonal.models.causal_lm import CausalLM
from zonal.models.config import ModelConfig
from zonal.models.parts import LanguageModel
from zonal.models.text_encoder import TextEncoder
from zonal.names import known_names


@known_names
def build(config: ModelConfig, seed: int) -> CausalLM:
    """A causal model whose initial weights depend only on (config, seed).

    Each weight is drawn from a stream seeded by SHA-256 of (seed, qualified name), so two configs that differ in
    operators share all weights of equal name and shape. Random features of operators follow the seed; other learned
    parameters of operators start at their declared values. torch's global generator is not used.

    Raises:
        ArgumentError: sizes do not fit.
        InsufficientMemoryError: the weights do not fit into memory. It is raised before any memory is allocated.
    """
    model = language_model(config, seed)
    if not isinstance(model, CausalLM):
        raise ArgumentError("build: a config with causal=True is required. language_model takes both kinds.")
    return model


@known_names
def language_model(config: ModelConfig, seed: int) -> LanguageModel:
    """The model of a config, a ``CausalLM`` or with ``causal=False`` a ``TextEncoder``; otherwise as ``build``."""
    with torch.random.fork_rng(devices=[]):
        device_memory.require(
            "build",
            f"the weights of a model of {len(config.layers)} layers of width {config.dim}",
            _weight_bytes(config),
            "cpu",
            "Ask for a smaller model.",
        )
        torch.manual_seed(seed)
        model = class_of(config)(config)
    model.reset_parameters(seed)
    return model


def class_of(config: ModelConfig) -> Callable[[ModelConfig], LanguageModel]:
    """The class of the model."""
    return CausalLM if config.causal else TextEncoder


def _weight_bytes(config: ModelConfig) -> int:
    """Bytes of all weights, laid out without memory for them, each kind of layer once."""
    kinds = Counter(zip(config.layers, config.conv_widths, strict=True))
    with torch.device("meta"):
        model = class_of(config)(
            dataclasses.replace(
                config, layers=tuple(spec for spec, _ in kinds), conv=tuple(width for _, width in kinds)
            )
        )
    layers = sum(times * _bytes(block) for block, times in zip(model.blocks, kinds.values(), strict=True))
    return _bytes(model.embedding) + layers + (0 if model.head is None else _bytes(model.head))


def _bytes(module: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in module.state_dict().values())
