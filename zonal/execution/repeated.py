"""Calls without gradients, masks and memory that run as they ran before: to prepare and to plan a thousand tokens takes a good part of the
time that the compiled kernels of the chunked path run."""

from typing import NamedTuple
from weakref import finalize

import torch
from torch import Tensor

from zonal.algebra.operator import Operator
from zonal.execution import calibration, native, native_ridge, native_sums
from zonal.execution.call import Call
from zonal.execution.constants import Constants
from zonal.execution.learned import Learned
from zonal.execution.native_sums import Runner

_KEPT = 64  # calls of an operator
_LONGEST = 1 << 14  # tokens: with more of them, what is saved is nothing beside the work, and who sees whom takes room


class _Kept(NamedTuple):
    """A call that may run again. planned: the constants by which the planner chose the path; None: it was asked for."""

    run: Runner
    learned: Learned
    planned: Constants | None


# of each operator that lives, by its id, by the shapes of q, k and v, causality, scale and whether the planner chose
_kept: dict[int, dict[tuple[object, ...], _Kept]] = {}


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    return q.dtype is k.dtype is v.dtype is torch.float32 and native.plain(q, k, v)


def keep(call: Call, scale: float | None, planned: Constants | None) -> None:
    """From now on calls like this one, which has run chunked without masks and memory, may run ``again``."""
    if call.raw is None or not _plain(*call.raw[:3]) or call.visibility.rule is None or max(call.shape[2:4]) > _LONGEST:
        return
    learned, kernel = Learned(call.operator), native_ridge if call.tags.solves else native_sums
    if (torch.is_grad_enabled() and not learned.nothing) or kernel.refusal(call) is not None:
        return
    with torch.inference_mode(False), torch.no_grad():
        run = kernel.runner(call)
    if run is None:
        return
    known = _kept.get(id(call.operator))
    if known is None:
        known = _kept[id(call.operator)] = {}
        finalize(call.operator, _kept.pop, id(call.operator), None)
    if len(known) >= _KEPT:
        known.clear()
    q, k, v = call.raw[:3]
    known[(q.shape, k.shape, v.shape, call.causal, scale, planned is not None)] = _Kept(run, learned, planned)


def again(
    q: Tensor, k: Tensor, v: Tensor, operator: Operator, causal: bool, scale: float | None, chosen: bool
) -> Tensor | None:
    """y of a call without masks and memory as it ran before, or None: then it goes the usual way, where everything is checked.

    chosen: whether the planner is to choose the path.
    """
    known = _kept.get(id(operator))
    kept = (
        None if known is None or not _plain(q, k, v) else known.get((q.shape, k.shape, v.shape, causal, scale, chosen))
    )
    if kept is None or (chosen and calibration.constants_for(q.device) is not kept.planned):
        return None
    if not kept.learned.nothing and (torch.is_grad_enabled() or not kept.learned.stands(operator)):
        return None
    return kept.run(q, k, v)


__all__ = ["again", "keep"]
