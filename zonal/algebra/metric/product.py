"""A weighted sum of metrics, each on its own part of a vector, with weights learned per head."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.declaration import Derived, Move, require, require_whole, row
from zonal.algebra.metric.base import Metric
from zonal.algebra.metric.curved import Hyperbolic, Sphere
from zonal.algebra.metric.euclidean import Euclidean
from zonal.formula import Term


class _Open(torch.autograd.Function):
    """max(x, 0), with the gradient of x where x > 0 or a descent step would raise x above 0.

    A gate at zero can thus be learned, and never becomes negative.
    """

    # torch.func may pass through; no jvp beside it, which torch.compile would not take
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return x.clamp_min(0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * ((x > 0) | (grad < 0))


@dataclass(frozen=True)
class Product(Metric):
    """d(a, b) = sum_i w_hi g_hi d_i(a_i, b_i) / typical_i on vectors cut into parts a = (a_1, a_2, …), one per factor.

    factors: the metrics. sizes: of the parts; one may be None and takes the remainder. None = equal shares, with the
    remainder in the first. weights: initial values of w, 1 each by default. learn: w is learned per head and kept
    positive by softplus. gates: initial values of g >= 0, also learned; None = no gates. A gate of zero switches its
    factor off exactly, and still gets the gradient that would open it. normalise: divide each distance by its typical
    value for vectors of N(0, 1), so that weights of 1 balance the factors; False = plain sums.

    adaptive: the first numbers of a query, one per factor, are logits of its own weights: w_hi is multiplied by
    softmax(logits)_i times the number of factors. Those of a key are not read. ``sizes`` then cover the rest.

    ``pair`` takes queries with their weights in front, (…, T, factors + D), as ``query`` makes them, so that weights
    can differ between queries. Plain points (…, T, D) get the declared weights.

    Raises: ArgumentError for sizes that do not fit the vectors, or weights out of range. Source: REWA (004).
    """

    factors: tuple[Metric, ...] = (Euclidean(), Sphere(), Hyperbolic(scale=None))
    sizes: tuple[int | None, ...] | None = None
    weights: tuple[float, ...] | None = None
    gates: tuple[float, ...] | None = None
    learn: bool = True
    normalise: bool = True
    adaptive: bool = False

    def indefinite_reason(self) -> str | None:
        reason = next((reason for own in self.factors if (reason := own.indefinite_reason())), None)
        if reason is None and self.adaptive:
            return "a product whose weights each query chooses gives keys an unsymmetric kernel; use adaptive=False"
        return reason

    def __post_init__(self) -> None:
        require(
            len(self.factors) > 0 and all(isinstance(f, Metric) for f in self.factors),
            f"Product: factors must be metrics, received {self.factors!r}.",
        )
        learned = [type(f).__name__ for f in self.factors if f.initial() or not f.keeps_keys]
        require(
            not learned,
            f"Product: factors without numbers of their own to learn are required, received {', '.join(learned)}.",
        )
        for name, least in (("weights", "> 0"), ("gates", ">= 0")):
            values = getattr(self, name)
            if values is not None:
                object.__setattr__(self, name, tuple(float(v) for v in values))
                good = len(values) == len(self.factors) and all(v > 0 or (v == 0 and name == "gates") for v in values)
                require(
                    good,
                    f"Product: {len(self.factors)} {name} {least} are required, one per factor, received {values}. "
                    "To switch a factor off, use a gate of 0.",
                )
        if self.sizes is not None:
            require(
                len(self.sizes) == len(self.factors),
                f"Product: {len(self.factors)} sizes are required, one a factor, received {self.sizes}.",
            )
            for size in self.sizes:
                if size is not None:
                    require_whole("Product: each of sizes", size)
            require(
                self.sizes.count(None) <= 1,
                f"Product: one size at most may be None, which is what the others leave, received {self.sizes}.",
            )

    def parts(self, dim: int) -> tuple[int, ...]:
        """The sizes of the parts of a point of ``dim`` numbers. Raises: ArgumentError when they do not fit."""
        beside = len(self.factors) * self.adaptive
        what = f" after {beside} that weigh the factors" if beside else ""
        if self.sizes is None:
            require(
                dim >= len(self.factors),
                f"metric.Product: {len(self.factors)} factors need vectors of at least as many numbers{what}, "
                f"received {dim + beside}.",
            )
            share = dim // len(self.factors)
            return (dim - share * (len(self.factors) - 1), *(share for _ in self.factors[1:]))
        given = sum(size or 0 for size in self.sizes)
        fits = dim > given if None in self.sizes else dim == given
        least = "more than " if None in self.sizes else ""
        require(
            fits,
            f"metric.Product: sizes {self.sizes} need vectors of {least}{given} numbers{what}, received "
            f"{dim + beside}. Choose sizes that sum to it, or None.",
        )
        return tuple(dim - given if size is None else size for size in self.sizes)

    def check(self, dim: int) -> None:
        for factor, size in zip(self.factors, self.parts(self.width(dim)), strict=True):
            factor.check(size)

    def _start(self) -> tuple[float, ...]:
        return self.weights or tuple(1.0 for _ in self.factors)

    def initial(self) -> dict[str, Tensor]:
        found = {}
        if self.learn:  # softplus of it is the weight
            found["weight"] = row(*(v + math.log(-math.expm1(-v)) for v in self._start()))[None]
        if self.gates is not None:
            found["gate"] = row(*self.gates)[None]
        return found

    def typical(self, dim: int) -> float:
        scales = (
            1.0 if self.normalise else factor.typical(size)
            for factor, size in zip(self.factors, self.parts(dim), strict=True)
        )
        return sum(weight * scale for weight, scale in zip(self._start(), scales, strict=True))

    def passes(self, dim: int) -> int:
        parts = zip(self.factors, self.parts(self.width(dim)), strict=True)
        return sum(factor.passes(size) for factor, size in parts)

    def head_weights(self, params: dict[str, Tensor], like: Tensor) -> Tensor:
        """w g (H or 1, factors) of the parameters, in the dtype of ``like``."""
        weight = F.softplus(params["weight"].to(like)) if self.learn else like.new_tensor(self._start())[None]
        return weight if self.gates is None else weight * _Open.apply(params["gate"].to(like))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the factors, numbered where two have the same type."""
        kinds = [type(factor).__name__ for factor in self.factors]
        return tuple(
            kind if kinds.count(kind) == 1 else f"{kind} {kinds[: place + 1].count(kind)}"
            for place, kind in enumerate(kinds)
        )

    @property
    def title(self) -> str:
        return " + ".join(factor.title for factor in self.factors)

    def moves(self) -> tuple[Move, ...]:
        each = "the distance" if len(self.factors) == 1 else "each distance"
        if self.adaptive:
            name, text = "weights a query", "each query weighs the distances by a softmax of its first "
            text += f"{len(self.factors)} numbers"
        elif self.learn:
            name = "weights per head"
            text = f"{each} has a weight > 0 per head, which is learned and the same for all queries"
        else:
            name, text = "fixed weights", f"{each} has a weight > 0 that is given"
        weighs = Move("restriction", "score", name, text)
        if self.gates is None:
            return (weighs,)
        text = f"{each} has a factor >= 0 per head, initially {', '.join(f'{g:g}' for g in self.gates)}"
        shut = Derived("", "hence a factor of gate 0 carries no evidence")
        return (weighs, Move("restriction", "score", "gates", text, (shut,)))

    def learned(self, params: dict[str, Tensor]) -> dict[str, Any]:
        """Learned values as plain numbers, per head.

        weights: w g of each factor in units of its typical distance, without the adaptive part. curvature: if all
        factors have one, sum_i w_i g_i curvature_i / sum_i w_i g_i, with 1 for a sphere and -1 for hyperbolic space; 0
        while all gates are shut.
        """
        weights = self.head_weights(params, torch.empty(0, dtype=torch.float64))
        found: dict[str, Any] = {"weights": dict(zip(self.names, weights.T.tolist(), strict=True))}
        curvatures = [factor.curvature for factor in self.factors if factor.curvature is not None]
        if len(curvatures) == len(self.factors):
            total = weights.sum(-1)
            found["curvature"] = ((weights @ weights.new_tensor(curvatures)) / total.where(total > 0, 1)).tolist()
        return found

    def _asked(self, q: Tensor, params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """The weights of queries, (1, H or 1, 1, factors) where they do not differ, and their points."""
        weights, dim = self.head_weights(params, q)[None, :, None], self.width(q.shape[-1])
        self.parts(dim)
        if not self.adaptive:
            return weights, q
        logits, point = q.split([len(self.factors), dim], -1)
        return weights * len(self.factors) * logits.softmax(-1), point

    def query(self, q: Tensor, params: dict[str, Tensor]) -> Tensor:
        weights, point = self._asked(q, params)
        return torch.cat([weights.expand(q.shape[0], q.shape[1], q.shape[2], -1), point], -1)

    def weighed(self, q: Tensor, params: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        weights, point = self._asked(q, params)
        return self._in_units(weights, point.shape[-1]), point

    def parted(self, q: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        if q.shape[-1] == dim:
            return self._in_units(q.new_tensor(self._start()).expand(*q.shape[:-2], 1, -1), dim), q
        weights, point = q.split([len(self.factors), dim], -1)
        return self._in_units(weights, dim), point

    def _in_units(self, weights: Tensor, dim: int) -> Tensor:
        """Weights (…, factors) with the typical distances divided out."""
        if not self.normalise:
            return weights
        return weights / weights.new_tensor(
            [factor.typical(size) for factor, size in zip(self.factors, self.parts(dim), strict=True)]
        )

    def terms(self, dim: int) -> tuple[Term, ...] | None:
        found, start = [], 0
        for factor, size in zip(self.factors, self.parts(dim), strict=True):
            terms = None if isinstance(factor, Product) else factor.terms(size)  # which has weights of its own
            if terms is None or len(terms) != 1:
                return None
            found.append(terms[0]._replace(start=start))
            start += size
        return tuple(found)

    def as_query(self, k: Tensor, params: dict[str, Tensor]) -> Tensor:
        return replace(self, adaptive=False).query(k, params)  # a key has no weights of its own

    def key(self, k: Tensor, params: dict[str, Tensor]) -> Tensor:
        return k[..., k.shape[-1] - self.width(k.shape[-1]) :]

    def width(self, dim: int) -> int:
        return dim - len(self.factors) if self.adaptive else dim

    def cut(self, q: Tensor, k: Tensor) -> tuple[Tensor, list[tuple[Metric, Tensor, Tensor]]]:
        """The weights (…, T or 1, factors) over typical distances, and each factor with its parts of q and k."""
        sizes = self.parts(k.shape[-1])
        weights, q = self.parted(q, k.shape[-1])
        return weights, list(zip(self.factors, q.split(sizes, -1), k.split(sizes, -1), strict=True))

    def pair(self, q: Tensor, k: Tensor) -> Tensor:
        weights, parts = self.cut(q, k)
        distances = [factor.pair(a, b) for factor, a, b in parts]
        return sum(
            (weights[..., i + 1, None] * d for i, d in enumerate(distances[1:])), weights[..., 0, None] * distances[0]
        )

    def pair_vjp(self, q: Tensor, k: Tensor, distance: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
        weights, parts = self.cut(q, k)
        slopes, dq, dk = [], [], []
        for i, (factor, a, b) in enumerate(parts):
            own = factor.pair(a, b)
            slopes.append((grad * own).sum(-1))
            for found, part in zip((dq, dk), factor.pair_vjp(a, b, own, grad * weights[..., i, None]), strict=True):
                found.append(part)
        if q.shape[-1] == k.shape[-1]:
            return torch.cat(dq, -1), torch.cat(dk, -1)
        slope = torch.stack(slopes, -1)
        if self.normalise:
            slope = slope / slope.new_tensor([factor.typical(a.shape[-1]) for factor, a, _ in parts])
        return torch.cat([slope, *dq], -1), torch.cat(dk, -1)


__all__ = ["Product"]
