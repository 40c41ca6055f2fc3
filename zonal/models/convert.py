"""Converts models of other libraries from their configs and weights. The other libraries are not imported."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zonal.errors import ArgumentError
from zonal.models.causal_lm import CausalLM
from zonal.models.config import ModelConfig
from zonal.nn import Mamba2
from zonal.store import unlike


def mamba2_from_transformers(config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> CausalLM:
    """The causal language model with the same logits as transformers' ``Mamba2ForCausalLM``.

    Args:
        config: its ``config.to_dict()``.
        weights: its ``state_dict()``.

    Raises:
        ArgumentError: a weight is missing or unknown, or a setting is not supported here; the message names it.
    """
    call = "models.mamba2_from_transformers"
    if config.get("hidden_act", "silu") != "silu":
        raise ArgumentError(f"{call}: hidden_act must be 'silu', received {config['hidden_act']!r}.")
    least, largest = (float(value) for value in config["time_step_limit"])
    limit = None if (least, largest) == (0.0, float("inf")) else (least, largest)
    spec = (
        f"mamba2(state={config['state_size']}, head_dim={config['head_dim']}, expand={config['expand']}, "
        f"groups={config['n_groups']}, "
        f"conv={config['conv_kernel']}, bias={config['use_bias']}, conv_bias={config['use_conv_bias']}, "
        f"norm_eps={config['layer_norm_epsilon']!r}, "
        f"step_limit={limit!r})"
    )
    model = CausalLM(
        ModelConfig(
            vocab_size=config["vocab_size"], dim=config["hidden_size"], layers=(spec,) * config["num_hidden_layers"],
            heads=1, mlp="none",
            tie_embeddings=config["tie_word_embeddings"], norm_eps=config["layer_norm_epsilon"],
        )
    )  # fmt: skip
    left = dict(weights)
    own = {"backbone.embeddings.weight": model.embedding.weight, "backbone.norm_f.weight": model.norm.weight}
    if model.head is None:
        left.pop("lm_head.weight", None)  # tied: the embedding once more
    else:
        own["lm_head.weight"] = model.head.weight
    for index, block in enumerate(model.blocks):
        start = f"backbone.layers.{index}."
        own[f"{start}norm.weight"] = block.attention_norm.weight  # type: ignore[union-attr, assignment]
        mixer = block.attention
        assert isinstance(mixer, Mamba2)
        names = [name for name in left if name.startswith(f"{start}mixer.")]
        mixer.load_transformers({name.removeprefix(f"{start}mixer."): left.pop(name) for name in names})
    if wrong := unlike(left, own):
        raise ArgumentError(f"{call}: {wrong}. The weights belong to another kind of model.")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(left[name])
    return model


__all__ = ["mamba2_from_transformers"]
