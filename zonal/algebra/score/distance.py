"""Distances of queries and keys, negative: the nearest scores most."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.declaration import Derived, Move, require, require_positive, require_whole
from zonal.algebra.metric import DotReduction, Euclidean, Metric, Riemannian
from zonal.algebra.score.base import Params, Score
from zonal.formula import Term


@dataclass(frozen=True)
class NegativeDistance(Score):
    """S_ts = -d(q_t, k_s) / temperature [+ dot q_t . k_s] for a metric d, which may be learned.

    dot: factor of an added dot product, None = no such term. shared_witness: a layer makes queries with the projection
    of keys (a call takes q and k as they are).
    neighbours: number of death times that a layer appends to queries and keys (``nn.deaths``), for a metric that ends
    in ``Topological``; a call expects them in q and k.

    Raises: ArgumentError for a temperature out of range.
    """

    kv_rows: ClassVar[tuple[str, ...]] = Riemannian.kv_rows

    metric: Metric = Euclidean()
    temperature: float = 1.0
    dot: float | None = None
    shared_witness: bool = False
    neighbours: int = 0

    @property
    def deaths(self) -> int:
        return self.neighbours

    @property
    def keeps_keys(self) -> bool:
        return self.metric.keeps_keys

    @property
    def one_map(self) -> bool:
        return self.shared_witness

    def indefinite_reason(self) -> str | None:
        reason = self.metric.indefinite_reason()
        if reason is None and self.dot is not None and self.dot < 0:
            return "a dot product beside the distance may be subtracted"
        return reason

    def width(self, dim: int) -> int:
        return self.metric.width(dim)

    def __post_init__(self) -> None:
        require_positive("NegativeDistance: temperature", self.temperature)
        require_whole("NegativeDistance: neighbours", self.neighbours, 0)
        require(
            isinstance(self.metric, Metric),
            f"NegativeDistance: metric must be a metric such as metric.Sphere(), received {self.metric!r}.",
        )
        kind = type(self.metric).__name__
        require(
            self.dot is None or self.metric.keeps_keys,
            f"NegativeDistance: dot is of keys as they come, and metric {kind} keeps others. Leave dot out.",
        )

    def initial(self) -> dict[str, Tensor]:
        return self.metric.initial()

    def started(self, entry: float, seed: int) -> dict[str, Tensor]:
        return self.metric.started(seed)

    def passes(self, dim: int) -> int:
        return self.metric.passes(dim)

    def sized(self, dim: int, heads: int) -> "NegativeDistance":
        metric = self.metric.sized(dim, heads)
        return self if metric is self.metric else replace(self, metric=metric)

    def prepare_query(self, q: Tensor, params: Params, scale: float | None) -> Tensor:
        self._unscaled(scale)
        return self.metric.query(q, params)

    @staticmethod
    def _unscaled(scale: float | None) -> None:
        require(
            scale is None,
            f"attention: scale has no meaning for a distance score (received {scale}); "
            "set NegativeDistance(temperature=...).",
        )

    def prepare_key(self, k: Tensor, params: Params) -> Tensor:
        return self.metric.key(k, params)

    def learned(self, params: Params) -> dict[str, Any]:
        return self.metric.learned(params)

    def as_query(self, k: Tensor, params: Params) -> Tensor:
        return self.metric.as_query(k, params)

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        score = self.metric.pair(q, k) / -self.temperature
        return score if self.dot is None else score + self._product(q, k)

    def terms(self, dim: int) -> tuple[Term, ...] | None:
        terms = self.metric.terms(dim)
        return terms if terms is None or self.dot is None else (*terms, Term("product", 0, dim))

    def weighed(
        self, q: Tensor, params: Params, dim: int, scale: float | None, *, prepared: bool
    ) -> tuple[Tensor, Tensor]:
        self._unscaled(scale)
        weights, points = self.metric.parted(q, dim) if prepared else self.metric.weighed(q, params)
        weights = weights / -self.temperature
        return (weights if self.dot is None else F.pad(weights, (0, 1), value=self.dot)), points

    def _product(self, q: Tensor, k: Tensor) -> Tensor:
        assert self.dot is not None
        return self.dot * q[..., q.shape[-1] - k.shape[-1] :] @ k.mT

    @property
    def dot_reduction(self) -> DotReduction | None:
        return self.metric.dot_reduction(self.temperature) if self.dot is None else None

    def reduced(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.metric.reduced(q, k)

    def pair_vjp(self, q: Tensor, k: Tensor, score: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        if self.dot is not None:
            score = score - self._product(q, k)
        dq, dk = self.metric.pair_vjp(q, k, score * -self.temperature, grad / -self.temperature)
        if self.dot is not None:
            learned = q.shape[-1] - k.shape[-1]  # what the metric put before the query
            dq = dq + F.pad(self.dot * grad @ k, (learned, 0))
            dk = dk + self.dot * grad.mT @ q[..., learned:]
        return dq, dk

    def moves(self) -> tuple[Move, ...]:
        name, beside = self.metric.title, "" if self.dot is None else ", beside a dot product"
        nearest = Derived("nearest", "hence S <= 0, and no key scores more than one equal to its query")
        text = f"evidence falls with the {name} distance of query and key{beside}"
        distance = self.move("restriction", f"{name} distance", text, *([nearest] if self.dot is None else []))
        return (distance, *self.metric.moves())


__all__ = ["NegativeDistance"]
