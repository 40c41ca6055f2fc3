"""REWA of shapes: K_ts = exp(-(alpha |q_t - k_s| + beta W_2(A_t, A_s)) / tau), each row divided by its sum.

A_t is the persistence diagram of the neighbourhood of token t. Cost: 5 n^2 operations per pair for n neighbours;
decoder memory: all keys and values. Paper: REWA (004).
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.declaration import require, require_whole
from zonal.algebra.link import Exp
from zonal.algebra.metric import Euclidean, Product, Topological
from zonal.algebra.prior import Prior
from zonal.algebra.score import NegativeDistance
from zonal.mechanisms.registry import mechanism


@mechanism(
    "REWA topological",
    "weights fall with the distance of tokens and of the shapes of their neighbourhoods. It keeps every key and value.",
    weights=r"$e^{-d/\tau}$, with the distance of neighbourhoods by their persistence diagrams, over row sum",
    memory="$S(D + n + P)$",
    paths="tiled",
)
def rewa_topological(
    neighbours: int = 4,
    weights: tuple[float, float] = (1.0, 1.0),
    gates: tuple[float, float] | None = None,
    temperature: float = 1.0,
    shared_witness: bool = False,
    eps: float = 1e-4,
    prior: Prior | tuple[Prior, ...] = (),
) -> Operator:
    """exp(-(alpha |q - k| + beta W_2(A_q, A_k)) / tau) with the row anchor; A is the diagram of a token's
    neighbourhood.

    neighbours: number of earlier tokens in a neighbourhood. In a call, the last ``neighbours`` numbers of q and k are
    the death times of its diagram; a layer computes them (``nn.deaths``). weights, gates: of the two distances, as in
    ``rewa``. temperature, shared_witness, eps: as in ``rewa``.

    Raises: ArgumentError for numbers out of range. Source: REWA (004).
    """
    for name, values in (("weights", weights), ("gates", gates)):
        require(
            values is None or len(values) == 2,
            f"rewa_topological: {name} must be two numbers, for the plane and for diagrams, received {values}.",
        )
    require_whole("rewa_topological: neighbours", neighbours)
    metric = Product((Euclidean(eps), Topological(eps)), (None, neighbours), weights, gates)
    return Operator(
        NegativeDistance(metric, temperature, None, shared_witness, neighbours),
        Exp(),
        Row(),
        prior,
        name="rewa_topological",
    )
