"""Steps of softmax attention over kept keys and values, which torch's fused attention reads."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.prior import Causal
from zonal.execution.call import Call
from zonal.execution.paths import tile
from zonal.execution.paths.steps.base import Steps, unfit
from zonal.formula import FORMULAS
from zonal.kernels.native import Reason
from zonal.memory import KeyValues
from zonal.memory.tokens import Tokens
from zonal.tracing import recorded


def keys_refusal(call: Call) -> Reason:
    """Why torch's fused attention does not take a token after kept keys and values, or None."""
    memory = cast(KeyValues, call.memory)
    room = memory.buffer.room
    if not call.dtype is memory.form.dtype is torch.float32 or call.shape.queries != 1:
        return "it takes one token in float32 after keys in float32"
    if recorded([room.k, room.v]):
        return "it has no gradients, and the memory may be asked for some"
    if call.log_decay is not None or memory.biased or room.mask is not None:
        return "decays, key biases and padding are not in it"
    return unfit(call, ("keys",), _not_softmax)


def _not_softmax(call: Call) -> Reason:
    """The refusal of other weights than exp(q . k) over its sum in a row, of prepared q and k, and of priors."""
    bound, tags = call.bound, call.tags
    exponential = bound.score.bilinear and tile.code_of(bound.link) == FORMULAS["exp"]
    if not exponential or tags.reduction != "row" or tags.top or not tags.includes_self:
        return "it computes softmax attention alone"
    plain_priors = all(isinstance(prior, Causal) for prior in bound.priors) and bound.slopes is None
    return None if plain_priors else "windows and biases of the distance are not in it"


class KeySteps(Steps):
    """Keys and values that torch's fused attention reads, one token a step."""

    def __init__(self, call: Call, memory: KeyValues) -> None:
        super().__init__(call, memory)
        self._held, self._grouped = memory, call.bound.groups > 1

    def takes(self, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> bool:
        return super().takes(q, k, v, scale) and q.shape[2] == 1

    def run(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
        assert log_decay is None  # operators that fade are refused
        self._held = cast(KeyValues, self._held.extended(Tokens(k, v)))
        self._count = self._held.count
        kept = self._held.tokens
        return F.scaled_dot_product_attention(q, kept.k, kept.v, scale=1.0, enable_gqa=self._grouped)

    def memory(self) -> KeyValues:
        return self._held  # later steps write behind its keys


__all__ = ["KeySteps", "keys_refusal"]
