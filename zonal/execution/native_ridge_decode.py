"""The streaming path of ridge and Koopman read-outs by a compiled kernel on the CPU: a few tokens absorbed and read in O(r^2) each.

A decoder's step is short, so that planning it costs more than running it: ``again`` repeats a step of which nothing but the numbers changed.
"""

import os
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.anchor import Koopman, Ridge
from zonal.algebra.operator import Bound
from zonal.algebra.score import Clipped
from zonal.execution import native
from zonal.execution.call import Call
from zonal.execution.learned import Learned
from zonal.execution.native_decode import MOST_TOKENS
from zonal.kernels import transforms
from zonal.kernels.cpp import build, library, ridge_decode_library
from zonal.kernels.cpp.ridge_decode_library import Sums
from zonal.memory import Memory, RidgeStatistics
from zonal.memory.ridge import REMAKE, Inverse, ridge_version

_KEPT = 64


def refusal(call: Call, kind: str) -> str | None:
    """Why torch's verbs of a memory of this kind run in the kernel's place, or None."""
    bound, (_, _, queries, keys, dim, value_dim) = call.bound, call.shape
    anchor = bound.anchor
    if os.environ.get(native.VARIABLE) == "off":
        return f"the environment says {native.VARIABLE}=off"
    if call.device.type not in ("cpu", "meta"):
        return f"there is no kernel for device {call.device.type!r}"
    if call.coefficients.dtype == torch.float64:
        return "the kernel is for float32 and shorter, the call is in float64"
    if kind != "ridge":
        return f"a memory of kind {kind!r} is not in it"
    if type(anchor) not in (Ridge, Koopman) or (isinstance(anchor, Ridge) and anchor.by_query):
        return "a ridge that follows the keys, a step divided by its norm, or another anchor, is not in it"
    if call.chunk is not None:
        return "a memory that waits for whole chunks is not in it"
    if not call.bias.empty or call.visibility.key_mask is not None or call.visibility.packed:
        return "log priors, key masks and packed documents are not in it"
    if not 1 <= queries <= MOST_TOKENS or queries != keys:
        return f"it takes 1 to {MOST_TOKENS} new tokens with a query each, this call has {queries} queries and {keys} keys"
    if min(dim, value_dim) < 1:
        return f"key and value dimensions must be at least 1, this call has {dim} and {value_dim}"
    if torch.is_grad_enabled() and (call.requires_grad or any(p.requires_grad for p in bound.anchor_params.values())):
        return "it has no gradients, and this call may be asked for some (torch.no_grad says that it is not)"
    if build.compiler() is None and ridge_decode_library.CODE.name not in build.carried():
        return "no C++ compiler was found (set CXX, or install g++ or clang++) and no good library came with the package"
    if torch.compiler.is_compiling() or transforms.active():
        return "a call that is traced or transformed needs operations of torch"
    failure = library.failure(ridge_decode_library.CODE, ridge_decode_library.SOURCE)
    return None if failure is None else f"the kernel could not be had ({failure})"


def takes(memory: RidgeStatistics) -> bool:
    """Whether the sums of a memory are as the kernel reads them, and nobody asks for their gradients."""
    return memory.gram.is_cpu and not (torch.is_grad_enabled() and (memory.gram.requires_grad or memory.cross.requires_grad))


class _Kept(NamedTuple):
    """What stays from step to step. scale (H,) float64 of the queries, anchor's factor included; powers (H,) int64; learned: the values it was made from."""

    bound: Bound
    clipped: Clipped | None
    scale: Tensor
    powers: Tensor
    include_self: bool
    learned: Learned


# of each operator, by (heads, key heads, key dim, scale)
_made: WeakKeyDictionary[Operator, dict[tuple[object, ...], _Kept]] = WeakKeyDictionary()


