"""Parts of a model, made from the names in its config, and what models of tokens share."""

from collections.abc import Iterable, Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from zonal.models.config import ModelConfig
from zonal.nn import Block, DenseSkip, Draws, KoopmanMLP, Latest, MixtureOfExperts, RMSNorm, Rotary, SwiGLU, TokenMixer
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


def rotary_of(config: ModelConfig) -> Rotary | bool:
    """The one table of angles of all layers, which holds no parameter; False without rotary positions."""
    return Rotary(config.qk_dim or config.size_of_head, config.rotary_base) if config.rotary else False


class LanguageModel(nn.Module):
    """Embedding, one residual block per mixer, norm, and an output head, which may be the embedding.

    block: the class of the blocks.
    """

    block: type[Block] = Block

    def __init__(self, config: ModelConfig, mixers: Iterable[TokenMixer]) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(
            self.block(mixer, mlp_of(config), config.norm_eps, config.residual, records)
            for records, mixer in enumerate(mixers, start=1)
        )
        self.history = history_of(config)
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)

    def reset_parameters(self, seed: int | None = None) -> None:
        """Draw all weights, and the random features of operators. With a seed, each is drawn from a stream named by its
        qualified name.
        """
        config = self.config
        draws = Draws(config.init_std, config.init_std * (2 * len(config.layers)) ** -0.5, seed)
        draws.normal_(self.embedding.weight, "embedding.weight")
        for index, block in enumerate(self._blocks()):
            block.reset_parameters(draws.child(f"blocks.{index}"))
        self.history.reset_parameters()
        self.norm.reset_parameters()
        if self.head is not None:
            draws.normal_(self.head.weight, "head.weight")

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self._head_weight())


__all__ = ["LanguageModel", "history_of", "mlp_of", "rotary_of"]
