"""What every token mixer has in common: the layer of a block that lets tokens see each other."""

import abc
import os
from typing import Any

import torch
from torch import Tensor, nn

from zonal.algebra.operator import Operator
from zonal.algebra.prior import Decay
from zonal.errors import ArgumentError
from zonal.names import known_names
from zonal.nn.convolution import ShortConvolution
from zonal.nn.initialise import Draws
from zonal.nn.memory import LayerMemory, Past, load_memories
from zonal.nn.positions import check_masks
from zonal.theory import influence


class TokenMixer(nn.Module, abc.ABC):
    """x (B, T, dim) -> y (B, T, dim): a block, a model, a memory and a file know a layer by this alone.

    dim: size of x and y. operator: how the past is read. convolution: the short convolution, None where there is none.
    causal: no token sees a later one; a memory needs that.
    """

    dim: int
    operator: Operator
    convolution: ShortConvolution | None
    causal: bool = True
    carries: tuple[str, ...] = ()
    """Names of what its memories carry beside keys and values."""
    parts_beside: int = 0
    """How many further memories stand beside the first, of a layer of several parts."""

    def __init_subclass__(cls) -> None:
        known_names(cls)

    @property
    def chooses(self) -> bool:
        """Whether it can read a token without storing it: its ``forward`` then takes an action_mask."""
        return False

    @abc.abstractmethod
    def reset_parameters(self, draws: Draws) -> None:
        """Draw all weights but the operator's own."""

    @abc.abstractmethod
    def empty_memory(
        self, batch: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> LayerMemory:
        """The memory of ``batch`` sequences that have not begun; dtype and device default to the layer's."""

    @abc.abstractmethod
    def learned(self) -> dict[str, Any]:
        """What a reader may want to know of what the layer has learned, in plain lists."""

    @abc.abstractmethod
    def forward(
        self,
        x: Tensor,
        memory: Past | None = None,
        *,
        return_memory: bool = False,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        path: str = "auto",
    ) -> Tensor | tuple[Tensor, Past]:
        """Mix.

        Args:
            x: (B, T, dim), one token or many.
            memory: what came before x; the result is then a pair.
            return_memory: also return a memory when none is given.
            key_padding_mask: (B, T), True = real token. Padding is read as zeros, as a query, too.
            cu_seqlens: (N + 1,) offsets of N documents packed into one row (B = 1); without memory.
            path: the execution path of ``zonal.attention``.

        Returns: y (B, T, dim), or (y, memory) when a memory is given or asked for. The given memory is not changed.
        """

    def reads(self, tokens: int) -> Tensor:
        """Which inputs each output may depend on, bool (T, T), among ``tokens`` real tokens of one document: a layer of
        ``zonal.influence``.

        An upper set. Queries, keys and values stand for what their convolution and their neighbourhood see.
        """
        operator = self.operator
        seen = influence.visible(operator.prior, tokens, causal=self.causal, include_self=operator.tags.includes_self)
        itself = torch.eye(tokens, dtype=torch.bool)
        past = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        if operator.tags.couples:  # by the masses of the others
            seen = torch.ones_like(seen)
        if any(isinstance(prior, Decay) and prior.gated for prior in operator.prior):  # by the decays in between
            seen = seen | (seen.cumsum(1) > 0) & past
        chart = itself
        if self.convolution is not None:
            chart = past & ~past.tril(-self.convolution.width)
        if operator.score.deaths:
            chart = chart | influence.reach([chart, past])
        return influence.reach([chart, seen | itself])

    def memory_bytes(self, length: int) -> int:
        """Bytes that the memory of one sequence takes after ``length`` tokens without padding."""
        memory = self.empty_memory(1)
        return memory.nbytes + sum(
            part.memory.bytes_at(length) - part.memory.nbytes for part in (memory, *memory.others)
        )

    def load_memory(self, path: str | os.PathLike[str]) -> LayerMemory:
        """The memory that ``LayerMemory.save`` wrote, on the layer's device.

        Raises: FileFormatError when the file is missing, damaged, or belongs to a layer of another kind.
        """
        return load_memories(path, [self.empty_memory(1)])[0]

    def _before(
        self,
        x: Tensor,
        memory: Past | None,
        return_memory: bool,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
    ) -> Past | None:
        """The memory to go on from: the given one, an empty one where one is to be returned, or None.

        Refuses what does not fit.
        """
        call = f"nn.{type(self).__name__}"
        if x.dim() != 3 or x.shape[2] != self.dim or x.shape[1] == 0:
            raise ArgumentError(f"{call}: x must be (batch, tokens >= 1, {self.dim}), received {tuple(x.shape)}.")
        batch, length, _ = x.shape
        check_masks(call, batch, length, key_padding_mask, cu_seqlens)
        if memory is None and return_memory:
            memory = self.empty_memory(batch, x.dtype, x.device)
        if memory is None:
            return None
        if cu_seqlens is not None:
            raise ArgumentError(
                f"{call}: packed documents (cu_seqlens) start afresh and take no memory. Pass one of the two."
            )
        if not self.causal:
            raise ArgumentError(
                f"{call}: a memory holds the past of a causal layer; this one was made with causal=False."
            )
        if memory.batch != batch:
            raise ArgumentError(f"{call}: the memory holds {memory.batch} sequences, x has batch {batch}.")
        if (memory.tail is None) != (self.convolution is None):
            raise ArgumentError(
                f"{call}: the memory comes from a layer with another convolution. Make it with this layer's "
                "empty_memory()."
            )
        if set(memory.carried) != set(self.carries) or len(memory.others) != self.parts_beside:
            raise ArgumentError(
                f"{call}: the memory comes from another kind of layer. Make it with this layer's empty_memory()."
            )
        if memory.operator is not self.operator:
            raise ArgumentError(
                f"{call}: the memory was made by another layer or model. Make it with this layer's "
                "empty_memory(), or load it with load_memory()."
            )
        return memory

    @staticmethod
    def _real(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
        """x with zeros for padding: whatever it held, NaN included, is then in no product, here or in the gradients."""
        return x if key_padding_mask is None else x.masked_fill(~key_padding_mask.unsqueeze(-1), 0)


__all__ = ["TokenMixer"]
