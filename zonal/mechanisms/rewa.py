"""REWA: attention by distance on a product of a plane, a sphere and a hyperbolic space.

log K_ts = -(alpha E(q_1, k_1) + beta S(q_2, k_2) + gamma H(q_3, k_3)) / tau,   q = (q_1, q_2, q_3), k likewise,

with E, S, H the three distances and weights alpha, beta, gamma > 0 learned a head; rows divided by their sum.
Cost: T S (2D + P) multiply-adds and about fifty operations a pair; memory of a decoder: all keys and values. Paper: REWA (004).
"""

from typing import Literal

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.declaration import require, require_whole
from zonal.algebra.link import Exp, Identity, Oscillatory
from zonal.algebra.metric import Euclidean, Hyperbolic, Metric, Product, Riemannian, Sphere, Topological
from zonal.algebra.prior import Prior
from zonal.algebra.score import Categorical, NegativeDistance, OperatorPath
from zonal.features import Features, Stationary
from zonal.features.stationary import Stationarity
from zonal.names import known_names


@known_names
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

    parts: (m, n, p) with m + n + p = D, a part of 0 leaving its space out; None = thirds, the plane taking what is left over.
        A layer makes queries and keys of that size, which may differ from that of values.
    weights, gates: where the three weights and gates start (``metric.Product``), in units of the distance typical for numbers from N(0, 1).
    temperature: tau. dot: the factor of a dot product of whole q and k beside the distances (``score.NegativeDistance``).
    shared_witness: one map makes queries and keys, as in the paper; each token is then nearest to itself, always.
    adaptive: each query weighs the spaces for itself, by a softmax over its first numbers, one a space; parts are of what follows.
    eps: where distances become smooth.

    Raises: ArgumentError for parts, weights or gates that are not three, or no parts at all.
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
        tuple(spaces[i] for i in kept), None if parts is None else tuple(parts[i] for i in kept), tuple(weights[i] for i in kept),
        None if gates is None else tuple(gates[i] for i in kept), adaptive=adaptive,
    )  # fmt: skip
    dim = None if parts is None else sum(parts) + len(kept) * adaptive
    return Operator(
        NegativeDistance(metric, temperature, dot, shared_witness), Exp(), Row(), prior, name="rewa", qk_dim=dim
    )


@known_names
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
    """Evidence that swings with distance: log K = sum_k a_k e^(-b_k d) cos(w_k d), d as in ``rewa``, row anchor. Keys at a period of one another agree.

    amplitudes, decays, frequencies: where a (of any sign), b > 0 and w start; learned a head (``link.Oscillatory``). The rest as for ``rewa``.

    Raises: ArgumentError as ``rewa``, and for lists of unequal length.
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


@known_names
def rewa_riemannian(
    units: int = 8,
    floor: float = 0.1,
    temperature: float = 1.0,
    shared_witness: bool = False,
    eps: float = 1e-4,
    seed: int | None = None,
    prior: Prior | tuple[Prior, ...] = (),
) -> Operator:
    """exp(-d(q, k) / tau) for d of a learned metric tensor: g(x) = floor I + sum_j sigmoid(w_j . x + c_j) u_j u_j^T along the straight way, row anchor.

    units: how many j; learned a key head. floor, eps, seed: as in ``metric.Riemannian``. temperature, shared_witness: as for ``rewa``.

    Raises: ArgumentError for numbers out of range.
    """
    metric = Riemannian(units, floor, eps, seed=seed)
    return Operator(
        NegativeDistance(metric, temperature, shared_witness=shared_witness),
        Exp(),
        Row(),
        prior,
        name="rewa_riemannian",
    )


@known_names
def rewa_topological(
    neighbours: int = 4,
    weights: tuple[float, float] = (1.0, 1.0),
    gates: tuple[float, float] | None = None,
    temperature: float = 1.0,
    shared_witness: bool = False,
    eps: float = 1e-4,
    prior: Prior | tuple[Prior, ...] = (),
) -> Operator:
    """exp(-(alpha |q - k| + beta W_2(A_q, A_k)) / tau) for the diagrams A of each token's causal neighbourhood, row anchor.

    neighbours: how many earlier tokens make a neighbourhood; in a call the last so many numbers of q and k are its deaths, which a layer puts there
    (``nn.deaths``). weights, gates: of the two distances, as for ``rewa``. temperature, shared_witness, eps: as for ``rewa``.

    Raises: ArgumentError for numbers out of range.
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


