"""Spherical Kernel Operator: y_t = (1/M_t) sum_s Phi_n(cos(q_t, k_s)) v_s, Phi_n a learned Gegenbauer series per head.

n is the degree of the series and M_t the number of visible keys. The layer normalises the output of each head (RMSNorm
over P). Cost: as softmax attention, without exponentials or running maxima. ``init="ones"`` is the paper's start, which
is not localised: the output is close to the causal mean. ``init="reproducing"`` starts from the kernel of the theory.
Paper: Khasia, Spherical Kernel Operator.
"""

from typing import Literal

from zonal.algebra import Operator
from zonal.algebra.anchor import Count
from zonal.algebra.link import Gegenbauer
from zonal.algebra.score import Cosine
from zonal.mechanisms.registry import mechanism


@mechanism(
    "SKO",
    "spherical kernel operator: a learned curve turns the cosine between query and key into a weight, which may be "
    "negative; each head learns its own curve.",
    weights=r"$\Phi_n(x)$, a learned Gegenbauer series, over count",
    memory="$S(D + P)$; $mP$ at low degree",
    paths="tiled, chunked",
)
def sko(
    degrees: tuple[float, ...] = (2.0, 3.0, 4.0, 5.0),
    manifold_dim: int | Literal["head"] = 64,
    init: Literal["ones", "reproducing"] = "ones",
    learn_degrees: bool = False,
    readout: Literal["head", "concat"] = "head",
) -> Operator:
    """y_t = (1/M_t) sum_s Phi_n(cos(q_t, k_s)) v_s, with a learned Gegenbauer series Phi_n per head.

    degrees: the polynomial degree n of each head; fractional degrees are allowed. They repeat over the heads, or are
    evenly spread where the number of heads is not a multiple. manifold_dim: q of the Gegenbauer family; "head" = head
    size - 1, the dimension of the sphere of the cosines. init, learn_degrees: as in ``link.Gegenbauer``. readout:
    whether a layer normalises each head's output, or all of them together.

    Raises: ArgumentError for degrees and dimensions out of range. Source: Khasia, Spherical Kernel Operator.
    """
    link = Gegenbauer(degrees=degrees, manifold_dim=manifold_dim, init=init, learn_degrees=learn_degrees)
    return Operator(Cosine(), link, Count(), name="sko", readout=readout)
