"""The definition, run as it is written: y = A(K_qk, K_kk, visible) V with every block in memory.

Cost: T S numbers a head (and S^2 with a solve, S^3/3 work). In float64 this is what all other paths are tested against.
"""

import torch.nn.functional as F
from torch import Tensor

from zonal.algebra import definition
from zonal.execution.call import Call


def weights(call: Call) -> Tensor:
    """W (B, H, T, S)."""
    return definition.weights(
        call.bound,
        call.coefficients,
        call.q,
        call.expand(call.k),
        call.visibility,
        call.bias,
        call.log_decay,
        call.marginals,
    )


def dense(call: Call) -> Tensor:
    """y (B, H, T, P)."""
    found = weights(call)
    if call.dropout:
        found = F.dropout(found, call.dropout)
    return call.scaled(found @ call.expand(call.v))