@known_names
def rewa_operator(
    relations: int = 0,
    choices: int | None = None,
    rank: int | None = None,
    size: int | None = None,
    temperature: float | None = None,
    shared_witness: bool = False,
    seed: int | None = None,
    prior: Prior | tuple[Prior, ...] = (),
) -> Operator:
    """Tokens as m x m operators: exp(-|A_t - B_s|^2 / tau), or exp(<A_t R_1 … R_n, B_s> / (m tau)) along n learned relations, row anchor.

    Without ``choices`` both are softmax attention: the distance with a key bias, the path with R_1 … R_n as part of the query's projection.
    choices: c; each query then weighs c relations and "none" at each of its n steps, by a softmax of its own numbers.
    size: m; a layer then makes queries and keys of the size that it takes. The rest as in ``score.OperatorPath``. All run as dot products.
    """
    dim = None if size is None else size**2 if rank is None else rank * (2 * size + 1)
    # left open where relations are drawn, so that a layer draws its own
    declared = None if relations and seed is None else size
    score = OperatorPath(
        declared, relations, rank, temperature, seed=seed, shared_witness=shared_witness, choices=choices
    )
    return Operator(score, Exp(), Row(), prior, name="rewa_operator", qk_dim=dim)


@known_names
def rewa_categorical(
    relation: bool = False,
    size: int | None = None,
    temperature: float = 1.0,
    transport: bool = False,
    seed: int | None = None,
    prior: Prior | tuple[Prior, ...] = (),
) -> Operator:
    """Tokens as orthogonal frames g: exp(tr(R^T A_ts) / tau) for the turn A_ts = g_t^-1 g_s, row anchor; turns compose, A_ts A_su = A_tu.

    size: m; a layer then makes queries and keys of m (m - 1) / 2 numbers. relation, transport, seed: as in ``score.Categorical``. One map makes queries
    and keys in a layer. It runs as a dot product of m^2 numbers.
    """
    dim = None if size is None else size * (size - 1) // 2
    score = Categorical(size, relation, temperature, transport, seed=seed)
    return Operator(score, Exp(), Row(), prior, name="rewa_categorical", qk_dim=dim)


@known_names
def rewa_functional(
    size: int = 64,
    kappa: Stationarity = "gaussian",
    form: Literal["softmax", "linear"] = "softmax",
    temperature: float = 0.25,
    width: float | None = None,
    smoothness: float = 1.5,
    orthogonal: bool = True,
    learn: bool = False,
    dim: int | None = None,
    seed: int | None = None,
) -> Operator:
    """Tokens as functions: exp(phi(q) . phi(k) / tau) of random Fourier features, or phi(q) . phi(k) of positive ones in linear time; row anchor.

    size: number of features. kappa: the kernel that phi . phi stands for, ``gaussian``, ``laplacian`` or ``matern``. form: ``softmax`` of signed
    features, or ``linear`` in positive ones. temperature: tau, of softmax. learn: train the frequencies. The rest as in ``features.Stationary`` and ``Features``.

    Raises: ArgumentError for names and sizes that do not fit.
    """
    require(form in ("softmax", "linear"), f"rewa_functional: form must be softmax or linear, received {form!r}.")
    require(temperature > 0, f"rewa_functional: temperature must be > 0, received {temperature}.")
    signed = form == "softmax"
    score = Features(
        Stationary(size, kappa, width, smoothness, orthogonal, learn, signed),
        dim=dim,
        seed=seed,
        temperature=temperature if signed else 1.0,
    )
    return Operator(score, Exp() if signed else Identity(), Row(), name="rewa_functional")
