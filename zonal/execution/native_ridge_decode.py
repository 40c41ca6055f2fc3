"""The streaming path of ridge and Koopman read-outs by a compiled kernel on the CPU: a few tokens absorbed and read in O(r^2) each.

A decoder's step is short, so that planning it costs more than running it: ``again`` repeats a step of which nothing but the numbers changed.
"""

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
from zonal.execution.native_ridge import clipped_of, multiplied, query_scale
from zonal.kernels import native as native_kernels
from zonal.kernels import transforms
from zonal.kernels.cpp import ridge_decode_library
from zonal.kernels.cpp.ridge_decode_library import Stepper
from zonal.memory import Memory, RidgeStatistics
from zonal.memory.lift import width_of
from zonal.memory.ridge import REMAKE, Inverse, ridge_version
from zonal.memory.stepped import Stepped, Sums

_KEPT = 64


def refusal(call: Call, kind: str) -> str | None:
    """Why torch's verbs of a memory of this kind run in the kernel's place, or None."""
    if torch.compiler.is_compiling() or transforms.active():
        return "a call that is traced or transformed needs operations of torch"
    bound, (_, _, queries, keys, dim, value_dim) = call.bound, call.shape
    anchor = bound.anchor
    reason = native_kernels.unfit(call.device.type, call.coefficients.dtype, ("cpu", "meta"))
    if reason is not None:
        return reason
    if kind != "ridge":
        return f"a memory of kind {kind!r} is not in it"
    if type(anchor) not in (Ridge, Koopman) or (isinstance(anchor, Ridge) and anchor.by_query):
        return "a ridge that follows the keys, a step divided by its norm, or another anchor, is not in it"
    if call.chunk is not None:
        return "a memory that waits for whole chunks is not in it"
    if not call.bias.empty or call.visibility.key_mask is not None or call.visibility.packed:
        return "log priors, key masks and packed documents are not in it"
    if not 1 <= queries <= MOST_TOKENS or queries != keys:
        return (
            f"it takes 1 to {MOST_TOKENS} new tokens with a query each, this call has {queries} queries and {keys} keys"
        )
    if min(dim, value_dim) < 1:
        return f"key and value dimensions must be at least 1, this call has {dim} and {value_dim}"
    if torch.is_grad_enabled() and (
        call.requires_grad
        or call.coefficients.requires_grad
        or any(p.requires_grad for p in bound.anchor_params.values())
    ):
        return "it has no gradients, and this call may be asked for some (torch.no_grad says that it is not)"
    return native_kernels.missing(ridge_decode_library.CODE, ridge_decode_library.SOURCE)


def takes(memory: RidgeStatistics) -> bool:
    """Whether the sums of a memory are as the kernel reads them, and nobody asks for their gradients."""
    if memory.stepped is not None:
        return True
    return memory.gram.is_cpu and not (
        torch.is_grad_enabled() and (memory.gram.requires_grad or memory.cross.requires_grad)
    )


class _Kept(NamedTuple):
    """What stays from step to step. clipped: how the kernel takes raw tokens, None: it takes prepared ones. version: of the ridge, as long as what
    was learned ``stands``."""

    bound: Bound
    stepper: Stepper
    clipped: Clipped | None
    learned: Learned
    version: tuple[float, ...] | None


# of each operator, by (heads, the memory's form, scale)
_made: WeakKeyDictionary[Operator, dict[tuple[object, ...], _Kept]] = WeakKeyDictionary()


def streaming(call: Call, memory: RidgeStatistics) -> tuple[Tensor, Memory]:
    """y (B, H, T, P) and the memory after the call's tokens, for a call that is not refused. Raises: BuildError when the kernel does not compile."""
    raw, bound = call.raw, call.bound
    clipped = clipped_of(call)
    anchor = bound.anchor
    assert isinstance(anchor, Ridge)
    batch, heads, _, _, _, value_dim = call.shape
    dim = width_of(bound, call.head_dim)
    with torch.no_grad():
        scale = query_scale(call, anchor, clipped or Clipped(1.0, None)).contiguous()
    limit = 0.0 if clipped is None or clipped.limit is None else clipped.limit
    stepper = Stepper(
        (batch, heads, bound.kv_heads, dim, value_dim),
        anchor.shifts > 0,
        scale,
        torch.tensor(anchor.powers(heads), dtype=torch.int64),
        limit,
        call.include_self,
    )
    kept = _Kept(bound, stepper, clipped, Learned(call.operator), ridge_version(call.operator))
    if clipped is None or raw is None:
        q, k, v = call.tokens
    else:
        q, k, v = raw.q, multiplied(raw.k, clipped), raw.v
    q, k = memory.featured(q), memory.featured(k)
    if q.dtype not in ridge_decode_library.DTYPES:
        q, k, v = q.float(), k.float(), v.float()
    stepped = _step(kept, memory, q, k, v)
    assert stepped is not None  # ``refusal`` has looked at the environment
    if raw is not None:
        known = _made.setdefault(call.operator, {})
        if len(known) >= _KEPT:
            known.clear()
        known[heads, memory.form, raw.scale] = kept
    return stepped[0].to(call.dtype), stepped[1]


