"""The interface of token mixers, the layers of a block in which tokens read other tokens."""

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
    """A layer x (B, T, dim) -> y (B, T, dim) in which tokens read other tokens. Blocks, models, memories and files use
    only this interface.

    dim: size of x and y.
    operator: the operator that reads the past.
    convolution: the short convolution, or None.
    causal: whether no token sees a later one. Only causal layers have a memory.
    """

    dim: int
    operator: Operator
    convolution: ShortConvolution | None
    causal: bool = True
    carries: tuple[str, ...] = ()
    """Names of the tensors that its memories carry in addition to keys and values."""
    parts_beside: int = 0
    """The number of memories after the first, in a layer of several parts."""

    def __init_subclass__(cls) -> None:
        known_names(cls)

    @property
    def chooses(self) -> bool:
        """Whether the layer can read a token without storing it; its ``forward`` then takes an action_mask."""
        return False

    @abc.abstractmethod
    def reset_parameters(self, draws: Draws) -> None:
        """Draw all weights except those of the operator."""

    @abc.abstractmethod
    def empty_memory(
        self, batch: int, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> LayerMemory:
        """The memory of ``batch`` sequences before their first token. Defaults: the dtype and device of the layer."""

    @abc.abstractmethod
    def learned(self) -> dict[str, Any]:
        """Learned quantities of interest, as plain lists."""

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
        """Apply the layer.

        Args:
            x: (B, T, dim), one token or more.
            memory: the past before x. The result is then a pair. The memory is not changed.
            return_memory: also return a memory if none is given.
            key_padding_mask: bool (B, T), True for a real token. Padded tokens are set to zero, also as queries.
            cu_seqlens: (N + 1,) offsets of N documents packed into one row (B = 1). Not with a memory.
            path: the execution path of ``zonal.attention``.

        Returns: y (B, T, dim), or (y, memory) if a memory is given or asked for.

        Raises:
            ArgumentError: shapes, masks or the memory do not fit the layer.
        """

    def reads(self, tokens: int) -> Tensor:
        """The inputs on which each output may depend, bool (T, T), for ``tokens`` real tokens of one document. This is
        a layer of ``zonal.influence``.

        It is an upper bound. The convolution and neighbourhoods of queries, keys and values are included.
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
        """Bytes of the memory of one sequence after ``length`` tokens without padding."""
        memory = self.empty_memory(1)
        return memory.nbytes + sum(
            part.memory.bytes_at(length) - part.memory.nbytes for part in (memory, *memory.others)
        )

    def load_memory(self, path: str | os.PathLike[str]) -> LayerMemory:
        """The memory that ``LayerMemory.save`` wrote, on the device of the layer.

        Raises:
            FileFormatError: the file is missing, damaged, or belongs to another kind of layer.
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
        """The past to continue from: the given memory, an empty one if a memory is to be returned, or None.

        Raises ArgumentError for inputs that do not fit.
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
