"""Which memories have steps that are set up once, on the CPU: a few tokens absorbed into a memory and read."""

from collections.abc import Callable
from typing import Any

from zonal.execution.call import Call
from zonal.execution.paths.steps.base import Steps
from zonal.execution.paths.steps.keys import KeySteps, keys_refusal
from zonal.execution.paths.steps.ridge import RidgeSteps, ridge_refusal
from zonal.execution.paths.steps.sums import SumsSteps, sums_refusal
from zonal.execution.paths.steps.window import WindowSteps, window_refusal
from zonal.kernels.native import Reason
from zonal.memory import KeyValues, Memory
from zonal.memory.ridge import GramStatistics
from zonal.memory.sums import Sums
from zonal.memory.windowed import WindowedSums

KINDS: dict[type[Memory], tuple[Callable[[Call], Reason], Callable[[Call, Any], Steps]]] = {
    GramStatistics: (ridge_refusal, RidgeSteps),
    WindowedSums: (window_refusal, WindowSteps),
    Sums: (sums_refusal, SumsSteps),
    KeyValues: (keys_refusal, KeySteps),
}
"""For each kind of memory that has steps: what they refuse, and the steps."""

__all__ = ["KINDS"]
