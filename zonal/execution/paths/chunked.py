"""The chunked path: sequences in blocks over a carried state of fixed size. Exact; linear in the number of tokens.

Operators whose kernel is a polynomial of a dot product carry sums of features (``scan``). Ridge and Koopman read-outs
of a plain product carry G, M, C (``blocks``). Packed documents run as a batch of documents.
"""

from typing import cast

import torch
from torch import Tensor

from zonal.algebra.anchor import Ridge
from zonal.errors import ArgumentError
from zonal.execution.call import Call, Result, check_memory, without_idle
from zonal.execution.paths.blocks import Statistics
from zonal.execution.paths.blocks import by_torch as ridge_by_torch
from zonal.execution.paths.documents import by_document
from zonal.execution.paths.scan import Job, Rule, block_size, scan
from zonal.features.serve import powers_of
from zonal.memory import DecayedSums, FeatureSums, Memory, Tokens
from zonal.memory.compact import statistics_of
from zonal.memory.refusals import features_refusal, statistics_refusal
from zonal.memory.summed import Summed
from zonal.memory.sums import anchored, carried, least_of, with_mass
from zonal.memory.tokens import joined


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
    elif call.window is not None or call.bound.slopes is not None:
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


def chunked(call: Call, block: int | None = None) -> Result:
    """y (B, H, T, P) by torch, and the memory after the call's tokens where it goes on from one, for a call that is
    not refused.

    block: tokens a block; a matter of speed, not of meaning.
    """
    if block is not None and block < 1:
        raise ArgumentError(f"attention: the block of path 'chunked' must be >= 1, received {block}.")
    memory = call.memory
    if call.visibility.packed and memory is None:
        return by_document(call, lambda part: chunked(part, block)[0]), None
    tokens, before = _placed(call)
    if call.causal and call.q.shape[2] > tokens.length:
        return without_idle(call, call.q.shape[2] - tokens.length, lambda part: chunked(part, block))
    final = None
    if call.tags.solves:
        y = ridge_by_torch(call, tokens, cast(Statistics | None, statistics_of(before)), block)
    else:
        y, final = _sums(call, tokens, before, block)
    y = call.scaled(y)
    if memory is None:
        return y, None
    if final is None:
        return y, memory.extended(call.new_tokens)
    return y, carried(cast(FeatureSums, memory), final, tokens)


def _placed(call: Call) -> tuple[Tokens, Memory | None]:
    """(keys of this run, the memory before them). Tokens that waited for their chunk to end come first again."""
    tokens, memory = call.new_tokens, call.memory
    if memory is not None:
        check_memory(call, memory)
        dtype = memory.form.statistics
    else:
        dtype = torch.float64 if call.tags.cancels else tokens.k.dtype
    tokens = tokens._replace(
        k=tokens.k.to(torch.promote_types(tokens.k.dtype, dtype)),
        v=tokens.v.to(torch.promote_types(tokens.v.dtype, dtype)),
    )
    if isinstance(memory, Summed) and memory.pending is not None:
        waiting = memory.pending.map(lambda x: x.to(tokens.k.dtype) if x.dtype.is_floating_point else x)
        return joined(waiting, tokens), memory.committed()
    return tokens, memory


def _sums(call: Call, tokens: Tokens, before: Memory | None, block: int | None) -> tuple[Tensor, Tensor | None]:
    """y (B, H, T, P) before the anchor's factor, and the sums after the last key where they are kept as they are."""
    features = powers_of(call.bound.link)
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
        Rule(call.causal, call.tags.includes_self, call.chunk, offset),
        call.bound.groups,
        block or block_size(features, (batch, heads, keys, dim, v.shape[3]), call.causal and before is None),
        before is not None and call.chunk is None,
    )
    total, final = scan(q, k, v, call.coefficients.to(q), decay, state, job)
    least = None
    if state is not None and call.tags.normalises:
        least = least_of(q, state, features, call.bound)
        if decay is not None:  # what is left of the memory's own rounding
            left = decay.cumsum(-1)[..., offset:].exp().to(least)
            least = least * left.repeat_interleave(call.bound.groups, 1)[..., None]
    return anchored(total, call.bound, _visible(call, tokens, before), least), final


def _visible(call: Call, tokens: Tokens, before: FeatureSums | DecayedSums | None) -> Tensor:
    """How many keys each query sees, (B or 1, 1, T, 1)."""
    seen = call.seen(call.q.shape[2], tokens.length, tokens.mask).count(call.q.device)
    return (seen if before is None else seen + before.real[:, None, None])[..., None]


__all__ = ["chunked", "refusal"]
