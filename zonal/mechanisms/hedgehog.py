"""Hedgehog attention with learned features, y_t = phi(q_t) . S_t / phi(q_t) . Z_t.

The features are phi(x) = softmax([W x, -W x]), with W learned per head and separately for queries and keys. S_t and Z_t
are the sums of phi(k_s) v_s^T and phi(k_s). Cost: T m P per head; decoder memory: m (P + 1) numbers per head.
Paper: Zhang et al. 2024.
"""

from typing import Literal

from zonal.algebra import Operator
from zonal.features import LearnedExp
from zonal.mechanisms.of_features import of_features
from zonal.mechanisms.registry import mechanism


@mechanism(
    "Hedgehog",
    "learned positive features of query and key; constant memory.",
    weights="learned positive features",
    memory="$m(P + 1)$",
    paths="tiled, chunked",
)
def hedgehog(
    size: int = 64,
    activation: Literal["softmax", "exp"] = "softmax",
    dim: int | None = None,
    seed: int | None = None,
    init_scale: float = 1.0,
) -> Operator:
    """Learned positive features phi(x) = softmax([W x, -W x]).

    size: number of features m, from W (m / 2, D). activation: "softmax" over the features, or "exp" of each. dim, seed:
    as in ``of_features``; without a layer and without dim, W keeps its initial value. init_scale: size of the entries
    of W x for a unit vector x before training; with "exp" start it small for long vectors, such as 0.25 for the queries
    and keys of a trained model.

    Raises: ArgumentError for sizes out of range. Source: Zhang et al. 2024 (Hedgehog).
    """
    return of_features(LearnedExp(size, activation=activation, init_scale=init_scale), dim, seed, name="hedgehog")
