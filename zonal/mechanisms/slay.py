"""SLAY: spherical Yat attention through positive random features, y_t = phi(q_t) . S_t / phi(q_t) . Z_t.

S_t and Z_t are the sums of phi(k_s) v_s^T and phi(k_s) over the past, with phi = [sqrt(w_r) (poly(u) ⊗ PRF(u; s_r))]_r
(``features.Slay``). The features approximate ``yat(eps)``; docs/slay.md measures the error and recommends alternatives.
Paper: SLAY (001).
"""

from collections.abc import Callable
from typing import Literal

from zonal.algebra import Operator
from zonal.algebra.declaration import require, require_one_of
from zonal.features import Anchors, FeatureMap, Nystrom, RandomMaclaurin, Slay, TensorSketch, square
from zonal.features.landmarks import Choice
from zonal.features.quadrature import Rule
from zonal.features.slay import Fusion
from zonal.mechanisms.of_features import of_features
from zonal.mechanisms.registry import mechanism

Factor = Literal["anchors", "exact", "nystrom", "tensor_sketch", "maclaurin", "none"]
_FACTORS: dict[Factor, Callable[[int, bool, Choice], FeatureMap | None]] = {
    "anchors": lambda size, learn, choice: Anchors(size, choice, learn),
    "exact": lambda size, learn, choice: square(),
    "nystrom": lambda size, learn, choice: Nystrom(size, choice=choice),
    "tensor_sketch": lambda size, learn, choice: TensorSketch(size),
    "maclaurin": lambda size, learn, choice: RandomMaclaurin(size),
    "none": lambda size, learn, choice: None,
}


@mechanism(
    "SLAY",
    "spherical Yat by the paper's random features; constant memory.",
    weights="Yat by random features ([poor approximation](slay.md))",
    memory="$m(P + 1)$",
    paths="tiled, chunked",
)
def slay(
    scale: str = "medium",
    eps: float = 0.01,
    polynomial: Factor = "anchors",
    nodes: int = 2,
    rule: Rule = "laguerre",
    size: int | None = None,
    draws: int | None = None,
    fusion: Fusion = "tensor",
    sketch_size: int = 64,
    orthogonal: bool = False,
    antithetic: bool = False,
    learn: bool = False,
    choice: Choice = "random",
    dim: int | None = None,
    seed: int | None = None,
    allow_signed: bool = False,
    anew: bool = False,
) -> Operator:
    """Spherical Yat by the paper's features, y_t = phi(q_t) . S_t / phi(q_t) . Z_t; docs/slay.md measures the error.

    The denominator is the sum itself, without the paper's delta. A row with sum zero gives zeros.

    scale: ``small``, ``medium`` or ``large``, with D random features per node and P polynomial features, D = P = 8, 16,
    32. draws, size: D and P in place of those of the scale. polynomial: the map of x^2. learn: train anchors and
    projections. choice: source of anchors and of Nystrom's landmarks, ``random``, ``orthogonal`` or ``kmeans`` of the
    keys given to ``Operator.fit``. dim, seed, allow_signed: as in ``of_features``. The other arguments are those of
    ``features.Slay``.

    Raises: ArgumentError for unknown names and sizes that do not fit; PathError for signed maps without
    ``allow_signed``. Source: SLAY (001).
    """
    preset = Slay.preset(scale)
    require_one_of("slay: polynomial", polynomial, _FACTORS)
    require(
        polynomial in ("anchors", "nystrom") or choice == "random",
        f"slay: polynomial {polynomial!r} has no landmarks to choose; leave choice out.",
    )
    features = Slay(
        eps=eps,
        nodes=nodes,
        rule=rule,
        polynomial=_FACTORS[polynomial](preset.draws if size is None else size, learn, choice),
        draws=preset.draws if draws is None else draws,
        orthogonal=orthogonal,
        antithetic=antithetic,
        learn=learn,
        fusion=fusion,
        sketch_size=sketch_size,
        anew=anew,
    )
    return of_features(features, dim, seed, allow_signed, name="slay")


__all__ = ["Factor", "slay"]
