"""Spherical Kernel Operator: y_t = (1/M_t) sum_s Phi_n(cos(q_t, k_s)) v_s, Phi_n a learned Gegenbauer series of degree
n a head.

M_t is the number of visible keys; the layer norms each head's output (RMSNorm over P). Cost: as softmax attention,
without exponentials or running maxima. ``init="ones"`` is the paper's start (not localised: the output is close to the
causal mean); ``init="reproducing"`` starts from the kernel of the theory. Paper: Khasia, Spherical Kernel Operator.
"""

from typing import Literal

from zonal.algebra import Operator
from zonal.algebra.anchor import Count
from zonal.algebra.link import Gegenbauer
from zonal.algebra.score import Cosine
from zonal.mechanisms.registry import mechanism


@mechanism(
    "SKO",
    "spherical kernel operator: a learnt curve turns the cosine between query and key into a weight, which may be "
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
    """degrees: polynomial degree of each head, in turn, or evenly spread where heads are not a multiple of them;
    fractional allowed.

    manifold_dim: the q of the Gegenbauer family; "head" = the size of a head less one, the sphere on which its cosines
    are taken.
    init, learn_degrees: as in ``link.Gegenbauer``. readout: the norm that a layer puts on outputs, of each head or of
    all.

    Raises: ArgumentError for degrees and dimensions that are none.
    """
    link = Gegenbauer(degrees=degrees, manifold_dim=manifold_dim, init=init, learn_degrees=learn_degrees)
    return Operator(Cosine(), link, Count(), name="sko", readout=readout)
