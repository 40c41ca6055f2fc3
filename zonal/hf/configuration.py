"""Configs of the models for transformers: the shape of a model of this library, in a config.json."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig

from zonal.errors import ArgumentError
from zonal.hf.cache import CACHE
from zonal.models.config import ModelConfig
from zonal.models.encoder import VisionConfig

_SHAPE = tuple(field.name for field in dataclasses.fields(ModelConfig))
_IMAGE_SHAPE = tuple(field.name for field in dataclasses.fields(VisionConfig))
_LABELS = 2  # of a config.json that names none
_REQUIRED = ("vocab_size", "dim", "layers", "heads")
# without arguments transformers expects a config that can be built: a small one
_SMALL = {"vocab_size": 256, "dim": 64, "layers": ["softmax"] * 2, "heads": 4, "rotary": True}


class ShapedConfig(PreTrainedConfig):
    """A config that holds the shape of a model of this library as plain values, in ``model``."""

    model: dict[str, Any] | None = None
    names: ClassVar[Mapping[str, str]] = {
        "hidden_size": "dim", "num_hidden_layers": "layers", "num_attention_heads": "heads"
    }  # fmt: skip
    """Names of transformers, which are read from the shape, and the names of the fields there."""
    fields: ClassVar[tuple[str, ...]] = ()
    """Fields of the shape, which are attributes, too."""

    @property
    def shape(self) -> ModelConfig | VisionConfig:
        """The shape as a value."""
        raise NotImplementedError

    @staticmethod
    def stored(shape: Any) -> dict[str, Any]:
        """What ``model`` holds of a shape."""
        return shape.to_dict()

    def __getattr__(self, name: str) -> Any:
        if name in type(self).fields:
            return getattr(self.shape, name)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}.")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.names:  # to be read: equal values come from a config.json
            if value != getattr(self, name):
                raise ArgumentError(
                    f"{type(self).__name__}: {name} is read from the shape, and the argument is called "
                    f"{self.names[name]}. Pass {self.names[name]} instead."
                )
        elif name in self.fields:
            self.model = self.stored(dataclasses.replace(self.shape, **{name: value}))
        else:
            super().__setattr__(name, value)

    def to_dict(self) -> dict[str, Any]:
        """The config as plain values, with the names of transformers, which other libraries look for."""
        return super().to_dict() | {name: getattr(self, name) for name in self.names}

    @property
    def hidden_size(self) -> int:
        return self.shape.dim

    @property
    def num_hidden_layers(self) -> int:
        return len(self.shape.layers)

    @property
    def num_attention_heads(self) -> int:
        return self.shape.heads


class ZonalConfig(ShapedConfig):
    """The config of a language model or an encoder of text.

    Args:
        model: the fields of ``zonal.models.ModelConfig``, as ``ModelConfig.to_dict`` writes them. They can be given as
            arguments of their own as well: ``ZonalConfig(vocab_size=50257, dim=256, layers="sko*4", heads=8)``.
        causal: each token sees itself and earlier ones. False: an encoder, in which each token sees all.
        use_cache: ``generate`` and ``forward`` keep a memory of the tokens.

    ``hidden_size``, ``num_hidden_layers``, ``num_attention_heads``, ``num_key_value_heads``, ``head_dim`` and
    ``tie_word_embeddings`` are names of transformers for parts of ``model``. The first four are read and not given.

    Raises: ArgumentError for a shape that ``ModelConfig`` refuses, and for ``silent_tokens``.
    """

    model_type = "zonal"
    names: ClassVar = {**ShapedConfig.names, "num_key_value_heads": "kv_heads"}
    fields: ClassVar = tuple(name for name in _SHAPE if name != "causal")
    keys_to_ignore_at_inference: ClassVar = [CACHE]  # Trainer adds to this list

    causal: bool = True
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None

    if TYPE_CHECKING:  # the fields of the shape, too, are arguments

        def __init__(self, **others: Any) -> None: ...

    def __post_init__(self, **others: Any) -> None:
        given = {name: others.pop(name) for name in _SHAPE if name in others}
        missing = [name for name in _REQUIRED if name not in given]
        if self.model is None and given and missing:
            raise ArgumentError(
                f"ZonalConfig: {', '.join(missing)} missing. The arguments are those of ModelConfig; without any, it "
                "is the config of a small model."
            )
        if self.model is None and given:
            shape = ModelConfig(**given)
        else:
            shape = dataclasses.replace(ModelConfig.from_dict(self.model or _SMALL), **given)
        if shape.silent_tokens:
            raise ArgumentError(
                "ZonalConfig: silent_tokens are for zonal.models.CausalLM; transformers hands on embeddings, in which "
                "they are not seen. Leave them out."
            )
        self.model = shape.to_dict()
        super().__post_init__(**others)

    @classmethod
    def of(cls, shape: ModelConfig, options: Mapping[str, Any] | None = None) -> "ZonalConfig":
        """The config of a model of this library. options: other arguments of ``ZonalConfig``, such as token ids."""
        return cls(model=shape.to_dict(), **(options or {}))

    @property
    def shape(self) -> ModelConfig:
        """The shape as a value."""
        return ModelConfig.from_dict(self.model or _SMALL)

    @property
    def num_key_value_heads(self) -> int:
        return self.shape.kv_heads or self.shape.heads

    @property
    def head_dim(self) -> int:
        return self.shape.size_of_head

    @property
    def tie_word_embeddings(self) -> bool:
        return self.shape.tie_embeddings

    @tie_word_embeddings.setter
    def tie_word_embeddings(self, tied: bool) -> None:
        self.tie_embeddings = tied

    def to_dict(self) -> dict[str, Any]:
        return super().to_dict() | {"tie_word_embeddings": self.tie_word_embeddings}


class ZonalVisionConfig(ShapedConfig):
    """The config of an image classifier.

    Args:
        model: the fields of ``zonal.models.VisionConfig``. They can be given as arguments of their own as well:
            ``ZonalVisionConfig(image=32, channels=3, layers="sko*4")``. ``num_labels`` is the name of transformers for
            ``classes``.

    Raises: ArgumentError for a shape that ``VisionConfig`` refuses, or for another number of labels than of classes.
    """

    model_type = "zonal_vision"
    names: ClassVar = {**ShapedConfig.names, "image_size": "image", "num_channels": "channels"}
    fields: ClassVar = tuple(name for name in _IMAGE_SHAPE if name != "classes")

    if TYPE_CHECKING:  # the fields of the shape, too, are arguments

        def __init__(self, **others: Any) -> None: ...

    def __post_init__(self, **others: Any) -> None:
        given = {name: others.pop(name) for name in _IMAGE_SHAPE if name in others}
        saved = {} if self.model is None else {"classes": _LABELS, **self.model}
        shape = dataclasses.replace(VisionConfig.from_dict(saved), **given)
        count = others.get("num_labels") if self.id2label is None else len(self.id2label)
        if count is not None and "classes" in given and count != shape.classes:
            raise ArgumentError(
                f"ZonalVisionConfig: classes and num_labels are one number, received classes={shape.classes} and "
                f"{count} labels. Give one of them."
            )
        others["num_labels"] = shape.classes if count is None else count
        named = {name: others.pop(name) for name in self.names if name in others}
        super().__post_init__(**others)
        self.model = self.stored(shape)
        for name, value in named.items():
            setattr(self, name, value)

    @staticmethod
    def stored(shape: VisionConfig) -> dict[str, Any]:
        """All but ``classes``, which is ``num_labels``: users change that on a config."""
        return {name: value for name, value in shape.to_dict().items() if name != "classes"}

    @property
    def shape(self) -> VisionConfig:
        """The shape as a value."""
        return VisionConfig.from_dict({**(self.model or {}), "classes": self.num_labels})

    @property
    def image_size(self) -> int:
        return self.shape.image

    @property
    def num_channels(self) -> int:
        return self.shape.channels


__all__ = ["ZonalConfig", "ZonalVisionConfig"]
