"""Parts of a model, made from the names in its config, and what models of tokens share."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zonal.errors import ArgumentError
from zonal.memory import Criterion, Reading
from zonal.models.config import ModelConfig
from zonal.models.cross_entropy import cross_entropy_sum, predict_rows
from zonal.models.layers import mixer
from zonal.names import known_names
from zonal.nn import (
    Attention,
    Block,
    DenseSkip,
    Draws,
    KoopmanMLP,
    MixtureOfExperts,
    Records,
    RMSNorm,
    Rotary,
    SwiGLU,
    TokenMixer,
)
from zonal.nn.block import FeedForward
from zonal.nn.linear import plain
from zonal.nn.memory import Past
from zonal.nn.norm import accumulation_dtype
from zonal.nn.stage import LATEST

IGNORE = -100
"""The target of positions that are not supervised."""


class Predictions(NamedTuple):
    """The predictions at the N supervised positions, in reading order.

    predicted, target: token ids, (N,).
    row: the sequence of each position in the batch, (N,).
    loss: in nats, (N,), float32 or better.
    """

    predicted: Tensor
    target: Tensor
    row: Tensor
    loss: Tensor


class Passed(NamedTuple):
    """What a pass through the blocks of a model gives.

    hidden: the input of the last norm, (B, T, dim).
    pasts: of each block, after the tokens; none where the blocks continue from none.
    readings: of the blocks that report.
    """

    hidden: Tensor
    pasts: tuple[Past, ...]
    readings: dict[int, Reading]


def mlp_of(config: ModelConfig) -> FeedForward | None:
    """A new mlp, or None for blocks without one."""
    if config.mlp == "none":
        return None
    if config.mlp == "swiglu":
        return SwiGLU(config.dim, config.mlp_hidden)
    if config.mlp == "experts":
        return MixtureOfExperts(config.dim, config.mlp_hidden, config.experts, config.experts_per_token)
    return KoopmanMLP(config.dim, config.mlp_hidden, gated=config.mlp == "koopman-gated")


def rotary_of(config: ModelConfig) -> Rotary | bool:
    """The one table of angles of all layers, which holds no parameter; False without rotary positions."""
    if not config.rotary:
        return False
    return Rotary(config.qk_dim or config.size_of_head, config.rotary_base, config.rope_scaling)


@known_names
class LanguageModel(nn.Module):
    """Embedding, one residual block per layer, norm, and an output head, which may be the embedding.

    block: the class of the blocks.
    """

    block: type[Block] = Block

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        rotary = rotary_of(config)
        mixers = (
            mixer(spec, config.dim, functools.partial(self._attention, width=width, rotary=rotary))
            for spec, width in zip(config.layers, config.conv_widths, strict=True)
        )
        self.blocks = nn.ModuleList(
            self.block(each, mlp_of(config), config.norm_eps, config.residual, records)
            for records, each in enumerate(mixers, start=1)
        )
        # what the norm before the output head reads
        self.history = DenseSkip(config.dim, len(config.layers) + 1) if config.residual == "dense" else LATEST
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)

    def _attention(
        self, spec: str, share: int, lift: int | None, gated: bool, width: int, rotary: Rotary | bool
    ) -> Attention:
        """A layer of attention, or one of ``share`` parts of a mixture, which have its heads between them. lift: size
        of lifted queries and keys. gated: a gate weighs the keys.
        """
        config = self.config
        if any((heads or share) % share for heads in (config.heads, config.kv_heads)):
            raise ArgumentError(
                f"CausalLM: a mixture of {share} parts needs heads and kv_heads in multiples of {share}, "
                f"received {config.heads} and {config.kv_heads}."
            )
        return Attention(
            config.dim, config.heads // share, spec,
            kv_heads=None if config.kv_heads is None else config.kv_heads // share, head_dim=config.size_of_head,
            qk_dim=config.qk_dim, rotary=rotary, qk_norm=config.qk_norm, conv=width, cg_lift=lift, key_gate=gated,
            causal=config.causal,
        )  # fmt: skip

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
            draws.linear_(self.head, "head")

    def forward(
        self,
        tokens: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        path: str = "auto",
        action_mask: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T) -> logits (B, T, V).

        The logits are those of the next token, from an encoder of the token itself. Masks and path are those of
        ``TokenMixer.forward``. action_mask: bool (B, T), False for tokens that ridge and Koopman read-outs read but do
        not store, in addition to ``silent_tokens``.

        Raises: ArgumentError if tokens or masks do not fit.
        """
        hidden = self.hidden(
            tokens, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, path=path, action_mask=action_mask
        )
        return self._logits(hidden)

    def hidden(
        self,
        tokens: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        path: str = "auto",
        action_mask: Tensor | None = None,
    ) -> Tensor:
        """tokens (B, T) -> the input of the output head, (B, T, dim). Arguments as in ``forward``."""
        passed = self._run_blocks(
            self._embed(tokens), key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, path=path,
            action_mask=self._stored(tokens, action_mask),
        )  # fmt: skip
        return self.norm(passed.hidden)

    def reads(self, tokens: int) -> tuple[Tensor, ...]:
        """The inputs that each layer can read, bool (T, T) per layer, for ``tokens`` tokens. These are the layers of
        ``zonal.influence``; no derivative of the model lies outside their ``reach``.
        """
        return tuple(block.attention.reads(tokens) for block in self._blocks())

    def loss(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        path: str = "auto",
    ) -> tuple[Tensor, int]:
        """Cross-entropy at supervised positions.

        Args:
            tokens: (B, T).
            targets: int64 (B, T), the token to predict at each position. −100: not supervised; the head does not run
                there.
            key_padding_mask, cu_seqlens, path: as in ``forward``.

        Returns: the sum in nats (a scalar, float32 or better) and the number of supervised positions.

        Raises: ArgumentError if shapes or tokens do not fit.
        """
        supervised = self._supervised("loss", tokens, targets)
        rows = self.hidden(tokens, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, path=path)[supervised]
        wanted = targets[supervised]
        if not self._plain_head():
            loss = F.cross_entropy(self._full_logits(rows), wanted, reduction="sum")
        else:
            loss = cross_entropy_sum(rows, self._head_weight(), wanted)
        return loss, rows.shape[0]

    @torch.no_grad()
    def predict(
        self,
        tokens: Tensor,
        targets: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        path: str = "auto",
        piece: int | None = None,
    ) -> Predictions:
        """The most likely token and the loss at every supervised position. Arguments as in ``loss``, and this:

        Args:
            piece: of a causal model: read this many tokens at a time, each piece from the memory of those before. None:
                read all at once. The results differ only by rounding; pieces bound the memory that reading takes.
        """
        supervised = self._supervised("predict", tokens, targets)
        if piece is None or piece >= tokens.shape[1]:
            hidden = self.hidden(tokens, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, path=path)
        else:
            hidden = self._hidden_in_pieces(tokens, piece, key_padding_mask, cu_seqlens, path)
        wanted = targets[supervised]
        if self._plain_head():
            predicted, loss = predict_rows(hidden[supervised], self._head_weight(), wanted)
        else:
            logits = self._full_logits(hidden[supervised])
            predicted, loss = logits.argmax(1), F.cross_entropy(logits, wanted, reduction="none")
        return Predictions(predicted, wanted, supervised.nonzero()[:, 0], loss)

    def num_parameters(self) -> int:
        """Number of trainable parameters. A tied weight counts once."""
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def learned(self) -> list[dict[str, Any]]:
        """For each layer its operator spec and the learned quantities of the operator, as plain lists."""
        return [
            {"layer": index, "operator": spec, **block.attention.learned()}
            for index, (spec, block) in enumerate(zip(self.config.layers, self._blocks(), strict=True))
        ]

    @torch.no_grad()
    def layer_inputs(self, tokens: Tensor, *, path: str = "auto") -> Iterator[tuple[int, TokenMixer, Tensor]]:
        """The index, the layer and the input (B, T, dim) of each layer when the model reads tokens (B, T), without
        gradients.
        """
        records: Records = (self._embed(tokens),)
        for index, block in enumerate(self._blocks()):
            yield index, block.attention, block.mixing().charted(records)
            records = self.history.kept(records, block(records, path=path, action_mask=self._stored(tokens)))

    def _run_blocks(
        self,
        x: Tensor,
        pasts: Sequence[Past] | None = None,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        path: str = "auto",
        action_mask: Tensor | None = None,
        report: Mapping[int, bool | Criterion] = MappingProxyType({}),
        inputs: list[Tensor] | None = None,
    ) -> Passed:
        """Run the blocks on embedded tokens x (B, T, dim).

        Args:
            pasts: what each block continues from. None: no past.
            report: blocks, by index, whose past says what it knows of the queries of the tokens.
            inputs: a list that gets the input of each block. None: they are not kept.
        """
        records: Records = (x,)
        after, readings = [], {}
        before = [None] * len(self.blocks) if pasts is None else pasts
        for index, (block, past) in enumerate(zip(self.blocks, before, strict=True)):
            if inputs is not None:
                inputs.append(records[-1])
            found = block(
                # a tensor where there is one record: reentrant checkpoints see gradients of tensors only
                records[0] if len(records) == 1 else records, past, key_padding_mask=key_padding_mask,
                cu_seqlens=cu_seqlens, path=path, action_mask=action_mask, report=report.get(index, False),
            )  # fmt: skip
            y, *kept = found if isinstance(found, tuple) else (found,)
            records = self.history.kept(records, y)
            after += kept[:1]
            if kept[1:]:
                readings[index] = kept[1]
        return Passed(self.history(records), tuple(after), readings)

    def _hidden_in_pieces(
        self, tokens: Tensor, piece: int, mask: Tensor | None, cu_seqlens: Tensor | None, path: str
    ) -> Tensor:
        """``hidden`` of so many tokens at a time."""
        raise ArgumentError(f"{type(self).__name__}.predict: every token sees the whole text. Leave piece out.")

    def _stored(self, tokens: Tensor, action_mask: Tensor | None = None) -> Tensor | None:
        """Which tokens memories take in, bool (B, T); None = all."""
        if not self.config.silent_tokens:
            return action_mask
        loud = torch.stack([tokens != silent for silent in self.config.silent_tokens]).all(0)
        return loud if action_mask is None else loud & action_mask

    def _supervised(self, call: str, tokens: Tensor, targets: Tensor) -> Tensor:
        """(B, T) bool, where there is a target."""
        call = f"{type(self).__name__}.{call}"
        if targets.shape != tokens.shape or targets.dtype != torch.int64:
            raise ArgumentError(
                f"{call}: targets must be int64 of the shape of tokens {tuple(tokens.shape)}, received "
                f"{targets.dtype} of shape {tuple(targets.shape)}."
            )
        supervised = targets != IGNORE
        if bool((supervised & ((targets < 0) | (targets >= self.config.vocab_size))).any()):
            raise ArgumentError(
                f"{call}: targets must be {IGNORE} (not supervised) or lie in [0, {self.config.vocab_size})."
            )
        return supervised

    def _embed(self, tokens: Tensor) -> Tensor:
        self._check_tokens("forward", tokens)
        return self.embedding(tokens)

    def _check_tokens(self, call: str, tokens: Tensor) -> None:
        call = f"{type(self).__name__}.{call}"
        if tokens.dim() != 2 or tokens.shape[1] == 0 or tokens.dtype not in (torch.int64, torch.int32):
            raise ArgumentError(
                f"{call}: tokens must be integers (batch, length >= 1), received {tokens.dtype} of "
                f"shape {tuple(tokens.shape)}."
            )
        # on a GPU this would wait for the device on every step, and a traced graph would break; there the embedding
        # itself refuses
        if tokens.device.type == "cpu" and tokens.numel() and not torch.compiler.is_compiling():
            low, high = (int(value) for value in tokens.aminmax())
            if low < 0 or high >= self.config.vocab_size:
                raise ArgumentError(
                    f"{call}: tokens must lie in [0, {self.config.vocab_size}), received {low} … {high}."
                )

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _plain_head(self) -> bool:
        """Whether logits are products with ``_head_weight``: no adapter and no hook is on the head."""
        return self.head is None or plain(self.head)

    def _logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.embedding.weight) if self.head is None else self.head(hidden)

    def _full_logits(self, hidden: Tensor) -> Tensor:
        """Logits in float32 or better, for a loss."""
        logits = self._logits(hidden)
        return logits.to(accumulation_dtype(logits.dtype))


__all__ = ["IGNORE", "LanguageModel", "Predictions"]