def streaming(call: Call, memory: RidgeStatistics) -> tuple[Tensor, Memory]:
    """y (B, H, T, P) and the memory after the call's tokens, for a call that is not refused. Raises: BuildError when the kernel does not compile."""
    raw, bound = call.raw, call.bound
    clipped = None if raw is None else bound.score.clipped(call.head_dim, raw.scale)
    anchor = bound.anchor
    assert isinstance(anchor, Ridge)
    heads = call.shape[1]
    with torch.no_grad():
        factor = anchor.output_scale(bound.anchor_params, bound.heads)
        scale = torch.full((heads,), 1.0 if clipped is None else clipped.scale, dtype=torch.float64)
        scale = (scale if factor is None else scale * factor).contiguous()
    kept = _Kept(bound, clipped, scale, torch.tensor(anchor.powers(heads)), call.include_self, Learned(call.operator))
    q, k, v = call.tokens if clipped is None or raw is None else raw[:3]
    if q.dtype not in ridge_decode_library.DTYPES:
        q, k, v = q.float(), k.float(), v.float()
    y, after = _step(kept, memory, q, k, v)
    if raw is not None:
        known = _made.setdefault(call.operator, {})
        if len(known) >= _KEPT:
            known.clear()
        known[heads, bound.kv_heads, call.head_dim, raw.scale] = kept
    return y.to(call.dtype), after


def _step(kept: _Kept, memory: RidgeStatistics, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Memory]:
    clipped, tokens = kept.clipped, q.shape[2]
    inverse, version = memory.inverse, ridge_version(memory.operator)
    if inverse is None or inverse.version != version:
        with torch.no_grad():
            inverse = Inverse(memory.solved(kept.bound), 0, version)  # the memory keeps it: others may go on from there, too
    elif inverse.age + tokens > REMAKE:
        with torch.no_grad():
            inverse = Inverse(memory.made(kept.bound), 0, version)
    before = Sums(memory.gram, memory.cross, inverse.matrix, memory.shift, memory.first, memory.last)
    y, after = ridge_decode_library.step(
        q, k, v, kept.scale, 0.0 if clipped is None or clipped.limit is None else clipped.limit, kept.powers, kept.include_self, before, memory.count, memory.padding
    )
    return y, RidgeStatistics(
        memory.operator, memory.form, memory.count + tokens, after.gram, after.cross, after.shift, after.first, after.last, None, memory.padding,
        memory.seams, None, Inverse(after.inverse, inverse.age + tokens, inverse.version),
    )  # fmt: skip


def again(q: Tensor, k: Tensor, v: Tensor, operator: Operator, memory: Memory, scale: float | None) -> tuple[Tensor, Memory] | None:
    """A causal call without masks and priors of its own as it ran before, or None: then it goes the usual way, where everything is checked.

    That this operator and these heads are not refused was found when the step was first made; what may differ from call to call is looked at here.
    """
    known = _made.get(operator)
    if known is None or type(memory) is not RidgeStatistics or memory.operator is not operator or q.ndim != 4:
        return None
    if not native.plain(q, k, v) or os.environ.get(native.VARIABLE) == "off" or not takes(memory):
        return None
    (batch, heads, key_dim, value_dim, _, _), dtype = memory.form, q.dtype
    _, query_heads, tokens, _ = shape = q.shape
    kept = known.get((query_heads, heads, key_dim, scale))
    if kept is None or kept.clipped is None or not 1 <= tokens <= MOST_TOKENS or not kept.learned.stands(operator):
        return None
    if shape != (batch, query_heads, tokens, key_dim) or k.shape != (batch, heads, tokens, key_dim) or v.shape != (batch, heads, tokens, value_dim):
        return None
    if dtype not in ridge_decode_library.DTYPES or k.dtype != dtype or v.dtype != dtype:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or any(p.requires_grad for p in operator.learned_parts.values())):
        return None
    return _step(kept, memory, q, k, v)


__all__ = ["again", "refusal", "streaming", "takes"]
