"""Retention, y_t = sum_s rate^(t - s) (q_t.k_s / sqrt D) v_s: linear attention whose past fades.

Cost: T D P per head; decoder memory: D P numbers per head at any length.
Papers: retention (Sun et al. 2023), and the scalar-decay form of SSD (Dao & Gu 2024).
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Raw
from zonal.algebra.link import Identity
from zonal.algebra.prior import Decay
from zonal.algebra.score import Dot
from zonal.mechanisms.registry import mechanism


@mechanism(
    "Retention",
    "the dot product, decaying by a constant factor per token; constant memory.",
    weights=r"$\rho^{t-s} \, q \cdot k / \sqrt D$",
    memory="$DP$",
    paths="tiled, chunked",
)
def retention(rates: tuple[float, ...] = (0.9, 0.97, 0.99, 0.997), learn: bool = True) -> Operator:
    """y_t = sum_s rate^(t - s) (q_t . k_s / sqrt D) v_s, without normalisation; a layer normalises each head's output.

    rates: 0 < rate < 1 per key head, initial values if learn is True.

    Raises: ArgumentError for rates out of range. Source: Sun et al. 2023; Dao and Gu 2024.
    """
    return Operator(Dot(), Identity(), Raw(), Decay(rates=rates, learn=learn), name="retention", readout="head")
