"""Softmax attention, y_t = sum_s exp(q_t.k_s / sqrt D) v_s / sum_s exp(q_t.k_s / sqrt D).

Cost: T S (D + P) multiply-adds; decoder memory: all keys and values. Paper: Vaswani et al. 2017.
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import Exp
from zonal.algebra.prior import Prior
from zonal.algebra.score import Dot
from zonal.mechanisms.registry import mechanism


@mechanism(
    "Softmax",
    "the usual attention: the exponential of the scaled dot product of query and key, each row divided by its sum. "
    "It keeps every key and value.",
    weights=r"$e^{q \cdot k / \sqrt D}$ over row sum",
    memory="$S(D + P)$",
    paths="tiled",
)
def softmax(scale: float | None = None, prior: Prior | tuple[Prior, ...] = ()) -> Operator:
    """y_t = sum_s exp(scale q_t . k_s) v_s / sum_s exp(scale q_t . k_s): dot score, exp link, row anchor.

    scale: None = D^-1/2. prior: added masks and biases, such as ``prior.Window`` or ``prior.ALiBi``.

    Source: Vaswani et al. 2017.
    """
    return Operator(Dot(scale=scale), Exp(), Row(), prior, name="softmax")
