"""Squared-affine attention: K = (x + b)^2, x = cos(q, k), rows divided by their sum.

A substitute for Yat with finitely many exact features, m = (D + 1)(D + 2)/2. Cost: T m P per head; decoder memory: m (P
+ 1) numbers per head. The form and the default b come from measurements on SLAY (docs/slay.md).
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import SquaredAffine
from zonal.algebra.score import Cosine
from zonal.mechanisms.registry import mechanism


@mechanism(
    "Squared affine",
    "the weight is (cosine + b)², which has finitely many features, so the memory is constant.",
    weights="$(x + b)^2$ over row sum",
    memory="$m(P + 1)$, $m = (D + 1)(D + 2)/2$",
    paths="tiled, chunked",
)
def squared_affine(bias: float = 0.04, learn_bias: bool = False, d_qk: int | None = None) -> Operator:
    """K = (x + b)^2 with x = cos(q, k): nonnegative, with (d + 1)(d + 2)/2 exact features.

    bias: b; learn_bias trains it. d_qk: size d of queries and keys in a layer.
    """
    return Operator(
        Cosine(), SquaredAffine(bias=bias, learn_bias=learn_bias), Row(), name="squared_affine", qk_dim=d_qk
    )
