"""REWA of operators: K_ts = exp(-|A_t - B_s|^2 / tau) of matrices, or exp(<A_t R_1 ...

R_n, B_s> / (m tau)) along relations.

Rows are divided by their sum. Cost: as softmax attention; memory of a decoder: all keys and values. Paper: REWA (004).
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import Exp
from zonal.algebra.prior import Prior
from zonal.algebra.score import OperatorPath
from zonal.mechanisms.registry import mechanism


@mechanism(
    "REWA operator",
    "tokens as matrices: evidence falls with their distance, or follows a path of learnt relations, fixed or chosen "
    "by the query.",
    weights=r"$e^{-\lVert A - B \rVert^2 / \tau}$ of matrices, or a path of learned relations, fixed or chosen by the "
    r"query, over row sum",
    memory="$S(D + P)$",
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
    """Tokens as m x m operators: exp(-|A_t - B_s|^2 / tau), or exp(<A_t R_1 … R_n, B_s> / (m tau)) along n learned
    relations, row anchor.

    Without ``choices`` both are softmax attention: the distance with a key bias, the path with R_1 … R_n as part of the
    query's projection.
    choices: c; each query then weighs c relations and "none" at each of its n steps, by a softmax of its own numbers.
    size: m; a layer then makes queries and keys of the size that it takes. The rest as in ``score.OperatorPath``. All
    run as dot products.
    """
    dim = None if size is None else size**2 if rank is None else rank * (2 * size + 1)
    # left open where relations are drawn, so that a layer draws its own
    declared = None if relations and seed is None else size
    score = OperatorPath(
        declared, relations, rank, temperature, seed=seed, shared_witness=shared_witness, choices=choices
    )
    return Operator(score, Exp(), Row(), prior, name="rewa_operator", qk_dim=dim)
