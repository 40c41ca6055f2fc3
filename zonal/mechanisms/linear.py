"""Linear attention, y_t = sum_s phi(q_t).phi(k_s) v_s / sum_s phi(q_t).phi(k_s), phi = elu + 1, with an optional decay.

Cost: T D P a head; memory of a decoder: D (P + 1) numbers a head, whatever the length.
Paper: Katharopoulos et al. 2020; with decay: retention (Sun et al. 2023) and the scalar-decay form of SSD (Dao & Gu 2024).
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Raw, Row
from zonal.algebra.link import Identity
from zonal.algebra.prior import Decay
from zonal.algebra.score import Dot
from zonal.names import known_names


@known_names
def linear() -> Operator:
    """elu + 1 on queries and keys, identity link, row anchor."""
    return Operator(Dot(scale=1.0, map="elu1"), Identity(), Row(), name="linear")


@known_names
def retention(rates: tuple[float, ...] = (0.9, 0.97, 0.99, 0.997), learn: bool = True) -> Operator:
    """y_t = sum_s rate^(t - s) (q_t.k_s / sqrt D) v_s: no normalisation, so the layer norms each head's output."""
    return Operator(Dot(), Identity(), Raw(), Decay(rates=rates, learn=learn), name="retention", readout="head")
