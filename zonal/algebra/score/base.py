"""Scores: one number S_ts per query and key.

A score first prepares queries and keys one by one (normalise, scale, map), then pairs them. Everything a memory stores
is a prepared key. For ``bilinear`` scores the pairing is a plain dot product of prepared vectors, which is what feature
maps and the ridge statistics need.
"""

from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from zonal.algebra.declaration import Declaration, Derived, Move, vjp
from zonal.algebra.metric import DotReduction
from zonal.algebra.score.feature_layer import FeatureLayer
from zonal.errors import ArgumentError
from zonal.formula import Term

Params = dict[str, Tensor]


def per_head(value: Tensor, like: Tensor) -> Tensor:
    """A row parameter (H,) shaped to scale (B, H, T, D)."""
    return value.to(like.dtype).view(1, -1, 1, 1)


def unit(x: Tensor, eps: float = 1e-12) -> Tensor:
    """x / |x| along the last axis, also where |x|^2 overflows or underflows; 0 with gradient 0 for a zero vector.

    A vector that is shorter than eps is divided by eps, if that is above 1e-9.
    """
    if x.shape[-1] == 0:  # which has no largest number
        return x
    # on rows of 16 to 128 numbers several times faster than vector_norm of order infinity
    largest = x.detach().abs().amax(-1, keepdim=True)
    least = 0.0 if eps > 1e-9 else 1e-9  # below such an eps no length is asked for
    zero = largest == 0
    along = x / torch.where((largest > least) & (largest < 1e9), 1.0, largest).masked_fill(zero, torch.inf)
    # a length of 0 has no second derivative: that of ones stands in for it
    length = torch.linalg.vector_norm(torch.where(zero, 1.0, along), dim=-1, keepdim=True)
    return along / length.clamp_min(max(eps, torch.finfo(x.dtype).tiny))


def prepared_keys(score: "Score", k: Tensor, params: Params) -> Tensor:
    """``prepare_key`` of k. Raises: ArgumentError unless ``width`` says how many numbers a prepared key has."""
    x, width = score.prepare_key(k, params), score.width(k.shape[-1])
    if x.shape[-1] != width:
        name = type(score).__name__
        raise ArgumentError(
            f"score {name}: width({k.shape[-1]}) must say how many numbers a prepared key has. It says {width}, and "
            f"{name} prepared keys of {x.shape[-1]}. Give the class a method width(self, dim) that returns it."
        )
    return x


def paired_scores(score: "Score", q: Tensor, k: Tensor) -> Tensor:
    """``pair`` of q and k. Raises: ArgumentError unless it gives one number for each pair, of their type."""
    found, expected = score.pair(q, k), (*q.shape[:-1], k.shape[-2])
    if tuple(found.shape) != expected or found.dtype != q.dtype:
        raise ArgumentError(
            f"score {type(score).__name__}: pair of q {tuple(q.shape)} and k {tuple(k.shape)} must give one number for "
            f"each query and key, {expected} of {q.dtype}. It gave {tuple(found.shape)} of {found.dtype}."
        )
    return found


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

    scale: (H,) or a number. By default it is the dot product of vectors that have been prepared.
    """

    normalise: bool = False
    scale: Tensor | float = 1.0


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
        """Gradients of sum(grad * pair(q, k)) with respect to prepared q and k; by autograd unless ``bilinear``."""
        return (grad @ k, grad.transpose(-1, -2) @ q) if self.bilinear else vjp(self.pair, q, k, grad)


__all__ = [
    "Clipped", "Fused", "Params", "Score", "low_rank", "paired_scores", "per_head", "prepared_keys", "shared_product",
    "unit",
]  # fmt: skip
