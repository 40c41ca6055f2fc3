"""Which path runs a call, and why."""

from dataclasses import dataclass

from zonal.execution import tiled
from zonal.execution.call import Call

PATHS = ("dense", "tiled", "chunked", "streaming")


@dataclass(frozen=True)
class Plan:
    """The chosen path and the reason."""

    path: str
    reason: str


def choose(call: Call, *, memory: bool = False) -> Plan:
    """The path for a prepared call."""
    if tiled.refusal(call.bound.anchor) is None and call.q.shape[2] * call.k.shape[2] > 256 * 256:
        return Plan("tiled", "long enough for tiles")
    return Plan("dense", "short")
