"""The pre-norm residual block."""

import functools

import torch
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.nn.attention import Attention
from zonal.nn.initialise import Draws
from zonal.nn.koopman import KoopmanMLP
from zonal.nn.memory import LayerMemory
from zonal.nn.mixer import TokenMixer
from zonal.nn.mlp import SwiGLU
from zonal.nn.norm import RMSNorm


class Block(nn.Module):
    """x ← x + attention(norm(x)); then x ← x + mlp(norm(x)) where there is an mlp.

    Args:
        attention: the token mixer, an ``Attention`` or a recurrence such as ``Mamba2``; its ``dim`` is the block's.
        mlp: the feed-forward layer, or None for a block of the mixer alone.
        eps: ε of the two norms.
    """

    def __init__(self, attention: TokenMixer, mlp: SwiGLU | KoopmanMLP | None = None, eps: float = 1e-6) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(attention.dim, eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(attention.dim, eps) if mlp is not None else None
        self.mlp = mlp

    def reset_parameters(self, draws: Draws) -> None:
        """Draw all weights but the operator's own."""
        self.attention_norm.reset_parameters()
        self.attention.reset_parameters(draws.child("attention"))
        if self.mlp is not None and self.mlp_norm is not None:
            self.mlp_norm.reset_parameters()
            self.mlp.reset_parameters(draws.child("mlp"))

    def empty_memory(self, batch: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> LayerMemory:
        """The memory of ``batch`` sequences that have not begun."""
        return self.attention.empty_memory(batch, dtype, device)

    def forward(
        self,
        x: Tensor,
        memory: LayerMemory | None = None,
        *,
        return_memory: bool = False,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        path: str = "auto",
        mass: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, LayerMemory]:
        """x (B, T, dim) -> y (B, T, dim), or (y, memory) when a memory is given or asked for, as in ``TokenMixer``; mass as in ``Attention``."""
        mixer = self.attention
        if mass is not None:
            if not isinstance(mixer, Attention):
                raise ArgumentError(f"nn.Block: mass (of merged tokens) is for a layer of Attention, and this one is a {type(mixer).__name__}. Merge nothing before it.")
            mixer = functools.partial(mixer, mass=mass)
        result = mixer(
            self.attention_norm(x),
            memory,
            return_memory=return_memory,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            path=path,
        )
        mixed, after = result if isinstance(result, tuple) else (result, None)
        x = x + mixed
        if self.mlp is not None and self.mlp_norm is not None:
            x = x + self.mlp(self.mlp_norm(x))
        return x if after is None else (x, after)
