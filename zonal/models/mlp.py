"""The mlp of a block, by the config's name for it."""

from zonal.models.config import ModelConfig
from zonal.nn import KoopmanMLP, SwiGLU


def mlp_of(config: ModelConfig) -> SwiGLU | KoopmanMLP | None:
    """A fresh mlp, None for blocks without one."""
    if config.mlp == "none":
        return None
    if config.mlp == "swiglu":
        return SwiGLU(config.dim, config.mlp_hidden)
    return KoopmanMLP(config.dim, config.mlp_hidden, gated=config.mlp == "koopman-gated")


__all__ = ["mlp_of"]
