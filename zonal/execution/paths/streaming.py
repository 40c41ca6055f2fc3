"""The streaming path: token by token through the verbs of a memory, as a decoder runs.

A query that sees its own key is read after its token is absorbed, one that does not before. Constant memory where the
operator's memory is; slow for many tokens, and the same function.
"""

import warnings

import torch
from torch import Tensor

from zonal.execution.call import Call, Result, check_memory, empty_memory, without_idle
from zonal.execution.paths.documents import by_document
from zonal.execution.paths.steps.base import Steps
from zonal.execution.paths.steps.kinds import KINDS
from zonal.kernels.build import BuildError
from zonal.memory import DecayedSums, KeyValues, Memory, Tokens
from zonal.memory.refusals import features_refusal
from zonal.memory.summed import Summed


def refusal(call: Call) -> str | None:
    """Why this call cannot run token by token, or None when it can."""
    if not call.causal:
        return "without causality every query waits for the last key"
    # sums do not keep a decay together with whole chunks, and a memory of keys takes one that its operator declares
    decays = call.log_decay is not None and not call.tags.decays
    by_sums = not call.tags.solves and (call.held is None or call.held.kind != "keys")
    if decays and call.chunk is not None and by_sums and features_refusal(call.bound, call.head_dim) is None:
        return "a decay together with whole chunks is not kept as sums (a memory made with kind='keys' takes it)"
    return None


def by_kernel(call: Call) -> Result:
    """y and the memory after a few tokens, by a compiled kernel. Raises: BuildError when it does not compile."""
    memory = call.memory
    memory = empty_memory(call) if memory is None else memory
    check_memory(call, memory)
    _, made = next(kernel for kind, kernel in KINDS.items() if isinstance(memory, kind))
    steps = made(call, memory)
    y = first_step(call, steps)
    if y is None:  # too much fades, or the environment has switched the kernels off since the call was planned
        return by_torch(call)
    return y, None if call.memory is None else steps.memory()


def by_torch(call: Call) -> Result:
    """y (B, H, T, P) by torch, and the memory after the call's tokens where it goes on from one."""
    memory = call.memory
    if call.visibility.packed and memory is None:
        return by_document(call, lambda part: by_torch(part)[0]), None
    if memory is None:
        # a memory that nobody will see may keep the computing type
        memory = empty_memory(call, torch.float64 if call.tags.cancels else call.k.dtype)
    check_memory(call, memory)
    queries, keys = call.q.shape[2], call.k.shape[2]
    if queries > keys:
        return without_idle(call, queries - keys, by_torch)
    tokens = call.new_tokens
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
    return call.scaled(y), None if call.memory is None else memory


def compiled_steps(call: Call) -> Steps | None:
    """The compiled kernel with the numbers of the call's memory, for steps like it, or None: torch's verbs run."""
    found = next((kernel for kind, kernel in KINDS.items() if isinstance(call.memory, kind)), None)
    if found is None:
        return None
    refuse, made = found
    try:
        return None if refuse(call) else made(call, call.memory)
    except BuildError as error:  # once: from now on it is refused
        warnings.warn(
            f"zonal: torch's steps of a decoder run in place of the compiled kernel, many times slower. {error}",
            stacklevel=4,
        )
    return None


def first_step(call: Call, steps: Steps) -> Tensor | None:
    """y (B, H, T, P) of the call that the steps were made for, or None as theirs."""
    run = steps.run if call.raw is None else steps.step
    return run(*call.given, call.log_decay)


def step(call: Call, memory: Memory, q: Tensor, token: Tokens) -> tuple[Tensor, Memory]:
    """y (B, H, 1, P) of one prepared query before the anchor's factor, and the memory with its token."""
    if isinstance(memory, KeyValues):
        grown = memory.extended(token)
        assert isinstance(grown, KeyValues)
        return grown.newest(q, call.bound, call.tags.includes_self), grown
    if call.chunk is not None:
        assert isinstance(memory, Summed)
        return memory.committed().lookup(q, call.bound), memory.extended(token)
    if call.tags.includes_self:
        memory = memory.extended(token)
        return memory.lookup(q, call.bound), memory
    if isinstance(memory, DecayedSums) and token.log_decay is not None:
        # time passes before the query reads, although its own key is not seen
        memory = memory.faded(token.log_decay.sum(-1))
        token = token._replace(log_decay=None)
    return memory.lookup(q, call.bound), memory.extended(token)


__all__ = ["by_kernel", "by_torch", "compiled_steps", "first_step", "refusal"]
