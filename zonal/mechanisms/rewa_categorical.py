"""REWA of frames: K_ts = exp(tr(R^T A_ts) / tau) for the rotation A_ts = g_t^-1 g_s between tokens' orthogonal frames.

Each row is divided by its sum. Cost: as softmax attention with m^2 numbers per key; decoder memory: all keys and
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
    "tokens are orthogonal frames; weights depend on the rotation between two frames. It keeps every key and value.",
    weights=r"$e^{\operatorname{tr}(R^\top g_q^{-1} g_k)/\tau}$ of orthogonal frames, over row sum; "
    r"values may be rotated with them",
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
    """Tokens as orthogonal frames g, with K_ts = exp(tr(R^T A_ts) / tau), A_ts = g_t^-1 g_s, and the row anchor.

    Relative rotations compose: A_ts A_su = A_tu. size: m; a layer then makes queries and keys of m (m - 1) / 2 numbers,
    both by one projection. relation, transport, seed: as in ``score.Categorical``. The operator runs as a dot product
    of m^2 numbers.

    Source: REWA (004).
    """
    dim = None if size is None else size * (size - 1) // 2
    score = Categorical(size, relation, temperature, transport, seed=seed)
    return Operator(score, Exp(), Row(), prior, name="rewa_categorical", qk_dim=dim)
