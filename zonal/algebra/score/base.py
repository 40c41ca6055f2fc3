"""Scores: one number S_ts per query and key.

A score first prepares queries and keys one by one (normalise, scale, map), then pairs them. Everything a memory stores
is a prepared key. For ``bilinear`` scores the pairing is a plain dot product of prepared vectors, which is what feature
maps and the ridge statistics need.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.declaration import (
    Declaration,
    Derived,
    Move,
    require,
    require_one_of,
    require_positive,
    require_whole,
    row,
)
from zonal.algebra.metric import DotReduction, Euclidean, Metric, Riemannian
from zonal.algebra.score.feature_layer import FeatureLayer
from zonal.formula import Activation, Term

Params = dict[str, Tensor]


def _per_head(value: Tensor, like: Tensor) -> Tensor:
    """A row parameter (H,) shaped to scale (B, H, T, D)."""
    return value.to(like.dtype).view(1, -1, 1, 1)


def unit(x: Tensor, eps: float = 1e-12) -> Tensor:
    """x / |x| along the last axis, also where |x|^2 overflows or underflows; 0 with gradient 0 for a zero vector."""
    if x.shape[-1] == 0:  # which has no largest number
        return x
    # on rows of 16 to 128 numbers several times faster than vector_norm of order infinity
    largest = x.detach().abs().amax(-1, keepdim=True)
    divisor = torch.where((largest > 1e-9) & (largest < 1e9), 1.0, largest).masked_fill(largest == 0, torch.inf)
    return F.normalize(x / divisor, dim=-1, eps=max(eps, torch.finfo(x.dtype).tiny))


def shared_product(x: Tensor, y: Tensor) -> Tensor:
    """x (B, H, T, N) times y (B, Hkv, N, M), head h of x with head h // (H / Hkv) of y, which is not repeated for it.

    With equal numbers of heads, and for other shapes, it is x @ y.
    """
    if x.ndim != 4 or x.shape[1] == y.shape[1]:
        return x @ y
    groups = x.shape[1] // y.shape[1]
    return (x.unflatten(1, (-1, groups)).flatten(2, 3) @ y).unflatten(2, (groups, -1)).flatten(1, 2)


class Fused(NamedTuple):
    """A bilinear score for the tile kernels: scale_h f(q) . f(k), with f the identity or x / |x|.

    scale: (H,) or a number.
    """

    normalise: bool
    scale: Tensor | float


class Clipped(NamedTuple):
    """A dot product of raw vectors with keys of limited length: scale (f q) . z, z = f k shortened to ``limit``.

    limit: None = no limit. factor: f (Hkv,), None = 1.
    """

    scale: float
    limit: float | None
    factor: Tensor | None = None


def low_rank(meet: str) -> Move:
    """The ledger's move of scores that are dot products of prepared vectors. meet: the form of the product."""
    dot = Derived(
        "low rank",
        "hence the score is a dot product: the best scores of a rank are dot products of vectors of that size (Eckart "
        "and Young)",
    )
    return Move("approximation", "score", "low rank", f"queries and keys meet only through {meet}", (dot,))


