"""Zonal: attention operators declared by their parts and run by the cheapest path, in layers, models and memories."""

from zonal import mechanisms, nn
from zonal.algebra import Operator, anchor, hashing, ledger, link, metric, prior, score
from zonal.attention import attention
from zonal.execution.decoder import StepDecoder  # noqa: F401 (what Memory.decoder makes)
from zonal.execution.explain import Plan, explain, plan
from zonal.execution.paths.transport import potentials
from zonal.memory import Decoder, Memory
from zonal.theory import carrier, influence, oset, probe, update

__version__ = "0.1.0"

__all__ = [
    "Decoder",
    "Memory",
    "Operator",
    "Plan",
    "anchor",
    "attention",
    "carrier",
    "explain",
    "hashing",
    "influence",
    "ledger",
    "link",
    "mechanisms",
    "metric",
    "nn",
    "oset",
    "plan",
    "potentials",
    "prior",
    "probe",
    "score",
    "update",
]
