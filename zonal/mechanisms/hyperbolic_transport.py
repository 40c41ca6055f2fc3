"""Sinkhorn attention by hyperbolic distance: K_ts = exp(-w d(q_t, k_s) / tau) under constraints on what keys receive.

y_t = (1 / mu_t) sum_s P_ts v_s, P the plan closest to K with given sums of rows and columns. Bidirectional.
Cost: as ``sinkhorn``. Paper: Geometric Attention (003), section 2.7.
"""

from typing import Literal

from zonal.algebra import Operator
from zonal.algebra.link import Exp
from zonal.algebra.metric import Hyperbolic, Product
from zonal.algebra.prior import Prior
from zonal.algebra.score import NegativeDistance
from zonal.mechanisms.registry import mechanism
from zonal.mechanisms.sinkhorn import plan


@mechanism(
    "Hyperbolic transport",
    "weights fall with hyperbolic distance, under constraints on what keys receive. For encoders: "
    "it reads the whole text at once.",
    weights=r"$e^{-w d(q, k)/\tau}$ of hyperbolic distance, scaled as in sinkhorn",
    memory="none: for encoders",
    paths="tiled",
)
def hyperbolic_transport(
    temperature: float = 1.0,
    rho: tuple[float | None, float | None] | None = None,
    bounds: tuple[float, float] | None = None,
    learn: bool = False,
    eps: float = 1e-4,
    tolerance: float = 1e-5,
    limit: int = 1000,
    on_limit: Literal["error", "keep"] = "error",
    prior: Prior | tuple[Prior, ...] = (),
) -> Operator:
    """log K = -w d(q, k) / tau with a transport plan as its anchor, as in ``sinkhorn``.

    d is the hyperbolic distance in units of its typical size, and w > 0 is learned per head. temperature: tau. eps:
    below this size the distance is smoothed (``metric.Hyperbolic``). The other arguments are those of ``sinkhorn``.

    Raises: ArgumentError as ``sinkhorn`` does.
    """
    score = NegativeDistance(Product((Hyperbolic(eps, scale=None),)), temperature)
    return Operator(
        score,
        Exp(),
        plan("hyperbolic_transport", rho, bounds, learn, tolerance, limit, on_limit),
        prior,
        name="hyperbolic_transport",
    )
