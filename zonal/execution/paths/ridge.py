"""The chunked path of ridge and Koopman read-outs by a compiled kernel (C++ on the CPU, Triton on CUDA): which calls it
takes, and how they are passed.
"""

from typing import cast

import torch
from torch import Tensor

from zonal import torch_func
from zonal.algebra.anchor import Ridge
from zonal.algebra.score import Clipped
from zonal.execution.call import Call, Result
from zonal.execution.paths import tile
from zonal.execution.paths.sums import Runner, places_of, run_kernel
from zonal.kernels.native import Reason, switched_off
from zonal.kernels.ridge import FAMILY, Before, RidgeInputs, RidgeSpec, prepared, read, ridge
from zonal.kernels.triton.sizes import RIDGE_LARGEST
from zonal.memory.compact import statistics_of
from zonal.memory.whitened import WhitenedFeatures, width_of


def refusal(call: Call) -> Reason:
    """Why torch's blocks run instead of the kernel, or None."""
    return FAMILY.refusal(
        call.device.type, call.coefficients.dtype, lambda: _unfit(call), cuda=lambda: cuda_refusal(call)
    )


def other_ridge(call: Call) -> Reason:
    """The refusal of an anchor that is neither Ridge nor Koopman with a ridge of its own."""
    if call.tags.reduction != "ridge":
        return f"anchor {type(call.bound.anchor).__name__} is not in it"
    return "a ridge that follows the keys, or a step divided by its norm, is not in it" if call.tags.by_query else None


def _unfit(call: Call) -> Reason:
    if (reason := other_ridge(call)) is not None:
        return reason
    if not call.causal:
        return "without causality one solve serves all queries, in a few products of torch"
    if call.biased:
        return "key biases are not in it"
    if call.held is not None and call.chunk is not None:
        return "a memory that waits for whole chunks is not in it"
    return tile.empty_rows(call) or torch_func.refusal()


def cuda_refusal(call: Call) -> Reason:
    """Why the Triton kernels do not run a call that the C++ kernel would, or None."""
    if call.log_decay is not None:
        return "on CUDA a past that fades is not in it"
    wide = width_of(call.bound, call.head_dim), call.shape.value_dim
    if max(wide) > RIDGE_LARGEST:
        return f"on CUDA key and value dimensions must be 1 to {RIDGE_LARGEST}, this call has {wide[0]} and {wide[1]}"
    powers = cast(Ridge, call.bound.anchor).powers(call.bound.heads)
    return f"on CUDA all heads have one power, this call has {powers}" if len(set(powers)) > 1 else None


def chunked(call: Call) -> Result:
    """y (B, H, T, P) for a call that is not refused, and the memory after its tokens where it goes on from one.

    Raises: BuildError when the kernel does not compile; NonFiniteError when G + rho I is not positive definite. On
        CUDA, where that check would wait for the device, the rows concerned are NaN instead.
    """
    seen, anchor, memory = call.visibility, cast(Ridge, call.bound.anchor), call.memory
    clipped = clipped_of(call)
    if clipped is None or call.raw is None:
        clipped, (q, k, v) = Clipped(1.0, None), call.tokens
    else:
        q, k, v = call.raw[:3]
        k = multiplied(k, clipped)
    white = WhitenedFeatures.of(call.bound, call.head_dim)
    if white is not None:
        q, k = white.whitened(q), white.whitened(k)
    scale, rho, spec = _numbers(call, anchor, clipped)
    earlier = statistics_of(memory) if memory is not None and memory.count else None
    before, passed = Before(), None
    if earlier is not None:
        before, passed = Before(*earlier.whitened(call.bound), earlier.level), earlier.real
    given = RidgeInputs(q, k, v, scale, rho, *before, call.log_decay, passed, edges=seen.borders)
    y, _ = run_kernel(ridge, read, given, seen, spec)
    return y.to(call.dtype), None if memory is None else memory.extended(call.new_tokens)


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


def _numbers(call: Call, anchor: Ridge, clipped: Clipped) -> tuple[Tensor, Tensor, RidgeSpec]:
    """``query_scale``, of each key head the ridge (Hkv,), and the rules."""
    bound = call.bound
    scale, rho = query_scale(call, anchor, clipped), anchor.ridge(bound.anchor_params, bound.kv_heads)
    return scale, rho, RidgeSpec(tuple(anchor.powers(bound.heads)), clipped.limit or 0.0)


def runner(call: Call) -> Runner | None:
    """The kernel for q, k and v like those of a call that is not refused, while its operator stays as it is.

    None when a call needs more than the kernel.
    """
    clipped, anchor = clipped_of(call), cast(Ridge, call.bound.anchor)
    if clipped is None or call.raw is None:
        return None
    scale, rho, spec = _numbers(call, anchor, clipped)
    seen, decay = places_of(call.visibility, call.raw.k.shape[2]), call.log_decay

    run = prepared(RidgeInputs(*call.raw[:3], scale, rho, log_decay=decay), seen, spec)
    return lambda q, k, v: None if switched_off() else run(q, multiplied(k, clipped), v)[0]


__all__ = ["chunked", "clipped_of", "cuda_refusal", "multiplied", "other_ridge", "query_scale", "refusal", "runner"]
