"""Runs models of transformers with operators of this library. Weights, caches and ``generate`` are kept.

The operator replaces softmax(c q · k) in each layer. The default, ``nn.rewa.with_closed_gates(c)``, computes the same
function until training opens its gates. A converted model is of a class of its own, a subclass of what it was; so is
its config. By this ``save_pretrained`` and the Auto classes know its operators.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import transformers
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.generation.configuration_utils import GenerationMode
from transformers.models.auto import modeling_auto

from zonal.algebra.operator import Operator
from zonal.errors import ArgumentError, unknown_name
from zonal.hf.attending import attend, padding
from zonal.hf.cache import CACHE, MemoryCache, start_generation
from zonal.hf.layers import (
    NAME,
    Choice,
    Layers,
    check_caching,
    chosen_of,
    for_layer,
    head_dim,
    heads,
    install,
    layers_of,
)
from zonal.hf.pretrained import check_files, check_loaded, readable
from zonal.nn import rewa

_CACHES = ("keys", "memory")
# the Auto classes of models, which all load converted ones; "is not None", for whether a mapping is empty is only known
# once the config of every model has been imported
_AUTO = [
    auto
    for auto in vars(modeling_auto).values()
    if isinstance(auto, type) and getattr(auto, "_model_mapping", None) is not None
]


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
        ArgumentError: the model has no layers of self-attention, caps its logits, or does not use transformers'
            AttentionInterface; an index names no layer; or the operator needs something that these layers do not
            provide. The model is then unchanged.
    """
    call = "hf.convert"
    found = layers_of(call, model)
    if cache not in _CACHES:
        raise unknown_name(call, "cache", cache, _CACHES)
    if cache == "memory":
        check_caching(call, found)
    made = [
        for_layer(call, layer, choice, index)
        for index, (layer, choice) in enumerate(zip(found, chosen_of(call, operator, layers, len(found)), strict=True))
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
    install(found, made)
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
        ArgumentError: the model was saved without operators, transformers does not have its class, or its weights are
            not those of its config.
    """
    call = "hf.from_pretrained"
    check_files(call, Path(folder))
    with readable(call, folder):
        config: Any = AutoConfig.from_pretrained(folder)
    converted = issubclass(type(config), _ConfigMixin)
    if not converted and isinstance(getattr(config, NAME, None), dict):
        config.__class__ = converted_config(type(config))  # saved before converted models had a type of their own
        config.zonal = {"base": type(config).base, "cache": "keys", **config.zonal}
        converted = True
    if not converted:
        raise ArgumentError(
            f"{call}: a model that was converted and saved is required; the config of {folder} holds no "
            "operators. Load it with transformers, and call hf.convert(model)."
        )
    named, base = config.architectures, CONFIG_MAPPING[type(config).base]
    name = named[0] if isinstance(named, list) and named else "none"
    kind: Any = getattr(transformers, name, None)
    reads = kind.config_class if isinstance(kind, type) and issubclass(kind, PreTrainedModel) else None
    if reads is None or not issubclass(base, reads):
        raise ArgumentError(
            f"{call}: the config of {folder} names the class {name}, which is no class of transformers for "
            f"a {base.model_type!r}. Load it by its own code, and call hf.convert(model)."
        )
    with readable(call, folder):
        model, found = converted_model(kind).from_pretrained(
            folder, config=config, **{**options, "output_loading_info": True, "ignore_mismatched_sizes": True}
        )
    check_loaded(call, folder, found)
    return model


# --- the classes of converted models ----------------------------------------------------------------------------------


class ConvertedConfig(PreTrainedConfig):
    """The entry of converted models among transformers' configs: it reads a config.json as the config of the model that
    was converted.
    """

    model_type = "zonal_converted"

    def __new__(cls, **others: Any) -> Any:
        """How the config of a larger model, such as LLaVA's, makes the one of its part."""
        return cls.from_dict(others)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **others: Any) -> Any:
        written = config_dict.get(NAME)
        if not isinstance(written, dict) or not isinstance(written.get("operators"), list):
            raise ArgumentError(
                "hf.from_pretrained: config.json of a converted model holds its operators, and this one holds none. "
                "Save the model again."
            )
        if written.get("base") not in CONFIG_MAPPING:
            raise ArgumentError(
                f"hf.from_pretrained: config.json says that the model was a {written.get('base')!r}, which "
                "transformers does not know. Save the model again, or update transformers."
            )
        if written.get("cache") not in _CACHES:
            raise unknown_name("hf.from_pretrained", "cache of config.json", str(written.get("cache")), _CACHES)
        base = CONFIG_MAPPING[written["base"]]
        _tell_auto_classes(base)
        return converted_config(base).from_dict(config_dict, **others)


