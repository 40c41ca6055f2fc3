"""Anchors: from kernel blocks to weights. One module for those that look at a query's own row, one for those that
solve, one for plans, one for hierarchies, one for a window with sums of what is before it.
"""

from zonal.algebra.anchor.base import Anchor, Blocks, Count, Marginals, Potentials, Raw, Row, State, SumAnchor, TopK
from zonal.algebra.anchor.hierarchy import Hierarchical
from zonal.algebra.anchor.local_global import LocalGlobal
from zonal.algebra.anchor.plan import BoundedPlan, Plan, PlanAnchor, UnbalancedPlan
from zonal.algebra.anchor.ridge import Koopman, Ridge

__all__ = [
    "Anchor", "Blocks", "BoundedPlan", "Count", "Hierarchical", "Koopman", "LocalGlobal", "Marginals", "Plan",
    "PlanAnchor", "Potentials", "Raw", "Ridge", "Row", "State", "SumAnchor", "TopK", "UnbalancedPlan",
]  # fmt: skip
