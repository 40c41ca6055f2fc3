"""REWA with waves: log K_ts = sum_k a_k e^(-b_k d) cos(w_k d) of the distance d of ``rewa``, each row divided by its
sum.

Cost: as ``rewa``, and eight operations per pair and wave; decoder memory: all keys and values. Paper: REWA (004).
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import Oscillatory
from zonal.algebra.prior import Prior
from zonal.mechanisms.registry import mechanism
from zonal.mechanisms.rewa import rewa


@mechanism(
    "REWA oscillatory",
    "the log weight is a sum of learned damped waves of the distance. It keeps every key and value.",
    weights=r"$e^{\sum_k a_k e^{-b_k d} \cos w_k d}$ of the distance of rewa, over row sum",
    memory="$S(D + P)$",
    paths="tiled",
)
def rewa_oscillatory(
    amplitudes: tuple[float, ...] = (1.0,),
    decays: tuple[float, ...] = (0.5,),
    frequencies: tuple[float, ...] = (3.0,),
    parts: tuple[int, ...] | None = None,
    weights: tuple[float, ...] = (1.0, 1.0, 1.0),
    temperature: float = 1.0,
    shared_witness: bool = False,
    eps: float = 1e-4,
    prior: Prior | tuple[Prior, ...] = (),
) -> Operator:
    """Evidence that oscillates with distance: log K = sum_k a_k e^(-b_k d) cos(w_k d), d as in ``rewa``, row anchor.

    Keys one period apart agree. amplitudes, decays, frequencies: initial values of a (of any sign), b > 0 and w,
    learned per head (``link.Oscillatory``). The other arguments are those of ``rewa``.

    Raises: ArgumentError as ``rewa`` and ``link.Oscillatory`` do. Source: REWA (004).
    """
    operator = rewa(parts, weights, None, temperature, None, shared_witness, False, eps, prior)
    return Operator(
        operator.score,
        Oscillatory(amplitudes, decays, frequencies),
        Row(),
        prior,
        name="rewa_oscillatory",
        qk_dim=operator.qk_dim,
    )
