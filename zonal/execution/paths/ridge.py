"""The chunked path of ridge and Koopman read-outs, by a compiled kernel (C++ on the CPU, Triton on CUDA) and by torch.

By torch, blocks carry G, M and C, each with one factor (``blocks``).
"""

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.anchor import Ridge
from zonal.algebra.primal import contraction, on_heads
from zonal.algebra.score import Clipped
from zonal.execution.call import Call, empty_memory
from zonal.execution.paths import tile
from zonal.execution.paths.blocks import (
    Sight,
    exclusive,
    factorise,
    into_blocks,
    linear,
    rows_from_blocks,
    rows_into_blocks,
    solve,
)
from zonal.execution.paths.fading import fading
from zonal.execution.paths.scan import Rule, Step
from zonal.execution.paths.sums import Runner, places_of
from zonal.kernels import transforms
from zonal.kernels.native import Reason, switched_off
from zonal.kernels.op import plain, recorded
from zonal.kernels.ridge import FAMILY, Before, RidgeInputs, RidgeSpec, read, ridge
from zonal.kernels.triton.sizes import RIDGE_LARGEST
from zonal.memory import FadingStatistics, Memory, RidgeStatistics, Tokens
from zonal.memory.inverse import positive_inverse, with_ridge
from zonal.memory.ridge import previous_keys, read_out, rows_of
from zonal.memory.whitened import WhitenedFeatures, width_of

_SAFE_TOKENS = 1024  # eps |G| / rho < 1e-3 for unit keys and rho = 0.1
_LOST = 1e-3  # of a number, from which on float32 is not enough: LOST of ridge.hpp


def refusal(call: Call, remembers: bool = False) -> Reason:
    """Why torch's blocks run instead of the kernel, or None. remembers: the call continues from or leaves a memory."""
    return FAMILY.refusal(
        call.device.type, call.coefficients.dtype, lambda: _unfit(call, remembers), cuda=lambda: cuda_refusal(call)
    )


def other_ridge(call: Call) -> Reason:
    """The refusal of an anchor that is neither Ridge nor Koopman with a ridge of its own."""
    if call.tags.reduction != "ridge":
        return f"anchor {type(call.bound.anchor).__name__} is not in it"
    return "a ridge that follows the keys, or a step divided by its norm, is not in it" if call.tags.by_query else None


def _unfit(call: Call, remembers: bool) -> Reason:
    if other_ridge(call):
        return other_ridge(call)
    if call.log_decay is not None:
        return "a past that fades is not in it"
    if not call.causal:
        return "without causality one solve serves all queries, in a few products of torch"
    if not call.bias.empty:
        return "log priors (decay, key biases) are not in it"
    if remembers and call.chunk is not None:
        return "a memory that waits for whole chunks is not in it"
    return tile.empty_rows(call) or tile.transformed()


def cuda_refusal(call: Call) -> Reason:
    """Why the Triton kernels do not run a call that the C++ kernel would, or None."""
    wide = width_of(call.bound, call.head_dim), call.shape[5]
    if max(wide) > RIDGE_LARGEST:
        return f"on CUDA key and value dimensions must be 1 to {RIDGE_LARGEST}, this call has {wide[0]} and {wide[1]}"
    powers = cast(Ridge, call.bound.anchor).powers(call.bound.heads)
    return f"on CUDA all heads have one power, this call has {powers}" if len(set(powers)) > 1 else None


def chunked(call: Call, memory: RidgeStatistics | None, *, return_memory: bool) -> tuple[Tensor, Memory | None]:
    """y (B, H, T, P) for a call that is not refused, and if asked the memory that follows ``memory``.

    Raises: BuildError when the kernel does not compile; NonFiniteError when G + rho I is not positive definite. On
        CUDA, where that check would wait for the device, the rows concerned are NaN instead.
    """
    seen, anchor = call.visibility, cast(Ridge, call.bound.anchor)
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
    earlier = memory if memory is not None and memory.count else None
    before = Before() if earlier is None else Before(*earlier.whitened(call.bound))
    given = RidgeInputs(q, k, v, scale, rho, *before)
    if plain(*given) and not recorded(given):
        y, _ = read(given, places_of(seen, k.shape[2]), spec)
    else:
        start, edges = (seen.segment_start, seen.edges) if seen.packed else (None, None)
        seen_by = {"key_mask": seen.key_mask, "lo": seen.lo, "hi": seen.hi, "segment_start": start, "edges": edges}
        y, _ = ridge(given._replace(**seen_by), spec)
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
    seen = places_of(call.visibility, call.raw.k.shape[2])

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        inputs = RidgeInputs(q, multiplied(k, clipped), v, scale, rho)
        return None if switched_off() else read(inputs, seen, spec)[0]

    return run


