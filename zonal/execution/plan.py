"""Which path runs a call, and why."""

from dataclasses import dataclass

from zonal.execution import tiled
from zonal.execution.call import Call
from zonal.execution.chunked import chunked_refusal
from zonal.memory import KeyValues, Memory

PATHS = ("dense", "tiled", "chunked", "streaming")


@dataclass(frozen=True)
class Plan:
    """The chosen path and the reason."""

    path: str
    reason: str


def choose(call: Call, *, memory: Memory | None = None) -> Plan:
    """The path for a prepared call."""
    if memory is not None:
        if call.causal and call.q.shape[2] == 1:
            return Plan("streaming", "one token")
        if not isinstance(memory, KeyValues):
            return Plan("chunked", "the memory holds sums")
    if call.tags.solves and chunked_refusal(call) is None:
        return Plan("chunked", "linear in the number of tokens")
    if tiled.refusal(call.bound.anchor) is None and call.q.shape[2] * call.k.shape[2] >= 256 * 256:
        return Plan("tiled", "long enough for tiles")
    return Plan("dense", "short")
