"""REWA: attention by distance on a product of a plane, a sphere and a hyperbolic space.

log K_ts = -(alpha E(q_1, k_1) + beta S(q_2, k_2) + gamma H(q_3, k_3)) / tau,   q = (q_1, q_2, q_3), k likewise,

E, S and H are the three distances, with weights alpha, beta, gamma > 0 learned per head. Each row is divided by its
sum. Cost: T S (2D + P) multiply-adds and about fifty operations per pair; decoder memory: all keys and values. Paper:
REWA (004).
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.declaration import require
from zonal.algebra.link import Exp
from zonal.algebra.metric import Euclidean, Hyperbolic, Metric, Product, Sphere
from zonal.algebra.prior import Prior
from zonal.algebra.score import NegativeDistance
from zonal.mechanisms.registry import mechanism


@mechanism(
    "REWA",
    "weights fall with distance, a learned sum of flat, spherical and hyperbolic distance. "
    "It keeps every key and value.",
    weights=r"$e^{-d(q, k)/\tau}$ over row sum, $d$ a learned sum of flat, spherical and hyperbolic distance",
    memory="$S(D + P)$",
    paths="tiled",
)
def rewa(
    parts: tuple[int, ...] | None = None,
    weights: tuple[float, ...] = (1.0, 1.0, 1.0),
    gates: tuple[float, ...] | None = None,
    temperature: float = 1.0,
    dot: float | None = None,
    shared_witness: bool = False,
    adaptive: bool = False,
    eps: float = 1e-4,
    prior: Prior | tuple[Prior, ...] = (),
) -> Operator:
    """Distance score on R^m x S^(n-1) x H^p, exp link, row anchor.

    parts: (m, n, p) with m + n + p = D; a part of 0 leaves its space out. None = thirds, with the remainder in the
    plane. A layer makes queries and keys of size D, which may differ from the size of values.
    weights, gates: initial values of the three weights and gates (``metric.Product``), in units of the typical distance
    between vectors of N(0, 1).
    temperature: tau. dot: factor of a dot product of whole q and k, added to the distances
    (``score.NegativeDistance``).
    shared_witness: one projection makes both queries and keys, as in the paper. Each token is then nearest to itself.
    adaptive: each query weights the spaces by a softmax over its first numbers, one per space; parts then divide the
    rest. eps: below this size distances are smoothed.

    Raises: ArgumentError unless parts, weights and gates have three entries each and some part is positive.
    Source: REWA (004).
    """
    spaces: tuple[Metric, ...] = (Euclidean(eps), Sphere(eps), Hyperbolic(eps, scale=None))
    for name, values in (("parts", parts), ("weights", weights), ("gates", gates)):
        require(
            values is None or len(values) == 3,
            f"rewa: {name} must be three numbers, for plane, sphere and hyperbolic space, received {values}.",
        )
    kept = [i for i in range(3) if parts is None or parts[i] != 0]
    require(len(kept) > 0, f"rewa: a part of at least one number is required, received {parts}.")
    metric = Product(
        tuple(spaces[i] for i in kept),
        None if parts is None else tuple(parts[i] for i in kept),
        tuple(weights[i] for i in kept),
        None if gates is None else tuple(gates[i] for i in kept),
        adaptive=adaptive,
    )
    dim = None if parts is None else sum(parts) + len(kept) * adaptive
    return Operator(
        NegativeDistance(metric, temperature, dot, shared_witness), Exp(), Row(), prior, name="rewa", qk_dim=dim
    )
