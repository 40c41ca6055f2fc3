"""Zonal: attention operators declared by their parts and run by the cheapest path, in layers, models and memories."""

import torch

from zonal import mechanisms, nn
from zonal.algebra import Operator, anchor, hashing, ledger, link, metric, prior, score
from zonal.attention import attention
from zonal.execution.decoder import StepDecoder  # noqa: F401 (what Memory.decoder makes)
from zonal.execution.explain import explain
from zonal.execution.paths.transport import potentials
from zonal.execution.planned import Plan, plan
from zonal.kernels.native import portable
from zonal.memory import Decoder, Memory
from zonal.theory import carrier, influence, oset, probe, update

__version__ = "0.1.0"

# The first call of MKL's vector functions finds out the kind of processor, without a lock. A second thread that calls
# at that moment can get a kernel of lower accuracy, for exp of nine digits (PyTorch issue 188792). One number is
# computed by one thread.
torch.exp(torch.zeros(1, dtype=torch.float64))

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
    "portable",
    "potentials",
    "prior",
    "probe",
    "score",
    "update",
]
