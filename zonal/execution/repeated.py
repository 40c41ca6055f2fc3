"""Calls without gradients, masks and memory that run as they ran before: to prepare and to plan a thousand tokens takes a good part of the
time that the kernel for sums over features runs."""

import os
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zonal.algebra.operator import Bound, Operator
from zonal.execution import calibration, native, native_sums
from zonal.execution.call import Call
from zonal.execution.constants import Constants
from zonal.features import feature_map
from zonal.kernels.cpp import sums_library
from zonal.kernels.cpp.sums_library import Places
from zonal.kernels.sums_spec import SumsSpec

_KEPT = 64  # calls of an operator


class _Kept(NamedTuple):
    """What a call without gradients, masks and memory ran with, and the operator's coefficients that it follows from.

    fixed: the operator has learned nothing. planned: the constants by which the planner chose the path; None: it was asked for.
    """

    bound: Bound
    numbers: tuple[Tensor, Tensor, Tensor, Places]
    spec: SumsSpec
    fixed: bool
    planned: Constants | None


# of each operator, by the shapes of q, k and v, causality, scale and whether the planner chose
_kept: WeakKeyDictionary[Operator, dict[tuple[object, ...], _Kept]] = WeakKeyDictionary()


def _plain(q: Tensor, k: Tensor, v: Tensor) -> bool:
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return False
    return q.dtype is k.dtype is v.dtype is torch.float32 and native.plain(q, k, v)


def keep(call: Call, scale: float | None, planned: Constants | None) -> None:
    """From now on calls like this one, which has run chunked without masks and memory, may run ``again``."""
    bound, raw, seen = call.bound, call.raw, call.visibility
    fused = None if raw is None else bound.score.fused(call.shape[4], bound.score_params, scale)
    if raw is None or fused is None or isinstance(fused.scale, Tensor) or not _plain(*raw[:3]) or native_sums.refusal(call) is not None:
        return
    if call.log_decay is not None or seen.rule is None or bound.anchor.output_scale(bound.anchor_params, bound.heads) is not None:
        return
    code, features, operator = native.code_of(bound.link), feature_map(bound.link), call.operator
    fixed = not any(True for _ in operator.parameters()) and not any(True for _ in operator.buffers())
    if not fixed and torch.is_grad_enabled():
        return
    assert code is not None
    assert features is not None
    known = _kept.setdefault(operator, {})
    if len(known) >= _KEPT:
        known.clear()
    with torch.inference_mode(False), torch.no_grad():
        rows, monomials = (x.float().contiguous() for x in native_sums.numbers(call, code))
        numbers = torch.full((bound.heads,), fused.scale), rows, monomials, native_sums.kept_places(seen.rule, raw.k.shape[2])
    key = (raw.q.shape, raw.k.shape, raw.v.shape, call.causal, scale, planned is not None)
    known[key] = _Kept(bound, numbers, native_sums.spec_of(call, code, features, fused, False), fixed, planned)


def again(q: Tensor, k: Tensor, v: Tensor, operator: Operator, causal: bool, scale: float | None, chosen: bool) -> Tensor | None:
    """y of a call without masks and memory as it ran before, or None: then it goes the usual way, where everything is checked.

    chosen: whether the planner is to choose the path.
    """
    known = _kept.get(operator) if isinstance(operator, Operator) else None
    kept = None if known is None or not _plain(q, k, v) else known.get((q.shape, k.shape, v.shape, causal, scale, chosen))
    if kept is None or os.environ.get(native.VARIABLE) == "off" or (chosen and calibration.constants_for(q.device) is not kept.planned):
        return None
    if not kept.fixed and (torch.is_grad_enabled() or operator.bind(kept.bound.heads, kept.bound.kv_heads).coefficients is not kept.bound.coefficients):
        return None
    return sums_library.forward(q, k, v, *kept.numbers, None, None, None, None, kept.spec)[0]


__all__ = ["again", "keep"]
