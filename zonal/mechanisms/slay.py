"""SLAY: spherical Yat attention through positive random features, y_t = phi(q_t) . S_t / (phi(q_t) . Z_t + delta).

S_t and Z_t are the sums of phi(k_s) v_s^T and phi(k_s) over the past, phi = [sqrt(w_r) (poly(u) ⊗ PRF(u; s_r))]_r (``features.Slay``). The
kernel that is meant is ``yat(eps)``; what the features give instead, and what to use, is in docs/slay.md. Paper: SLAY (001).
"""

from typing import Literal

from zonal.algebra.declaration import require
from zonal.features import Anchors, FeatureMap, Nystrom, RandomMaclaurin, Slay, TensorSketch, square
from zonal.features.quadrature import Rule
from zonal.features.slay import Fusion

Factor = Literal["anchors", "exact", "nystrom", "tensor_sketch", "maclaurin", "none"]
_FACTORS = ("anchors", "exact", "nystrom", "tensor_sketch", "maclaurin", "none")


def slay_features(
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
    delta: float = 1e-6,
) -> Slay:
    """The paper's features from plain values, as an operator spec gives them.

    scale: ``small``, ``medium`` or ``large`` (D = P = 8, 16, 32). polynomial: the map of x^2. size: P, and draws: D, instead of the scale's.
    learn: train anchors and projections. The rest as in ``features.Slay``.

    Raises: ArgumentError for names and sizes that do not fit.
    """
    preset = Slay.preset(scale)
    draws = preset.draws if draws is None else draws
    size = preset.draws if size is None else size
    require(polynomial in _FACTORS, f"slay_features: polynomial must be one of {', '.join(_FACTORS)}, received {polynomial!r}.")
    return Slay(
        eps=eps, nodes=nodes, rule=rule, polynomial=_factor(polynomial, size, learn), draws=draws, orthogonal=orthogonal, antithetic=antithetic,
        learn=learn, fusion=fusion, sketch_size=sketch_size, delta=delta,
    )  # fmt: skip


def _factor(name: Factor, size: int, learn: bool) -> FeatureMap | None:
    match name:
        case "anchors":
            return Anchors(size, learn=learn)
        case "exact":
            return square()
        case "nystrom":
            return Nystrom(size)
        case "tensor_sketch":
            return TensorSketch(size)
        case "maclaurin":
            return RandomMaclaurin(size)
        case "none":
            return None


__all__ = ["Factor", "slay_features"]