# -- by torch --------------------------------------------------------------------------------------


def by_torch(call: Call, tokens: Tokens, before: Memory | None, block: int | None) -> Tensor:
    """y (B, H, T, P) before the anchor's factor, for queries at the last of the tokens that follow ``before``."""
    anchor = cast(Ridge, call.bound.anchor)
    if call.log_decay is not None:
        begun = empty_memory(call) if before is None else before
        assert isinstance(begun, FadingStatistics)
        return fading(call, tokens, begun, block)
    assert before is None or isinstance(before, RidgeStatistics)
    if before is not None and before.count == 0:
        before = None
    silent = tokens.silent()
    rho = anchor.ridge(call.bound.anchor_params, call.bound.kv_heads).view(1, -1, 1, 1, 1)
    white = WhitenedFeatures.of(call.bound, call.head_dim)
    queries, keys = call.q, silent.k
    if white is not None:
        queries, keys = white.whitened(queries.to(keys)), white.whitened(keys)
    past = (None, None, None, None) if before is None else before.whitened(call.bound)
    count = keys.shape[2] + (0 if before is None else before.count)
    dtype = torch.float64 if loses_digits(keys, past[0], count, rho, anchor) else tokens.k.dtype
    q, z, v = queries.to(dtype), keys.to(dtype), silent.v.to(dtype)
    gram, cross, shift, last = (None if x is None else x.to(dtype) for x in past)
    earlier = None
    if anchor.shifts:
        earlier = previous_keys(z, tokens.mask, z.new_zeros(*z.shape[:2], z.shape[3]) if last is None else last)
    peak = None if before is None else before.peak
    parts = _Parts(q, z, v, earlier, gram, cross, shift, peak, rho.to(dtype))
    return _tied(call, parts, anchor, block) if call.causal else _free(call, parts, anchor)


def usual_block(dim: int) -> int:
    """Tokens per block for keys of ``dim`` numbers. The best is about ``dim`` (measured for 16 to 64)."""
    return min(max(dim, 32), 64)


@torch.no_grad()
def loses_digits(z: Tensor, before: Tensor | None, tokens: int, rho: Tensor, anchor: Ridge) -> bool:
    """Whether float32 would lose three digits.

    It does when the squared length of keys z is large against the ridge: gradients lose as much. Past a thousand tokens
    it also does when keys that fill few directions, after others with sum ``before``, make eps |G| |P| large.
    """
    if z.dtype == torch.float64 or z.numel() == 0:
        return False
    eps, looks = torch.finfo(z.dtype).eps, not torch.compiler.is_compiling() and not transforms.active()
    if (
        not anchor.moving
        and looks
        and bool((eps * (z.square().sum(-1).amax(-1) / rho.flatten()).square() > _LOST).any())
    ):
        return True
    if tokens <= _SAFE_TOKENS:
        return False
    gram = (z.mT @ z).double()
    gram = gram if before is None else gram + before
    ridge = _ridge_of(anchor, rho.squeeze(2).to(gram), gram, z.square().sum(-1).amax(-1).to(gram)[..., None, None])
    inverse = positive_inverse(with_ridge(gram, ridge), "attention")
    condition = torch.linalg.matrix_norm(gram) * torch.linalg.matrix_norm(inverse)
    return bool((eps * condition > _LOST).any())


def _ridge_of(anchor: Ridge, rho: Tensor, gram: Tensor, peak: Tensor | None) -> Tensor:
    """rho (…, 1, 1) for keys with sum ``gram`` (…, r, r) and largest z.z ``peak`` (…, 1, 1). It may follow them."""
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    return anchor.moved(rho, peak, trace, gram.shape[-1]) if anchor.moving else rho


class _Parts(NamedTuple):
    """Queries, keys and values, and what came before them."""

    q: Tensor
    z: Tensor
    v: Tensor
    earlier: Tensor | None
    gram: Tensor | None
    cross: Tensor | None
    shift: Tensor | None
    peak: Tensor | None
    rho: Tensor


