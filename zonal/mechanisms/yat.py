"""Spherical Yat attention: K = x^2 / (2 + eps - 2x), x = cos(q, k), rows divided by their sum.

Cost: T S (D + P) multiply-adds; decoder memory: all keys and values. Paper: SLAY.
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import Yat
from zonal.algebra.score import Cosine
from zonal.mechanisms.registry import mechanism


@mechanism(
    "Yat",
    "squared cosine over squared distance: sharp where query and key nearly agree.",
    weights=r"$x^2 / (2 + \varepsilon - 2x)$ over row sum",
    memory="$S(D + P)$",
    paths="tiled",
)
def yat(eps: float = 0.01) -> Operator:
    """K = x^2 / (2 + eps - 2x) with x = cos(q, k): squared alignment over squared distance on the sphere, row anchor.

    Raises: ArgumentError for eps <= 0. Source: SLAY (001), eq. 3.
    """
    return Operator(Cosine(), Yat(eps=eps), Row(), name="yat")
