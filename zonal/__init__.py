"""Zonal: attention operators declared by their parts, planned onto the cheapest exact path, and used as layers, models and memories."""

from zonal import mechanisms, nn
from zonal.algebra import Operator, anchor, ledger, link, metric, prior, score, search
from zonal.attention import attention
from zonal.execution.explain import explain
from zonal.execution.transport import potentials
from zonal.memory import Memory

__version__ = "0.1.0"

__all__ = ["Memory", "Operator", "anchor", "attention", "explain", "ledger", "link", "mechanisms", "metric", "nn", "potentials", "prior", "score", "search"]
