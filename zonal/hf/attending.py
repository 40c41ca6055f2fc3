"""The attention functions that transformers calls, and the masks that it makes for them."""

import functools
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from zonal import mechanisms
from zonal.algebra.operator import Operator
from zonal.algebra.prior import Window
from zonal.attention import attention
from zonal.errors import ArgumentError
from zonal.hf.cache import MemoryCache
from zonal.hf.layers import NAME, fitted, need, operator_of, read_out, scale_of

_SOME_SIZE = 64  # of a head, a square as some scores need it
# what models may hand to their attention and an operator has no place for
_UNKNOWN = ("softcap", "position_bias", "s_aux", "head_mask", "cache")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in a converted layer.

    Args:
        query: (B, H, T, D).
        key, value: (B, Hkv, S, ·), including cached tokens, unless a ``MemoryCache`` holds those.
        attention_mask: the mask of ``padding``, (B, S), nonzero for a real token.

    Returns: ((B, T, H, P), None).

    Raises:
        ArgumentError: the layer was not converted, or asks for something that operators do not support: dropout, soft
            caps, the weights, or another mask.
    """
    call = "hf.attend"
    operator = operator_of(module)
    if operator is None:
        raise ArgumentError(
            f"{call}: {type(module).__name__} has no operator. Convert the model with "
            "hf.convert(model), or load a saved one with hf.from_pretrained."
        )
    asked = _unknown(dropout, others)
    if asked is not None:
        raise ArgumentError(
            f"{call}: {type(module).__name__} asks for {asked}, which operators do not know. Use another "
            "attn_implementation for this model."
        )
    if scaling is not None and scaling != scale_of(module):  # the layer has scaled its queries itself, in part
        query = query * (scaling / scale_of(module))
    own = next((prior for prior in operator.prior if isinstance(prior, Window)), None)
    if sliding_window is not None and (own is None or own.left >= sliding_window):
        raise ArgumentError(
            f"{call}: {type(module).__name__} keeps {sliding_window} tokens, and its operator has no such "
            "Window. Convert the model again."
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ArgumentError(
            f"{call}: a mask (batch, tokens), nonzero = a real token, is required, received shape "
            f"{tuple(attention_mask.shape)}."
        )
    real = None if attention_mask is None else attention_mask.bool()
    past = MemoryCache.of_keys(key)
    if past is not None:
        cache, layer = past
        y = cache.read(layer, operator, query, key, value, real)
    else:
        y = attention(query, key, value, operator, causal=bool(module.is_causal), key_padding_mask=real)  # type: ignore[arg-type]
    return read_out(module, operator, y.transpose(1, 2)), None


def register() -> tuple[str, ...]:
    """Make every mechanism known to transformers: ``from_pretrained(..., attn_implementation="zonal:squared_affine")``.

    This is for operators that have nothing of their own to keep: no learned or drawn numbers, and no norm of what is
    read out. A model that is loaded with another one says so when it is called; ``convert`` has a place for those.

    Returns: the names that can be used.
    """
    usable = []
    for name in mechanisms.names():
        AttentionInterface.register(f"{NAME}:{name}", functools.partial(_attend_by_name, name))
        AttentionMaskInterface.register(f"{NAME}:{name}", padding)
        made = mechanisms.resolve(name)
        if _kept(made) is None and need(made, made.qk_dim or 0, True) is None:
            usable.append(f"{NAME}:{name}")
    return tuple(usable)


def _attend_by_name(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function of ``attn_implementation="zonal:<name>"``."""
    call, asked = f"{NAME}:{name}", _unknown(dropout, others)
    if asked is not None:
        raise ArgumentError(f"{call}: {type(module).__name__} asks for {asked}, which operators do not know.")
    operator = _named_operator(name, scaling, sliding_window)
    causal = bool(module.is_causal)
    lacking = _kept(operator) or need(operator, query.shape[3], causal)
    if lacking is not None:
        raise ArgumentError(
            f"{call}: the operator needs {lacking}. Load the model with its own attention, and call "
            f"zonal.hf.convert(model, {name!r}) where this can be provided."
        )
    real = None if attention_mask is None else attention_mask.bool()
    y = attention(query, key, value, operator, causal=causal, key_padding_mask=real)
    assert isinstance(y, Tensor)
    return y.transpose(1, 2), None


@functools.lru_cache(maxsize=64)
def _named_operator(name: str, scale: float | None, window: int | None) -> Operator:
    """The operator of a name with what a layer says of its scale and window."""
    return fitted(mechanisms.resolve(name), scale, window)


def _kept(operator: Operator) -> str | None:
    """What of the operator a model would have to keep, or None."""
    if operator.readout is not None:
        return "a norm of what is read out"
    if any(True for _ in operator.parameters()) or any(True for _ in operator.buffers()):
        return "numbers of its own that are learned or drawn"
    if operator.score != operator.for_heads(1, 1, dim=operator.qk_dim or _SOME_SIZE).score:
        return "to be sized for the layer"
    return None


def _unknown(dropout: float, others: Mapping[str, Any]) -> str | None:
    """What a model asks for and operators do not know, or None."""
    if dropout:
        return f"dropout={dropout}"
    if others.get("output_attentions"):
        return "output_attentions"
    return next((name for name in _UNKNOWN if others.get(name) is not None), None)


def padding(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    **others: Any,
) -> Tensor | None:
    """The mask that transformers makes for converted layers: real tokens (B, S), or None if all are real. Operators
    apply causality and windows themselves.

    Raises:
        ArgumentError: the mask is of another kind: packed sequences, overlays, or a cache with space for later tokens.
    """
    if not (allow_is_causal_skip or allow_is_bidirectional_skip) or int(q_offset) + q_length != kv_offset + kv_length:
        raise ArgumentError(
            "hf.convert: a converted model takes its own causal or bidirectional mask, windows and "
            "padding, and a cache that grows; received a mask of another kind (packed position_ids, an overlay) or a "
            "static cache. Use one sequence per row, "
            "with the default cache."
        )
    if attention_mask is None:
        return None
    seen = attention_mask[:, -kv_length:]
    return None if bool(seen.all()) else seen


__all__ = ["attend", "padding", "register"]
