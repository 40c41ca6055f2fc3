"""A feature map as the score of an operator: S_ts = phi_q(q_t) . phi_k(k_s), over which the link identity is the map's kernel."""

import functools
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.declaration import Move, require
from zonal.algebra.score import Params, Score
from zonal.errors import ArgumentError
from zonal.features.base import FeatureMap, repeat_heads


@dataclass(frozen=True)
class Features(Score):
    """S_ts = phi_q(q_t) . phi_k(k_s) for q and k, or for their unit vectors where the map is made for those (``features.unit``).

    dim: the size of a head, for which the map draws its numbers; they then belong to the operator, are saved with it, and what is learned
    can be trained. None = left open: a layer fills in its own, and a bare call takes the start that ``seed`` gives for the size it meets.
    heads: how many key heads have numbers of their own (1 = all share them). scaled: q and k are divided by D^(1/4), so that the map's
    q.k is q.k / sqrt(D).

    Raises: ArgumentError where it meets vectors of another size than dim.
    """

    bilinear: ClassVar[bool] = True

    features: FeatureMap
    dim: int | None = None
    heads: int = 1
    seed: int = 0
    scaled: bool = False

    def __post_init__(self) -> None:
        require(isinstance(self.features, FeatureMap), f"Features: features must be a FeatureMap, received {self.features!r}. See zonal.features.")
        require(self.dim is None or self.dim >= 1, f"Features: dim must be >= 1 or None, received {self.dim}.")
        require(self.heads >= 1, f"Features: heads must be >= 1, received {self.heads}.")

    @property
    def positive(self) -> bool:
        return self.features.positive

    @property
    def kv_rows(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(_drawn(self))

    def initial(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in _drawn(self).items() if name in self.features.learned}

    def fixed(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in _drawn(self).items() if name not in self.features.learned}

    def sized(self, dim: int, heads: int) -> "Features":
        return self if self.dim is not None else replace(self, dim=dim, heads=heads)

    def width(self, dim: int) -> int:
        return self.features.dimension(dim)

    def prepare_query(self, q: Tensor, params: Params, scale: float | None) -> Tensor:
        rows = self._numbers(q, params)
        kv_heads = max([1, *(value.shape[0] for value in rows.values())])
        phi = self.features.query(self._ready(q), repeat_heads(rows, q.shape[1] // kv_heads))
        return phi if scale is None else phi * scale

    def prepare_key(self, k: Tensor, params: Params) -> Tensor:
        return self.features.key(self._ready(k), self._numbers(k, params))

    def _numbers(self, x: Tensor, params: Params) -> Params:
        """What was drawn and learned, as the map takes it for x."""
        dim = x.shape[-1]
        if self.dim is None:
            params = _drawn(replace(self, dim=dim))
        elif self.dim != dim:
            raise ArgumentError(
                f"attention: {type(self.features).__name__} features have been made for heads of size {self.dim}, and meet one of {dim}. "
                f"Declare dim={dim}, or leave it open and use the operator in nn.Attention, which gives its own."
            )
        return {name: value.to(x.device, x.dtype if value.is_floating_point() else value.dtype) for name, value in params.items()}

    def _ready(self, x: Tensor) -> Tensor:
        if self.scaled:
            x = x * x.shape[-1] ** -0.25
        return F.normalize(x, dim=-1) if self.features.unit else x

    def moves(self) -> tuple[Move, ...]:
        claim = self.features.claim
        if claim.kind == "exact":
            return (Move("derived", "score", f"features of {type(self.features).__name__}: {claim.text}"),)
        kind = "assumed" if claim.kind == "learned" else "approximated"
        return (Move(kind, "score", f"features of {type(self.features).__name__} ({claim.kind}): {claim.text}"),)


@functools.lru_cache(maxsize=16)  # an operator asks several times, and landmarks take a while
def _drawn(score: Features) -> dict[str, Tensor]:
    if score.dim is None:
        return {}
    with torch.inference_mode(False):  # kept for calls with gradients, too
        return score.features.prepare(score.dim, score.heads, seed=score.seed)


__all__ = ["Features"]
