"""Layers of self-attention in models of transformers: finding them, and giving them operators that fit."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from zonal import mechanisms
from zonal.algebra.metric import Product
from zonal.algebra.named import in_use
from zonal.algebra.operator import Operator
from zonal.algebra.prior import Decay, Window
from zonal.algebra.refusals import leak
from zonal.algebra.score import Dot, NegativeDistance
from zonal.errors import ArgumentError
from zonal.nn.norm import RMSNorm

NAME = "zonal"
"""The ``attn_implementation`` of converted models, and the entry of their config.json that holds the operators."""
_UNUSED_WINDOW = ("moshi",)
"""Models whose config has a sliding window that their layers do not use."""
_WINDOW_OF_ALL = ("minimax",)
"""Models whose layers of the kind "full_attention" have the sliding window of the config."""
_SIZES = ("head_dim", "head_size", "attention_head_size")

Make = Callable[[float], Operator]
Choice = Operator | str | Make
Layers = Sequence[int] | Mapping[int, Choice] | Callable[[int], Choice | None]
"""What ``convert`` takes as ``layers``."""


def operators(model: nn.Module) -> list[Operator]:
    """The operators of a converted model, by layer.

    Raises:
        ArgumentError: the model was not converted.
    """
    found = [own for module in model.modules() if _attends(module) and (own := operator_of(module)) is not None]
    if not found:
        raise ArgumentError(
            f"hf.operators: a converted model is required, received {type(model).__name__}. Call "
            "hf.convert(model) first, or load it with hf.from_pretrained."
        )
    return found


def layers_of(call: str, model: nn.Module) -> list[Any]:
    """The layers of self-attention, in their order."""
    modules = model.modules() if isinstance(model, PreTrainedModel) else ()
    layers = [module for module in modules if _attends(module)]
    if not layers:
        raise ArgumentError(
            f"{call}: a model of transformers with layers of self-attention is required, received "
            f"{type(model).__name__}. Its layers of attention must have is_causal and a size of heads, as Llama's; "
            "convert a model before peft wraps it."
        )
    decoding = [layer for layer in layers if getattr(layer, "is_decoder", False) is True]
    # a layer of a decoder that is not causal itself attends to an encoder, or leaves causality to a mask
    if len({is_causal(layer) for layer in layers}) > 1 or not all(layer.is_causal for layer in decoding):
        raise ArgumentError(
            f"{call}: a decoder or an encoder is required; {type(model).__name__} has causal layers and others. "
            "Convert a part that has layers of one kind, such as an encoder, or the language model of one for images."
        )
    return layers


def _attends(module: nn.Module) -> bool:
    """Whether a module is a layer of self-attention."""
    return hasattr(module, "is_causal") and head_dim(module) is not None


def is_causal(layer: Any) -> bool:
    """Whether tokens see earlier ones only. The config of a decoder may say that they see all (``is_causal=False``)."""
    return bool(layer.is_causal) and getattr(getattr(layer, "config", None), "is_causal", True) is not False


def check_window(call: str, layer: Any, window: int | None, *, causal: bool) -> None:
    """Raise ArgumentError for the sliding window of a decoder whose tokens see all."""
    if window is not None and layer.is_causal and not causal:
        raise ArgumentError(
            f"{call}: {type(layer).__name__} has a sliding window of {window} tokens and is asked that each token sees "
            "all (is_causal=False), which operators do not have. Texts that are shorter than the window need none: set "
            "sliding_window=None in the config, and convert the model then."
        )


def check_caching(call: str, layers: Sequence[Any]) -> None:
    """Raise ArgumentError unless layers can keep memories as a cache of transformers."""
    numbers, config = [getattr(layer, "layer_idx", None) for layer in layers], layers[0].config
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    mixed = _attending(kinds) != list(kinds)  # as in Falcon-H1
    if mixed or numbers != list(range(len(layers))) or not is_causal(layers[0]):
        found = f"layers of the kinds {', '.join(sorted(set(kinds)))}" if mixed else f"layers {numbers}"
        raise ArgumentError(
            f"{call}: cache='memory' is for decoders whose layers are all attention, received {found} of "
            f"{type(layers[0]).__name__}. Use cache='keys'."
        )
    sharing = [number for number, layer in enumerate(layers) if getattr(layer, "is_kv_shared_layer", False)]
    if sharing:
        raise ArgumentError(
            f"{call}: cache='memory' is for layers with keys of their own, and {type(layers[0]).__name__} in layers "
            f"{sharing} reads those of earlier layers. Use cache='keys'."
        )


def _attending(kinds: Iterable[str]) -> list[str]:
    """The kinds of the layers of attention: those that ``convert`` counts, without convolutions and recurrences."""
    return [kind for kind in kinds if kind.endswith("attention") and kind != "linear_attention"]


def chosen_of(call: str, operator: Choice, layers: Layers | None, count: int) -> list[Choice]:
    """The choice for each of ``count`` layers."""
    if layers is None:
        return [operator] * count
    if callable(layers):
        given = {index: choice for index in range(count) if (choice := layers(index)) is not None}
    elif isinstance(layers, Mapping):
        given = dict(layers)
    else:
        given = dict.fromkeys(layers, operator) if isinstance(layers, Iterable) else {}
    wrong = [index for index in given if type(index) is bool or not isinstance(index, int) or not 0 <= index < count]
    if wrong or not given:
        raise ArgumentError(
            f"{call}: layers must name some of the layers 0 to {count - 1}, received {wrong or layers!r}. Leave "
            "layers out for all."
        )
    return [given.get(index, "softmax") for index in range(count)]


def install(layers: Sequence[Any], operators: Sequence[Operator]) -> None:
    """Give each layer its operator, and the norm that the operator declares."""
    for layer, own in zip(layers, operators, strict=True):
        layer.operator = own
        width = {"head": head_dim(layer), "concat": heads(layer)[0] * head_dim(layer)}.get(own.readout or "")
        layer.readout = None if width is None else RMSNorm(width).to(next(layer.parameters()).device)


def operator_of(layer: Any) -> Operator | None:
    """The operator of a converted layer, also where ``modules_to_save`` of peft has wrapped it."""
    held = in_use(getattr(layer, "operator", None))
    return held if isinstance(held, Operator) else None


def head_dim(layer: Any) -> Any:
    """Numbers per head; models have one of three names for it."""
    return next((size for name in _SIZES if isinstance(size := getattr(layer, name, None), int)), None)


def heads(layer: Any) -> tuple[int, int]:
    """Of queries, and of keys and values."""
    config = layer.config
    if getattr(config, "is_heterogeneous", False):  # layers have sizes of their own, as in Gemma 4
        config = config.per_layer_config[layer.layer_idx]
    return config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def for_layer(call: str, layer: Any, operator: Choice, index: int = 0) -> Operator:
    """A copy of the operator, sized for a layer, with its scale and window. index: of the layer, which draws its own
    random features.

    Raises: ArgumentError for a layer that does more than operators know, and for an operator that does not fit.
    """
    dim = head_dim(layer)
    if "chunked_attention" in (getattr(layer.config, "layer_types", None) or ()):
        raise ArgumentError(
            f"{call}: {type(layer).__name__} is of a model with attention in chunks, which operators do not have. "
            "Models with full attention or sliding windows can be converted."
        )
    if getattr(layer, "attn_logit_softcapping", None) is not None:
        raise ArgumentError(
            f"{call}: {type(layer).__name__} caps its logits, which operators do not. Load the model with "
            "attn_logit_softcapping=None (null in its config.json) first. Its predictions then differ a little, which "
            "training can correct."
        )
    if getattr(layer, "sinks", None) is not None:
        raise ArgumentError(
            f"{call}: {type(layer).__name__} has a learned sink per head in the denominator of its softmax, which "
            "operators do not have. Models without sinks can be converted."
        )
    window = window_of(layer)
    check_window(call, layer, window, causal=is_causal(layer))
    bare = _scaled(call, layer, operator)
    made = windowed(bare, window, causal=is_causal(layer))
    lacking = need(made, dim, is_causal(layer))
    if lacking is not None:
        raise ArgumentError(
            f"{call}: operator {made.name!r} needs {lacking}. Use zonal.nn.Attention, which "
            "has it, or another operator."
        )
    bare.check(call, dim)
    try:
        made.check(call, dim)
    except ArgumentError as error:
        raise ArgumentError(
            f"{call}: {type(layer).__name__} has a sliding window of {window} tokens, which operator {made.name!r} "
            f"cannot have. The memory of such a layer is bounded already. {_others(layer)}"
        ) from error
    try:
        own = made.for_heads(*heads(layer), dim=dim)
    except ArgumentError as error:
        raise ArgumentError(
            f"{call}: operator {made.name!r} needs other queries and keys than those of {dim} numbers per head: {error}"
        ) from error
    for slot in own.sized_since(made):  # what they draw is this layer's own
        own.start(slot, 1.0, index)
    return own.to(next(layer.parameters()).device)


def _scaled(call: str, layer: Any, operator: Choice) -> Operator:
    """The operator that was chosen for a layer, with the layer's scale where it has none of its own."""
    made: Any = operator
    if isinstance(operator, str):
        made = mechanisms.resolve(operator)
    elif callable(operator) and not isinstance(operator, Operator):
        made = operator(scale_of(layer))
    if not isinstance(made, Operator):
        raise ArgumentError(
            f"{call}: an operator, a spec such as 'sko', or a function from the scale of a layer to an operator is "
            f"required for {type(layer).__name__}, received {made!r}."
        )
    if open_scale(made):
        made = made.replace(score=dataclasses.replace(made.score, scale=scale_of(layer)))  # type: ignore[call-arg]
    return made


