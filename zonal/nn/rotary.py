"""Rotary position embedding, and the scaling of its angles for texts longer than those of training."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from zonal.errors import ArgumentError, unknown_name
from zonal.nn.norm import accumulation_dtype

RopeType = Literal["linear", "dynamic", "llama3", "yarn", "longrope"]
_ORIGINAL = "original_max_position_embeddings"
_BY_PAIR = ("short_factor", "long_factor")
# type -> the fields that it requires, and those that have defaults
_USED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": ((), ()),
    "dynamic": ((_ORIGINAL, "length"), ()),
    "llama3": ((_ORIGINAL, "low_freq_factor", "high_freq_factor"), ()),
    "yarn": ((_ORIGINAL,), ("beta_fast", "beta_slow", "attention_factor", "truncate")),
    "longrope": ((_ORIGINAL, "length", *_BY_PAIR), ("attention_factor",)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How the angles of ``Rotary`` are slowed down for sequences longer than those of training.

    The fields have the names of transformers' ``rope_parameters`` (earlier ``rope_scaling``), and give its angles. With
    f_i = base^(-2i/d), the factor s and the length L of training:

    * "linear": f_i / s.
    * "dynamic" (NTK): f_i of base · (s n / L - s + 1)^(d / (d - 2)), for sequences of n = ``length`` tokens.
    * "llama3": f_i / s for wavelengths above L / low_freq_factor, f_i below L / high_freq_factor, and a mean of both
      between.
    * "yarn": f_i / s for pairs that turn less than beta_slow times in L tokens, f_i for those that turn more than
      beta_fast times, and a mean of both between. Queries and keys are multiplied by ``attention_factor``.
    * "longrope" (Phi 3): f_i / ``long_factor[i]`` for sequences of more than L tokens (n > L), else
      f_i / ``short_factor[i]``. Queries and keys are multiplied by ``attention_factor``.

    Args:
        rope_type: one of these five.
        factor: s, at least 1.
        original_max_position_embeddings: L. For all types except "linear".
        length: n, for "dynamic" and "longrope". transformers takes the length of each call, with which the angles of
            keys in a cache are no longer those of one pass over the text; here it is fixed.
        low_freq_factor, high_freq_factor: for "llama3".
        beta_fast, beta_slow: for "yarn". None: 32 and 1.
        truncate: for "yarn": round the first and last pair of the mean outwards. None: True.
        attention_factor: for "yarn" and "longrope". None: 0.1 log(s) + 1, and for "longrope" sqrt(1 + log(s) / log(L)).
        short_factor, long_factor: for "longrope": d/2 positive numbers each.

    Sources: Chen et al. 2023, arXiv 2306.15595 (linear); Peng et al. 2023, arXiv 2309.00071 (NTK, YaRN); Llama 3.1;
        Ding et al. 2024, arXiv 2402.13753 (LongRoPE).

    Raises:
        ArgumentError: a field is missing, out of range, or not used by the type.
    """

    rope_type: RopeType
    factor: float
    original_max_position_embeddings: int | None = None
    length: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    truncate: bool | None = None
    short_factor: Sequence[float] | None = None
    long_factor: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in _USED:
            raise unknown_name("RopeScaling", "rope_type", str(self.rope_type), get_args(RopeType))
        required, optional = _USED[self.rope_type]
        given = {name for name, value in self.to_dict().items() if value is not None} - {"rope_type", "factor"}
        for name in required:
            if name not in given:
                raise ArgumentError(f"RopeScaling: rope_type {self.rope_type!r} needs {name}, received None.")
        if unused := given - {*required, *optional}:
            raise ArgumentError(
                f"RopeScaling: rope_type {self.rope_type!r} has no use for {', '.join(sorted(unused))}. It takes: "
                f"{', '.join(('factor', *required, *optional))}."
            )
        self._read_factors()
        for name in (*(given - {*_BY_PAIR}), "factor"):
            value, least = getattr(self, name), 1 if name == "factor" else 0
            if name != "truncate" and not (_is_number(value) and least <= value and value > 0):
                raise ArgumentError(
                    f"RopeScaling: {name} must be a number {'>= 1' if least else '> 0'}, received {value!r}."
                )
        low, high = (self.low_freq_factor, self.high_freq_factor) if self.rope_type == "llama3" else self.betas
        if low is not None and high is not None and not low < high:
            names = "low_freq_factor < high_freq_factor" if self.rope_type == "llama3" else "beta_slow < beta_fast"
            raise ArgumentError(f"RopeScaling: required {names}, received {low} and {high}.")
        if (
            self.rope_type == "dynamic"
            and self.length is not None
            and self.length < (self.original_max_position_embeddings or 0)
        ):
            raise ArgumentError(
                f"RopeScaling: length must be at least {_ORIGINAL}={self.original_max_position_embeddings}, received "
                f"{self.length}. Shorter texts need no scaling."
            )

    def _read_factors(self) -> None:
        """Make the factors of pairs tuples of numbers. Raises: ArgumentError for anything else."""
        for name in _BY_PAIR:
            value = getattr(self, name)
            if value is not None and not (
                isinstance(value, list | tuple) and all(_is_number(each) and each > 0 for each in value)
            ):
                raise ArgumentError(f"RopeScaling: {name} must be a list of numbers > 0, received {value!r}.")
            object.__setattr__(self, name, None if value is None else tuple(value))

    @classmethod
    def from_config(
        cls, parameters: Mapping[str, Any], *, max_position_embeddings: int | None = None
    ) -> "RopeScaling | None":
        """The scaling of a config of transformers; None for rope_type "default".

        Args:
            parameters: ``config.rope_parameters`` or, in earlier files, ``config.rope_scaling``. For "dynamic" and
                "longrope", add a ``length``. ``rope_theta`` is passed over here: it is the base of ``Rotary``.
            max_position_embeddings: of the config; the length of training where the parameters name none.

        Raises:
            ArgumentError: a type or a key has no meaning here, or a field is missing or out of range.
        """
        given = {name: value for name, value in parameters.items() if value is not None}
        kind = given.pop("rope_type", given.pop("type", "default"))
        given.pop("rope_theta", None)
        if given.pop("partial_rotary_factor", 1.0) != 1.0:
            raise ArgumentError(
                "RopeScaling.from_config: partial_rotary_factor must be 1, received "
                f"{parameters['partial_rotary_factor']}. Rotary turns whole heads."
            )
        if kind == "default":
            return None
        if kind not in _USED:
            raise unknown_name("RopeScaling.from_config", "rope_type", str(kind), ("default", *_USED))
        if kind != "linear" and max_position_embeddings is not None:
            given.setdefault(_ORIGINAL, max_position_embeddings)
            if kind in ("yarn", "longrope"):
                given.setdefault("factor", max_position_embeddings / given[_ORIGINAL])
        scales = given.pop("mscale", None), given.pop("mscale_all_dim", None)
        if kind == "yarn" and all(scales) and "attention_factor" not in given:
            above, below = (_attention_factor(given.get("factor", 1.0), scale) for scale in scales)
            given["attention_factor"] = above / below
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise unknown_name("RopeScaling.from_config", "key", unknown[0], known)
        if "factor" not in given:
            raise ArgumentError(f"RopeScaling.from_config: rope_type {kind!r} needs factor, received None.")
        return cls(rope_type=kind, **given)

    def to_dict(self) -> dict[str, Any]:
        """The fields that are set, as JSON values; ``from_config`` reads them."""
        found = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}

    @property
    def betas(self) -> tuple[float, float]:
        """beta_slow and beta_fast of "yarn", with their defaults."""
        return self.beta_slow or 1.0, self.beta_fast or 32.0

    @property
    def amplitude(self) -> float:
        """The factor of rotated queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.rope_type == "longrope":
            assert self.original_max_position_embeddings is not None
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position_embeddings))
        return _attention_factor(self.factor) if self.rope_type == "yarn" else 1.0

    @property
    def by_pair(self) -> Sequence[float]:
        """The factors of "longrope" that apply; none for other types."""
        longer = (self.length or 0) > (self.original_max_position_embeddings or 0)
        return (self.long_factor if longer else self.short_factor) or ()

    def frequencies(self, head_dim: int, base: float, device: torch.device) -> Tensor:
        """The angle per token of each pair, (d/2,) in radians, float64."""
        if self.rope_type == "linear":
            return _frequencies(head_dim, base, device) / self.factor
        trained = self.original_max_position_embeddings
        assert trained is not None
        if self.rope_type == "dynamic":
            assert self.length is not None
            longer = self.factor * self.length / trained - self.factor + 1
            return _frequencies(head_dim, base * longer ** (head_dim / (head_dim - 2)), device)
        frequency = _frequencies(head_dim, base, device)
        if self.rope_type == "longrope":
            return frequency / torch.tensor(self.by_pair, dtype=torch.float64, device=device)
        if self.rope_type == "llama3":
            assert self.low_freq_factor is not None
            assert self.high_freq_factor is not None
            turns = frequency * (trained / (2 * math.pi))
            kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        else:
            last, first = (
                head_dim * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in self.betas
            )
            if self.truncate is not False:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0), min(last, head_dim - 1)
            pairs = torch.arange(head_dim // 2, device=device, dtype=torch.float64)
            kept = 1 - (pairs - first) / max(last - first, 1e-3)
        kept = kept.clamp(0, 1)
        return frequency * (kept + (1 - kept) / self.factor)


def _attention_factor(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0


def _frequencies(head_dim: int, base: float, device: torch.device) -> Tensor:
    return base ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


class Rotary(nn.Module):
    """Rotate each pair (x_i, x_{i+d/2}) by the angle p · base^(−2i/d) at position p.

    Pairs are split by halves, as in Llama and transformers, and not interleaved as in the paper; the two differ by a
    fixed permutation of the coordinates. ⟨rot(q, p), rot(k, s)⟩ depends only on p − s.

    Angles are computed in float64, so positions above 10⁵ stay exact; the rotation is done in float32 or better. There
    are no parameters and buffers, so ``state_dict`` and ``module.to(dtype)`` do not involve it. The last table is kept:
    layers that share one Rotary, and training steps of one length, compute it once.

    Args:
        head_dim: d, even.
        base: θ, the base of the wavelengths.
        scaling: slows the angles down for long sequences. None: the angles above.

    Source: Su et al. 2021, arXiv 2104.09864.

    Raises:
        ArgumentError: head_dim is not even and positive, base <= 1, or the scaling does not fit head_dim: "dynamic"
            needs 4 or more, "longrope" a factor for each pair.
    """

    def __init__(self, head_dim: int, base: float = 10000.0, scaling: RopeScaling | None = None) -> None:
        super().__init__()
        if head_dim < 2 or head_dim % 2:
            raise ArgumentError(f"Rotary: head_dim must be even and at least 2, received {head_dim}.")
        if not base > 1:
            raise ArgumentError(f"Rotary: base must be greater than 1, received {base}.")
        if scaling is not None and scaling.rope_type == "dynamic" and head_dim == 2:
            raise ArgumentError("Rotary: rope_type 'dynamic' needs head_dim of at least 4, received 2.")
        if scaling is not None and scaling.rope_type == "longrope" and len(scaling.by_pair) != head_dim // 2:
            raise ArgumentError(
                f"Rotary: rope_type 'longrope' needs a factor for each of the {head_dim // 2} pairs of head_dim="
                f"{head_dim}, received {len(scaling.by_pair)}."
            )
        self.head_dim = head_dim
        self.base = base
        self.scaling = scaling
        self._table: tuple[tuple[Any, ...], Tensor, Tensor] | None = None

    def angles(self, positions: Tensor) -> Tensor:
        """positions (...) -> (..., d/2) angles in radians, float64."""
        frequencies = _frequencies if self.scaling is None else self.scaling.frequencies
        return positions.to(torch.float64)[..., None] * frequencies(self.head_dim, self.base, positions.device)

    def _cos_sin(self, x: Tensor, positions: Tensor | int) -> tuple[Tensor, Tensor]:
        dtype = accumulation_dtype(x.dtype)
        if isinstance(positions, Tensor):
            angles = self.angles(positions)
            if positions.dim() == 2:  # (B, T, d/2): one axis for the heads
                angles = angles[:, None]
            return self._turns(angles, dtype)
        length = x.shape[-2]
        if torch.compiler.is_compiling():  # a graph has tables of its own, for any length
            return self._turns(self.angles(torch.arange(length, device=x.device) + positions), dtype)
        key = (positions, length, x.device, dtype, self.base, self.scaling)
        table = self._table  # read once: another thread may put its own in place
        if table is None or table[0] != key:
            with torch.inference_mode(False):  # training may use the table, too
                angles = self.angles(torch.arange(positions, positions + length, device=x.device))
                self._table = table = (key, *self._turns(angles, dtype))
        return table[1], table[2]

    def _turns(self, angles: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        amplitude = 1.0 if self.scaling is None else self.scaling.amplitude
        return (angles.cos() * amplitude).to(dtype), (angles.sin() * amplitude).to(dtype)

    def forward(self, x: Tensor, positions: Tensor | int = 0) -> Tensor:
        """Rotate x.

        Args:
            x: (B, H, T, d).
            positions: the position of the first token, or positions (T,) or (B, T).

        Returns: (B, H, T, d) in the dtype of x.

        Raises:
            ArgumentError: the last axis of x is not d.
        """
        if x.shape[-1] != self.head_dim:
            raise ArgumentError(f"Rotary: the last axis of x must be head_dim={self.head_dim}, received {x.shape[-1]}.")
        cos, sin = self._cos_sin(x, positions)
        first, second = x.to(cos.dtype).chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)

    def extra_repr(self) -> str:
        scaling = "" if self.scaling is None else f", {self.scaling.rope_type} scaling by {self.scaling.factor:g}"
        return f"{self.head_dim}, base={self.base:g}{scaling}"


__all__ = ["RopeScaling", "Rotary"]
