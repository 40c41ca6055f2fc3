"""Performer attention, y_t = phi(q_t) . S_t / phi(q_t) . Z_t with positive random features phi of the exponential.

S_t and Z_t are the sums of phi(k_s) v_s^T and phi(k_s). Cost: T m P per head; decoder memory: m (P + 1) numbers per
head. Paper: Choromanski et al. 2021 (FAVOR+).
"""

from zonal.algebra import Operator
from zonal.features import PositiveRandom
from zonal.mechanisms.of_features import of_features
from zonal.mechanisms.registry import mechanism


@mechanism(
    "Performer",
    "softmax by positive random features; constant memory.",
    weights="softmax by positive random features",
    memory="$m(P + 1)$",
    paths="tiled, chunked",
)
def performer(draws: int = 64, orthogonal: bool = True, dim: int | None = None, seed: int | None = None) -> Operator:
    """Softmax attention at scale D^-1/2 by positive random features (FAVOR+): E phi(q) . phi(k) = exp(q.k / sqrt(D)).

    draws: number of features m. orthogonal: random directions are orthogonal within blocks of D. dim, seed: as in
    ``of_features``.

    Raises: ArgumentError for sizes out of range. Source: Choromanski et al. 2021.
    """
    return of_features(PositiveRandom(draws, s=0.5, orthogonal=orthogonal), dim, seed, scaled=True, name="performer")
