"""REWA on a learned manifold: K_ts = exp(-d(q_t, k_s) / tau), with d from a learned metric tensor g.

g(x) = floor I + sum_j sigmoid(w_j . x + c_j) u_j u_j^T. Each row is divided by its sum. Decoder memory: all keys and
values. Paper: REWA (004).
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import Exp
from zonal.algebra.metric import Riemannian
from zonal.algebra.prior import Prior
from zonal.algebra.score import NegativeDistance
from zonal.mechanisms.registry import mechanism


@mechanism(
    "REWA Riemannian",
    "weights fall with distance in a space whose metric tensor is learned. It keeps every key and value.",
    weights=r"$e^{-d(q, k)/\tau}$ with a learned metric tensor, over row sum",
    memory="$S(D + 2n + P)$",
    paths="tiled",
)
def rewa_riemannian(
    units: int = 8,
    floor: float = 0.1,
    temperature: float = 1.0,
    shared_witness: bool = False,
    eps: float = 1e-4,
    seed: int | None = None,
    prior: Prior | tuple[Prior, ...] = (),
) -> Operator:
    """exp(-d(q, k) / tau), with d along the straight line under a learned metric tensor g, and the row anchor.

    g(x) = floor I + sum_j sigmoid(w_j . x + c_j) u_j u_j^T. units: the number of terms j, learned per key head. floor,
    eps, seed: as in ``metric.Riemannian``. temperature, shared_witness: as in ``rewa``.

    Raises: ArgumentError for numbers out of range. Source: REWA (004).
    """
    metric = Riemannian(units, floor, eps, seed=seed)
    return Operator(
        NegativeDistance(metric, temperature, shared_witness=shared_witness),
        Exp(),
        Row(),
        prior,
        name="rewa_riemannian",
    )
