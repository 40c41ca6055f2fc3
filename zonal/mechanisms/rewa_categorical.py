"""REWA of frames: K_ts = exp(tr(R^T A_ts) / tau) for the turn A_ts = g_t^-1 g_s between orthogonal frames of tokens.

Rows are divided by their sum. Cost: as softmax attention with m^2 numbers a key; memory of a decoder: all keys and
values.
Paper: REWA (004).
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Row
from zonal.algebra.link import Exp
from zonal.algebra.prior import Prior
from zonal.algebra.score import Categorical
from zonal.mechanisms.registry import mechanism


@mechanism(
    "REWA categorical",
    "tokens as frames: evidence is the trace of the turn from one to the other. It keeps every key and value.",
    weights=r"$e^{\operatorname{tr}(R^\top g_q^{-1} g_k)/\tau}$ of orthogonal frames, over row sum; "
    r"values may turn with them",
    memory="$S(m^2 + P)$",
    paths="tiled",
)
def rewa_categorical(
    relation: bool = False,
    size: int | None = None,
    temperature: float = 1.0,
    transport: bool = False,
    seed: int | None = None,
    prior: Prior | tuple[Prior, ...] = (),
) -> Operator:
    """Tokens as orthogonal frames g: exp(tr(R^T A_ts) / tau) for the turn A_ts = g_t^-1 g_s, row anchor; turns compose,
    A_ts A_su = A_tu.

    size: m; a layer then makes queries and keys of m (m - 1) / 2 numbers. relation, transport, seed: as in
    ``score.Categorical``. One map makes queries and keys in a layer. It runs as a dot product of m^2 numbers.
    """
    dim = None if size is None else size * (size - 1) // 2
    score = Categorical(size, relation, temperature, transport, seed=seed)
    return Operator(score, Exp(), Row(), prior, name="rewa_categorical", qk_dim=dim)
