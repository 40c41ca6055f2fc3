"""Sinkhorn attention: softmax attention under constraints on what keys receive.

y_t = (1 / mu_t) sum_s P_ts v_s, where P is the plan closest to exp(q_t . k_s / sqrt D) with given row and column sums.
Bidirectional. Cost: as softmax attention, with 2 n + 1 passes over the scores in the forward for n iterations.
Papers: Geometric Attention (003), section 2.7; Sander et al. 2022.
"""

from typing import Literal

from zonal.algebra import Operator
from zonal.algebra.anchor import BoundedPlan, Plan, PlanAnchor, UnbalancedPlan
from zonal.algebra.declaration import require
from zonal.algebra.link import Exp
from zonal.algebra.prior import Prior
from zonal.algebra.score import Dot
from zonal.mechanisms.registry import mechanism


def plan(
    call: str,
    rho: tuple[float | None, float | None] | None,
    bounds: tuple[float, float] | None,
    learn: bool,
    tolerance: float,
    limit: int,
    on_limit: Literal["error", "keep"],
) -> PlanAnchor:
    require(
        rho is None or bounds is None,
        f"{call}: give either rho (penalties) or bounds (a range), received rho={rho}, bounds={bounds}.",
    )
    if bounds is not None:
        require(
            isinstance(bounds, tuple) and len(bounds) == 2,
            f"{call}: bounds must be two numbers (low, high), received {bounds!r}.",
        )
        return BoundedPlan(tolerance, limit, on_limit, learn=learn, low=bounds[0], high=bounds[1])
    if rho is None:
        return Plan(tolerance, limit, on_limit, learn=learn)
    return UnbalancedPlan(tolerance, limit, on_limit, learn=learn, rho=rho)


@mechanism(
    "Sinkhorn",
    "softmax under constraints on what keys receive, by Sinkhorn's iteration. For encoders: "
    "it reads the whole text at once.",
    weights=r"$e^{q \cdot k/\sqrt D}$ scaled so that keys receive their share exactly, approximately, or within bounds",
    memory="none: for encoders",
    paths="tiled",
)
def sinkhorn(
    rho: tuple[float | None, float | None] | None = None,
    bounds: tuple[float, float] | None = None,
    scale: float | None = None,
    learn: bool = False,
    tolerance: float = 1e-5,
    limit: int = 1000,
    on_limit: Literal["error", "keep"] = "error",
    prior: Prior | tuple[Prior, ...] = (),
) -> Operator:
    """Dot score, exp link, and a transport plan as anchor: balanced, unbalanced (``rho``) or bounded (``bounds``).

    scale: of the score; None = D^-1/2. rho: penalties on the row and column marginals; None = an exact constraint.
    bounds: (low, high), the least and most that a key receives, in units of its share. learn: a layer computes the
    masses from its input. tolerance, limit, on_limit: of the iteration (``anchor.PlanAnchor``).

    Raises: ArgumentError for both rho and bounds, and for numbers out of range.
    """
    return Operator(
        Dot(scale=scale),
        Exp(),
        plan("sinkhorn", rho, bounds, learn, tolerance, limit, on_limit),
        prior,
        name="sinkhorn",
    )
