"""Theory of operators: probes, o-sets, carriers, influence through layers, updates as plans, and the scores of heads.

Layers, memories and execution paths use none of it.
"""

from zonal.theory import carrier, influence, oset, probe, update

__all__ = ["carrier", "influence", "oset", "probe", "update"]
