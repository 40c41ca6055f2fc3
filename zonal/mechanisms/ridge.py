"""Ridge retrieval, y = C P q with P = (G + rho I)^-1 over the keys seen so far, G = sum z z^T, C = sum v z^T.

It returns the value stored with a key, reduced by the ridge. Cost: T r (r + P) per head; decoder memory: about
2 r^2 + P r numbers per head. Paper: Echo (Koopman operators).
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Ridge
from zonal.algebra.link import Identity
from zonal.algebra.prior import ChunkCausal, Decay, Prior
from zonal.algebra.score import Dot
from zonal.mechanisms.registry import mechanism

_RATE = 0.998


def priors(chunk: int | None, fading: bool) -> tuple[Prior, ...]:
    chunks = () if chunk is None else (ChunkCausal(size=chunk),)
    return (*chunks, Decay(rates=(_RATE,), learn=False, gated=True)) if fading else chunks


@mechanism(
    "Ridge",
    "each read solves a regularised least-squares fit from the keys seen so far to their values; constant memory.",
    weights=r"$K_{qk}(K_{kk} + \rho I)^{-1}$",
    memory="$2D^2 + DP$",
    paths="chunked",
)
def ridge(
    eps: float = 0.1,
    learn_ridge: bool = True,
    key_limit: float | None = 1.0,
    chunk: int | None = None,
    relative: float = 0.0,
    fading: bool = False,
    compact: bool = False,
) -> Operator:
    """y_t = C (G + rho I)^-1 q_t: linear ridge regression from keys to values, refitted at every token.

    G = sum z z^T and C = sum v z^T over earlier keys z, clipped to norm <= key_limit. eps, learn_ridge, relative,
    compact: as in ``anchor.Ridge``. chunk: read whole chunks of this many earlier tokens only. fading: as in ``ska``.

    Raises: ArgumentError for numbers out of range, and for fading with arguments that cannot fade. Source: Echo
    (Koopman operators).
    """
    anchor = Ridge(eps=eps, learn_ridge=learn_ridge, relative=relative, compact=compact)
    return Operator(Dot(scale=1.0, key_limit=key_limit), Identity(), anchor, priors(chunk, fading), name="ridge")