def _added(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a^T b."""
    return a.mT @ b if total is None else total + a.mT @ b


def _free(call: Call, parts: _Parts, anchor: Ridge) -> Tensor:
    """All keys are visible to all queries: one solve."""
    z = parts.z
    gram, cross = _added(parts.gram, z, z), _added(parts.cross, parts.v, z)
    peak = None
    if anchor.mode == "running_max":
        peak = z.square().sum(-1).amax(-1) if z.shape[2] else z.new_zeros(z.shape[:2])
        peak = (peak if parts.peak is None else torch.maximum(peak, parts.peak.to(peak)))[..., None, None]
    regular = with_ridge(gram, _ridge_of(anchor, parts.rho.squeeze(2), gram, peak))
    shift = None if parts.earlier is None else _added(parts.shift, z, parts.earlier)
    contracted = contraction(regular, shift, "attention") if anchor.spectral and shift is not None else None
    return read_out(parts.q, call.bound, positive_inverse(regular, "attention"), shift, cross, contracted)


def _tied(call: Call, parts: _Parts, anchor: Ridge, block: int | None) -> Tensor:
    queries, keys, groups, chunk = parts.q.shape[2], parts.z.shape[2], call.bound.groups, call.chunk
    if queries == 0:
        return parts.q[..., :1].expand(*parts.q.shape[:3], parts.v.shape[3])  # no rows, but part of the graph
    usual = block or usual_block(parts.z.shape[3])
    outright = anchor.by_query or (chunk is not None and chunk > usual)
    offset = keys - queries
    base = offset if chunk is None else offset // chunk * chunk
    gram, cross, shift = parts.gram, parts.cross, parts.shift
    z, v, earlier = parts.z[:, :, base:], parts.v[:, :, base:], parts.earlier
    peak = parts.peak
    if base:
        first = parts.z[:, :, :base]
        gram, cross = _added(gram, first, first), _added(cross, parts.v[:, :, :base], first)
        if earlier is not None:
            shift = _added(shift, first, earlier[:, :, :base])
            earlier = earlier[:, :, base:]
        if anchor.mode == "running_max":
            largest = first.square().sum(-1).amax(-1)
            peak = largest if peak is None else torch.maximum(peak.to(largest), largest)
    length = keys - base
    if outright:
        assert chunk is not None
        size = chunk
    elif chunk is not None:
        size = chunk * max(1, usual // chunk)
    else:
        size = min(usual, length)
        size = -(-length // -(-length // size)) if block is None else size  # even blocks
    zb, vb = into_blocks(z, size), into_blocks(v, size)
    q = parts.q if length == queries else F.pad(parts.q, (0, 0, length - queries, 0))
    xb = rows_into_blocks(q, groups, size)
    sight = None
    if not outright:
        mask = None if chunk is None else Rule(True, False, chunk, 0).mask(Step(0, size, 0, size, True), z.device)
        sight = Sight(groups, size, 0 if call.include_self else -1, mask)
    ridge = parts.rho
    contracted = None
    if anchor.by_query:
        before, so_far = exclusive(zb.mT @ zb, gram), None
        if anchor.mode == "running_max":
            largest = zb.square().sum(-1).amax(-1)  # (B, Hkv, n)
            first = torch.zeros_like(largest[:, :, :1]) if peak is None else peak.to(largest).unsqueeze(2)
            so_far = torch.cat([first, largest[:, :, :-1]], 2).cummax(2).values[..., None, None]
        ridge = _ridge_of(anchor, ridge, before, so_far)
        if anchor.spectral and earlier is not None:
            contracted = contraction(
                with_ridge(before, ridge), exclusive(zb.mT @ into_blocks(earlier, size), shift), "attention"
            )
    factor = factorise(zb, gram, ridge, sight)
    x = solve(xb, zb, gram, ridge, factor)
    if earlier is not None:
        eb = into_blocks(earlier, size)
        for step in range(anchor.shifts):
            further = linear(x, eb, zb, None if shift is None else shift.mT, sight)
            further = solve(further, zb, gram, ridge, factor)
            if contracted is not None:
                further = further * contracted[..., None, None]
            which = on_heads(anchor.powers(call.bound.heads), step, x.device)
            x = further if which is None else torch.where(rows_of(which, groups, size).unsqueeze(1), further, x)
    y = linear(x, zb, vb, None if cross is None else cross.mT, sight)
    return rows_from_blocks(y, groups, size, length)[:, :, length - queries :]


__all__ = [
    "by_torch", "chunked", "clipped_of", "cuda_refusal", "loses_digits", "multiplied", "other_ridge", "query_scale",
    "refusal", "runner", "usual_block",
]  # fmt: skip
