"""Declarations of attention operators, with one module per slot."""

from zonal.algebra import anchor, hashing, ledger, link, metric, prior, score
from zonal.algebra.declaration import Move
from zonal.algebra.operator import Bound, Operator, Tags

__all__ = ["Bound", "Move", "Operator", "Tags", "anchor", "hashing", "ledger", "link", "metric", "prior", "score"]
