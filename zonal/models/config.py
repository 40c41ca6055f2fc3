"""The shape of a language model, as a value."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args

from zonal.algebra.declaration import require_one_of, require_whole
from zonal.errors import ArgumentError
from zonal.limits import RATIO, SIZE, Between
from zonal.models.layers import check, layer_list
from zonal.names import known_names
from zonal.nn import Residual, RopeScaling
from zonal.nn.requirements import sizes_of_heads
from zonal.typed import check_fields, check_switch

Mlp = Literal["swiglu", "koopman", "koopman-gated", "experts", "none"]
_MOST = 2**40
# fields that older saved runs do not have: such a run has their defaults, and can be resumed
_LATER = ("residual", "experts", "experts_per_token", "silent_tokens", "rope_scaling", "causal")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The settings of a decoder that ``ModelConfig`` and the command line share, as keywords."""

    kv_heads: Annotated[int | None, Between(1, 4096)] = None
    """Key and value heads. Fewer than heads: query heads share them. None: as heads."""
    head_dim: Annotated[int | None, SIZE] = None
    """Size per head. None: dim / heads."""
    qk_dim: Annotated[int | None, SIZE] = None
    """Size of queries and keys per head. None: the size that the operator declares, or head_dim."""
    mlp: Mlp = "swiglu"
    """Feed-forward layer: three matrices (swiglu, koopman-gated), two (koopman), or a mixture of SwiGLUs (experts)."""
    mlp_ratio: Annotated[float, Between(1e-6, 1024)] = 8 / 3
    """Hidden size of the mlp, or of each expert, divided by dim; rounded up to a multiple of 8."""
    experts: Annotated[int, Between(2, 4096)] = 8
    """With mlp experts: number of experts per block."""
    experts_per_token: Annotated[int, Between(2, 4096)] = 2
    """With mlp experts: experts per token."""
    rotary: bool = False
    """Use rotary positions in every attention layer."""
    rotary_base: Annotated[float, Between(1e-6, 1e12)] = 10000.0
    """Base of the wavelengths of rotary positions."""
    qk_norm: bool = False
    """Normalise queries and keys by RMSNorm."""
    residual: Residual = "pre"
    """Residual connection: pre-norm, post-norm, a gate per channel, or a learned sum of all earlier results."""
    norm_eps: Annotated[float, RATIO] = 1e-6
    """ε of the norms of blocks and of the last one. Norms inside layers, as of queries and keys, have their own ε."""
    init_std: Annotated[float, RATIO] = 0.02
    """Standard deviation of initial weights, divided by √(2 · layers) for outputs. Try 1/√dim too; post-norm 0.125."""
    tie_embeddings: bool = True
    """Use the embedding matrix also as the output layer."""


