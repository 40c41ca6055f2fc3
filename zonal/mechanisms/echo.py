"""Ridge retrieval and Spectral Koopman Attention: y = eta gamma^K C P (M P)^K q with P = (G + rho I)^-1 over the keys seen so far.

G = sum z z^T, M = sum z_t z_{t-1}^T, C = sum v z^T. K = 0 returns the value stored with a key, K = 1 the value one step later
(an induction head), K = 2 two later. Training and decoding are the same function, token by token. Cost: T r (r + P) a head;
memory of a decoder: about 2 r^2 + P r numbers a head. ``chunk`` gives the paper's chunk-causal form. Paper: Echo (Koopman operators).
"""

from zonal.algebra import Operator
from zonal.algebra.anchor import Koopman, Ridge
from zonal.algebra.link import Identity
from zonal.algebra.prior import ChunkCausal, Prior
from zonal.algebra.score import Dot


def _priors(chunk: int | None) -> tuple[Prior, ...]:
    return () if chunk is None else (ChunkCausal(size=chunk),)


def ridge(eps: float = 0.1, learn_ridge: bool = True, key_limit: float | None = 1.0, chunk: int | None = None) -> Operator:
    """Linear ridge regression from keys (clipped to norm <= key_limit) to values, refitted at every token."""
    return Operator(Dot(scale=1.0, key_limit=key_limit), Identity(), Ridge(eps=eps, learn_ridge=learn_ridge), _priors(chunk), name="ridge")


def ska(
    power: int = 0, eps: float = 0.1, key_limit: float | None = 1.0, chunk: int | None = None, running_max: bool = False
) -> Operator:
    """Koopman read-out of the given power. ``chunk`` with ``running_max`` and ``key_limit=None`` is the paper's form."""
    anchor = Koopman(power=power, eps=eps, mode="running_max" if running_max else "constant")
    return Operator(Dot(scale=1.0, key_limit=key_limit), Identity(), anchor, _priors(chunk), name="ska", layer_init="zero_output")
