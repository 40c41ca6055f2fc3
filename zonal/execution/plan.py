"""Which route runs a call, and why: of those that can run it and fit in memory, the one with the least estimated time.

The time of a route is multiply-adds / rate + bytes / bandwidth + launches x overhead, from its ``Work`` and
the machine. The bandwidth is that of fresh memory for routes whose buffers are large.
"""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from zonal import device_memory, torch_func
from zonal.errors import PathError, unknown_name
from zonal.execution import machine as machines
from zonal.execution.call import Call, Result
from zonal.execution.machine import LARGE, Machine
from zonal.execution.paths.dense import dense
from zonal.execution.routes import PATHS, Asked, Route, asked
from zonal.execution.shape import Shape, shape_of
from zonal.kernels.build import BuildError


class Estimate(NamedTuple):
    """The predicted cost of one route, backward included where the call needs gradients.

    flops: two per multiply-add. bytes_moved: read and written. calls: torch calls or kernel launches. peak_bytes: the
    most memory in use at once beyond the inputs, including the output and what backward keeps.
    """

    route: Route
    seconds: float
    flops: float
    bytes_moved: float
    calls: int
    peak_bytes: int

    @property
    def path(self) -> str:
        return self.route.path


@dataclass(frozen=True)
class Choice:
    """The routes that can run a call, the chosen one first, and why. Reasons are written when they are asked for.

    estimates: one per path, in the order of the routes; none where the routes were not ranked.
    found: what the table said of the call. available: bytes that a route may use.
    unranked: the reason where the routes were not ranked.
    """

    routes: tuple[Route, ...] = field(compare=False)
    estimates: tuple[Estimate, ...] = ()
    found: Asked = field(default=Asked((), {}, {}), compare=False)
    available: int = 0
    unranked: str = ""

    @property
    def path(self) -> str:
        return self.routes[0].path

    @cached_property
    def reason(self) -> str:
        """Why the first route runs, in a sentence."""
        if self.unranked:
            return self.unranked
        fitting = [estimate for estimate in self.estimates if estimate.peak_bytes <= self.available]
        if fitting:
            return _reason(fitting)
        least = self.estimates[0].peak_bytes
        return f"no path fits in the {self.available:,} bytes available; this one needs least, about {least:,}"

    @cached_property
    def refused(self) -> Mapping[str, str]:
        """path -> why it cannot run the call, or does not fit in memory."""
        large = {
            e.path: f"it needs about {e.peak_bytes:,} bytes and {self.available:,} are available"
            for e in self.estimates[1:]
            if e.peak_bytes > self.available
        }
        return {**self.found.refused, **large}


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
        return Choice(found.routes, found=found, unranked=f"path={path!r} was asked for")
    machine = machines.machine_for(call.device) if machine is None else machine
    return ranked(shape_of(call), found, machine, available)


def _impossible(call: Call, path: str, found: Asked) -> PathError:
    name, outside = call.operator.name, ""
    if torch_func.active():
        outside = (
            " Fold what is mapped into the batch and call it outside of torch.func (torch.autograd.forward_ad gives "
            "forward-mode derivatives)."
        )
    if path == "auto":
        why = "; ".join(f"path {path!r}: {reason}" for path, reason in found.refused.items())
        return PathError(f"attention: no path can run operator {name!r} here ({why}).{outside}")
    others = [other for other in PATHS if other != path and asked(call, other).routes]
    can = " or ".join(f"path={other!r}" for other in others)
    instead = f"Use {can}, or path='auto'." if others else f"No other path can.{outside}"
    return PathError(f"attention: path {path!r} cannot run operator {name!r}: {found.refused[path]}. {instead}")


def _traced(found: Asked) -> Choice:
    """The choice for a call that is being traced, where nothing can be measured: the first route that can run it."""
    # a plan and a tree have no other form that is one graph
    whole = ("plan", "tree")
    tiles = [r for r in found.routes if r.path == "tiled" and (r.compiled or r.family in whole)]
    order = ("chunked", "dense", "tiled", "streaming", "sparse")
    first = [*tiles, *(route for path in order for route in found.routes if route.path == path)][0]
    reason = "a traced call takes the compiled kernel of tiles where it can, else chunked, else dense"
    return Choice((first,), found=found, unranked=reason)


def estimated(route: Route, shape: Shape, machine: Machine) -> Estimate:
    """The estimate of one route."""
    work = route.work(shape)
    rate = machine.rate(route.rate, route.compiled) * 4 / shape.itemsize
    # whole rounds of tasks: three on two threads take as long as four
    idle = 1.0 if work.tasks > 64 else machine.threads * math.ceil(work.tasks / machine.threads) / max(work.tasks, 1)
    bandwidth = machine.bandwidth if work.buffer < LARGE else machine.fresh
    took = work.multiply_adds * idle / rate + work.bytes / bandwidth + work.launches * machine.call
    return Estimate(route, took, 2 * work.multiply_adds, work.bytes, round(work.launches), round(work.peak_bytes))


def ranked(shape: Shape, found: Asked, machine: Machine, available: int | None) -> Choice:
    """The choice among paths that can run a call: the fastest first, and those that do not fit in memory last.

    A path is estimated by its first route that can run the call: compiled routes come before torch in the table.
    """
    paths: dict[str, list[Route]] = {}
    for route in found.routes:
        paths.setdefault(route.path, []).append(route)
    estimates = sorted((estimated(routes[0], shape, machine) for routes in paths.values()), key=lambda e: e.seconds)
    most = max(estimate.peak_bytes for estimate in estimates)
    if available is None:
        available = machine.memory_bytes
        # asking the system costs more than a short call; below a sixteenth of all memory the answer cannot matter
        if most * 16 > available:
            free = device_memory.free(shape.device)
            available = available if free is None else free
    if most > available:
        if all(estimate.peak_bytes > available for estimate in estimates):
            estimates.sort(key=lambda e: e.peak_bytes)
        else:
            estimates.sort(key=lambda e: e.peak_bytes > available)
    routes = tuple(route for estimate in estimates for route in paths[estimate.path])
    return Choice(routes, tuple(estimates), found, available)


def _reason(fitting: list[Estimate]) -> str:
    best = fitting[0]
    if len(fitting) == 1:
        return "the only path that can run this call and fits in memory"
    other = fitting[1]
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
    """A duration as text, such as 3.2 ms."""
    if seconds >= 100:
        return f"{seconds:,.0f} s"
    unit, size = ("s", 1.0) if seconds >= 1 else ("ms", 1e-3) if seconds >= 1e-3 else ("µs", 1e-6)
    return f"{seconds / size:.3g} {unit}"


def run(choice: Choice, call: Call) -> Result:
    """Run the chosen route; where its kernel cannot be built, the next one, with a warning."""
    if call.shape.batch == 0 and call.memory is None:  # a batch of no rows: nothing to sum or to keep
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
