"""REWA of operators: tokens are m x m matrices, compared by distance or along a path of learned relations.

K_ts = exp(-|A_t - B_s|^2 / tau), or exp(<A_t R_1 … R_n, B_s> / (m tau)). Each row is divided by its sum. Cost: as
softmax attention; decoder memory: all keys and values. Paper: REWA (004).
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import Exp
from zonal.algebra.prior import Prior
from zonal.algebra.score import OperatorPath
from zonal.mechanisms.registry import mechanism


@mechanism(
    "REWA operator",
    "tokens are matrices; weights fall with their distance, or follow a path of learned relations, fixed or chosen "
    "by the query.",
    weights=r"$e^{-\lVert A - B \rVert^2 / \tau}$ of matrices, or a path of learned relations, fixed or chosen by the "
    r"query, over row sum",
    memory="$S(D + P)$, and $2S$ for the distance",
    paths="tiled",
)
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
    """Tokens as m x m matrices: exp(-|A_t - B_s|^2 / tau), or exp(<A_t R_1 … R_n, B_s> / (m tau)), row anchor.

    R_1 … R_n are learned relations. Without ``choices`` both forms are softmax attention: the distance with a bias per
    key, the path with R_1 … R_n as part of the query projection. choices: number c of relations. Each query then
    weights c relations and "none" at each of its n steps, by a softmax over numbers of its own. size: m; a layer makes
    queries and keys of the size that this needs. The other arguments are those of ``score.OperatorPath``. All forms run
    as dot products.

    Source: REWA (004).
    """
    dim = None if size is None else size**2 if rank is None else rank * (2 * size + 1)
    # left open where relations are drawn, so that a layer draws its own
    declared = None if relations and seed is None else size
    score = OperatorPath(
        declared, relations, rank, temperature, seed=seed, shared_witness=shared_witness, choices=choices
    )
    return Operator(score, Exp(), Row(), prior, name="rewa_operator", qk_dim=dim)
