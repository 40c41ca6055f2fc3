"""The chunked path: sequences in blocks over a carried state of fixed size. Exact; linear in the number of tokens.

Operators whose kernel is a polynomial of a dot product carry sums of features (``scan``). Ridge and Koopman read-outs
of a plain product carry G, M, C (``ridge_block``). Packed documents run as a batch of documents.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra.anchor import Ridge
from zonal.algebra.primal import contraction, on_heads
from zonal.algebra.prior import visibility
from zonal.errors import ArgumentError
from zonal.execution.call import Call
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
from zonal.execution.paths.documents import by_document
from zonal.execution.paths.fading import fading
from zonal.execution.paths.scan import Job, Rule, Step, block_size, scan
from zonal.features import feature_map
from zonal.kernels import transforms
from zonal.memory import DecayedSums, FadingStatistics, FeatureSums, KeyValues, Memory, RidgeStatistics, Tokens
from zonal.memory.inverse import positive_inverse, with_ridge
from zonal.memory.refusals import features_refusal, statistics_refusal
from zonal.memory.ridge import previous_keys, read_out, rows_of
from zonal.memory.sums import anchored, carried, least_of, with_mass
from zonal.memory.tokens import joined
from zonal.memory.whitened import WhitenedFeatures

_SAFE_TOKENS = 1024  # eps |G| / rho < 1e-3 for unit keys and rho = 0.1
_LOST = 1e-3  # of a number, from which on float32 is not enough: LOST of ridge.hpp


def ridge_block(dim: int) -> int:
    """Tokens per block for keys of ``dim`` numbers. The best is about ``dim`` (measured for 16 to 64)."""
    return min(max(dim, 32), 64)


def refusal(call: Call) -> str | None:
    """Why this call cannot run chunked, or None when it can."""
    if call.tags.solves:
        reason = statistics_refusal(call.bound, call.head_dim)
        if reason is None and call.tags.by_query and call.causal and call.chunk is None:
            moving = cast(Ridge, call.bound.anchor).moving
            what = "the ridge follows the keys seen so far" if moving else "each step is divided by its own norm"
            reason = (
                f"{what}, so every token has an inverse of its own; "
                "add prior.ChunkCausal, or use mode='constant', relative=0 and spectral_norm='none'"
            )
    elif call.window is not None or call.bias.slope is not None:
        reason = features_refusal(call.bound, call.head_dim)
        reason = reason or "weights depend on positions, and a sum over keys does not keep them"
    elif call.log_decay is not None and call.chunk is not None:
        reason = "a decay together with whole chunks is not carried"
    else:
        reason = features_refusal(call.bound, call.head_dim)
    if reason is None and call.held is not None and call.held.kind == "keys":
        reason = (
            "a memory of keys and values is not carried as sums "
            "(one made without kind='keys' holds sums where the operator allows it)"
        )
    return reason


def chunked(
    call: Call, memory: Memory | None, *, return_memory: bool, block: int | None = None
) -> tuple[Tensor, Memory | None]:
    """y (B, H, T, P) by torch, and the memory after the call's tokens, for a call that is not refused.

    Args:
        memory: what came before; None = nothing. It is not changed.
        block: tokens a block; a matter of speed, not of meaning.
    """
    if block is not None and block < 1:
        raise ArgumentError(f"attention: the block of path 'chunked' must be >= 1, received {block}.")
    if return_memory and memory is None and not call.visibility.packed:
        memory = empty_memory(call)
    if call.visibility.packed and (memory is not None or return_memory):
        raise ArgumentError(
            "attention: packed documents (cu_seqlens) start afresh and neither take nor leave a memory."
        )
    if call.visibility.packed:
        return by_document(call, lambda part: chunked(part, None, return_memory=False, block=block)[0]), None
    tokens, before = _placed(call, memory)
    if call.causal and call.q.shape[2] > tokens.length:
        # the first queries come before the first key and see nothing
        idle = call.q.shape[2] - tokens.length
        y, after = chunked(tail(call, idle), memory, return_memory=return_memory, block=block)
        return F.pad(y, (0, 0, idle, 0)), after
    run = _ridge if call.tags.solves else _sums
    return run(call, tokens, before, memory, return_memory, block)


def empty_memory(call: Call, dtype: torch.dtype | None = None) -> Memory:
    """The memory of a call's operator before its first token. ``dtype`` of keys and values: by default the result's."""
    batch, _, _, _, _, value_dim = call.shape
    heads = call.bound.kv_heads
    return Memory.empty(call.operator, batch, heads, call.head_dim, value_dim, dtype or call.dtype, call.device)


def tail(call: Call, first: int) -> Call:
    """The call without its first queries."""
    return call.with_tokens(
        call.q[:, :, first:], call.k, call.v, call.visibility.tail(first), call.bias, call.log_decay, call.key_bias
    )


def _placed(call: Call, memory: Memory | None) -> tuple[Tokens, Memory | None]:
    """(keys of this run, the memory before them). Tokens that waited for their chunk to end come first again."""
    tokens = call.new_tokens
    if memory is None:
        return tokens, None
    check_memory(call, memory)
    dtype = memory.form.statistics
    tokens = tokens._replace(
        k=tokens.k.to(torch.promote_types(tokens.k.dtype, dtype)),
        v=tokens.v.to(torch.promote_types(tokens.v.dtype, dtype)),
    )
    if isinstance(memory, FeatureSums | RidgeStatistics) and memory.pending is not None:
        waiting = memory.pending.map(lambda x: x.to(tokens.k.dtype) if x.dtype.is_floating_point else x)
        return joined(waiting, tokens), memory.committed()
    return tokens, memory


def check_memory(call: Call, memory: Memory) -> None:
    """Raise ArgumentError unless the call can go on from the memory."""
    batch, _, queries, keys, _, value_dim = call.shape
    if call.causal and memory.count and queries != keys:
        raise ArgumentError(
            "attention: with a memory, causal queries are the new tokens themselves: q must have as many tokens as k, "
            f"received {queries} and {keys}."
        )
    if isinstance(memory, KeyValues) and memory.reach is not None and not call.causal:
        first = max(0, memory.count + keys - queries - memory.reach + 1)
        gone = memory.count - (memory.end - memory.begin)
        if first < gone:
            raise ArgumentError(
                f"attention: the first of {queries} queries sees keys from token {first} on, "
                f"but a memory with a window has dropped the first {gone}. "
                "Pass at most as many queries as new keys, or all keys at once without a memory."
            )
    wanted = batch, call.bound.kv_heads, call.head_dim, value_dim
    if tuple(memory.form[:4]) != wanted:
        raise ArgumentError(
            f"attention: the memory holds (batch, key heads, key dim, value dim) = {tuple(memory.form[:4])}, "
            f"the call has {wanted}."
        )


def _sums(
    call: Call, tokens: Tokens, before: Memory | None, memory: Memory | None, return_memory: bool, block: int | None
) -> tuple[Tensor, Memory | None]:
    features = feature_map(call.bound.link)
    assert features is not None
    assert before is None or isinstance(before, FeatureSums | DecayedSums)
    q = call.q.to(tokens.k.dtype)
    batch, heads, queries, dim = q.shape
    k, v = with_mass(call.tags.normalises, tokens, tokens.k.dtype)
    decay = tokens.log_decay
    decay = None if decay is None else decay.expand(batch, -1, -1)
    keys = tokens.length
    offset = keys - queries if call.causal else 0
    state = None if before is None or before.count == 0 else before.state.to(k)
    job = Job(
        features,
        call.bound.link,
        Rule(call.causal, call.include_self, call.chunk, offset),
        call.bound.groups,
        block
        or block_size(
            features, (batch, heads, keys, dim, v.shape[3]), call.causal and before is None and not return_memory
        ),
        return_memory and call.chunk is None,
    )
    total, final = scan(q, k, v, call.coefficients.to(q), decay, state, job)
    least = None
    if state is not None and call.tags.normalises:
        least = least_of(q, state, features, call.bound)
        if decay is not None:  # what is left of the memory's own rounding
            left = decay.cumsum(-1)[..., offset:].exp().to(least)
            least = least * left.repeat_interleave(call.bound.groups, 1)[..., None]
    y = call.scaled(anchored(total, call.bound, _visible(call, tokens, before), least))
    if not return_memory or memory is None:
        return y, None
    if call.chunk is not None:
        return y, memory.extended(Tokens(call.k, call.v, call.visibility.key_mask, None, call.key_bias))
    assert final is not None
    assert isinstance(memory, FeatureSums | DecayedSums)
    return y, carried(memory, final, tokens)


def _visible(call: Call, tokens: Tokens, before: FeatureSums | DecayedSums | None) -> Tensor:
    """How many keys each query sees, (B or 1, 1, T, 1)."""
    priors = tuple(p for p in call.bound.priors if p.orders)
    seen = visibility(
        call.q.shape[2],
        tokens.length,
        priors,
        causal=call.causal,
        include_self=call.include_self,
        key_padding_mask=tokens.mask,
    ).count(call.q.device)
    return (seen if before is None else seen + before.real[:, None, None])[..., None]


def _ridge(
    call: Call, tokens: Tokens, before: Memory | None, memory: Memory | None, return_memory: bool, block: int | None
) -> tuple[Tensor, Memory | None]:
    anchor = cast(Ridge, call.bound.anchor)
    if call.log_decay is not None:
        begun = empty_memory(call) if before is None else before
        assert isinstance(begun, FadingStatistics)
        y = fading(call, tokens, begun, block)
        return call.scaled(y), memory.extended(
            Tokens(call.k, call.v, call.visibility.key_mask, call.log_decay)
        ) if return_memory and memory is not None else None
    assert before is None or isinstance(before, RidgeStatistics)
    if before is not None and before.count == 0:
        before = None
    silent = tokens.silent()
    rho = anchor.ridge(call.bound.anchor_params, call.bound.kv_heads).view(1, -1, 1, 1, 1)
    white = WhitenedFeatures.of(call.bound, call.head_dim)
    queries, keys = (
        (call.q, silent.k) if white is None else (white.whitened(call.q.to(silent.k)), white.whitened(silent.k))
    )
    past = (None, None, None, None) if before is None else before.whitened(call.bound)
    count = keys.shape[2] + (0 if before is None else before.count)
    dtype = torch.float64 if loses_digits(keys, past[0], count, rho, anchor) else tokens.k.dtype
    q, z, v = queries.to(dtype), keys.to(dtype), silent.v.to(dtype)
    gram, cross, shift, last = (None if x is None else x.to(dtype) for x in past)
    peak = None if before is None else before.peak
    earlier = None
    if anchor.shifts:
        earlier = previous_keys(z, tokens.mask, z.new_zeros(*z.shape[:2], z.shape[3]) if last is None else last)
    parts = _Parts(q, z, v, earlier, gram, cross, shift, peak, rho.to(dtype))
    y = _tied(call, parts, anchor, block) if call.causal else _free(call, parts, anchor)
    after = None
    if return_memory and memory is not None:
        after = memory.extended(Tokens(call.k, call.v, call.visibility.key_mask))
    return call.scaled(y), after


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


class _Parts:
    """Keys, values and what came before them."""

    def __init__(
        self,
        q: Tensor,
        z: Tensor,
        v: Tensor,
        earlier: Tensor | None,
        gram: Tensor | None,
        cross: Tensor | None,
        shift: Tensor | None,
        peak: Tensor | None,
        rho: Tensor,
    ) -> None:
        self.q, self.z, self.v, self.earlier, self.gram, self.cross, self.shift, self.peak, self.rho = (
            q,
            z,
            v,
            earlier,
            gram,
            cross,
            shift,
            peak,
            rho,
        )


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
    usual = block or ridge_block(parts.z.shape[3])
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


__all__ = ["check_memory", "chunked", "empty_memory", "refusal", "ridge_block", "tail"]
