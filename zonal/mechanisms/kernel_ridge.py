"""Kernel ridge and Koopman read-outs, y_t = k(q_t, K) (k(K, K) + rho I)^-1 V over the keys K seen so far.

The kernel k is that of another mechanism, and the fit is that of ``ridge`` and ``ska`` in the feature space of k. No
paper describes this combination. A polynomial kernel of degree n has m = C(n + D - 1, n) + C(n + D - 2, n - 1) exact
features, so its read-out takes linear time: T m (m + P) per head, with a decoder memory of about 2 m^2 + P m numbers
per head. Other kernels use the dense path.
"""

from collections.abc import Callable
from typing import Literal

from zonal.algebra import Operator
from zonal.algebra.anchor import Koopman, Ridge
from zonal.algebra.link import Gegenbauer
from zonal.algebra.prior import ChunkCausal
from zonal.algebra.score import Cosine
from zonal.mechanisms import spec as specs
from zonal.mechanisms.polynomial_square import polynomial_square
from zonal.mechanisms.registry import mechanism
from zonal.mechanisms.slay import slay
from zonal.mechanisms.squared_affine import squared_affine
from zonal.mechanisms.yat import yat


def sko(degrees: tuple[float, ...] = (2.0,), manifold_dim: int | Literal["head"] = 64) -> Operator:
    """The kernel of ``mechanisms.sko``, with weights w_k kept positive so that it is positive definite."""
    return Operator(Cosine(), Gegenbauer(degrees=degrees, manifold_dim=manifold_dim, nonnegative=True))


_KERNELS: dict[str, Callable[..., Operator]] = {
    f.__name__: f for f in (squared_affine, polynomial_square, sko, yat, slay)
}


@mechanism(
    "Kernel ridge",
    "each read solves a least-squares fit from features of the keys, such as squares, to their values. It recalls more "
    "pairs than a key has numbers; constant memory for short keys.",
    weights="ridge or ska with the kernel of squared_affine, sko or yat",
    memory="$2m^2 + mP$, $m$ features",
    paths="chunked",
)
def kernel_ridge(
    kernel: str = "squared_affine",
    power: int | tuple[int, ...] | None = None,
    eps: float = 0.1,
    learn_ridge: bool = True,
    chunk: int | None = None,
    d_qk: int | None = None,
) -> Operator:
    """Ridge regression from keys to values with another mechanism's kernel, refitted at every token.

    With a power it becomes the Koopman read-out of ``ska``.

    kernel: the mechanism that gives score and link, with or without arguments: squared_affine, polynomial_square, sko
    (degrees and manifold_dim, with positive weights), yat, or slay (the paper's random features for yat). d_qk: size of
    queries and keys in a layer.

    Raises: ArgumentError for an unknown kernel, and for one that may not be positive definite.
    """
    made = specs.made(kernel, _KERNELS)
    if power is None:
        anchor = Ridge(eps=eps, learn_ridge=learn_ridge)
    else:
        anchor = Koopman(power=power, eps=eps, learn_ridge=learn_ridge)
    return Operator(
        made.score,
        made.link,
        anchor,
        () if chunk is None else ChunkCausal(size=chunk),
        name="kernel_ridge",
        layer_init="default" if power is None else "orthogonal",
        qk_dim=made.qk_dim if d_qk is None else d_qk,
    )


__all__ = ["kernel_ridge"]
