"""Which route runs a call, and why: of those that can run it and fit in memory, the one with the least estimated time.

The time of a route is multiply-adds / rate + bytes / bandwidth + launches x overhead, from its ``Work`` and
the machine.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from zonal.errors import PathError, unknown_name
from zonal.execution import machine as machines
from zonal.execution.call import Call
from zonal.execution.machine import Machine
from zonal.execution.paths.dense import dense
from zonal.execution.routes import PATHS, Asked, Result, Route, asked
from zonal.execution.shape import Shape, shape_of
from zonal.kernels.build import BuildError


@dataclass(frozen=True)
class Estimate:
    """The predicted cost of one route, backward included where the call needs gradients.

    flops: two per multiply-add. bytes_moved: read and written. calls: torch calls or kernel launches. peak_bytes: the
    most memory in use at once beyond the inputs, including the output and what backward keeps.
    """

    path: str
    route: str
    seconds: float
    flops: float
    bytes_moved: float
    calls: int
    peak_bytes: int


@dataclass(frozen=True)
class Choice:
    """The chosen path and the reason in a sentence.

    routes: those that can run the call, the chosen one first. estimates: one per route, in the same order.
    refused: path -> why it cannot run the call, or does not fit in memory. without: route -> why
    another of its path runs.
    """

    path: str
    reason: str
    routes: tuple[Route, ...] = field(default=(), compare=False)
    estimates: tuple[Estimate, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    without: Mapping[str, str] = field(default_factory=dict)


def choose(call: Call, path: str = "auto", *, machine: Machine | None = None, available: int | None = None) -> Choice:
    """The route for a prepared call. The same call, machine and memory always give the same choice.

    Args:
        path: "auto" = of any path; else of this one.
        machine: speeds; None = measured once and kept (``machine.machine_for``).
        available: bytes that a route may use; None = what is free, asked only when a route needs much of the memory.

    Raises: ArgumentError for an unknown path; PathError where none can run the call, with those that can.
    """
    if path != "auto" and path not in PATHS:
        raise unknown_name("attention", "path", path, ("auto", *PATHS))
    found = asked(call, None if path == "auto" else path)
    if not found.routes:
        raise _impossible(call, path, found)
    if torch.compiler.is_compiling():
        return _traced(found)
    if path != "auto":  # the first of its routes: what is compiled comes before torch
        without = {str(route): why for route, why in found.without.items()}
        return Choice(path, f"path={path!r} was asked for", found.routes, without=without)
    machine = machines.machine_for(call.device) if machine is None else machine
    return ranked(shape_of(call), found, machine, available)


def _impossible(call: Call, path: str, found: Asked) -> PathError:
    name = call.operator.name
    outside = "fold what is mapped into the batch and call it outside of torch.func."
    if path == "auto":
        why = "; ".join(f"path {path!r}: {reason}" for path, reason in found.refused.items())
        return PathError(f"attention: no path can run operator {name!r} here ({why}). {outside.capitalize()}")
    others = [other for other in PATHS if other != path and asked(call, other).routes]
    can = " or ".join(f"path={other!r}" for other in others)
    instead = f"Use {can}, or path='auto'." if others else f"No path can: {outside}"
    return PathError(f"attention: path {path!r} cannot run operator {name!r}: {found.refused[path]}. {instead}")


def _traced(found: Asked) -> Choice:
    """The choice for a call that is being traced, where nothing can be measured: the first route that can run it."""
    # a plan and a tree have no other form that is one graph
    whole = ("plan", "tree")
    tiles = [r for r in found.routes if r.path == "tiled" and (r.compiled or r.family in whole)]
    order = ("chunked", "dense", "tiled", "streaming", "sparse")
    first = [*tiles, *(route for path in order for route in found.routes if route.path == path)][0]
    reason = "a traced call takes the compiled kernel of tiles where it can, else chunked, else dense"
    return Choice(first.path, reason, (first,), refused=found.refused)


def seconds(route: Route, shape: Shape, machine: Machine) -> Estimate:
    """The estimate of one route."""
    work = route.work(shape)
    rate = machine.rate(route.rate, route.compiled) * 4 / shape.itemsize
    # whole rounds of tasks: three on two threads take as long as four
    idle = 1.0 if work.tasks > 64 else machine.threads * math.ceil(work.tasks / machine.threads) / max(work.tasks, 1)
    took = work.multiply_adds * idle / rate + work.bytes / machine.bandwidth + work.launches * machine.call
    return Estimate(
        route.path, route.name, took, 2 * work.multiply_adds, work.bytes, round(work.launches), round(work.peak_bytes)
    )


def ranked(shape: Shape, found: Asked, machine: Machine, available: int | None = None) -> Choice:
    """The choice among routes that can run a call."""
    both = sorted(((route, seconds(route, shape, machine)) for route in found.routes), key=lambda pair: pair[1].seconds)
    if available is None:
        available = machine.memory_bytes
        # asking the system costs more than a short call; below a sixteenth of all memory the answer cannot matter
        if max(estimate.peak_bytes for _, estimate in both) * 16 > available:
            free = machines.free_memory(shape.device)
            available = available if free is None else free
    fitting = [pair for pair in both if pair[1].peak_bytes <= available]
    refused = dict(found.refused)
    for path in dict.fromkeys(estimate.path for _, estimate in both):
        if all(estimate.path != path for _, estimate in fitting):
            least = min(estimate.peak_bytes for _, estimate in both if estimate.path == path)
            refused[path] = f"it needs about {least:,} bytes and {available:,} are available"
    without = {str(route): why for route, why in found.without.items()}
    if fitting:
        reason = _reason([estimate for _, estimate in fitting])
        both = fitting + [pair for pair in both if pair not in fitting]
    else:
        both = sorted(both, key=lambda pair: pair[1].peak_bytes)
        least = both[0][1]
        reason = f"no path fits in the {available:,} bytes available; this one needs least, about {least.peak_bytes:,}"
        refused.pop(least.path)
    return Choice(
        both[0][0].path, reason, tuple(route for route, _ in both), tuple(estimate for _, estimate in both),
        MappingProxyType(refused), MappingProxyType(without),
    )  # fmt: skip


def _reason(fitting: list[Estimate]) -> str:
    best = fitting[0]
    other = next((estimate for estimate in fitting if estimate.path != best.path), None)
    if other is None:
        return "the only path that can run this call and fits in memory"
    why = []
    for mine, theirs, what in (
        (best.flops, other.flops, "fewer operations"), (best.bytes_moved, other.bytes_moved, "less memory moved"),
        (best.calls, other.calls, "fewer torch calls"),
    ):  # fmt: skip
        if mine * 1.2 < theirs:
            why.append(f"{_times(theirs / max(mine, 1))} {what}")
    because = f": {', '.join(why)}" if why else ""
    return f"about {duration(best.seconds)}, against {duration(other.seconds)} for {other.path}{because}"


def _times(ratio: float) -> str:
    return f"{ratio:.2g}x" if ratio < 100 else f"{ratio:.0f}x"


def duration(seconds: float) -> str:
    """Seconds for people."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)
    return f"{seconds / size:.3g} {unit}"


def run(choice: Choice, call: Call) -> Result:
    """Run the chosen route; where its kernel cannot be built, the next one, with a warning."""
    if call.shape[0] == 0 and call.memory is None:  # a batch of no rows: nothing to sum or to keep
        return dense(call), None
    for route, other in zip(choice.routes, choice.routes[1:], strict=False):
        try:
            return route.run(call)
        except BuildError as error:  # once: from now on it is refused
            warnings.warn(
                f"zonal: {_spoken(other)} in place of the compiled kernel, several times slower. {error}", stacklevel=5
            )
    return choice.routes[-1].run(call)


def _spoken(route: Route) -> str:
    what = {
        "tiled": "tiles run",
        "chunked": "blocks run",
        "streaming": "steps of a decoder run",
        "sparse": "gathers run",
    }
    owner = "another kernel's" if route.compiled else "torch's"
    return f"{owner} {what.get(route.path, 'matrices run')}"


__all__ = ["PATHS", "Choice", "Estimate", "choose", "duration", "ranked", "run"]
