"""The one entry: prepare, plan, run, return."""

import contextlib
from dataclasses import replace
from typing import Literal, overload

import torch
from torch import Tensor

from zonal import mechanisms
from zonal.algebra import Operator
from zonal.algebra.anchor import Potentials
from zonal.algebra.operator import apart
from zonal.errors import ArgumentError, unknown_name
from zonal.execution.advice import advise
from zonal.execution.call import Call, Held, autocast, prepare
from zonal.execution.chunked import check_memory, empty_memory
from zonal.execution.dense import dense
from zonal.execution.plan import PATHS, choose, run
from zonal.kernels import transforms
from zonal.memory import Memory
from zonal.memory.alike import check_draws, same_declaration
from zonal.names import known_names

_PATHS = ("auto", *PATHS)


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operator: Operator | str,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    memory: None = None,
    return_memory: Literal[False] = False,
    path: str = "auto",
    log_decay: Tensor | None = None,
    key_bias: Tensor | None = None,
    action_mask: Tensor | None = None,
    key_gate: Tensor | None = None,
    query_mass: Tensor | None = None,
    key_mass: Tensor | None = None,
    start: Potentials | None = None,
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operator: Operator | str,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    memory: Memory | None = None,
    return_memory: bool = False,
    path: str = "auto",
    log_decay: Tensor | None = None,
    key_bias: Tensor | None = None,
    action_mask: Tensor | None = None,
    key_gate: Tensor | None = None,
    query_mass: Tensor | None = None,
    key_mass: Tensor | None = None,
    start: Potentials | None = None,
) -> Tensor | tuple[Tensor, Memory]: ...


@known_names
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operator: Operator | str,
    *,
    causal: bool = False,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    memory: Memory | None = None,
    return_memory: bool = False,
    path: str = "auto",
    log_decay: Tensor | None = None,
    key_bias: Tensor | None = None,
    action_mask: Tensor | None = None,
    key_gate: Tensor | None = None,
    query_mass: Tensor | None = None,
    key_mass: Tensor | None = None,
    start: Potentials | None = None,
) -> Tensor | tuple[Tensor, Memory]:
    """y_t = sum_s W_ts v_s, W = A(B l(S)) for a declared operator, by the cheapest path: exact, or where the operator
    declares a search, an approximation of it.

    Args:
        q, k, v: (B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, P); H a multiple of Hkv. With one head of q and one of k all
            heads of v share them. One floating type; statistics, sums and polynomials are computed in float32 or
            better.
        operator: an Operator, or a spec such as "sko" or "ska(power=1)", which is read at each call, with its numbers
            as they start.
        causal: queries see no later key. Whether they see their own is the operator's (softmax and its like do, ridge
            and Koopman do not). With T < S the queries are the last T positions.
        key_padding_mask: bool (B, S), True = real token.
        cu_seqlens: int (N + 1,), borders of N documents packed along T = S with B = 1; nothing crosses a border.
        scale: in place of the score's own, where the operator leaves it open.
        memory: what came before k and v; queries see all of it. It is not changed.
        return_memory: also return the memory after k and v (always, when ``memory`` is given).
        path: "auto" (the planner's choice), "dense", "tiled", "chunked", "streaming", or "sparse", for operators that
            declare a search.
        log_decay: (B, Hkv, S), <= 0: each token fades what came before by exp(log_decay). key_bias: (B, Hkv, S), added
            to log K. Operators that solve take log_decay where they declare a Decay prior, and no key_bias.
        action_mask: bool (B, S), False = the token is read for but not stored; key_gate: (B, Hkv, S), what its key is
            multiplied by, 0 to 1. Both are for ridge and Koopman read-outs of the plain product. Other than padding,
            such a token is one: time passes, and it reads.
        query_mass, key_mass: (B, H, T), (B, Hkv, S), >= 0: what queries give and keys receive in a plan, as parts of
            their document's sum; 0 = takes no part. None: alike for all that see a key, or that a query sees. With
            padded queries give a query_mass of 0 for them.
        start: potentials that a plan's iteration begins with (``zonal.potentials``).

    Returns: y (B, H, T, P) in the type of q, or (y, memory). A query that may see no key gets zeros.

    Raises: ArgumentError for arguments that do not fit; PathError for a path that cannot run this operator, with the
        path that can; ConvergenceError where a plan is not found within its limit of iterations.
    """
    if isinstance(operator, str):
        operator = mechanisms.resolve(operator)
    if path not in _PATHS:  # before any work
        raise unknown_name("attention", "path", path, _PATHS)
    kind = q.device.type
    lowered = torch.is_autocast_enabled(kind)
    if lowered:  # as torch's own attention does
        q, k, v = (autocast(x, kind) for x in (q, k, v))
    with torch.autocast(kind, enabled=False) if lowered else contextlib.nullcontext():
        call = prepare(
            operator,
            q,
            k,
            v,
            causal=causal,
            key_padding_mask=key_padding_mask,
            cu_seqlens=cu_seqlens,
            scale=scale,
            log_decay=log_decay,
            key_bias=key_bias,
            action_mask=action_mask,
            key_gate=key_gate,
            query_mass=query_mass,
            key_mass=key_mass,
            start=start,
            past=memory.count if isinstance(memory, Memory) else 0,
        )
        advise(q, k, key_padding_mask, from_start=memory is None and query_mass is None)
        if memory is None and not return_memory:
            # with nothing to sum, the definition is the answer, which planner, kernels and memories need not know
            return dense(call) if call.empty else run(choose(call, path), call)[0]
        return _with_memory(call, memory, path)


def _with_memory(call: Call, memory: Memory | None, path: str) -> tuple[Tensor, Memory]:
    if call.tags.couples:
        raise ArgumentError(
            f"attention: operator {call.operator.name!r} reads all queries together, so that a memory read query by "
            "query would give other answers. Leave memory and return_memory out."
        )
    if transforms.active():
        raise ArgumentError(
            "attention: memory and return_memory have no meaning under torch.func's transforms, whose tensors cannot "
            "be kept. Leave both out."
        )
    if call.visibility.packed:
        raise ArgumentError(
            "attention: packed documents (cu_seqlens) start afresh and neither take nor leave a memory. "
            "Pass one of the two."
        )
    if memory is None:
        memory = empty_memory(call)
    elif not isinstance(memory, Memory):
        raise ArgumentError(
            f"attention: memory must be a zonal.Memory, received {type(memory).__name__}. "
            "Make one with Memory.empty(operator, …)."
        )
    elif not same_declaration(memory.operator, call.operator):
        raise ArgumentError(
            f"attention: the memory must be of the call's operator, received {apart(memory.operator, call.operator)}. "
            "Make a memory for this one with Memory.empty(operator, …)."
        )
    check_draws("attention", memory.operator, call.operator)
    check_memory(call, memory)
    given, memory = memory, memory.unnamed()
    call = replace(call, memory=memory, held=Held.of(memory))
    y, after = run(choose(call, path), call)
    assert after is not None
    return y, given.recorded(after, call.new_tokens) if given.parts else after
