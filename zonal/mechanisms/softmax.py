"""Softmax attention, y_t = sum_s exp(q_t.k_s / sqrt D) v_s / sum_s exp(q_t.k_s / sqrt D), and its cosine form.

Cost: T S (D + P) multiply-adds; memory of a decoder: all keys and values. Paper: Vaswani et al. 2017; cosine: Henry et al. 2020.
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import Exp
from zonal.algebra.prior import Prior
from zonal.algebra.score import Cosine, Dot
from zonal.names import known_names


@known_names
def softmax(scale: float | None = None, prior: Prior | tuple[Prior, ...] = ()) -> Operator:
    """Dot score (scale D^-1/2 unless given), exp link, row anchor."""
    return Operator(Dot(scale=scale), Exp(), Row(), prior, name="softmax")


@known_names
def cosine(temperature: float = 0.1, learn_temperature: bool = True, prior: Prior | tuple[Prior, ...] = ()) -> Operator:
    """exp(cos(q, k) / temperature), row-normalised; one learned temperature a head."""
    return Operator(
        Cosine(temperature=temperature, learn_temperature=learn_temperature), Exp(), Row(), prior, name="cosine"
    )
