"""Squared-affine attention: K = (x + b)^2, x = cos(q, k), rows divided by their sum.

It stands in for Yat and has finitely many exact features, m = (D + 1)(D + 2)/2. Cost: T m P a head; memory of a
decoder: m (P + 1) numbers a head. The form and its b follow from measurements on SLAY (docs/slay.md).
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import SquaredAffine
from zonal.algebra.score import Cosine
from zonal.mechanisms.registry import mechanism


@mechanism(
    "Squared affine",
    "the weight is (cosine + b)², a square that finitely many features can hold: "
    "the memory does not grow with the text.",
    weights="$(x + b)^2$ over row sum",
    memory="$m(P + 1)$, $m = (D + 1)(D + 2)/2$",
    paths="tiled, chunked",
)
def squared_affine(bias: float = 0.04, learn_bias: bool = False, d_qk: int | None = None) -> Operator:
    """(x + b)^2: nonnegative, exact with (d + 1)(d + 2)/2 features.

    d_qk: the size that a layer gives its queries and keys.
    """
    return Operator(
        Cosine(), SquaredAffine(bias=bias, learn_bias=learn_bias), Row(), name="squared_affine", qk_dim=d_qk
    )
