"""The streaming path: token by token through the verbs of a memory, as a decoder runs.

A query that sees its own key is read after its token is absorbed, one that does not before. Constant memory where the
operator's memory is; slow for many tokens, and the same function.
"""

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.errors import ArgumentError, PathError
from zonal.execution import native_decode, native_ridge_decode
from zonal.execution.call import Call
from zonal.execution.chunked import check_memory, empty_memory, tail
from zonal.execution.documents import by_document
from zonal.execution.native_decode import SumsSteps
from zonal.execution.native_ridge_decode import RidgeSteps
from zonal.kernels.build import BuildError
from zonal.memory import DecayedSums, FeatureSums, KeyValues, Memory, RidgeStatistics, Tokens


def streaming_refusal(call: Call) -> str | None:
    """Why this call cannot run token by token, or None when it can."""
    return None if call.causal else "without causality every query waits for the last key"


def streaming(call: Call, memory: Memory | None, *, return_memory: bool) -> tuple[Tensor, Memory | None]:
    """y (B, H, T, P), and the memory after the call's tokens. The given memory (None = an empty one) is not changed.

    Raises: PathError when ``streaming_refusal`` has a reason.
    """
    reason = streaming_refusal(call)
    if reason is not None:
        raise PathError(f"attention: path 'streaming' cannot run this call: {reason}. Use path='dense' or causal=True.")
    if call.q.shape[2] > 1 and call.visibility.packed:
        if memory is not None or return_memory:
            raise ArgumentError(
                "attention: packed documents (cu_seqlens) start afresh and neither take nor leave a memory."
            )
        return by_document(call, lambda part: streaming(part, None, return_memory=False)[0]), None
    if memory is None:
        # a memory that nobody will see may keep the computing type
        memory = empty_memory(call, None if return_memory else torch.float64 if call.tags.cancels else call.k.dtype)
    check_memory(call, memory)
    queries, keys = call.q.shape[2], call.k.shape[2]
    if queries > keys:
        # the first queries stand before the first key and see nothing
        y, after = streaming(tail(call, queries - keys), memory, return_memory=return_memory)
        return F.pad(y, (0, 0, queries - keys, 0)), after
    steps = compiled_steps(call, memory)
    if steps is not None:
        y = first_step(call, steps)
        if y is not None:
            return y, steps.memory() if return_memory else None
    tokens = Tokens(call.k, call.v, call.visibility.key_mask, call.log_decay, call.key_bias)
    if keys > queries:
        memory = memory.extended(tokens.span(0, keys - queries))
    rows = []
    for t in range(queries):
        q = call.q if queries == 1 else call.q[:, :, t : t + 1]
        token = tokens if keys == 1 else tokens.span(keys - queries + t, keys - queries + t + 1)
        y, memory = step(call, memory, q, token)
        rows.append(y)
    if not rows:
        y = call.q[..., :1].expand(*call.q.shape[:3], call.v.shape[3])  # no rows, but part of the graph
    else:
        y = rows[0] if queries == 1 else torch.cat(rows, 2)
    return call.scaled(y), memory if return_memory else None


def compiled_steps(call: Call, memory: Memory) -> SumsSteps | RidgeSteps | None:
    """The compiled kernel with the numbers of a memory, for steps like this call, or None: torch's verbs run."""
    try:
        if isinstance(memory, RidgeStatistics):
            recorded = torch.is_grad_enabled() and (memory.gram.requires_grad or memory.cross.requires_grad)
            refused = recorded or native_ridge_decode.refusal(call, memory.kind)
            return None if refused else RidgeSteps(call, memory)
        if not isinstance(memory, FeatureSums) or memory.form.statistics != torch.float32:
            return None
        recorded = torch.is_grad_enabled() and memory.state.requires_grad
        return None if recorded or native_decode.refusal(call, memory.kind) else SumsSteps(call, memory)
    except BuildError as error:  # once: from now on it is refused
        warnings.warn(
            f"zonal: torch's steps of a decoder run in place of the compiled kernel, many times slower. {error}",
            stacklevel=4,
        )
    return None


def first_step(call: Call, steps: SumsSteps | RidgeSteps) -> Tensor | None:
    """y (B, H, T, P) of the call that the steps were made for, or None as theirs."""
    if call.raw is not None:
        return steps.step(*call.raw[:3])
    y = steps.run(*call.tokens)
    return None if y is None else y.to(call.dtype)


def step(call: Call, memory: Memory, q: Tensor, token: Tokens) -> tuple[Tensor, Memory]:
    """y (B, H, 1, P) of one prepared query before the anchor's factor, and the memory with its token."""
    if isinstance(memory, KeyValues):
        grown = memory.extended(token)
        assert isinstance(grown, KeyValues)
        return grown.newest(q, call.bound, call.include_self), grown
    if call.chunk is not None:
        assert isinstance(memory, FeatureSums | RidgeStatistics)
        return memory.committed().lookup(q, call.bound), memory.extended(token)
    if call.include_self:
        memory = memory.extended(token)
        return memory.lookup(q, call.bound), memory
    if isinstance(memory, DecayedSums) and token.log_decay is not None:
        # time passes before the query reads, although its own key is not seen
        memory = memory.faded(token.log_decay)
        token = token._replace(log_decay=None)
    return memory.lookup(q, call.bound), memory.extended(token)


__all__ = ["compiled_steps", "first_step", "streaming", "streaming_refusal"]
