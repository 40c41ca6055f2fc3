"""The chunked path by a compiled kernel, C++ on the CPU and Triton on CUDA: which ridge and Koopman read-outs it takes, and how a call becomes one."""

import torch
from torch import Tensor

from zonal.algebra.anchor import Koopman, Ridge
from zonal.algebra.score import Clipped
from zonal.execution import native
from zonal.execution.call import Call
from zonal.execution.native_sums import Runner, places_of
from zonal.kernels import native as native_kernels
from zonal.kernels import ridge_ops, transforms
from zonal.kernels.cpp import ridge_library
from zonal.kernels.cpp.ridge_library import Before
from zonal.kernels.triton.sizes import RIDGE_LARGEST
from zonal.memory import Memory, RidgeStatistics, Tokens
from zonal.memory.whitened import WhitenedFeatures, width_of


def refusal(call: Call, remembers: bool = False) -> str | None:
    """Why torch's blocks run in the kernel's place, or None. remembers: the call goes on from a memory, or leaves one."""
    anchor = call.bound.anchor
    reason = native_kernels.unfit(call.device.type, call.coefficients.dtype)
    if reason is not None:
        return reason
    if type(anchor) not in (Ridge, Koopman):
        return f"anchor {type(anchor).__name__} is not in it"
    if isinstance(anchor, Ridge) and anchor.by_query:
        return "a ridge that follows the keys, or a step divided by its norm, is not in it"
    if call.log_decay is not None:
        return "a past that fades is not in it"
    if not call.causal:
        return "without causality one solve serves all queries, in a few products of torch"
    if not call.bias.empty:
        return "log priors (decay, key biases) are not in it"
    if remembers and call.chunk is not None:
        return "a memory that waits for whole chunks is not in it"
    if min(call.shape[4:]) < 1:
        return f"key and value dimensions must be at least 1, this call has {call.shape[4]} and {call.shape[5]}"
    if transforms.active():
        return "a call that is transformed needs operations of torch"
    if call.device.type == "cuda":
        return cuda_refusal(call)
    return native_kernels.missing(ridge_library.CODE, ridge_library.SOURCE)


def cuda_refusal(call: Call) -> str | None:
    """Why the Triton kernels do not run a call that the C++ kernel would, or None."""
    wide = width_of(call.bound, call.head_dim), call.shape[5]
    if max(wide) > RIDGE_LARGEST:
        return f"on CUDA key and value dimensions must be 1 to {RIDGE_LARGEST}, this call has {wide[0]} and {wide[1]}"
    powers = call.bound.anchor.powers(call.bound.heads) if isinstance(call.bound.anchor, Ridge) else ()
    if len(set(powers)) > 1:
        return f"on CUDA all heads have one power, this call has {powers}"
    return None if native.has_triton() else "triton is not installed (pip install triton)"


def chunked(call: Call, memory: RidgeStatistics | None, *, return_memory: bool) -> tuple[Tensor, Memory | None]:
    """y (B, H, T, P) for a call that is not refused, and where asked for what follows ``memory``. Raises: BuildError when the kernel does not compile.

    NonFiniteError where G + rho I is not positive definite; on CUDA, where that would wait for the device, such rows are NaN.
    """
    seen, anchor = call.visibility, call.bound.anchor
    assert isinstance(anchor, Ridge)
    clipped = clipped_of(call)
    if clipped is None or call.raw is None:
        clipped, (q, k, v) = Clipped(1.0, None), call.tokens
    else:
        q, k, v = call.raw[:3]
        k = multiplied(k, clipped)
    white = WhitenedFeatures.of(call.bound, call.head_dim)
    if white is not None:
        q, k = white.whitened(q), white.whitened(k)
    scale, rho, powers = _numbers(call, anchor, clipped)
    before = memory if memory is not None and memory.count else None
    parts = (None, None, None, None) if before is None else before.whitened(call.bound)
    recorded = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, scale, rho, *parts))
    if not recorded and native.plain(q, k, v):
        y, _ = ridge_library.forward(
            q, k, v, scale, rho, places_of(seen, k.shape[2]), Before(*parts), powers, clipped.limit or 0.0
        )
    else:
        documents = 1 if seen.edges is None or not seen.packed else seen.edges.shape[0] - 1
        start = seen.segment_start if seen.packed else None
        y, _ = ridge_ops.ridge(
            q, k, v, scale, rho, seen.key_mask, seen.lo, seen.hi, start, *parts, powers, clipped.limit or 0.0, documents
        )
    after = None if memory is None or not return_memory else memory.extended(Tokens(call.k, call.v, seen.key_mask))
    return y.to(call.dtype), after


def clipped_of(call: Call) -> Clipped | None:
    """The score as the kernel computes it from raw queries and keys, or None: it gets prepared ones."""
    clipped = (
        None if call.raw is None else call.bound.score.clipped(call.head_dim, call.bound.score_params, call.raw.scale)
    )
    # a product in a shorter type would be rounded to it
    return None if clipped is None or (clipped.factor is not None and call.dtype != torch.float32) else clipped


def multiplied(k: Tensor, clipped: Clipped) -> Tensor:
    """Raw keys (B, Hkv, S, D) as the kernel takes them: times their factor."""
    return k if clipped.factor is None else k * clipped.factor.to(k).view(1, -1, 1, 1)


def query_scale(call: Call, anchor: Ridge, clipped: Clipped) -> Tensor:
    """What the queries of each head are multiplied by, (H,) float64: the read-out is linear in its query."""
    bound = call.bound
    scale = torch.full((bound.heads,), clipped.scale, dtype=torch.float64, device=call.device)
    after = anchor.output_scale(bound.anchor_params, bound.heads)
    if after is not None:
        scale = scale * after
    return scale if clipped.factor is None else scale * clipped.factor.to(scale).repeat_interleave(bound.groups)


def _numbers(call: Call, anchor: Ridge, clipped: Clipped) -> tuple[Tensor, Tensor, list[int]]:
    """``query_scale``, of each key head the ridge (Hkv,), and the powers (H,)."""
    bound = call.bound
    return (
        query_scale(call, anchor, clipped),
        anchor.ridge(bound.anchor_params, bound.kv_heads),
        list(anchor.powers(bound.heads)),
    )


def runner(call: Call) -> Runner | None:
    """The kernel for q, k and v like those of a call that is not refused, as long as its operator stays as it is; None where there is more to do."""
    clipped, anchor = clipped_of(call), call.bound.anchor
    if clipped is None or call.raw is None:
        return None
    assert isinstance(anchor, Ridge)
    scale, rho, powers = _numbers(call, anchor, clipped)
    reader = ridge_library.Reader(
        scale, rho, places_of(call.visibility, call.raw.k.shape[2]), Before(), powers, clipped.limit or 0.0
    )
    return reader if clipped.factor is None else lambda q, k, v: reader(q, multiplied(k, clipped), v)


__all__ = ["chunked", "clipped_of", "cuda_refusal", "multiplied", "query_scale", "refusal", "runner"]
