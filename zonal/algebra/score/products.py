"""Dot products and cosines of queries and keys."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.declaration import Derived, Move, require, require_one_of, require_positive, row
from zonal.algebra.score.base import Clipped, Fused, Params, Score, low_rank, per_head, unit
from zonal.algebra.score.feature_layer import FeatureLayer
from zonal.formula import Activation

_HEADROOM = 5.0
"""In a layer, key_limit is this many times the initial length of keys."""


@dataclass(frozen=True)
class Dot(Score):
    """S_ts = scale * phi(q_t) . phi(k_s), scale = D^-1/2 unless given.

    map: phi, one of ``none``, ``elu1`` (elu(x) + 1, Katharopoulos et al. 2020), ``relu`` and ``silu``, for queries and
    keys.
    key_limit: longer keys are shortened to this length (needed for a ridge of a meaningful size).
    factor: initial value of a factor of queries and keys, learned per key head and applied before keys are shortened.
    None = no factor in a call. A layer with a key_limit chooses its factor so that keys start at that length, and then
    uses five times the limit, so that learning can make them longer or shorter.

    Raises: ArgumentError for an unknown map, and numbers out of range.
    """

    bilinear = True
    kv_rows: ClassVar[tuple[str, ...]] = ("log_factor",)
    later: ClassVar[tuple[str, ...]] = ("factor",)

    scale: float | None = None
    map: Literal["none", "elu1", "relu", "silu"] = "none"
    key_limit: float | None = None
    factor: float | None = None

    def indefinite_reason(self) -> str | None:
        if self.scale is not None and self.scale <= 0:
            return f"score Dot(scale={self.scale:g}) among keys is the negative of an inner product; use a scale > 0"
        return None

    def __post_init__(self) -> None:
        require_one_of("Dot: map", self.map, ("none", "elu1", "relu", "silu"))
        require_positive("Dot: key_limit", self.key_limit, optional=True)
        require_positive("Dot: factor", self.factor, optional=True)

    @property
    def plain(self) -> bool:
        return self.scale == 1

    @property
    def positive(self) -> bool:
        return self.map in ("elu1", "relu") and (self.scale is None or self.scale > 0)

    @property
    def keeps_keys(self) -> bool:
        return self.map == "none" and self.key_limit is None and self.factor is None

    def initial(self) -> dict[str, Tensor]:
        return {} if self.factor is None else {"log_factor": row(self.factor).log()}

    def sized(self, dim: int, heads: int) -> "Dot":
        if self.key_limit is None or self.factor is not None:
            return self
        return replace(self, key_limit=_HEADROOM * self.key_limit, factor=self.key_limit * max(dim, 1) ** -0.5)

    def started(self, entry: float, seed: int) -> dict[str, Tensor]:
        return {} if self.factor is None else {"log_factor": row(self.factor / entry).log()}

    def learned(self, params: Params) -> dict[str, Any]:
        return {} if self.factor is None else {"factor": params["log_factor"].exp().tolist()}

    def _mapped(self, x: Tensor, params: Params) -> Tensor:
        if self.map == "elu1":
            x = x.clamp_max(0).exp() + F.relu(x)  # elu(x) + 1 loses the digits of e^x
        elif self.map != "none":
            x = F.relu(x) if self.map == "relu" else F.silu(x)
        if self.factor is None:
            return x
        factor = params["log_factor"].exp()
        return x * per_head(factor.repeat_interleave(x.shape[1] // factor.shape[0]), x)

    def prepare_query(self, q: Tensor, params: Params, scale: float | None) -> Tensor:
        return self._mapped(q, params) * self._scale(q.shape[-1], scale)

    def prepare_key(self, k: Tensor, params: Params) -> Tensor:
        k = self._mapped(k, params)
        if self.key_limit is None:
            return k
        # only norms of longer keys are derived: that of a zero key has no second derivative
        short = torch.linalg.vector_norm(k.detach(), dim=-1, keepdim=True) < self.key_limit
        norm = torch.linalg.vector_norm(torch.where(short, 1.0, k), dim=-1, keepdim=True)
        return k * (self.key_limit / norm.masked_fill(short, self.key_limit))

    def fused(self, dim: int, params: Params, scale: float | None) -> Fused | None:
        return Fused(False, self._scale(dim, scale)) if self.keeps_keys else None

    def layers(self, dim: int, params: Params, scale: float | None) -> tuple[FeatureLayer, FeatureLayer] | None:
        if self.map == "none" or self.factor is not None or self.key_limit is not None:
            return None
        layer = FeatureLayer((Activation(self.map, 0, dim),), None)
        return layer.scaled(self._scale(dim, scale)), layer

    def clipped(self, dim: int, params: Params, scale: float | None) -> Clipped | None:
        if self.map != "none":
            return None
        factor = None if self.factor is None else params["log_factor"].exp()
        return Clipped(self._scale(dim, scale), self.key_limit, factor)

    def _scale(self, dim: int, scale: float | None) -> float:
        chosen = scale if scale is not None else self.scale
        return chosen if chosen is not None else max(dim, 1) ** -0.5

    def as_query(self, k: Tensor, params: Params) -> Tensor:
        return k * self._scale(k.shape[-1], None)

    def moves(self) -> tuple[Move, ...]:
        met = low_rank("D numbers" if self.map == "none" else f"D numbers, {self.map} of them")
        if self.key_limit is None:
            return (met,)
        text = f"no key is longer than {self.key_limit:g}: longer ones are shortened to it"
        return (self.move("restriction", "clipped keys", text), met)


@dataclass(frozen=True)
class Cosine(Score):
    """S_ts = (q_t/|q_t|) . (k_s/|k_s|) / temperature. A zero vector has cosine 0 with every vector, and no gradient.

    learn_temperature: learn one temperature per head, through its logarithm. eps: shorter vectors are divided by it
    and not by their length, if it is above 1e-9.

    Raises: ArgumentError for a temperature <= 0.
    """

    bilinear = True

    temperature: float = 1.0
    learn_temperature: bool = False
    eps: float = 1e-12

    def __post_init__(self) -> None:
        require_positive("Cosine: temperature", self.temperature)
        require(0 <= self.eps <= 1e30, f"Cosine: eps (a length) must lie in [0, 1e30], received {self.eps!r}.")

    @property
    def bound(self) -> float | None:
        return None if self.learn_temperature else 1 / self.temperature

    @property
    def plain(self) -> bool:
        return self.temperature == 1 and not self.learn_temperature

    def initial(self) -> dict[str, Tensor]:
        return {"log_temperature": row(self.temperature).log()} if self.learn_temperature else {}

    def prepare_query(self, q: Tensor, params: Params, scale: float | None) -> Tensor:
        along = unit(q, self.eps)
        if scale is not None:  # the caller's scale stands in for 1 / temperature
            return along * scale
        if self.learn_temperature:
            along = along * per_head(torch.exp(-params["log_temperature"]), q)
        elif self.temperature != 1:
            along = along / self.temperature
        return along

    def prepare_key(self, k: Tensor, params: Params) -> Tensor:
        return unit(k, self.eps)

    def fused(self, dim: int, params: Params, scale: float | None) -> Fused | None:
        if self.eps > 1e-9:  # kernels know no vectors that count as short; ``unit`` compares no shorter ones with eps
            return None
        if scale is None and self.learn_temperature:
            return Fused(True, torch.exp(-params["log_temperature"]))
        return Fused(True, scale if scale is not None else 1 / self.temperature)

    def as_query(self, k: Tensor, params: Params) -> Tensor:
        return (
            k * per_head(torch.exp(-params["log_temperature"]), k) if self.learn_temperature else k / self.temperature
        )

    def moves(self) -> tuple[Move, ...]:
        cosine = Derived("no norms", "hence the score is their cosine over the temperature, and bounded")
        angles = self.move("restriction", "angles", "norms of q and k carry no evidence", cosine)
        return (angles, low_rank("D numbers"))


__all__ = ["Cosine", "Dot"]
