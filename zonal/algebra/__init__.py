"""What an attention operator is: one module a slot, declarations only."""

from zonal.algebra import anchor, carrier, hashing, influence, ledger, link, metric, oset, prior, probe, score, update
from zonal.algebra.declaration import Move
from zonal.algebra.operator import Bound, Operator, Tags

__all__ = [
    "Bound",
    "Move",
    "Operator",
    "Tags",
    "anchor",
    "carrier",
    "hashing",
    "influence",
    "ledger",
    "link",
    "metric",
    "oset",
    "prior",
    "probe",
    "score",
    "update",
]