class Score(Declaration, abstract=True):
    """Base of scores: S (B, H, T, S) from q (B, H, T, D) and k (B, H, S, D).

    bilinear: the score is a dot product of prepared vectors. bound: the largest |S| it can take, None = unbounded.
    positive: S >= 0 always. plain: the kernel among keys is z.z of the prepared keys, so that sums such as G = sum z
    z^T define it. keeps_keys: a prepared key equals the given key, so that a memory can keep it in the given type.
    one_map: a layer makes queries and keys with one projection. transports: a layer carries values from token to token
    by what the score compares (``Categorical``). deaths: the number of death times that a layer appends to each query
    and key, from a token's earlier neighbours.
    """

    slot = "score"
    bilinear: ClassVar[bool] = False
    bound: ClassVar[float | None] = None
    positive: ClassVar[bool] = False
    plain: ClassVar[bool] = False
    keeps_keys: ClassVar[bool] = False
    one_map: ClassVar[bool] = False
    transports: ClassVar[bool] = False
    deaths: ClassVar[int] = 0

    def check_values(self, dim: int) -> None:
        """Raise ArgumentError when values of ``dim`` numbers cannot be carried."""

    def carried(self, v: Tensor, x: Tensor, back: bool = False) -> Tensor:
        """Values v (B, H, T, P) in a frame where those of all tokens can be summed, by raw keys x (B, H, T, D).

        back: from that frame to the one of the raw queries x.
        """
        raise NotImplementedError(f"{type(self).__name__}.carried")

    def indefinite_reason(self) -> str | None:
        """Why scores among keys may be neither inner products nor negated distances of negative type, or None."""
        return None if self.bilinear else f"score {type(self).__name__} among keys need not be symmetric"

    def width(self, dim: int) -> int:
        """How many numbers a prepared vector has, from heads of size ``dim``."""
        return dim

    def factors(self, dim: int) -> int:
        """How many numbers the kernel of sums takes for such a vector, where ``layers`` makes them."""
        return self.width(dim)

    def passes(self, dim: int) -> int:
        """About how many elementwise passes ``pair`` makes over all pairs besides its product, for heads of size
        ``dim``.
        """
        return 0

    def sized(self, dim: int, heads: int) -> "Score":
        """The score for heads of size ``dim`` and a number of key heads, with open sizes filled in."""
        return self

    def started(self, entry: float, seed: int) -> dict[str, Tensor]:
        """What a layer starts with in place of ``initial()`` and ``fixed()`` where it has sized the score, by name.

        entry: the size of one number of its queries and keys. seed: of what is drawn at random.
        """
        return {}

    def chosen(self, k: Tensor) -> dict[str, Tensor]:
        """What the score takes from keys k (B, Hkv, S, D), by names in ``initial`` and ``fixed``; usually nothing."""
        return {}

    def prepare_query(self, q: Tensor, params: Params, scale: float | None) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__}.prepare_query")

    def prepare_key(self, k: Tensor, params: Params) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__}.prepare_key")

    def fused(self, dim: int, params: Params, scale: float | None) -> Fused | None:
        """The score in the form that tile kernels compute from raw queries and keys; None = prepare them first."""
        return None

    def layers(self, dim: int, params: Params, scale: float | None) -> tuple[FeatureLayer, FeatureLayer] | None:
        """How the feature kernel makes queries and keys from raw ones of ``dim`` numbers; None = prepare them."""
        return None

    def clipped(self, dim: int, params: Params, scale: float | None) -> Clipped | None:
        """The score in the form that the ridge kernel computes from raw queries and keys; None = prepare them first."""
        return None

    def terms(self, dim: int) -> tuple[Term, ...] | None:
        """The distances whose weighted sum is the score, on prepared keys of ``dim`` numbers, or None.

        For the distance kernel.
        """
        return None

    def weighed(
        self, q: Tensor, params: Params, dim: int, scale: float | None, *, prepared: bool
    ) -> tuple[Tensor, Tensor]:
        """The weights (B, H, T, terms) of ``terms`` and the points (B, H, T, dim) of queries, raw or prepared.

        An axis along which all weights are equal has length 1.
        """
        raise NotImplementedError(f"{type(self).__name__}.weighed")

    @property
    def dot_reduction(self) -> DotReduction | None:
        """How a score that is not ``bilinear`` follows from dot products of ``reduced`` vectors, for the kernels.

        None: torch computes it.
        """
        return None

    def reduced(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Prepared q (B, H, T, D) and k (B, Hkv, S, D) as the vectors of ``dot_reduction``."""
        raise NotImplementedError(f"{type(self).__name__}.reduced")

    def learned(self, params: Params) -> dict[str, Any]:
        """Learned values other than the temperature as plain lists, for people."""
        return {}

    def as_query(self, k: Tensor, params: Params) -> Tensor:
        """A prepared key in the place of a query: what the kernel among keys, K_kk, is made with."""
        return k

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        """Prepared q (..., T, D), k (..., S, D) -> S (..., T, S). A bilinear score also takes k of fewer heads, which
        runs of query heads share.
        """
        return shared_product(q, k.transpose(-1, -2))

    def pair_vjp(self, q: Tensor, k: Tensor, score: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of sum(grad * pair(q, k)) with respect to prepared q and k."""
        return grad @ k, grad.transpose(-1, -2) @ q


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
            x = F.elu(x) + 1
        elif self.map != "none":
            x = F.relu(x) if self.map == "relu" else F.silu(x)
        if self.factor is None:
            return x
        factor = params["log_factor"].exp()
        return x * _per_head(factor.repeat_interleave(x.shape[1] // factor.shape[0]), x)

    def prepare_query(self, q: Tensor, params: Params, scale: float | None) -> Tensor:
        return self._mapped(q, params) * self._scale(q.shape[-1], scale)

    def prepare_key(self, k: Tensor, params: Params) -> Tensor:
        k = self._mapped(k, params)
        if self.key_limit is None:
            return k
        norm = torch.linalg.vector_norm(k, dim=-1, keepdim=True)
        return k * (self.key_limit / norm.clamp_min(self.key_limit))

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

    learn_temperature: learn one temperature per head, through its logarithm. eps: shorter vectors count as zero.

    Raises: ArgumentError for a temperature <= 0.
    """

    bilinear = True

    temperature: float = 1.0
    learn_temperature: bool = False
    eps: float = 1e-12

    def __post_init__(self) -> None:
        require_positive("Cosine: temperature", self.temperature)

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
            along = along * _per_head(torch.exp(-params["log_temperature"]), q)
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
            k * _per_head(torch.exp(-params["log_temperature"]), k) if self.learn_temperature else k / self.temperature
        )

    def moves(self) -> tuple[Move, ...]:
        cosine = Derived("no norms", "hence the score is their cosine over the temperature, and bounded")
        angles = self.move("restriction", "angles", "norms of q and k carry no evidence", cosine)
        return (angles, low_rank("D numbers"))


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


__all__ = [
    "Clipped", "Cosine", "Dot", "Fused", "NegativeDistance", "Params", "Score", "low_rank", "shared_product", "unit",
]  # fmt: skip
