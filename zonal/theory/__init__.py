"""Theory of operators: probes, o-sets, carriers, influence through layers, and updates as plans.

Layers and memories use parts of it: ``nn`` merges tokens along carriers, and a criterion accepts by an o-set. Execution
paths do not.
"""

from zonal.theory import carrier, influence, oset, probe, update

__all__ = ["carrier", "influence", "oset", "probe", "update"]
