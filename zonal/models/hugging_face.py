"""Runs decoders of Hugging Face's transformers with operators of this library. Weights, caches and ``generate`` are
kept.

The operator replaces softmax(c q · k) in each layer. The default, ``nn.rewa.with_closed_gates(c)``, computes the same
function until training opens its gates. transformers is imported only when a model is converted or loaded.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from zonal import mechanisms
from zonal.algebra.metric import Product
from zonal.algebra.operator import LEAK, Operator
from zonal.algebra.prior import Decay, Window
from zonal.algebra.score import Dot, NegativeDistance
from zonal.attention import attention
from zonal.errors import ArgumentError
from zonal.nn import rewa
from zonal.nn.norm import RMSNorm

NAME = "zonal"
"""The ``attn_implementation`` of converted models, and the entry of their config.json that holds the operators."""
_REQUIRED = "transformers>=5.20"
# what models may hand to their attention and an operator has no place for
_UNKNOWN = ("softcap", "position_bias", "s_aux", "head_mask", "cache")

Make = Callable[[float], Operator]


def convert(model: nn.Module, operator: Operator | str | Make = rewa.with_closed_gates) -> list[Operator]:
    """Replace the attention of a transformers model by an operator, in every layer. Forward, backward and ``generate``
    then use it.

    Args:
        model: a decoder, such as ``AutoModelForCausalLM.from_pretrained(...)``. The operator gets queries and keys
            after their norms and rotary positions, with grouped heads, padding and caches. A layer with a sliding
            window gets the prior ``Window``.
        operator: an operator for all layers, of which each layer gets its own copy with one row of learned parameters
            per head; a spec such as "sko"; or a function from c, the scale of the dot product of a layer, to an
            operator. A ``Dot`` score without a scale gets c. Random features are drawn for each layer. A learned scale
            of keys starts as for keys with entries of size one.

    Returns: the operators by layer. They are submodules of the layers (``self_attn.operator``), so they are trained and
        saved with the model, and so is the norm of an operator that declares one (``self_attn.readout``).
        ``save_pretrained`` writes their declarations to the config, and ``from_pretrained`` of this module reads them;
        transformers alone refuses to load such a model. Converting a model again replaces its operators.

    Raises:
        ArgumentError: transformers is missing; the model has no layers of causal attention, drops out attention
            weights, or does not use transformers' AttentionInterface; or the operator needs something that these layers
            do not provide. The model is then unchanged.
    """
    call = "hugging_face.convert"
    library = _transformers(call)
    layers = _layers(call, model)
    made = [_for_layer(call, layer, operator) for layer in layers]
    _register(library)
    before = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    for layer in layers:
        if layer.config._attn_implementation != NAME:
            model.set_attn_implementation(before)  # type: ignore[operator]
            raise ArgumentError(
                f"{call}: {type(layer).__name__} has an attention of its own, which transformers cannot "
                "exchange. Models that follow its AttentionInterface are required."
            )
    _install(layers, made)
    config: Any = model.config
    config.attn_implementation = (
        NAME  # in config.json, where transformers reads it: a load that does not know the name fails by it
    )
    setattr(config, NAME, {"operators": [own.config() for own in made]})
    return made


def from_pretrained(folder: str | Path, options: Mapping[str, Any] = MappingProxyType({})) -> nn.Module:
    """A converted model that ``save_pretrained`` wrote, with its operators and their learned parameters. Its logits are
    the same as before saving.

    Args:
        folder: a folder, or a name that transformers finds.
        options: arguments for ``from_pretrained`` of the class of the model, such as ``{"dtype": torch.bfloat16}``.
            Operators stay in float32.

    Raises:
        ArgumentError: transformers is missing, the model was saved without operators, or transformers does not have its
            class.
    """
    call = "hugging_face.from_pretrained"
    library = _transformers(call)
    _register(library)
    config = library.AutoConfig.from_pretrained(folder)
    written = getattr(config, NAME, None)
    if not isinstance(written, dict) or not isinstance(written.get("operators"), list):
        raise ArgumentError(
            f"{call}: a model that was converted and saved is required; the config of {folder} holds no "
            "operators. Load it with transformers, and call hugging_face.convert(model)."
        )
    name = (config.architectures or ["none"])[0]
    kind = getattr(library, name, None)
    if kind is None:
        raise ArgumentError(
            f"{call}: the config of {folder} names the class {name}, which transformers does not have. Load it "
            "by its own code, and call hugging_face.convert(model)."
        )

    class Restored(kind):  # type: ignore[misc, valid-type]
        """The model with its operators in place before transformers fills in what was saved."""

        _keep_in_fp32_modules_strict = frozenset({*(kind._keep_in_fp32_modules_strict or ()), "operator", "readout"})

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            layers = _layers(call, self)
            declared = [Operator.from_config(each) for each in written["operators"]]
            if len(declared) != len(layers):
                raise ArgumentError(
                    f"{call}: an operator for each of {len(layers)} layers is required, and {folder} holds "
                    f"{len(declared)}. Save the model again."
                )
            _install(
                layers,
                [
                    own.for_heads(*_heads(layer), dim=layer.head_dim)
                    for own, layer in zip(declared, layers, strict=True)
                ],
            )

    model = Restored.from_pretrained(folder, **options)
    model.__class__ = kind  # saved again, it is what it was
    model.config.attn_implementation = NAME
    return model


def operators(model: nn.Module) -> list[Operator]:
    """The operators of a converted model, by layer.

    Raises:
        ArgumentError: the model was not converted.
    """
    found = [
        own for module in model.modules() if hasattr(module, "layer_idx") and (own := _operator(module)) is not None
    ]
    if not found:
        raise ArgumentError(
            f"hugging_face.operators: a converted model is required, received {type(model).__name__}. Call "
            "hugging_face.convert(model) first, or load it with hugging_face.from_pretrained."
        )
    return found


def _transformers(call: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ArgumentError(
            f"{call}: the package transformers is required ({error}). pip install '{_REQUIRED}'"
        ) from error


def _register(library: Any) -> None:
    library.AttentionInterface.register(NAME, attend)
    library.AttentionMaskInterface.register(NAME, padding)


def _layers(call: str, model: nn.Module) -> list[Any]:
    """The layers of causal attention, in their order."""
    layers = [
        module
        for module in model.modules()
        if getattr(module, "is_causal", None) is True and hasattr(module, "layer_idx") and hasattr(module, "head_dim")
    ]
    if not layers or not hasattr(model, "set_attn_implementation"):
        raise ArgumentError(
            f"{call}: a model of transformers with layers of causal attention is required, received "
            f"{type(model).__name__}."
        )
    return layers


def _install(layers: Sequence[Any], operators: Sequence[Operator]) -> None:
    for layer, own in zip(layers, operators, strict=True):
        layer.operator = own
        width = {"head": layer.head_dim, "concat": _heads(layer)[0] * layer.head_dim}.get(own.readout or "")
        layer.readout = None if width is None else RMSNorm(width).to(next(layer.parameters()).device)


def _operator(layer: Any) -> Operator | None:
    """The operator of a converted layer, also where ``modules_to_save`` of peft has wrapped it."""
    held: Any = getattr(layer, "operator", None)
    copies = getattr(held, "modules_to_save", None)
    if copies is not None:
        active = [] if held.disable_adapters else held.active_adapters
        held = copies[active[0]] if active else held.original_module
    return held if isinstance(held, Operator) else None


def _heads(layer: Any) -> tuple[int, int]:
    """Of queries, and of keys and values."""
    heads = layer.config.num_attention_heads
    return heads, getattr(layer.config, "num_key_value_heads", None) or heads


def _for_layer(call: str, layer: Any, operator: Operator | str | Make) -> Operator:
    config, scale = layer.config, _scale(layer)
    if getattr(layer, "attention_dropout", 0.0) or getattr(getattr(layer, "attn_dropout", None), "p", 0.0):
        raise ArgumentError(
            f"{call}: {type(layer).__name__} drops out weights of attention, which operators do not. Set the "
            "config's dropout of attention to 0 first."
        )
    if isinstance(operator, str):
        made = mechanisms.resolve(operator)
    else:
        made = operator if isinstance(operator, Operator) else operator(scale)
    if isinstance(made.score, Dot) and made.score.scale is None:
        made = made.replace(score=dataclasses.replace(made.score, scale=scale))
    window = layer.sliding_window if hasattr(layer, "sliding_window") else getattr(config, "sliding_window", None)
    if window is not None and not any(isinstance(prior, Window) for prior in made.prior):
        made = made.replace(prior=(*made.prior, Window(left=window - 1)))
    need = _need(made, layer.head_dim)
    if need is not None:
        raise ArgumentError(
            f"{call}: operator {made.name!r} needs {need}. Use zonal.nn.Attention, which has it, or another operator."
        )
    made.check(call, layer.head_dim)
    try:
        own = made.for_heads(*_heads(layer), dim=layer.head_dim)
    except ArgumentError as error:
        raise ArgumentError(
            f"{call}: operator {made.name!r} needs other queries and keys than those of {layer.head_dim} numbers "
            f"per head: {error}"
        ) from error
    if own.score != made.score:  # it was sized here: what it draws is this layer's own
        own.start(1.0, layer.layer_idx)
    return own.to(next(layer.parameters()).device)


def _need(operator: Operator, head_dim: int) -> str | None:
    """What the operator asks of a layer and layers of transformers do not have, or None.

    A norm of what is read out is provided (``readout``).
    """
    score = operator.score
    if operator.anchor.couples:
        return f"a bidirectional layer, and this one is causal, which {LEAK}"
    if operator.qk_dim not in (None, head_dim):
        return f"queries and keys of {operator.qk_dim} numbers per head, and these layers have {head_dim}"
    if score.one_map:
        return "one map that makes both queries and keys, and the layer has one for each"
    if score.transports:
        return "values that are carried from token to token, which the layer does not do"
    if score.deaths:
        return f"{score.deaths} deaths of its neighbourhood behind each query and key, which the layer does not compute"
    if isinstance(score, NegativeDistance) and isinstance(score.metric, Product) and score.metric.adaptive:
        return (
            "logits of its own weights as the first numbers of each query, which the layer's map was not made "
            "for and rotary positions turn"
        )
    if any(isinstance(prior, Decay) and prior.gated for prior in operator.prior):
        return "a decay that each token sets by a gate of the layer's input, which transformers does not hand over"
    return None


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
    """The attention function that transformers calls in a converted layer.

    Args:
        query: (B, H, T, D).
        key, value: (B, Hkv, S, ·), including cached tokens.
        attention_mask: the mask of ``padding``, (B, S), nonzero for a real token.

    Returns: ((B, T, H, P), None).

    Raises:
        ArgumentError: the layer was not converted, or asks for something that operators do not support: dropout, soft
            caps, the weights, or another mask.
    """
    call = "hugging_face.attend"
    operator = _operator(module)
    if operator is None:
        raise ArgumentError(
            f"{call}: {type(module).__name__} has no operator. Convert the model with "
            "hugging_face.convert(model), or load a saved one with hugging_face.from_pretrained."
        )
    given = [name for name in _UNKNOWN if others.get(name) is not None]
    if dropout or output_attentions or given or (scaling is not None and scaling != _scale(module)):
        what = (
            given[0]
            if given
            else f"dropout={dropout}"
            if dropout
            else "output_attentions"
            if output_attentions
            else f"scaling={scaling}"
        )
        raise ArgumentError(
            f"{call}: {type(module).__name__} asks for {what}, which operators do not know. Use another "
            "attn_implementation for this model."
        )
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
    y = attention(
        query,
        key,
        value,
        operator,
        causal=True,
        key_padding_mask=None if attention_mask is None else attention_mask.bool(),
    )
    assert isinstance(y, Tensor)
    return _read_out(module, operator, y.transpose(1, 2)), None


def _read_out(layer: Any, operator: Operator, y: Tensor) -> Tensor:
    """y (B, T, H, P) after the norm that the operator declares."""
    if operator.readout is None:
        return y
    return layer.readout(y) if operator.readout == "head" else layer.readout(y.flatten(2)).unflatten(2, y.shape[2:])


def padding(
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = False,
    **others: Any,
) -> Tensor | None:
    """The mask that transformers makes for converted layers: real tokens (B, S), or None if all are real. Operators
    apply causality and windows themselves.

    Raises:
        ArgumentError: the mask is of another kind: packed sequences, overlays, or a cache with space for later tokens.
    """
    if not allow_is_causal_skip or int(q_offset) + q_length != kv_offset + kv_length:
        raise ArgumentError(
            "hugging_face.convert: a converted model takes causal masks, windows and padding, and a cache that "
            "grows; received a mask of another kind "
            "(packed position_ids, an overlay, a bidirectional one) or a static cache. Use one sequence per row, "
            "with the default cache."
        )
    if attention_mask is None:
        return None
    seen = attention_mask[:, -kv_length:]
    return None if bool(seen.all()) else seen


__all__ = ["NAME", "attend", "convert", "from_pretrained", "operators", "padding"]
