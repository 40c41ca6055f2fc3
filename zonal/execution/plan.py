"""Which path runs a call, and why: the cheapest by the cost model among those that can and that fit in memory."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from zonal.errors import PathError, unknown_name
from zonal.execution import calibration, cost
from zonal.execution.call import Call
from zonal.execution.constants import Constants
from zonal.execution.problem import PATHS, Held, Problem, path_refusal, problem_of, refusals
from zonal.execution.tally import Estimate
from zonal.memory import Memory


@dataclass(frozen=True)
class Plan:
    """The chosen path and the reason in a sentence.

    estimates: of every path that could run, the fastest first. refused: path -> why it cannot, or does not fit in memory. settled: the
    constants from which it followed; None where the memory that was free had a part in it, or nothing could be measured.
    """

    path: str
    reason: str
    estimates: tuple[Estimate, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    settled: Constants | None = None


def choose(
    call: Call, *, memory: Memory | None = None, constants: Constants | None = None, available: int | None = None
) -> Plan:
    """The path for a prepared call. The same call, constants and memory always give the same plan.

    Args:
        memory: what the call goes on from; a memory is then returned, too.
        constants: of the machine; None = measured once and kept (``calibration``).
        available: bytes that a path may use; None = what is free, asked only when a path needs a good part of what there is.
    """
    problem = problem_of(call, None if memory is None else Held.of(memory))
    refused = dict(problem.refused)
    if len(refused) == len(PATHS):
        why = "; ".join(f"path {path!r}: {reason}" for path, reason in refused.items())
        raise PathError(
            f"attention: no path can run operator {call.operator.name!r} here ({why}). Fold what is mapped into the batch and call it outside of torch.func."
        )
    return _traced(problem) if torch.compiler.is_compiling() else decide(problem, constants, available)


def _traced(problem: Problem) -> Plan:
    """The plan of a call that is being traced, where nothing can be measured or asked of the system: the first path that can run."""
    refused = [path for path, _ in problem.refused]
    kernel = ("tiled",) if problem.without_kernel is None else ()
    path = next(path for path in (*kernel, "chunked", "dense", "tiled", "streaming") if path not in refused)
    return Plan(path, "a traced call takes the compiled kernel where it can, else chunked, else dense")


def decide(problem: Problem, constants: Constants | None = None, available: int | None = None) -> Plan:
    """``choose`` for a problem."""
    if constants is None:
        constants = calibration.constants_for(problem.device)
    plan = _usual(problem, constants)
    if available is None:
        if plan.settled is not None:
            return plan
        available = calibration.free_memory(problem.device)
    return _ranked(problem, plan.estimates, constants.memory_bytes if available is None else available)


def validate(path: str, call: Call, memory: Memory | None = None) -> None:
    """Check that a path can be forced.

    Raises: ArgumentError for an unknown name; PathError that says why it cannot run this call and what can.
    """
    if path not in PATHS:
        raise unknown_name("attention", "path", path, ("auto", *PATHS))
    held = None if memory is None else Held.of(memory)
    reason = path_refusal(path, call, held)
    if reason is not None:
        refused = dict(refusals(call, held))
        others = " or ".join(f"path={other!r}" for other in PATHS if other not in refused)
        instead = (
            f"Use {others}, or path='auto'."
            if others
            else "No path can: fold what is mapped into the batch and call it outside of torch.func."
        )
        raise PathError(f"attention: path {path!r} cannot run operator {call.operator.name!r}: {reason}. {instead}")


@functools.lru_cache(maxsize=4096)
def _usual(problem: Problem, constants: Constants) -> Plan:
    """The plan with all of the device's memory."""
    refused = dict(problem.refused)
    estimated = tuple(cost.MODELS[path](problem, constants) for path in PATHS if path not in refused)
    plan = _ranked(problem, estimated, constants.memory_bytes)
    # asking the system for free memory costs more than a short call; below a sixteenth of all of it the answer cannot matter
    small = max(estimate.peak_bytes for estimate in estimated) * 16 <= constants.memory_bytes
    return replace(plan, settled=constants) if small else plan


def _ranked(problem: Problem, estimated: tuple[Estimate, ...], available: int) -> Plan:
    refused = dict(problem.refused)
    # a rule in place of a price: what a decoder does at each token must not wait for a plan
    steps = problem.keeps and problem.without_decode is None and "streaming" not in refused
    fitting = [estimate for estimate in estimated if estimate.peak_bytes <= available]
    for estimate in estimated:
        if estimate.peak_bytes > available:
            refused[estimate.path] = f"it needs about {estimate.peak_bytes:,} bytes and {available:,} are available"
    order = {path: index for index, path in enumerate(PATHS)}
    ranked = tuple(
        sorted(estimated, key=lambda e: (e.path in refused, steps and e.path != "streaming", e.seconds, order[e.path]))
    )
    if not fitting:
        least = min(estimated, key=lambda estimate: estimate.peak_bytes)
        return Plan(
            least.path, f"no path fits in the {available:,} bytes available; this one needs least, about {least.peak_bytes:,}", ranked,
            MappingProxyType({path: why for path, why in refused.items() if path != least.path}),
        )  # fmt: skip
    if steps and ranked[0].path == "streaming":
        return Plan(
            "streaming",
            "a few tokens after a memory of sums: a compiled kernel takes them in and reads in one pass",
            ranked,
            MappingProxyType(refused),
        )
    return Plan(
        ranked[0].path, _reason([e for e in ranked if e.path not in refused]), ranked, MappingProxyType(refused)
    )


def _reason(fitting: list[Estimate]) -> str:
    best = fitting[0]
    if len(fitting) == 1:
        return "the only path that can run this call and fits in memory"
    other = fitting[1]
    why = []
    for mine, theirs, what in (
        (best.flops, other.flops, "fewer operations"), (best.bytes_moved, other.bytes_moved, "less memory moved"), (best.calls, other.calls, "fewer torch calls"),
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


__all__ = ["PATHS", "Plan", "choose", "decide", "duration", "validate"]