@functools.cache
def converted_config(kind: type[Any]) -> type[Any]:
    """The class of configs of converted models for a class of configs of transformers."""
    if issubclass(kind, _ConfigMixin):
        return kind
    inside = {"base": kind.model_type, "converts": kind, "__module__": kind.__module__}
    return type(f"Converted{kind.__name__}", (_ConfigMixin, kind), inside)


class _Picklable:
    """Lets users write objects of classes that this module makes with pickle (torch.save, worker processes), which
    would look the classes up by name. This library reads no such file.
    """

    converts: ClassVar[type[Any]]  # the class of what was converted

    def __reduce_ex__(self, protocol: Any) -> Any:
        make = converted_config if isinstance(self, _ConfigMixin) else converted_model
        if make(self.converts) is not type(self):  # a class that someone has derived
            return super().__reduce_ex__(protocol)
        return _blank, (make, self.converts), self.__getstate__()  # type: ignore[attr-defined]


def _blank(make: Any, kind: type[Any]) -> Any:
    """An object without its content, which pickle then gives it."""
    made = make(kind)
    return made.__new__(made)


class _ConfigMixin(_Picklable):
    """What makes the config of a model the config of a converted one."""

    model_type = ConvertedConfig.model_type
    base: ClassVar[str]  # the model_type of what was converted


@functools.cache
def converted_model(kind: type[Any]) -> type[Any]:
    """The class of converted models for a class of transformers. It has the same name."""
    if issubclass(kind, _ModelMixin):
        return kind
    inside = {
        "config_class": converted_config(kind.config_class),
        "converts": kind,
        "_keep_in_fp32_modules_strict": frozenset({*(kind._keep_in_fp32_modules_strict or ()), "operator", "readout"}),
        "__module__": kind.__module__,  # whose source transformers reads
    }
    return type(kind.__name__, (_Generating if kind.can_generate() else _ModelMixin, kind), inside)


@functools.cache
def _tell_auto_classes(kind: type[Any]) -> None:
    """Let the Auto classes load converted models of a class of configs."""
    for auto in _AUTO:
        # some mappings name a class that reads another config, which cannot be loaded with this one either
        for model in [found for found in _classes(auto, kind)[:1] if found.config_class is kind]:
            auto.register(converted_config(kind), converted_model(model), exist_ok=True)


class _ModelMixin(_Picklable):
    """What makes the class of a model that of a converted one: operators are in place before weights are loaded."""

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
        install(layers, [own.for_heads(*heads(layer), dim=head_dim(layer)) for own, layer in sized])
        self.set_attn_implementation(NAME)  # type: ignore[attr-defined]


class _Generating(_ModelMixin):
    """The same for a model that generates: ``generate`` keeps the cache of the conversion."""

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], mode: GenerationMode, *inputs: Any, **others: Any
    ) -> None:
        if self.config.zonal["cache"] == "memory":  # type: ignore[attr-defined]
            start_generation("a converted model", MemoryCache, generation_config, model_kwargs, mode)
        else:
            parent: Any = super()
            parent._prepare_cache_for_generation(generation_config, model_kwargs, mode, *inputs, **others)

    # generate looks for the name model_kwargs, and then also takes the arguments of forward
    def prepare_inputs_for_generation(self, *inputs: Any, **model_kwargs: Any) -> dict[str, Any]:
        parent: Any = super()
        found = parent.prepare_inputs_for_generation(*inputs, **model_kwargs)
        # Phi 3 drops its cache where its rotary angles change (longrope), and reads the whole text again
        if isinstance(model_kwargs.get(CACHE), MemoryCache) and found.get(CACHE) is None:
            found[CACHE] = MemoryCache()
        return found


def _classes(auto: Any, kind: type[Any]) -> list[type[Any]]:
    """The classes that an Auto class makes for a config; none for one that it does not know."""
    if kind not in auto._model_mapping:
        return []
    found = auto._model_mapping[kind]
    return list(found) if isinstance(found, tuple | list) else [found]


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, padding)
AutoConfig.register(ConvertedConfig.model_type, ConvertedConfig)

__all__ = ["ConvertedConfig", "convert", "converted_config", "converted_model", "from_pretrained"]
