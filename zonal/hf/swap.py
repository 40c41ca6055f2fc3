"""Runs models of transformers with operators of this library. Weights, caches and ``generate`` are kept.

The operator replaces softmax(c q · k) in each layer. The default, ``nn.rewa.with_closed_gates(c)``, computes the same
function until training opens its gates. A converted model is of a class of its own, a subclass of what it was; so is
its config. By this ``save_pretrained`` and the Auto classes know its operators.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedConfig,
    PreTrainedModel,
)

from zonal import mechanisms
from zonal.algebra.metric import Product
from zonal.algebra.operator import LEAK, Operator
from zonal.algebra.prior import Decay, Window
from zonal.algebra.score import Dot, NegativeDistance
from zonal.attention import attention
from zonal.errors import ArgumentError, unknown_name
from zonal.hf.cache import MemoryCache, start_generation
from zonal.nn import rewa
from zonal.nn.norm import RMSNorm

NAME = "zonal"
"""The ``attn_implementation`` of converted models, and the entry of their config.json that holds the operators."""
_CACHES = ("keys", "memory")
_SOME_SIZE = 64  # of a head, a square as some scores need it
# what models may hand to their attention and an operator has no place for
_UNKNOWN = ("softcap", "position_bias", "s_aux", "head_mask", "cache")
_SIZES = ("head_dim", "head_size", "attention_head_size")
_DROPOUTS = ("attention_dropout", "attn_dropout", "dropout")
# the Auto classes that load converted models
_AUTO = (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

Make = Callable[[float], Operator]
Choice = Operator | str | Make
Layers = Sequence[int] | Mapping[int, Choice] | Callable[[int], Choice | None]


def convert(
    model: nn.Module,
    operator: Choice = rewa.with_closed_gates,
    *,
    layers: Layers | None = None,
    cache: Literal["keys", "memory"] = "keys",
) -> list[Operator]:
    """Replace the attention of a transformers model by operators. Forward, backward and ``generate`` then use them.

    Args:
        model: a decoder or an encoder, such as ``AutoModelForCausalLM.from_pretrained(...)``. The operator gets queries
            and keys after their norms and rotary positions, with grouped heads, padding and caches. A layer with a
            sliding window gets the prior ``Window``.
        operator: an operator for all layers, of which each layer gets its own copy with one row of learned parameters
            per head; a spec such as "sko"; or a function from c, the scale of the dot product of a layer, to an
            operator. A ``Dot`` score without a scale gets c. Random features are drawn for each layer. A learned scale
            of keys starts as for keys with entries of size one.
        layers: the layers that get it, by index; a mapping from indices to operators; or a function from the index to
            an operator or None. The other layers get softmax. None: all.
        cache: what ``generate`` keeps. "keys": keys and values, as before. "memory": the memories of the operators
            (``MemoryCache``), constant in size for operators that have such a memory.

    Returns: the operators by layer. They are submodules of the layers (``self_attn.operator``), so they are trained and
        saved with the model, and so is the norm of an operator that declares one (``self_attn.readout``).
        ``save_pretrained`` writes their declarations to config.json; ``from_pretrained`` and the Auto classes restore
        them once ``zonal.hf`` is imported. Converting a model again replaces its operators.

    Raises:
        ArgumentError: the model has no layers of self-attention, drops out attention weights, caps its logits, or does
            not use transformers' AttentionInterface; an index names no layer; or the operator needs something that
            these layers do not provide. The model is then unchanged.
    """
    call = "hf.convert"
    found = layers_of(call, model)
    if cache not in _CACHES:
        raise unknown_name(call, "cache", cache, _CACHES)
    if cache == "memory":
        _check_caching(call, found)
    made = [
        for_layer(call, layer, choice)
        for layer, choice in zip(found, _chosen(call, operator, layers, len(found)), strict=True)
    ]
    before = model.config._attn_implementation  # type: ignore[union-attr]
    model.set_attn_implementation(NAME)  # type: ignore[operator]
    for layer in found:
        if layer.config._attn_implementation != NAME:
            model.set_attn_implementation(before)  # type: ignore[operator]
            raise ArgumentError(
                f"{call}: {type(layer).__name__} has an attention of its own, which transformers cannot "
                "exchange. Models that follow its AttentionInterface are required."
            )
    _install(found, made)
    config: Any = model.config
    config.__class__ = converted_config(type(config))
    setattr(config, NAME, {"base": type(config).base, "operators": [own.config() for own in made], "cache": cache})
    model.__class__ = converted_model(type(model))
    return made


def from_pretrained(folder: str | Path, options: Mapping[str, Any] = MappingProxyType({})) -> nn.Module:
    """A converted model that ``save_pretrained`` wrote, with its operators and their learned parameters. Its logits are
    the same as before saving. ``AutoModelForCausalLM.from_pretrained`` gives the same model.

    Args:
        folder: a folder, or a name that transformers finds.
        options: arguments for ``from_pretrained`` of the class of the model, such as ``{"dtype": torch.bfloat16}``.
            Operators stay in float32.

    Raises:
        ArgumentError: the model was saved without operators, or transformers does not have its class.
    """
    call = "hf.from_pretrained"
    config: Any = AutoConfig.from_pretrained(folder)
    if not issubclass(type(config), _ConvertedConfig) and isinstance(getattr(config, NAME, None), dict):
        config.__class__ = converted_config(type(config))  # saved before converted models had a type of their own
        config.zonal = {"base": type(config).base, "cache": "keys", **config.zonal}
    if not issubclass(type(config), _ConvertedConfig):
        raise ArgumentError(
            f"{call}: a model that was converted and saved is required; the config of {folder} holds no "
            "operators. Load it with transformers, and call hf.convert(model)."
        )
    name = (config.architectures or ["none"])[0]
    kinds = [kind for auto in _AUTO for kind in _classes(auto, type(config).__mro__[2]) if kind.__name__ == name]
    if not kinds:
        raise ArgumentError(
            f"{call}: the config of {folder} names the class {name}, which transformers does not have. Load it "
            "by its own code, and call hf.convert(model)."
        )
    return converted_model(kinds[0]).from_pretrained(folder, config=config, **options)


# --- the classes of converted models ----------------------------------------------------------------------------------


class ConvertedConfig(PreTrainedConfig):
    """The entry of converted models among transformers' configs: it reads a config.json as the config of the model that
    was converted.
    """

    model_type = "zonal_converted"

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **others: Any) -> Any:
        written = config_dict.get(NAME)
        if not isinstance(written, dict) or not isinstance(written.get("operators"), list):
            raise ArgumentError(
                "hf.from_pretrained: config.json of a converted model holds its operators, and this one holds none. "
                "Save the model again."
            )
        if written.get("base") not in CONFIG_MAPPING:
            raise unknown_name("hf.from_pretrained", "base of config.json", str(written.get("base")), CONFIG_MAPPING)
        base = CONFIG_MAPPING[written["base"]]
        _tell_auto_classes(base)
        return converted_config(base).from_dict(config_dict, **others)


@functools.cache
def converted_config(kind: type[Any]) -> type[Any]:
    """The class of configs of converted models for a class of configs of transformers."""
    if issubclass(kind, _ConvertedConfig):
        return kind
    inside = {"base": kind.model_type, "__module__": kind.__module__}
    return type(f"Converted{kind.__name__}", (_ConvertedConfig, kind), inside)


class _ConvertedConfig:
    """What makes the config of a model the config of a converted one."""

    model_type = ConvertedConfig.model_type
    base: ClassVar[str]  # the model_type of what was converted


@functools.cache
def converted_model(kind: type[Any]) -> type[Any]:
    """The class of converted models for a class of transformers. It has the same name."""
    if issubclass(kind, _Converted):
        return kind
    inside = {
        "config_class": converted_config(kind.config_class),
        "_keep_in_fp32_modules_strict": frozenset({*(kind._keep_in_fp32_modules_strict or ()), "operator", "readout"}),
        "__module__": kind.__module__,  # whose source transformers reads
    }
    return type(kind.__name__, (_Converted, kind), inside)


@functools.cache
def _tell_auto_classes(kind: type[Any]) -> None:
    """Let the Auto classes load converted models of a class of configs."""
    for auto in _AUTO:
        for model in _classes(auto, kind)[:1]:
            auto.register(converted_config(kind), converted_model(model), exist_ok=True)


class _Converted:
    """What makes the class of a model that of a converted one: operators are in place before weights are loaded, and
    ``generate`` starts with the cache of the conversion.
    """

    def __init__(self, config: Any, *inputs: Any, **others: Any) -> None:
        super().__init__(config, *inputs, **others)  # type: ignore[call-arg]
        layers = layers_of("hf.from_pretrained", self)  # type: ignore[arg-type]
        declared = [Operator.from_config(each) for each in config.zonal["operators"]]
        if len(declared) != len(layers):
            raise ArgumentError(
                f"hf.from_pretrained: an operator for each of {len(layers)} layers is required, and config.json holds "
                f"{len(declared)}. Save the model again."
            )
        sized = zip(declared, layers, strict=True)
        _install(layers, [own.for_heads(*_heads(layer), dim=_head_dim(layer)) for own, layer in sized])
        self.set_attn_implementation(NAME)  # type: ignore[attr-defined]

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *inputs: Any, **others: Any
    ) -> None:
        if self.config.zonal["cache"] == "memory":  # type: ignore[attr-defined]
            start_generation("a converted model", MemoryCache, generation_config, model_kwargs)
        else:
            super()._prepare_cache_for_generation(generation_config, model_kwargs, *inputs, **others)  # type: ignore[misc]


def _classes(auto: Any, kind: type[Any]) -> list[type[Any]]:
    """The classes that an Auto class makes for a config; none for one that it does not know."""
    if kind not in auto._model_mapping:
        return []
    found = auto._model_mapping[kind]
    return list(found) if isinstance(found, tuple | list) else [found]


# --- layers -----------------------------------------------------------------------------------------------------------


def operators(model: nn.Module) -> list[Operator]:
    """The operators of a converted model, by layer.

    Raises:
        ArgumentError: the model was not converted.
    """
    found = [
        own for module in model.modules() if hasattr(module, "layer_idx") and (own := operator_of(module)) is not None
    ]
    if not found:
        raise ArgumentError(
            f"hf.operators: a converted model is required, received {type(model).__name__}. Call "
            "hf.convert(model) first, or load it with hf.from_pretrained."
        )
    return found


def layers_of(call: str, model: nn.Module) -> list[Any]:
    """The layers of self-attention, in their order."""
    layers = [module for module in model.modules() if hasattr(module, "is_causal") and _head_dim(module) is not None]
    if not layers or not isinstance(model, PreTrainedModel):
        raise ArgumentError(
            f"{call}: a model of transformers with layers of self-attention is required, received "
            f"{type(model).__name__}."
        )
    if len({bool(layer.is_causal) for layer in layers}) > 1:
        raise ArgumentError(
            f"{call}: a decoder or an encoder is required; {type(model).__name__} has causal layers and others. "
            "Convert its encoder or its decoder alone."
        )
    return layers


def _check_caching(call: str, layers: Sequence[Any]) -> None:
    """Raise ArgumentError unless layers can keep memories as a cache of transformers."""
    numbers = [getattr(layer, "layer_idx", None) for layer in layers]
    if numbers != list(range(len(layers))) or not layers[0].is_causal:
        raise ArgumentError(
            f"{call}: cache='memory' is for decoders whose layers are all attention, received layers {numbers} of "
            f"{type(layers[0]).__name__}. Use cache='keys'."
        )


def _chosen(call: str, operator: Choice, layers: Layers | None, count: int) -> list[Choice]:
    """What each of ``count`` layers is to get."""
    if layers is None:
        return [operator] * count
    if callable(layers):
        given = {index: choice for index in range(count) if (choice := layers(index)) is not None}
    else:
        given = dict(layers) if isinstance(layers, Mapping) else dict.fromkeys(layers, operator)
    wrong = [index for index in given if not isinstance(index, int) or not 0 <= index < count]
    if wrong or not given:
        raise ArgumentError(
            f"{call}: layers must name some of the layers 0 to {count - 1}, received {wrong or 'none'}. Leave layers "
            "out for all."
        )
    return [given.get(index, "softmax") for index in range(count)]


def _install(layers: Sequence[Any], operators: Sequence[Operator]) -> None:
    for layer, own in zip(layers, operators, strict=True):
        layer.operator = own
        width = {"head": _head_dim(layer), "concat": _heads(layer)[0] * _head_dim(layer)}.get(own.readout or "")
        layer.readout = None if width is None else RMSNorm(width).to(next(layer.parameters()).device)


def operator_of(layer: Any) -> Operator | None:
    """The operator of a converted layer, also where ``modules_to_save`` of peft has wrapped it."""
    held: Any = getattr(layer, "operator", None)
    copies = getattr(held, "modules_to_save", None)
    if copies is not None:
        active = [] if held.disable_adapters else held.active_adapters
        held = copies[active[0]] if active else held.original_module
    return held if isinstance(held, Operator) else None


def _head_dim(layer: Any) -> Any:
    """Numbers per head, which models call by three names."""
    return next((size for name in _SIZES if isinstance(size := getattr(layer, name, None), int)), None)


def _heads(layer: Any) -> tuple[int, int]:
    """Of queries, and of keys and values."""
    heads = layer.config.num_attention_heads
    return heads, getattr(layer.config, "num_key_value_heads", None) or heads


def for_layer(call: str, layer: Any, operator: Choice) -> Operator:
    config, scale, dim = layer.config, _scale(layer), _head_dim(layer)
    if any(_rate(getattr(layer, name, 0.0)) for name in _DROPOUTS):
        raise ArgumentError(
            f"{call}: {type(layer).__name__} drops out weights of attention, which operators do not. Set the "
            "config's dropout of attention to 0 first."
        )
    if getattr(layer, "attn_logit_softcapping", None) is not None:
        raise ArgumentError(
            f"{call}: {type(layer).__name__} caps its logits, which operators do not. Load the model with "
            "attn_logit_softcapping=None first; its answers then differ a little, which training mends."
        )
    if isinstance(operator, str):
        made = mechanisms.resolve(operator)
    else:
        made = operator if isinstance(operator, Operator) else operator(scale)
    window = layer.sliding_window if hasattr(layer, "sliding_window") else getattr(config, "sliding_window", None)
    made = _fitted(made, scale, window)
    need = _need(made, dim, bool(layer.is_causal))
    if need is not None:
        raise ArgumentError(
            f"{call}: operator {made.name!r} needs {need}. Use zonal.nn.Attention, which has it, or another operator."
        )
    made.check(call, dim)
    try:
        own = made.for_heads(*_heads(layer), dim=dim)
    except ArgumentError as error:
        raise ArgumentError(
            f"{call}: operator {made.name!r} needs other queries and keys than those of {dim} numbers per head: {error}"
        ) from error
    for slot in own.sized_since(made):  # what they draw is this layer's own
        own.start(slot, 1.0, getattr(layer, "layer_idx", None) or 0)
    return own.to(next(layer.parameters()).device)


def _need(operator: Operator, head_dim: int, causal: bool) -> str | None:
    """What the operator asks of a layer and layers of transformers do not have, or None.

    A norm of what is read out is provided (``readout``).
    """
    score = operator.score
    if operator.anchor.couples and causal:
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


def _rate(dropout: Any) -> float:
    """The rate of a number or of a ``nn.Dropout``."""
    return float(getattr(dropout, "p", dropout) or 0.0)


def _scale(layer: Any) -> float:
    """c, by which the layer multiplies its dot products."""
    return float(getattr(layer, "scaling", _head_dim(layer) ** -0.5))


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
    if scaling is not None and scaling != _scale(module):  # the layer has scaled its queries itself, in part
        query = query * (scaling / _scale(module))
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
        if _kept(made) is None and _need(made, made.qk_dim or 0, True) is None:
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
    need = _kept(operator) or _need(operator, query.shape[3], causal)
    if need is not None:
        raise ArgumentError(
            f"{call}: the operator needs {need}. Load the model with its own attention, and call "
            f"zonal.hf.convert(model, {name!r}) where this can be provided."
        )
    real = None if attention_mask is None else attention_mask.bool()
    y = attention(query, key, value, operator, causal=causal, key_padding_mask=real)
    assert isinstance(y, Tensor)
    return y.transpose(1, 2), None


@functools.lru_cache(maxsize=64)
def _named_operator(name: str, scale: float | None, window: int | None) -> Operator:
    """The operator of a name with what a layer says of its scale and window."""
    return _fitted(mechanisms.resolve(name), scale, window)


def _fitted(operator: Operator, scale: float | None, window: int | None) -> Operator:
    """The operator with the scale of a layer, where it leaves that open, and with its window."""
    if isinstance(operator.score, Dot) and operator.score.scale is None:
        operator = operator.replace(score=dataclasses.replace(operator.score, scale=scale))
    if window is not None and not any(isinstance(prior, Window) for prior in operator.prior):
        operator = operator.replace(prior=(*operator.prior, Window(left=window - 1)))
    return operator


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


def read_out(layer: Any, operator: Operator, y: Tensor) -> Tensor:
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


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, padding)
AutoConfig.register(ConvertedConfig.model_type, ConvertedConfig)

__all__ = [
    "NAME",
    "ConvertedConfig",
    "attend",
    "convert",
    "converted_config",
    "converted_model",
    "from_pretrained",
    "operators",
    "padding",
    "register",
]
