"""What is proved about operators: probes, o-sets, carriers, influence through layers, and updates as plans.

Layers and memories use parts of it (``nn`` merges tokens along carriers, a criterion accepts by an o-set); no execution
path does.
"""

from zonal.theory import carrier, influence, oset, probe, update

__all__ = ["carrier", "influence", "oset", "probe", "update"]
