"""Decoders of Hugging Face's transformers on operators of this library, in place: their weights, caches and ``generate`` stay as they are.

A layer whose weights are softmax(c q . k) gets an operator in the place of that; the default, ``nn.rewa.with_closed_gates(c)``, computes the same
until its gates are opened. transformers is asked for when a model is converted, and by nothing else.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from zonal import mechanisms
from zonal.algebra.operator import Operator
from zonal.algebra.prior import Window
from zonal.algebra.score import Dot
from zonal.attention import attention
from zonal.errors import ArgumentError
from zonal.nn import rewa

NAME = "zonal"
# what models may hand to their attention and an operator has no place for
_UNKNOWN = ("softcap", "position_bias", "s_aux", "head_mask", "cache")

Make = Callable[[float], Operator]


def convert(model: nn.Module, operator: Operator | str | Make = rewa.with_closed_gates) -> list[Operator]:
    """Put an operator into every layer of attention of a model of transformers, which from then on runs on it: forward, backward and ``generate``.

    Args:
        model: a decoder, such as ``AutoModelForCausalLM.from_pretrained(...)``. Queries and keys reach the operator after their norms and rotary
            positions, with grouped heads, padding and caches as they come. A layer with a sliding window gets the prior ``Window``.
        operator: one for all layers, each of which gets its own copy, a row of learned numbers a head; a spec such as "sko"; or a function
            from c, the factor of the layer's dot product, to an operator. A ``Dot`` score whose scale is open takes c.

    Returns: the operators by layer. They are submodules of the layers (``self_attn.operator``), trained and saved with the model; a model that was
    converted before gets the new ones.

    Raises: ArgumentError when transformers is missing, or for a model without layers of causal attention, with dropout in them, or with an attention of its own.
    """
    call = "hugging_face.convert"
    try:
        library: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ArgumentError(f"{call}: the package transformers is required ({error}). pip install 'transformers>=5.20'") from error
    layers = [module for module in model.modules() if getattr(module, "is_causal", None) is True and hasattr(module, "layer_idx") and hasattr(module, "head_dim")]
    if not layers or not hasattr(model, "set_attn_implementation"):
        raise ArgumentError(f"{call}: a model of transformers with layers of causal attention is required, received {type(model).__name__}.")
    made = [_for_layer(call, layer, operator) for layer in layers]
    library.AttentionInterface.register(NAME, attend)
    library.AttentionMaskInterface.register(NAME, padding)
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    for layer, own in zip(layers, made, strict=True):
        if layer.config._attn_implementation != NAME:  # type: ignore[union-attr]
            raise ArgumentError(f"{call}: {type(layer).__name__} has an attention of its own, which transformers cannot exchange. Models that follow its AttentionInterface are required.")
        layer.operator = own
    return made


def operators(model: nn.Module) -> list[Operator]:
    """The operators of a converted model, by layer. Raises: ArgumentError for a model that was not converted."""
    found = [own for module in model.modules() if hasattr(module, "layer_idx") and isinstance(own := getattr(module, "operator", None), Operator)]
    if not found:
        raise ArgumentError(f"hugging_face.operators: a converted model is required, received {type(model).__name__}. Call hugging_face.convert(model) first.")
    return found


def _for_layer(call: str, layer: Any, operator: Operator | str | Make) -> Operator:
    config, scale = layer.config, _scale(layer)
    if getattr(layer, "attention_dropout", 0.0) or getattr(getattr(layer, "attn_dropout", None), "p", 0.0):
        raise ArgumentError(f"{call}: {type(layer).__name__} drops out weights of attention, which operators do not. Set the config's dropout of attention to 0 first.")
    if isinstance(operator, str):
        made = mechanisms.resolve(operator)
    else:
        made = operator if isinstance(operator, Operator) else operator(scale)
    if isinstance(made.score, Dot) and made.score.scale is None:
        made = made.replace(score=dataclasses.replace(made.score, scale=scale))
    window = layer.sliding_window if hasattr(layer, "sliding_window") else getattr(config, "sliding_window", None)
    if window is not None and not any(isinstance(prior, Window) for prior in made.prior):
        made = made.replace(prior=(*made.prior, Window(left=window - 1)))
    heads = config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    return made.for_heads(heads, kv_heads, dim=layer.head_dim).to(next(layer.parameters()).device)


def _scale(layer: Any) -> float:
    """c, by which the layer multiplies its dot products."""
    return float(getattr(layer, "scaling", layer.head_dim**-0.5))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    output_attentions: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in a converted layer. query (B, H, T, D), key and value (B, Hkv, S, ·) with what a cache holds -> ((B, T, H, P), None).

    attention_mask: of ``padding``, (B, S), nonzero = a real token.

    Raises: ArgumentError for a layer that was not converted, and for what an operator does not know (dropout, soft caps, weights asked for, other masks).
    """
    call = "hugging_face.attend"
    operator = getattr(module, "operator", None)
    if not isinstance(operator, Operator):
        raise ArgumentError(f"{call}: {type(module).__name__} has no operator. Convert the model: hugging_face.convert(model).")
    given = [name for name in _UNKNOWN if others.get(name) is not None]
    if dropout or output_attentions or given or (scaling is not None and scaling != _scale(module)):
        what = given[0] if given else f"dropout={dropout}" if dropout else "output_attentions" if output_attentions else f"scaling={scaling}"
        raise ArgumentError(f"{call}: {type(module).__name__} asks for {what}, which operators do not know. Use another attn_implementation for this model.")
    own = next((prior for prior in operator.prior if isinstance(prior, Window)), None)
    if sliding_window is not None and (own is None or own.left >= sliding_window):
        raise ArgumentError(f"{call}: {type(module).__name__} keeps {sliding_window} tokens, and its operator has no such Window. Convert the model again.")
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ArgumentError(f"{call}: a mask (batch, tokens), nonzero = a real token, is required, received shape {tuple(attention_mask.shape)}.")
    y = attention(query, key, value, operator, causal=True, key_padding_mask=None if attention_mask is None else attention_mask.bool())
    assert isinstance(y, Tensor)
    return y.transpose(1, 2), None


def padding(
    q_length: int, kv_length: int, q_offset: int | Tensor = 0, kv_offset: int = 0, attention_mask: Tensor | None = None, allow_is_causal_skip: bool = False, **others: Any
) -> Tensor | None:
    """The mask that transformers makes for converted layers: of real tokens (B, S), None where all are; operators know causality and windows by themselves.

    Raises: ArgumentError for masks that are more than that: packed sequences, overlays, and caches with room for tokens to come.
    """
    if not allow_is_causal_skip or int(q_offset) + q_length != kv_offset + kv_length:
        raise ArgumentError(
            "hugging_face.convert: a converted model takes causal masks, windows and padding, and a cache that grows; received a mask of another kind "
            "(packed position_ids, an overlay, a bidirectional one) or a static cache. Run sequences one a row, with the default cache."
        )
    if attention_mask is None:
        return None
    seen = attention_mask[:, -kv_length:]
    return None if bool(seen.all()) else seen


__all__ = ["NAME", "attend", "convert", "operators", "padding"]
