"""The residual block: a stage that mixes tokens, one that reads a context if there is one, and one that works per
token.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from zonal.errors import ArgumentError, unknown_name
from zonal.memory import Criterion, Memory, Reading
from zonal.names import known_names
from zonal.nn.attention import Attention
from zonal.nn.experts import MixtureOfExperts
from zonal.nn.initialise import Draws
from zonal.nn.koopman import KoopmanMLP
from zonal.nn.memory import Past
from zonal.nn.mixer import TokenMixer
from zonal.nn.mlp import SwiGLU
from zonal.nn.norm import RMSNorm
from zonal.nn.stage import LATEST, DenseSkip, GatedResidual, Latest, PostNorm, Records, Stage

Residual = Literal["pre", "post", "gated", "dense"]
FeedForward = SwiGLU | KoopmanMLP | MixtureOfExperts


@known_names
class Block(nn.Module):
    """x ← x + attention(norm(x)), then x ← x + cross(norm(x), context) if there is a layer ``cross``, then
    x ← x + mlp(norm(x)) if there is an mlp.

    ``residual`` chooses another composition of the same stages (see ``zonal.nn.stage``).

    Args:
        attention: the token mixer, an ``Attention`` or a recurrence such as ``Mamba2``. Its ``dim`` is that of the
            block.
        mlp: the feed-forward layer. None: the block has only the mixer.
        eps: ε of the two norms.
        residual: "pre": as above. "post": x ← norm(x + attention(x)). "gated": x ← x + gate(x) ⊙ attention(norm(x)).
            "dense": as "pre", applied to a learned sum of all records so far: the embedding and the outputs of all
            earlier blocks.
        records: for "dense", the number of these records, which is the place of the block in its model, from 1.
        cross: a layer of cross-attention, as in the decoder of an encoder-decoder. The block then needs a context at
            each call. None: a context goes to ``attention``.

    Raises:
        ArgumentError: ``residual`` is unknown, or ``cross`` has another width.
    """

    def __init__(
        self,
        attention: TokenMixer,
        mlp: FeedForward | None = None,
        eps: float = 1e-6,
        residual: Residual = "pre",
        records: int = 1,
        cross: Attention | None = None,
    ) -> None:
        super().__init__()
        if residual not in get_args(Residual):
            raise unknown_name("nn.Block", "residual", residual, get_args(Residual))
        dim, gated = attention.dim, residual == "gated"
        if cross is not None and cross.dim != dim:
            raise ArgumentError(
                f"nn.Block: cross must have the width of attention, dim={dim}, received dim={cross.dim}. The size of "
                "the context's tokens is its context_dim."
            )
        self.residual = residual
        self.history = DenseSkip(dim, records) if residual == "dense" else LATEST
        self.attention_norm = RMSNorm(dim, eps)
        self.attention = attention
        self.attention_gate = GatedResidual(dim, eps) if gated else None
        self.cross_norm = RMSNorm(dim, eps) if cross is not None else None
        self.cross = cross
        self.cross_gate = GatedResidual(dim, eps) if gated and cross is not None else None
        self.mlp_norm = RMSNorm(dim, eps) if mlp is not None else None
        self.mlp = mlp
        self.mlp_gate = GatedResidual(dim, eps) if gated and mlp is not None else None

    def reset_parameters(self, draws: Draws) -> None:
        """Draw all weights except those of the operator."""
        self.history.reset_parameters()
        self.attention_norm.reset_parameters()
        self.attention.reset_parameters(draws.child("attention"))
        for norm in (self.cross_norm, self.mlp_norm):
            if norm is not None:
                norm.reset_parameters()
        for name in ("cross", "mlp", "attention_gate", "cross_gate", "mlp_gate"):
            if (part := getattr(self, name)) is not None:
                part.reset_parameters(draws.child(name))

    def mixing(self, update: Callable[[Tensor], Any] | None = None) -> Stage:
        """The first stage. update: another call of the attention; None: the attention of the block."""
        update = self.attention if update is None else update
        return self._stage(update, self.history, self.attention_norm, self.attention_gate)

    def crossing(
        self, context: Tensor | Memory | None, context_padding_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Stage | None:
        """The stage that reads a context, or None without ``cross``."""
        if self.cross is None or self.cross_norm is None:
            return None
        if context is None:
            raise ArgumentError(
                "nn.Block: the block has a layer of cross-attention and needs a context. Pass context=c, or "
                "context=block.cross.context_memory(c) for many calls."
            )
        call = functools.partial(
            self.cross, context=context, context_padding_mask=context_padding_mask, key_padding_mask=key_padding_mask
        )
        return self._stage(call, LATEST, self.cross_norm, self.cross_gate)

    def feeding(self) -> Stage | None:
        """The last stage, or None without an mlp."""
        if self.mlp is None or self.mlp_norm is None:
            return None
        return self._stage(self.mlp, LATEST, self.mlp_norm, self.mlp_gate)

    def _stage(
        self, update: Callable[[Tensor], Any], memory: Latest | DenseSkip, norm: RMSNorm, gate: GatedResidual | None
    ) -> Stage:
        if self.residual == "post":
            return Stage(update, memory, compose=PostNorm(norm))
        return Stage(update, memory, norm, torch.add if gate is None else gate)

    def forward(
        self,
        x: Tensor | Records,
        memory: Past | None = None,
        *,
        return_memory: bool = False,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        path: str = "auto",
        mass: Tensor | None = None,
        action_mask: Tensor | None = None,
        context: Tensor | Memory | None = None,
        context_padding_mask: Tensor | None = None,
        report: bool | Criterion = False,
    ) -> Tensor | tuple[Tensor, Past] | tuple[Tensor, Past, Reading]:
        """Apply the block.

        Args:
            x: (B, T, dim), or a tuple of all records so far.
            action_mask: bool (B, T). A ridge or Koopman read-out reads a token with False but does not store it. Other
                mixers ignore it.
            context, context_padding_mask: as in ``TokenMixer.forward``, for ``cross``, or without it for ``attention``.
            memory, return_memory, key_padding_mask, cu_seqlens, path, mass, report: as in ``TokenMixer.forward``, for
                ``attention``.

        Returns: y (B, T, dim), or (y, memory) if a memory is given or asked for, or (y, memory, reading).

        Raises:
            ArgumentError: shapes do not fit, mass is given to a mixer other than ``Attention``, or ``cross`` has no
                context.
        """
        crossing = self.crossing(context, context_padding_mask, key_padding_mask)
        call = functools.partial(
            self.attention,
            memory=memory,
            return_memory=return_memory,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            path=path,
            action_mask=None if action_mask is None or not self.attention.chooses else action_mask,
            mass=mass,
            context=context if crossing is None else None,
            context_padding_mask=context_padding_mask if crossing is None else None,
            report=report,
        )
        result = self.mixing(call)(x)
        y, *after = result if isinstance(result, tuple) else (result,)
        for stage in (crossing, self.feeding()):
            y = y if stage is None else stage(y)
        return (y, *after) if after else y


__all__ = ["Block", "FeedForward", "Residual"]