def _others(layer: Any) -> str:
    """What to do about a layer with a sliding window, as a sentence."""
    kinds = getattr(layer.config, "layer_types", None) or ()
    full = [index for index, kind in enumerate(_attending(kinds)) if kind == "full_attention"]
    if full and _model_type(layer) not in _WINDOW_OF_ALL:
        return f"Convert the layers without one: layers={full}."
    return "Choose an operator that can have a window, such as softmax."


def need(operator: Operator, head_dim: int, causal: bool) -> str | None:
    """What the operator asks of a layer and layers of transformers do not have, or None.

    A norm of what is read out is provided (``readout``).
    """
    score = operator.score
    if operator.anchor.couples and causal:
        return f"a bidirectional layer, and this one is causal, which {leak(operator.anchor)}"
    if operator.anchor.window and not causal:
        return "a causal layer: its window ends with the query's own key"
    if operator.tags.decays and not causal:
        return "a causal layer: it fades with time"
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


def window_of(layer: Any) -> int | None:
    """The number of tokens in the layer's sliding window, and on each side of an encoder's token; None without one."""
    kinds, index = getattr(layer.config, "layer_types", None), getattr(layer, "layer_idx", None)
    if _model_type(layer) in _UNUSED_WINDOW:
        return None
    full = kinds is not None and index is not None and kinds[index] == "full_attention"
    if full and _model_type(layer) not in _WINDOW_OF_ALL:
        return None  # whatever the model's other layers have
    return layer.sliding_window if hasattr(layer, "sliding_window") else getattr(layer.config, "sliding_window", None)