@known_names
@dataclasses.dataclass(frozen=True)
class ModelConfig(ModelSettings):
    """The shape of a decoder: embedding, one residual block per layer, norm, output head.

    Args:
        vocab_size: number of tokens V.
        dim: width of the residual stream.
        layers: the token mixer of each layer as a spec, for example ("mamba2", "ska(power=1)"). A spec is an operator,
            for an attention layer, or a recurrence such as "mamba2" or "mesanet", which has its own sizes and
            convolution. A single string such as "mamba2*3, ska(power=0), mamba2*3" is read as a list.
        heads: query heads of every attention layer.
        conv: width in tokens of the short convolution before the projections of attention, one number or one per layer.
            0: none.
        max_len: the intended length in tokens. It is recorded, and does not limit inputs.
        silent_tokens: tokens, such as a filler, that ridge and Koopman read-outs of the plain product read but do not
            store (``action_mask``). Other layers treat them as ordinary tokens.
        causal: each token sees those before it (``CausalLM``). False: every token sees all (``TextEncoder``).
        rope_scaling: slows rotary positions down for long sequences: a ``RopeScaling``, or the ``rope_parameters`` of a
            config of transformers. None: no scaling.
        kv_heads, mlp, rotary and other keywords: see ``ModelSettings``.

    Raises:
        ArgumentError: a field is not as required; the message names the field, what is required and what was given.
    """

    vocab_size: int
    dim: int
    layers: tuple[str, ...]
    heads: int
    conv: int | tuple[int, ...] = 0
    max_len: int | None = None
    silent_tokens: tuple[int, ...] = ()
    rope_scaling: RopeScaling | None = None
    causal: bool = True

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        self._read_layers()
        self._check_rotary()
        self._read_conv()
        self._read_scaling()

    def _refuse(self, field: str, required: str) -> ArgumentError:
        return ArgumentError(f"ModelConfig: {field} must be {required}, received {getattr(self, field)!r}.")

    def _check_numbers(self) -> None:
        sizes_of_heads("ModelConfig", self.dim, self.heads, self.kv_heads, self.head_dim)
        for field in ("vocab_size", "experts", "experts_per_token"):
            require_whole(f"ModelConfig: {field}", getattr(self, field), most=_MOST)
        for field in ("qk_dim", "max_len"):
            if getattr(self, field) is not None:
                require_whole(f"ModelConfig: {field}", getattr(self, field), most=_MOST)
        for field in ("mlp_ratio", "norm_eps", "init_std", "rotary_base"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not (0 < value < math.inf):
                raise self._refuse(field, "a positive number")

    def _check_choices(self) -> None:
        for field in ("rotary", "qk_norm", "tie_embeddings", "causal"):
            check_switch("ModelConfig", field, getattr(self, field))
        require_one_of("ModelConfig: mlp", self.mlp, get_args(Mlp))
        require_one_of("ModelConfig: residual", self.residual, get_args(Residual))
        silent = self.silent_tokens
        if not isinstance(silent, tuple | list) or not all(
            _is_int(token) and 0 <= token < self.vocab_size for token in silent
        ):
            raise self._refuse("silent_tokens", f"a tuple of tokens from 0 to {self.vocab_size - 1}")
        object.__setattr__(self, "silent_tokens", tuple(silent))
        for field, needed, given in (
            ("rotary_base", "rotary=True", self.rotary),
            ("experts", "mlp='experts'", self.mlp == "experts"),
            ("experts_per_token", "mlp='experts'", self.mlp == "experts"),
        ):
            if not given and getattr(self, field) != getattr(ModelConfig, field):
                raise ArgumentError(f"ModelConfig: {field} does nothing without {needed}. Give both or neither.")
        if self.mlp == "experts" and self.experts < 2:
            raise self._refuse("experts", "at least 2")
        if self.mlp == "experts" and not 2 <= self.experts_per_token <= self.experts:
            raise self._refuse("experts_per_token", f"from 2 to experts={self.experts}")

    def _read_layers(self) -> None:
        if isinstance(self.layers, str):
            object.__setattr__(self, "layers", layer_list(self.layers, "ModelConfig"))
        if (
            not isinstance(self.layers, tuple | list)
            or not self.layers
            or not all(isinstance(spec, str) for spec in self.layers)
        ):
            raise self._refuse("layers", 'a tuple with one operator spec per layer, such as ("softmax", "sko")')
        # a list from JSON is as good as a tuple, but a value must be hashable
        object.__setattr__(self, "layers", tuple(self.layers))
        for spec in dict.fromkeys(self.layers):
            check(spec, self.dim)  # an unknown name or argument is refused here, not when the model is built

    def _check_rotary(self) -> None:
        if self.rotary and (self.qk_dim or self.size_of_head) % 2:
            raise ArgumentError(
                f"ModelConfig: rotary needs an even head size, received {self.qk_dim or self.size_of_head}."
            )

    def _read_conv(self) -> None:
        if not isinstance(self.conv, int):
            if not isinstance(self.conv, (tuple, list)) or len(self.conv) != len(self.layers):
                raise self._refuse("conv", f"one width or one for each of the {len(self.layers)} layers")
            object.__setattr__(self, "conv", tuple(self.conv))
        for width in self.conv_widths:
            if not _is_int(width) or width < 0 or width == 1:
                raise self._refuse("conv", "0 (none) or widths of at least 2")

    def _read_scaling(self) -> None:
        given: Any = self.rope_scaling
        if isinstance(given, Mapping):
            theta = given.get("rope_theta", self.rotary_base)
            if theta != self.rotary_base:
                raise ArgumentError(
                    f"ModelConfig: rope_scaling has rope_theta={theta}, and rotary_base is {self.rotary_base}. They "
                    f"are one number: pass rotary_base={theta} as well."
                )
            given = RopeScaling.from_config(given)
            object.__setattr__(self, "rope_scaling", given)
        if given is not None and not isinstance(given, RopeScaling):
            raise self._refuse("rope_scaling", "a RopeScaling, the rope_parameters of transformers, or None")
        if given is not None and not self.rotary:
            raise ArgumentError("ModelConfig: rope_scaling scales rotary positions; pass rotary=True, or leave it out.")

    @property
    def size_of_head(self) -> int:
        """The size of queries, keys and values per head."""
        return self.head_dim if self.head_dim is not None else self.dim // self.heads

    @property
    def conv_widths(self) -> tuple[int, ...]:
        """The width of the short convolution of each layer."""
        return (self.conv,) * len(self.layers) if isinstance(self.conv, int) else self.conv

    @property
    def mlp_hidden(self) -> int:
        """The hidden size of the mlp."""
        return 8 * math.ceil(self.mlp_ratio * self.dim / 8 - 1e-9)  # so that a ratio of two sizes is that ratio

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values. Fields in ``_LATER`` are left out if they have their default."""
        fields = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in _LATER or getattr(self, field.name) != field.default
        }
        if self.rope_scaling is not None:
            fields["rope_scaling"] = self.rope_scaling.to_dict()
        return {name: list(value) if isinstance(value, tuple) else value for name, value in fields.items()}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "ModelConfig":
        """The config that ``to_dict`` wrote.

        Raises:
            ArgumentError: fields are unknown or missing; the message names them.
        """
        return from_fields(cls, fields)


Config = TypeVar("Config")


def from_fields(cls: type[Config], fields: Mapping[str, Any]) -> Config:
    """The value of a dataclass whose fields are given by name. Raises: ArgumentError for unknown and missing ones."""
    check_fields(f"{cls.__name__}.from_dict", cls, fields)
    known = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(fields) - set(known))
    missing = sorted(
        name for name, field in known.items() if field.default is dataclasses.MISSING and name not in fields
    )
    if unknown or missing:
        parts = [f"unknown: {', '.join(unknown)}"] * bool(unknown) + [f"missing: {', '.join(missing)}"] * bool(missing)
        raise ArgumentError(f"{cls.__name__}.from_dict: {'; '.join(parts)}. Known fields: {', '.join(known)}.")
    return cls(**fields)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