def _step(kept: _Kept, memory: RidgeStatistics, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Memory] | None:
    """None when the environment has switched the kernels off since the stepper was made."""
    stepped, version, tokens = memory.stepped, kept.version, q.shape[2]
    if stepped is None or stepped.version != version or stepped.age + memory.count - stepped.count + tokens > REMAKE:
        stepped = _begun(kept, memory, tokens)
    after = None
    if len(stepped.rows_at) + tokens >= ridge_decode_library.LATE:
        after = Sums(*(None if x is None else torch.empty_like(x) for x in stepped.sums))  # type: ignore[arg-type]
    found = kept.stepper(q, k, v, stepped.sums_at, stepped.rows_at, stepped.count, memory.padding, after)
    if found is None:
        return None
    y, rows = found
    if after is not None:
        stepped = Stepped.of(after, memory.count + tokens, stepped.age + memory.count - stepped.count + tokens, version)
    elif rows is not None:
        stepped = stepped.followed(rows)
    return y, memory.moved(tokens, stepped)


def _begun(kept: _Kept, memory: RidgeStatistics, tokens: int) -> Stepped:
    """The sums of a memory that no step has left, or whose inverse is to be made again before so many tokens more."""
    inverse, version = memory.inverse, kept.version
    with torch.no_grad():
        if inverse is None or inverse.version != version:
            inverse = Inverse(
                memory.solved(kept.bound), 0, version
            )  # the memory keeps it: others may go on from there, too
        elif inverse.age + tokens > REMAKE:
            inverse = Inverse(memory.made(kept.bound), 0, version)
    sums = Sums(memory.gram, memory.cross, inverse.matrix, memory.shift, memory.first, memory.last)
    stepped = Stepped.of(sums, memory.count, inverse.age, version)
    kept.stepper.places(stepped.sums)
    if not (memory.gram.requires_grad or memory.cross.requires_grad):
        memory.keep(stepped)
    return stepped


def again(
    q: Tensor, k: Tensor, v: Tensor, operator: Operator, memory: Memory, scale: float | None
) -> tuple[Tensor, Memory] | None:
    """A causal call without masks and priors of its own as it ran before, or None: then it goes the usual way, where everything is checked.

    That this operator and these heads are not refused was found when the step was first made; what may differ from call to call is looked at here.
    """
    known = _made.get(operator)
    if (
        known is None
        or type(memory) is not RidgeStatistics
        or memory.operator is not operator
        or q.ndim != 4
        or not native.plain(q, k, v)
    ):
        return None
    form, dtype = memory.form, q.dtype
    _, heads, tokens, _ = shape = q.shape
    kept = known.get((heads, form, scale))
    if (
        kept is None
        or kept.clipped is None
        or not 1 <= tokens <= MOST_TOKENS
        or not takes(memory)
        or not kept.learned.stands(operator)
    ):
        return None
    batch, kv_heads, key_dim, value_dim, _, _ = form
    if (
        shape != (batch, heads, tokens, key_dim)
        or k.shape != (batch, kv_heads, tokens, key_dim)
        or v.shape != (batch, kv_heads, tokens, value_dim)
    ):
        return None
    if dtype not in ridge_decode_library.DTYPES or k.dtype is not dtype or v.dtype is not dtype:
        return None
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad or not kept.learned.nothing):
        return None
    return _step(kept, memory, q, multiplied(k, kept.clipped), v)


__all__ = ["again", "refusal", "streaming", "takes"]