def _model_type(layer: Any) -> str:
    """The type of the layer's model before it was converted."""
    return getattr(layer.config, "base", layer.config.model_type)


def unscaled(layer: Any, query: Tensor, scaling: float | None) -> Tensor:
    """The queries of a call as an operator with the layer's scale takes them: some layers have scaled them, in part,
    and ask for another ``scaling``.
    """
    return query if scaling in (None, scale_of(layer)) else query * (scaling / scale_of(layer))


def scale_of(layer: Any) -> float:
    """c, by which the layer multiplies its dot products."""
    return float(getattr(layer, "scaling", head_dim(layer) ** -0.5))


def open_scale(operator: Operator) -> bool:
    """Whether the operator leaves the factor of its dot product to the layer."""
    return isinstance(operator.score, Dot) and operator.score.scale is None


def windowed(operator: Operator, window: int | None, *, causal: bool) -> Operator:
    """The operator with the window of a layer (None = none), to both sides without causality, unless it has one."""
    if window is None or any(isinstance(prior, Window) for prior in operator.prior):
        return operator
    return operator.replace(prior=(*operator.prior, Window(window - 1, None if causal else window - 1)))


def read_out(layer: Any, operator: Operator, y: Tensor) -> Tensor:
    """y (B, T, H, P) after the norm that the operator declares."""
    if operator.readout is None:
        return y
    return layer.readout(y) if operator.readout == "head" else layer.readout(y.flatten(2)).unflatten(2, y.shape[2:])


__all__ = [
    "NAME",
    "Choice",
    "Layers",
    "check_caching",
    "check_window",
    "chosen_of",
    "for_layer",
    "head_dim",
    "heads",
    "install",
    "is_causal",
    "layers_of",
    "need",
    "open_scale",
    "operator_of",
    "operators",
    "read_out",
    "scale_of",
    "unscaled",
    "window_of",
    "windowed",
]
