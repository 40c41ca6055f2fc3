"""The attention functions that transformers calls, and the masks that it makes for them."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from zonal import mechanisms
from zonal.algebra.operator import Operator
from zonal.algebra.prior import Window
from zonal.attention import attention
from zonal.errors import ArgumentError
from zonal.hf.cache import MemoryCache
from zonal.hf.layers import NAME, check_window, is_causal, need, open_scale, operator_of, read_out, unscaled, windowed
from zonal.hf.packing import MaskFunction, offsets_of_mask
from zonal.stretch import active

_SOME_SIZE = 64  # of a head, a square as some scores need it
# arguments that models may pass to their attention and operators do not support
_UNSUPPORTED = ("output_attentions", "softcap", "position_bias", "s_aux", "head_mask", "cache")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in a converted layer.

    Args:
        query: (B, H, T, D).
        key, value: (B, Hkv, S, ·), including cached tokens, unless a ``MemoryCache`` holds those.
        attention_mask: the mask of ``padding``; or (B, S), nonzero for a real token.
        dropout: the share of weights that are set to zero; layers ask for it in training only. It takes path "dense",
            whose time and memory are quadratic in the number of tokens.

    Returns: ((B, T, H, P), None).

    Raises:
        ArgumentError: the layer was not converted, or asks for something that operators do not support: soft caps,
            the weights, dropout with a ``MemoryCache``, another mask, or an offloaded operator.
    """
    call = "hf.attend"
    operator = _loaded(call, module, query)
    mask = _mask_of(call, module, attention_mask, others)
    _check_stretch(call, module, query, mask, others.get("position_ids"))
    query = unscaled(module, query, scaling)
    own = next((prior for prior in operator.prior if isinstance(prior, Window)), None)
    if sliding_window is not None and (own is None or own.left >= sliding_window):
        raise ArgumentError(
            f"{call}: {type(module).__name__} keeps {sliding_window} tokens, and its operator has no such "
            "Window. Convert the model again."
        )
    causal = _causal(call, module, others)
    past = MemoryCache.of_keys(key)
    check_window(call, module, None if own is None else own.left + 1, causal=causal)
    if past is None:
        y = _attention(query, key, value, operator, causal, mask, dropout=dropout)
    else:
        _check_cached(call, module, causal, dropout)
        cache, layer = past
        y = cache.read(layer, operator, query, key, value, mask.real)
    return read_out(module, operator, y.transpose(1, 2)).contiguous(), None  # some models take a view of it


def _loaded(call: str, module: nn.Module, query: Tensor) -> Operator:
    """The operator of a layer. Raises: ArgumentError where it has none, or where its weights are not on the device."""
    operator = operator_of(module)
    if operator is None:
        raise ArgumentError(
            f"{call}: {type(module).__name__} has no operator. Convert the model with "
            "hf.convert(model), or load a saved one with hf.from_pretrained. If it shares its config with a model that "
            "was converted, give it one of its own, copy.deepcopy(config); an encoder that was converted alone works "
            "alone where it shares its config with a decoder."
        )
    first = next(operator.parameters(), None)  # a device_map places an operator whole
    if first is not None and first.is_meta and not query.is_meta:
        raise ArgumentError(
            f"{call}: the operator of {type(module).__name__} is offloaded to the disk or the CPU by device_map, which "
            "brings weights only to modules that are called. Load the model with a device_map without offloading, "
            "such as {'': 'cpu'}."
        )
    return operator


def _check_cached(call: str, module: nn.Module, causal: bool, dropout: float) -> None:
    """Raise ArgumentError for a call with a ``MemoryCache`` that memories cannot answer."""
    name = type(module).__name__
    if not causal:
        raise ArgumentError(
            f"{call}: {name} has a MemoryCache, which keeps earlier tokens, and the call asks that "
            "each token sees all (is_causal=False). Pass use_cache=False."
        )
    if active() is not None:
        raise ArgumentError(
            f"{call}: within sequence_parallel the past is in other ranks, and memories are not filled. Pass "
            "use_cache=False."
        )
    if dropout:
        raise ArgumentError(
            f"{call}: {name} is in training and sets weights of attention to zero "
            f"(dropout={dropout}), which memories do not hold. Pass use_cache=False, or call model.eval() first."
        )


