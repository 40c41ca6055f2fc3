"""Cosine attention, y_t = sum_s exp(cos(q_t, k_s) / tau) v_s / sum_s exp(cos(q_t, k_s) / tau), tau learned per head.

Cost: T S (D + P) multiply-adds; decoder memory: all keys and values. Paper: Henry et al. 2020.
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import Exp
from zonal.algebra.prior import Prior
from zonal.algebra.score import Cosine
from zonal.mechanisms.registry import mechanism


@mechanism(
    "Cosine",
    "softmax over cosines, with a learned temperature, instead of dot products.",
    weights=r"$e^{x / \tau}$ over row sum",
    memory="$S(D + P)$",
    paths="tiled",
)
def cosine(temperature: float = 0.1, learn_temperature: bool = True, prior: Prior | tuple[Prior, ...] = ()) -> Operator:
    """y_t = sum_s exp(cos(q_t, k_s) / tau) v_s / sum_s exp(cos(q_t, k_s) / tau): cosine score, exp link, row anchor.

    temperature: tau, the initial value if learn_temperature is True, which learns one per head. prior: added masks and
    biases.

    Raises: ArgumentError for a temperature <= 0. Source: Henry et al. 2020.
    """
    return Operator(
        Cosine(temperature=temperature, learn_temperature=learn_temperature), Exp(), Row(), prior, name="cosine"
    )
