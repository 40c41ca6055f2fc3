"""Models by name: the shapes of the Echo paper, and models to compare with them at equal numbers of parameters."""

import dataclasses
from typing import get_args

import torch

from zonal.errors import ArgumentError, unknown_name
from zonal.mechanisms import spec as specs
from zonal.models.build import class_of
from zonal.models.config import Mlp, ModelConfig

_MAMBA_1M = "mamba2(state=16, groups=4)"
_MAMBA = "mamba2(state=64)"

PRESETS: dict[str, ModelConfig] = {
    "echo-1M": ModelConfig(
        vocab_size=128, dim=128, layers=(_MAMBA_1M,) * 2 + ("ska(power=2)",) * 2, heads=4, qk_dim=24,
        mlp_ratio=384 / 128, tie_embeddings=False
    ),
    "echo-50M": ModelConfig(
        vocab_size=32000, dim=448, layers=(_MAMBA, _MAMBA, "ska(power=2)", _MAMBA) * 4, heads=7, qk_dim=56,
        mlp="koopman", mlp_ratio=1216 / 448
    ),
    "echo-180M": ModelConfig(
        vocab_size=32000, dim=768,
        layers=((_MAMBA,) * 7 + ("ska(power=2)",)) * 2 + (_MAMBA,) * 8, heads=12, qk_dim=48,
        mlp="koopman", mlp_ratio=2048 / 768,
    ),
}  # fmt: skip
"""Echo, arXiv 2605.06997, sections 3.4 and 4.1 and appendix G.2: Mamba-2 with a few layers of spectral Koopman
attention (rank 24, 56, 48; the library's own ridge and bound of keys), a SwiGLU in the small one and Koopman MLPs in
the others, each of 64 ⌈8/3 dim / 64⌉ numbers. Positions of SKA are counted from 1: the paper's first and last layers
are always Mamba-2.
"""

_MIXERS = ("mamba", "mamba-attention")


def names() -> tuple[str, ...]:
    """The names that ``preset`` accepts, without their endings for the mlp."""
    return tuple(f"{name}{ending}" for name in PRESETS for ending in ("", *(f"-{mixer}" for mixer in _MIXERS)))


def preset(name: str, *, vocab_size: int | None = None, max_len: int | None = None) -> ModelConfig:
    """The model of a name such as ``echo-50M``, or a model with as many parameters to compare with it.

    Endings, in this order, each after a dash: "mamba" replaces attention by the recurrence of the other layers;
    "mamba-attention" replaces it by softmax with rotary positions. Then "swiglu", "koopman" or "koopman-gated" chooses
    the mlp. A model with an ending gets the hidden size of the mlp that comes nearest to the parameters of the model
    without ending (``matched``).

    Args:
        name: the name.
        vocab_size: replaces the vocabulary size of the preset, also in the model that it is compared with.
        max_len: the intended length in tokens.

    Raises:
        ArgumentError: the name is unknown; the message gives the nearest names.
    """
    base = next((known for known in PRESETS if name == known or name.startswith(f"{known}-")), None)
    if base is None:
        raise unknown_name("preset", "preset", name, names())
    plain = dataclasses.replace(
        PRESETS[base], max_len=max_len, vocab_size=PRESETS[base].vocab_size if vocab_size is None else vocab_size
    )
    if name == base:
        return plain
    mlps = [mlp for mlp in get_args(Mlp) if mlp not in ("none", "experts")]
    chosen = [(mixer, mlp) for mixer in ("", *_MIXERS) for mlp in ("", *mlps)]
    known = {"-".join(filter(None, (base, *endings))): endings for endings in chosen}
    if name not in known:
        raise unknown_name("preset", "preset", name, known)
    mixer, mlp = known[name]
    changed = _with_mixers(plain, mixer) if mixer else plain
    return matched(dataclasses.replace(changed, mlp=mlp or plain.mlp), num_parameters(plain))


def _with_mixers(config: ModelConfig, mixer: str) -> ModelConfig:
    recurrence = next(spec for spec in config.layers if specs.name_of(spec) == "mamba2")
    other = recurrence if mixer == "mamba" else "softmax"
    layers = tuple(spec if spec == recurrence else other for spec in config.layers)
    return dataclasses.replace(config, layers=layers, rotary=mixer == "mamba-attention", qk_dim=None)


def num_parameters(config: ModelConfig) -> int:
    """Number of trainable parameters of the model. No memory is allocated for them."""
    with torch.device("meta"):
        return class_of(config)(config).num_parameters()


def matched(config: ModelConfig, parameters: int) -> ModelConfig:
    """The config with the hidden size of its mlp, a multiple of 8, that brings the model nearest to ``parameters``.

    Raises:
        ArgumentError: the model has no mlp, or more parameters even with the smallest mlp.
    """
    if config.mlp == "none":
        raise ArgumentError(
            "matched: the size of the mlp makes up for other parts, and this config has mlp='none'. Choose another mlp."
        )

    def sized(hidden: int) -> ModelConfig:
        return dataclasses.replace(config, mlp_ratio=hidden / config.dim)

    least = num_parameters(sized(8))
    step = num_parameters(sized(16)) - least  # what 8 numbers more take, in all layers
    more = round((parameters - least) / step)
    if more < 0:
        raise ArgumentError(
            f"matched: this config has {least:,} parameters with an mlp of 8 numbers, {parameters:,} were asked "
            "for. Ask for more."
        )
    return sized(8 + 8 * more)


__all__ = ["PRESETS", "matched", "names", "num_parameters", "preset"]
