"""Linear attention, y_t = sum_s phi(q_t).phi(k_s) v_s / sum_s phi(q_t).phi(k_s), phi = elu + 1.

Cost: T D P per head; decoder memory: D (P + 1) numbers per head at any length. Paper: Katharopoulos et al. 2020.
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import Identity
from zonal.algebra.score import Dot
from zonal.mechanisms.registry import mechanism


@mechanism(
    "Linear",
    "query and key pass through elu + 1 and their dot product is the weight; "
    "one small matrix per head remembers the whole past.",
    weights=r"$\phi(q) \cdot \phi(k)$ over row sum",
    memory="$D(P + 1)$",
    paths="tiled, chunked",
)
def linear() -> Operator:
    """y_t = sum_s phi(q_t) . phi(k_s) v_s / sum_s phi(q_t) . phi(k_s) with phi(x) = elu(x) + 1 on q and k.

    Source: Katharopoulos et al. 2020.
    """
    return Operator(Dot(scale=1.0, map="elu1"), Identity(), Row(), name="linear")
