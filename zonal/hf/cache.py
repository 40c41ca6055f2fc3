"""The cache of transformers whose content is the memory of a model."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import Cache

from zonal.errors import ArgumentError
from zonal.models.memory import ModelMemory
from zonal.nn import LayerMemory
from zonal.nn.memory import LayerDecoder, Past


class _Read(NamedTuple):
    """What one call read: the memories before it, its input (B, T, dim) and its padding mask."""

    before: tuple[LayerMemory, ...]
    x: Tensor
    real: Tensor | None


class ZonalCache(Cache):
    """The memory of all layers, as ``past_key_values``.

    Its size does not grow with the text where the operators of the model have memories of constant size. It is filled
    by the first call of a model, and each call changes it in place; ``fork`` copies it. ``generate`` makes one.

    A cache that records (``activate_past_recording``) can give tokens back (``crop``): it keeps the memories before
    each call, and the next call reads those tokens of the call again that were kept. Assisted generation uses this.

    Args:
        memory: where to start: what a model of this library has read. None: nothing.
    """

    def __init__(self, memory: ModelMemory | None = None) -> None:
        super().__init__(layers=[])
        self._pasts: tuple[Past, ...] = () if memory is None else memory.layers
        self._origin = "" if memory is None else memory.origin
        self._length = 0 if memory is None else memory.count
        self._recorded: list[_Read] | None = None
        self._again: _Read | None = None

    # --- for the model ----------------------------------------------------------------------------------------------

    def begin(
        self, x: Tensor, real: Tensor | None, layers: int, empty: Callable[[], ModelMemory]
    ) -> tuple[tuple[Past, ...], Tensor, Tensor | None]:
        """The pasts of all layers, and the input and padding mask that are to be read after them: those given, behind
        tokens that are to be read again. layers: their number in the model. empty: makes the memory to start from.
        """
        if not self._pasts:
            start = empty()
            self._pasts, self._origin = start.layers, start.origin
        if len(self._pasts) != layers or self.batch_size != len(x):
            raise ArgumentError(
                f"ZonalCache: the cache holds {len(self._pasts)} layers of {self.batch_size} sequences, and the call "
                f"is of {layers} layers and {len(x)} sequences. Use a cache of this model and batch."
            )
        again, self._again = self._again, None
        if again is not None:
            if real is not None or again.real is not None:
                real = torch.cat([_mask(again.x, again.real), _mask(x, real)], 1)
            x = torch.cat([again.x, x], 1)
        if self._recorded is not None:
            self._pasts = before = self.memory().layers
            self._recorded.append(_Read(before, x, real))
        elif isinstance(self._pasts[0], LayerMemory) and self._pasts[0].memory.count:
            self._pasts = tuple(past.decoder() if isinstance(past, LayerMemory) else past for past in self._pasts)
        return self._pasts, x, real

    def end(self, pasts: Sequence[Past], tokens: int) -> None:
        """Keep the pasts after ``tokens`` new tokens."""
        self._pasts = tuple(pasts)
        self._length += tokens

    def memory(self) -> ModelMemory:
        """The memory of all tokens so far, as a value of this library.

        Raises: ArgumentError before the first call, and after a ``crop`` whose tokens are still to be read again.
        """
        if not self._pasts or self._again is not None:
            raise ArgumentError(
                "ZonalCache.memory: a cache that a model has read tokens into is required. Call the model with it "
                "first."
            )
        layers = (past.value() if isinstance(past, LayerDecoder) else past for past in self._pasts)
        return ModelMemory(tuple(layers), self._origin)

    def fork(self) -> "ZonalCache":
        """A copy that goes on by itself."""
        copy = ZonalCache(self.memory().fork()) if self._pasts else ZonalCache()
        copy._length = self._length
        return copy

    # --- for transformers -------------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens read, padding included."""
        return self._length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys and position of the first, for masks of attention, which these models do not make."""
        return self._length + query_length, 0

    @property
    def batch_size(self) -> int:
        """Number of sequences; -1 before the first call."""
        return self._pasts[0].batch if self._pasts else -1

    @property
    def is_initialized(self) -> bool:
        return bool(self._pasts)

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def is_croppable(self) -> bool:
        return self._recorded is not None

    def __len__(self) -> int:
        return len(self._pasts)

    def __repr__(self) -> str:
        return f"ZonalCache({len(self._pasts)} layers, {self._length} tokens)"

    def activate_past_recording(self) -> None:
        """Keep what ``crop`` needs from now on: the memories before each call and its input."""
        if self._recorded is None:
            self._recorded = []

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens, and all records of earlier calls.

        Raises: ArgumentError for a cache that does not record, or tokens older than its records.
        """
        if self._recorded is None or tokens_to_remove > 0:
            raise ArgumentError(
                f"ZonalCache.crop: call activate_past_recording() before the tokens are read, and give the number of "
                f"tokens to forget as a negative number; received {tokens_to_remove}."
            )
        left = -tokens_to_remove
        while left:
            if not self._recorded:
                raise ArgumentError(
                    f"ZonalCache.crop: {left} of {-tokens_to_remove} tokens were read before the cache recorded. Call "
                    "activate_past_recording() earlier."
                )
            last = self._recorded.pop()
            kept = max(0, last.x.shape[1] - left)
            left -= last.x.shape[1] - kept
            self._pasts = last.before
            self._again = None if kept == 0 else _Read(
                last.before, last.x[:, :kept], None if last.real is None else last.real[:, :kept]
            )  # fmt: skip
        self._length += tokens_to_remove
        self._recorded = []

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences ``beam_idx``, in this order."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take the sequences ``indices``, in this order. Records for ``crop`` end."""
        layers = self.memory().layers
        self._pasts = tuple(layer.gather(indices) for layer in layers)
        self._recorded = None if self._recorded is None else []

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self._pasts, self._length, self._again = (), 0, None
        self._recorded = None if self._recorded is None else []


def _mask(x: Tensor, real: Tensor | None) -> Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if real is None else real


__all__ = ["ZonalCache"]
