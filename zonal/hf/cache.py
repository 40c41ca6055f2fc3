"""Caches of transformers whose content is the memory of a model: for models of this library, and for converted models
of transformers.
"""

import abc
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from transformers import Cache
from transformers.generation.configuration_utils import GenerationMode
from transformers.modeling_outputs import BaseModelOutputWithPast

from zonal.algebra import Operator
from zonal.attention import attention
from zonal.errors import ArgumentError
from zonal.memory import Criterion, Memory, Reading
from zonal.models.causal_lm import CausalLM
from zonal.models.memory import ModelMemory
from zonal.nn import LayerMemory
from zonal.nn.memory import LayerDecoder, Past

# what the installed transformers calls a cache, as an argument and in outputs of models: 5.24 changed the name
CACHE = "cache" if hasattr(BaseModelOutputWithPast, "cache") else "past_key_values"

_MARK = "_zonal_cache"  # the attribute of keys that says which cache and layer they belong to


class OperatorCache(Cache, abc.ABC):
    """What both caches share: the memories of all layers, as one value of this library.

    Each call of the model changes the cache in place; ``fork`` copies it. A cache that records
    (``activate_past_recording``) can give the newest tokens back (``crop``), which assisted generation needs.

    Args:
        memory: where to start: what the model has read. None: nothing.

    Attributes:
        report: layers, by index, whose memory says at each call what it knows of the queries of the call's tokens: with
            a criterion, or True for the default one. None of them at first.
        readings: what they said at the last call, by layer, each (B, H, T) (``zonal.memory.Reading``). The memory is
            the one before the call, so that tokens of one call do not answer each other.
    """

    def __init__(self, memory: ModelMemory | None = None) -> None:
        super().__init__(layers=[])
        self.report: Mapping[int, bool | Criterion] = {}
        self.readings: dict[int, Reading] = {}
        self._pasts: list[Past] = [] if memory is None else [*memory.layers]
        self._origin = "" if memory is None else memory.origin
        self._recording = False

    @abc.abstractmethod
    def _cropped(self, count: int) -> None:
        """``crop`` of the newest ``count`` tokens by a cache that records."""

    @abc.abstractmethod
    def _drop_records(self) -> None:
        """Forget what ``crop`` needs; a cache that records goes on to record."""

    def memory(self) -> ModelMemory:
        """The memory of all tokens so far, as a value of this library.

        Raises: ArgumentError before the first call.
        """
        if not self._pasts:
            raise ArgumentError(
                f"{type(self).__name__}.memory: a cache that a model has read tokens into is required. Call the model "
                "with it first."
            )
        return ModelMemory(tuple(past.value() for past in self._pasts), self._origin)

    def fork(self) -> Self:
        """A copy that goes on by itself. It reports on the same layers, and records if this cache does, from now on."""
        made = type(self)(self.memory().fork() if self._pasts else None)
        made.report = dict(self.report)
        if self.is_croppable:
            made.activate_past_recording()
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """As ``fork``: transformers' way to use the cache of a prefix several times."""
        return self.fork()

    # --- for transformers -------------------------------------------------------------------------------------------

    @property
    def is_croppable(self) -> bool:
        return self._recording

    def activate_past_recording(self) -> None:
        """Keep what ``crop`` needs from now on: the memories before each call and what it reads."""
        self._recording = True

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest ``-tokens_to_remove`` tokens, and all records of earlier calls.

        Raises: ArgumentError for a cache that does not record, or tokens older than its records.
        """
        if not self._recording or tokens_to_remove > 0:
            raise ArgumentError(
                f"{type(self).__name__}.crop: call activate_past_recording() before the tokens are read, and give the "
                f"number of tokens to forget as a negative number; received {tokens_to_remove}."
            )
        self._cropped(-tokens_to_remove)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens read, padding included."""
        return self._pasts[layer_idx].length if layer_idx < len(self._pasts) else 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: no limit."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Number of keys that a mask covers and position of the first: the new tokens."""
        return query_length, self.get_seq_length(layer_idx)

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
    def is_linear(self) -> list[bool]:
        """False for each layer: to transformers, linear ones do not count their tokens."""
        return [False] * len(self)

    def __len__(self) -> int:
        return len(self._pasts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self._pasts)} layers, {self.get_seq_length()} tokens)"

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the sequences ``beam_idx``, in this order."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Take the sequences ``indices``, in this order. Records for ``crop`` end."""
        self._pasts = [layer.gather(indices) for layer in self.memory().layers]
        self._drop_records()

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times."""
        self.batch_select_indices(torch.arange(self.batch_size).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self._pasts = []
        self._drop_records()


class _Read(NamedTuple):
    """What one call read: the memories before it, its input (B, T, dim) and its padding mask."""

    before: tuple[LayerMemory, ...]
    x: Tensor
    real: Tensor | None


class ZonalCache(OperatorCache):
    """The memory of all layers of a model of this library.

    Its size does not grow with the text where the operators of the model have memories of constant size. It is filled
    by the first call of a model, and each call changes it in place; ``fork`` copies it. ``generate`` makes one.

    A cache that records (``activate_past_recording``) can give tokens back (``crop``): it keeps the memories before
    each call, and the next call reads those tokens of the call again that were kept. Assisted generation uses this.
    """

    def __init__(self, memory: ModelMemory | None = None) -> None:
        super().__init__(memory)
        self._recorded: list[_Read] = []
        self._again: _Read | None = None

    # --- for the model ----------------------------------------------------------------------------------------------

    def begin(self, model: CausalLM, x: Tensor, real: Tensor | None) -> tuple[Sequence[Past], Tensor, Tensor | None]:
        """The pasts of all layers of the model, and the input and padding mask that are to be read after them: those
        given, behind tokens that are to be read again.
        """
        if not self._pasts:
            start = model.empty_memory(len(x), x.dtype, x.device)
            self._pasts = [*start.layers]
            self._origin = start.origin
        if len(self._pasts) != len(model.blocks) or self.batch_size != len(x):
            raise ArgumentError(
                f"ZonalCache: the cache holds {len(self._pasts)} layers of {self.batch_size} sequences, and the call "
                f"is of {len(model.blocks)} layers and {len(x)} sequences. Use a cache of this model and batch."
            )
        again, self._again = self._again, None
        if again is not None:
            if real is not None or again.real is not None:
                real = torch.cat([_mask(again.x, again.real), _mask(x, real)], 1)
            x = torch.cat([again.x, x], 1)
        if self._recording:
            before = self.memory().layers
            self._pasts = list(before)
            self._recorded.append(_Read(before, x, real))
        elif isinstance(self._pasts[0], LayerMemory) and self._pasts[0].memory.count:
            self._pasts = [past.decoder() if isinstance(past, LayerMemory) else past for past in self._pasts]
        return self._pasts, x, real

    def end(self, pasts: Sequence[Past], readings: dict[int, Reading]) -> None:
        """Keep the pasts after the tokens of a call, and the readings."""
        self._pasts, self.readings = list(pasts), readings

    def memory(self) -> ModelMemory:
        """As in every cache; also refused after a ``crop`` whose tokens are still to be read again."""
        if self._again is not None:
            raise ArgumentError(
                "ZonalCache.memory: tokens that crop kept are still to be read again. Call the model with the cache "
                "first."
            )
        return super().memory()

    # --- for transformers -------------------------------------------------------------------------------------------

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Number of tokens read, padding and those to be read again included."""
        return super().get_seq_length(layer_idx) + (0 if self._again is None else self._again.x.shape[1])

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *inputs: Any, **others: Any
    ) -> tuple[Tensor, Tensor]:
        """Raises ArgumentError: no layer of this library hands over keys and values."""
        raise ArgumentError(
            "ZonalCache: this cache is for the models of this library (ZonalForCausalLM), and received keys and values "
            "of another. Use MemoryCache for a converted model."
        )

    def _cropped(self, count: int) -> None:
        """The next call reads those tokens of the call again that are kept."""
        _check_recorded(self, count, sum(read.x.shape[1] for read in self._recorded))
        left = count
        while left:
            last = self._recorded.pop()
            kept = max(0, last.x.shape[1] - left)
            left -= last.x.shape[1] - kept
            self._pasts = list(last.before)
            self._again = None if kept == 0 else _Read(
                last.before, last.x[:, :kept], None if last.real is None else last.real[:, :kept]
            )  # fmt: skip
        self._recorded = []

    def _drop_records(self) -> None:
        self._recorded, self._again = [], None


