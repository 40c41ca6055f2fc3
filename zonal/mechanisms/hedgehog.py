"""Hedgehog attention, y_t = phi(q_t) . S_t / phi(q_t) .

Z_t with phi(x) = softmax([W x, -W x]), W learned a head and side.

S_t and Z_t are the sums of phi(k_s) v_s^T and phi(k_s). Cost: T m P a head; memory of a decoder: m (P + 1) numbers a
head.
Paper: Zhang et al. 2024.
"""

from typing import Literal

from zonal.algebra import Operator
from zonal.features import (
    LearnedExp,
)
from zonal.mechanisms.of_features import of_features
from zonal.mechanisms.registry import mechanism


@mechanism(
    "Hedgehog",
    "learnt positive features of query and key; constant memory.",
    weights="learned positive features",
    memory="$m(P + 1)$",
    paths="tiled, chunked",
)
def hedgehog(
    size: int = 64, activation: Literal["softmax", "exp"] = "softmax", dim: int | None = None, seed: int | None = None
) -> Operator:
    """Learned positive features, softmax over [W x, -W x] with W trained: the strong baseline among linear-time maps.

    dim, seed: as for ``of_features``; without a layer and without dim it stays at its start. Source: Zhang et al. 2024
    (Hedgehog).
    """
    return of_features(LearnedExp(size, activation=activation), dim, seed, name="hedgehog")