def register() -> tuple[str, ...]:
    """Make every mechanism known to transformers: ``from_pretrained(..., attn_implementation="zonal:squared_affine")``.

    This is for operators that have nothing of their own to keep: no learned or drawn numbers, and no norm of what is
    read out. A model that is loaded with another one says so when it is called; ``convert`` has a place for those.

    Returns: the names that can be used.
    """
    usable = []
    for mechanism in mechanisms.names():
        name, operator = f"{NAME}:{mechanism}", mechanisms.resolve(mechanism)
        lacking = _kept(operator)
        AttentionInterface.register(name, functools.partial(_attend_by_name, name, operator, lacking))
        AttentionMaskInterface.register(name, padding)
        if lacking is None and need(operator, operator.qk_dim or _SOME_SIZE, True) is None:
            usable.append(name)
    return tuple(usable)


def _attend_by_name(
    name: str,
    operator: Operator,
    lacking: str | None,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of ``attn_implementation=name``.

    lacking: what the operator would have to keep, or None.
    """
    mask, causal = _mask_of(name, module, attention_mask, others), _causal(name, module, others)
    _check_stretch(name, module, query, mask, others.get("position_ids"))
    lacking = lacking or need(operator, query.shape[3], causal)
    if lacking is not None:
        raise ArgumentError(
            f"{name}: the operator needs {lacking}. Load the model with its own attention, and call "
            f"zonal.hf.convert(model, {name.removeprefix(f'{NAME}:')!r}) where this can be provided."
        )
    check_window(name, module, sliding_window, causal=causal)
    scale = scaling if open_scale(operator) else None
    operator = windowed(operator, sliding_window, causal=causal)
    y = _attention(query, key, value, operator, causal, mask, scale, dropout)
    return y.transpose(1, 2).contiguous(), None


def _causal(call: str, module: nn.Module, others: Mapping[str, Any]) -> bool:
    """Whether tokens of a call see earlier ones only: by the layer, its config and the call."""
    causal, asked = is_causal(module), others.get("is_causal")
    if asked is True and not causal:  # its operator was made for tokens that see all
        raise ArgumentError(
            f"{call}: the layer {type(module).__name__} says that each token sees all, and its model asks in the call "
            "that it sees earlier ones only (is_causal=True). Such models, as text encoders of CLIP are, cannot be "
            "converted: load the model with its own attention."
        )
    return causal and asked is not False


def _kept(operator: Operator) -> str | None:
    """What of the operator a model would have to keep, or None."""
    if operator.readout is not None:
        return "a norm of what is read out"
    if any(True for _ in operator.parameters()) or any(True for _ in operator.buffers()):
        return "numbers of its own that are learned or drawn"
    if operator.score != operator.for_heads(1, 1, dim=operator.qk_dim or _SOME_SIZE).score:
        return "to be sized for the layer"
    return None


class _Mask(NamedTuple):
    """Which keys count: ``real`` (B, S) bool, or the offsets of documents packed into rows, which are joined in order.
    Both None: all keys.
    """

    real: Tensor | None = None
    offsets: Tensor | None = None


def _attention(
    q: Tensor, k: Tensor, v: Tensor, operator: Operator, causal: bool, mask: _Mask, scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:  # fmt: skip
    """``zonal.attention`` on (B, H, T, D), with packed documents as one row."""
    if mask.offsets is None:
        return attention(q, k, v, operator, causal=causal, key_padding_mask=mask.real, scale=scale, dropout=dropout)
    batch = len(q)
    q, k, v = (x.transpose(0, 1).flatten(1, 2)[None] for x in (q, k, v))  # one row
    y = attention(q, k, v, operator, causal=causal, cu_seqlens=mask.offsets, scale=scale, dropout=dropout)
    return y[0].unflatten(1, (batch, -1)).transpose(0, 1)


def _mask_of(call: str, module: nn.Module, mask: Tensor | None, others: Mapping[str, Any]) -> _Mask:
    """A mask of ``padding`` as a ``_Mask``.

    Raises: ArgumentError for another mask, for a layer that asks for something that operators do not support, and for
        packed documents where transformers has made a mask of one sequence per row.
    """
    asked = next((name for name in _UNSUPPORTED if _asks(others.get(name))), None)
    if asked is not None:
        raise ArgumentError(
            f"{call}: {type(module).__name__} asks for {asked}, which operators do not support. Use "
            "another attn_implementation for this model."
        )
    if mask is not None and mask.dim() == 1:
        return _Mask(offsets=mask)
    if mask is not None and mask.dtype == torch.bool and mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        mask = mask[:, 0, 0]
    if mask is not None and mask.dim() != 2:
        raise ArgumentError(
            f"{call}: a mask (batch, tokens), nonzero = a real token, is required, received shape {tuple(mask.shape)}."
        )
    if (starts := others.get("cu_seq_lens_q")) is not None and len(starts) > 2:  # for kernels that take no mask
        raise ArgumentError(
            f"{call}: packed documents are told apart by position_ids, and {type(module).__name__} was only given "
            "cu_seq_lens_q. Give position_ids that start again from 0 with each document, and use_cache=False."
        )
    real = None if mask is None else mask.bool()
    positions = others.get("position_ids")
    if positions is not None and not getattr(module, "layer_idx", 0) and _starts_again(positions, real):
        raise ArgumentError(
            f"{call}: the mask says one sequence for packed documents (position_ids that start again from 0). Pass "
            f"use_cache=False and leave attention_mask out; where transformers makes no mask for them "
            f"({type(module).__name__} may be such a layer), give each document a row."
        )
    return _Mask(real)


def _check_stretch(call: str, module: nn.Module, query: Tensor, mask: _Mask, positions: Tensor | None) -> None:
    """Raise ArgumentError for positions that do not go on from the stretch of another rank, or are not known."""
    stretch = active()
    if stretch is None or getattr(module, "layer_idx", 0):
        return
    if positions is None:
        raise ArgumentError(
            f"{call}: {type(module).__name__} is not told the positions of its tokens, so that sequence_parallel "
            "cannot see whether they go on from one rank to the next. Use a model that hands position_ids to its "
            "layers, such as Llama."
        )
    every = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool, device=query.device)
    stretch.check_positions(positions, every if mask.real is None else mask.real)


def _starts_again(positions: Tensor, real: Tensor | None) -> bool:
    """Whether positions (B or 1, T) start again from 0 behind a real token."""
    again = (positions[:, 1:] == 0) & (positions[:, :-1] >= 0)
    if real is not None:
        new = real[:, -positions.shape[1] :]
        again = again & new[:, 1:] & new[:, :-1]
    return bool(again.any())


def _asks(value: Any) -> bool:
    """Whether an argument asks for something: a tensor, or a value other than None, False and 0."""
    return isinstance(value, Tensor) or bool(value)


def padding(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    *,
    batch_size: int,
    mask_function: MaskFunction,
    device: torch.device,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **others: Any,
) -> Tensor | None:
    """The mask that transformers makes for converted layers. Operators apply causality and windows themselves.

    mask_function: of transformers, which documents packed into rows are read from.

    Returns: real tokens (B, 1, 1, S) bool, with axes for heads and queries, of which Gemma 4 slices the latter; or the
        offsets (N + 1,) of packed documents in rows one behind the other; or None if each row is one sequence of real
        tokens.

    Raises:
        ArgumentError: the mask has another shape, or is of another kind: a function of the user's, blocks that see
            later tokens, or a cache with space for later tokens.
    """
    plain = allow_is_causal_skip or allow_is_bidirectional_skip
    grows = int(q_offset) + q_length == kv_offset + kv_length
    could_pack = q_length == kv_length and attention_mask is None and not use_vmap
    if not grows or not (plain or could_pack):
        raise ArgumentError(
            "hf.convert: a converted model takes its own causal or bidirectional mask, windows, padding and packed "
            "documents, and a cache that grows; received a mask function or a static cache. Use the default cache, "
            "and no mask function."
        )
    if attention_mask is None:
        return None if plain else offsets_of_mask(mask_function, batch_size, q_length, device)
    whole = (batch_size, kv_offset + kv_length)
    if attention_mask.shape not in (whole, (batch_size, kv_length)):
        raise ArgumentError(
            f"hf.convert: attention_mask must be (batch, tokens) = {whole}, tokens of the cache included, nonzero for "
            f"a real token, received {tuple(attention_mask.shape)}."
        )
    seen = attention_mask[:, -kv_length:].bool()
    return None if bool(seen.all()) else seen[:, None, None]


__all__ = ["attend", "padding", "register"]
