"""What an attention layer remembers of a sequence."""

import dataclasses
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from zonal.memory import Memory


@dataclasses.dataclass(frozen=True)
class LayerMemory:
    """The past of a layer, as a value: nothing here is changed in place.

    Args:
        memory: what the operator remembers of keys and values.
        tail: (B, w − 1, dim), the last inputs of the short convolution; None where there is none.
        length: tokens read, padding included.
        padding: (B,) how many of them were padding; None = none in any row.
    """

    memory: "Memory"
    tail: Tensor | None = None
    length: int = 0
    padding: Tensor | None = None

    @property
    def position(self) -> int | Tensor:
        """The position of the next token: one number, or (B,) where rows differ."""
        return self.length if self.padding is None else self.length - self.padding

    @property
    def nbytes(self) -> int:
        """Bytes held, all rows together."""
        return self.memory.nbytes + (0 if self.tail is None else self.tail.nbytes)

    def advance(self, memory: "Memory", tail: Tensor | None, tokens: int, key_padding_mask: Tensor | None) -> "LayerMemory":
        """The memory after ``tokens`` more tokens."""
        padding = self.padding
        if key_padding_mask is not None:
            absent = (~key_padding_mask).sum(dim=1)
            padding = absent if padding is None else padding + absent
        return LayerMemory(memory, tail, self.length + tokens, padding)

    def fork(self) -> "LayerMemory":
        """A copy that shares no storage."""
        return LayerMemory(
            self.memory.fork(),
            None if self.tail is None else self.tail.clone(),
            self.length,
            None if self.padding is None else self.padding.clone(),
        )
