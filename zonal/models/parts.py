"""Parts of a model, made from the names in its config."""

from zonal.models.config import ModelConfig
from zonal.nn import DenseSkip, KoopmanMLP, Latest, MixtureOfExperts, SwiGLU
from zonal.nn.block import FeedForward
from zonal.nn.stage import LATEST


def mlp_of(config: ModelConfig) -> FeedForward | None:
    """A new mlp, or None for blocks without one."""
    if config.mlp == "none":
        return None
    if config.mlp == "swiglu":
        return SwiGLU(config.dim, config.mlp_hidden)
    if config.mlp == "experts":
        return MixtureOfExperts(config.dim, config.mlp_hidden, config.experts, config.experts_per_token)
    return KoopmanMLP(config.dim, config.mlp_hidden, gated=config.mlp == "koopman-gated")


def history_of(config: ModelConfig) -> Latest | DenseSkip:
    """The memory that the norm before the output head reads."""
    return DenseSkip(config.dim, len(config.layers) + 1) if config.residual == "dense" else LATEST


__all__ = ["history_of", "mlp_of"]