class _Tokens(NamedTuple):
    """What one call brought to a layer: the memory before it, keys, values and their padding mask."""

    before: LayerMemory
    k: Tensor
    v: Tensor
    real: Tensor | None

    def first(self, count: int) -> LayerMemory:
        """The memory after the first ``count`` of these tokens."""
        if count == 0:
            return self.before
        real = None if self.real is None else self.real[:, :count]
        memory = self.before.memory.absorb(self.k[:, :, :count], self.v[:, :, :count], real)
        return self.before.advance(memory, None, count, real)


class MemoryCache(OperatorCache):
    """The memories of the layers of a converted model.

    Its size does not grow with the text where the operators' memories are constant; a layer of softmax keeps its keys
    and values. ``generate`` makes one if the model was converted with cache="memory"; any other call takes one that you
    make: ``model(tokens, **{CACHE: MemoryCache()})``.
    """

    def __init__(self, memory: ModelMemory | None = None) -> None:
        super().__init__(memory)
        self._records: dict[int, list[_Tokens]] = {}
        self._unread: set[int] = set()

    # --- for a converted layer --------------------------------------------------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *inputs: Any, **others: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values alone. The keys say which cache and layer they belong to, and the attention function
        of the converted layer reads them there (``of_keys``, ``read``).

        Raises: ArgumentError if the layer before has not read its tokens, as in a model that was not converted.
        """
        if self._unread:
            raise ArgumentError(
                f"MemoryCache: the attention of layer {min(self._unread)} has not read the tokens of its call from the "
                "cache. Convert the model with zonal.hf.convert, and use a new cache after a call that failed. A layer "
                "that changes its keys behind the cache (JetMoE) needs cache='keys'."
            )
        self._unread.add(layer_idx)
        marked = key_states.view_as(key_states)
        setattr(marked, _MARK, (self, layer_idx))
        return marked, value_states

    @staticmethod
    def of_keys(k: Tensor) -> "tuple[MemoryCache, int] | None":
        """The cache and the layer of keys that ``update`` returned; None for other keys."""
        return getattr(k, _MARK, None)

    def read(self, layer: int, operator: Operator, q: Tensor, k: Tensor, v: Tensor, real: Tensor | None) -> Tensor:
        """What the queries of new tokens read in a layer, as ``zonal.attention`` after its memory; the tokens are
        absorbed. real: which of them are no padding, bool (B, T); None = all.
        """
        if layer not in self._unread:
            raise ArgumentError(
                f"MemoryCache: the tokens of layer {layer} are read a second time in one call, by a layer with two "
                "attentions (DiffLlama) or one that shares its keys (Gemma 4), and memories take tokens once. Leave "
                "the cache out, and convert the model with cache='keys'."
            )
        self._unread.remove(layer)
        if layer == len(self._pasts):
            empty = Memory.empty(operator, k.shape[0], k.shape[1], k.shape[3], v.shape[3], k.dtype, k.device)
            self._pasts.append(LayerMemory(empty))
        past = self._pasts[layer]
        if past.batch != len(q):
            raise ArgumentError(
                f"MemoryCache: the cache holds {past.batch} sequences, and the call is of {len(q)}. Use a cache of "
                "this batch."
            )
        if past.operator is not operator:
            raise ArgumentError(
                f"MemoryCache: the memory of layer {layer} was made by operator {past.operator.name!r} of another "
                "model, or before this one was converted again. Use a new cache."
            )
        self.readings.pop(layer, None)
        report = self.report.get(layer, False)
        if report is not False:
            with torch.no_grad():
                self.readings[layer] = past.memory.read(q, report=report)
        if self._recording:
            past = past.value()
            self._records.setdefault(layer, []).append(_Tokens(past, k, v, real))
        elif isinstance(past, LayerMemory) and past.memory.count:
            past = past.decoder()
        if isinstance(past, LayerDecoder):
            y, absorbed = past.decoder.step(q, k, v, key_padding_mask=real), past.decoder
        else:
            y, absorbed = attention(q, k, v, operator, causal=True, key_padding_mask=real, memory=past.memory)
        self._pasts[layer] = past.advance(absorbed, None, k.shape[2], real)
        return y

    # --- for transformers -------------------------------------------------------------------------------------------

    def _cropped(self, count: int) -> None:
        """The tokens of a call that are kept are absorbed again."""
        of_layers = [self._records.get(layer, []) for layer in range(len(self._pasts))]
        for records in of_layers:
            _check_recorded(self, count, sum(read.k.shape[2] for read in records))
        for layer, records in enumerate(of_layers):
            left = count
            while left:
                last = records.pop()
                kept = max(0, last.k.shape[2] - left)
                left -= last.k.shape[2] - kept
                self._pasts[layer] = last.first(kept)
        self._records = {}

    def _drop_records(self) -> None:
        self._records = {}
        self._unread = set()


def start_generation(
    what: str, kind: type[OperatorCache], generation_config: Any, model_kwargs: dict[str, Any], mode: GenerationMode
) -> None:
    """Give ``generate`` of a model (what: its name in an error) a cache of this kind to start with, unless the call has
    one or uses none.
    """
    given = model_kwargs.get(CACHE)
    if given is not None and mode is GenerationMode.ASSISTED_GENERATION and given.get_seq_length():
        # the first step of assisted generation reads the whole prompt, also what the cache has read
        raise ArgumentError(
            f"generate: assisted generation begins without a cache, or with an empty one; the cache given to {what} "
            f"holds {given.get_seq_length()} tokens. Leave prompt_lookup_num_tokens and assistant_model out."
        )
    if given is not None or generation_config.use_cache is False:
        return
    if generation_config.cache_implementation is not None:
        raise ArgumentError(
            f"generate: cache_implementation is for keys and values, and {what} keeps memories; received "
            f"{generation_config.cache_implementation!r}. Leave it out."
        )
    cache = model_kwargs[CACHE] = kind()
    if generation_config.is_assistant:
        cache.activate_past_recording()


def _check_recorded(cache: OperatorCache, asked: int, recorded: int) -> None:
    if asked > recorded:
        raise ArgumentError(
            f"{type(cache).__name__}.crop: {asked - recorded} of {asked} tokens were read before the cache recorded. "
            "Call activate_past_recording() earlier."
        )


def _mask(x: Tensor, real: Tensor | None) -> Tensor:
    return torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if real is None else real


__all__ = ["CACHE", "MemoryCache", "OperatorCache", "ZonalCache", "start_generation"]
