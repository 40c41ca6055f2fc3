"""``attention``, the entry point of the library: it prepares a call, plans it and runs it."""

import contextlib
import warnings
from typing import Any

import torch
from torch import Tensor

from zonal import mechanisms, torch_func
from zonal.algebra import Operator
from zonal.algebra.anchor import Potentials
from zonal.algebra.operator import apart
from zonal.errors import ArgumentError, unknown_name
from zonal.execution.call import (
    Call,
    check_carried,
    check_memory,
    empty_memory,
    lowered,
    prepare,
    resumed,
    thinned,
    weighted,
)
from zonal.execution.mask import Masses
from zonal.execution.paths.dense import dense
from zonal.execution.plan import PATHS, choose, run
from zonal.memory import Memory
from zonal.memory.alike import check_draws, same_declaration
from zonal.names import known_names
from zonal.stretch import active
from zonal.typed import check_switch

_PATHS = ("auto", *PATHS)


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
    dropout: float = 0.0,
) -> Any:
    """y_t = sum_s W_ts v_s with W = A(B l(S)) for a declared operator, by the cheapest path.

    S is the score, l the link, B the prior and A the anchor. The result is exact, unless the operator declares a
    search.

    Args:
        q, k, v: (B, H, T, D), (B, Hkv, S, D), (B, Hkv, S, P), with H a multiple of Hkv and one floating dtype. With one
            head in q and k, all heads of v share it. Statistics, sums and polynomials use at least float32.
        operator: an Operator, or a spec such as "sko" or "ska(power=1)". A spec is resolved at each call, with
            parameters at their initial values.
        causal: hide later keys. The operator decides whether a query sees its own key: softmax and most others do,
            ridge and Koopman do not. With T < S the queries are the last T positions.
        key_padding_mask: bool (B, S), True = real token.
        cu_seqlens: int (N + 1,), borders of N documents packed along T = S with B = 1. Documents do not see each other.
        scale: factor of the score, for operators that do not fix it; None = the score's default.
        memory: the keys and values before k and v, which all queries see. It is not changed.
        return_memory: also return the memory after k and v. A call with ``memory`` always returns it.
        path: "auto" (chosen by the planner), "dense", "tiled", "chunked", "streaming", or "sparse" for operators that
            declare a search.
        log_decay: (B, Hkv, S), <= 0. Each token multiplies the evidence of earlier tokens by exp(log_decay), of which
            what is below -1000 counts as -1000. Operators that solve a linear system take it only with a Decay prior.
        key_bias: (B, Hkv, S), added to log K. Operators that solve a linear system do not take it, and anchors that
            couple queries take none of -inf.
        action_mask: bool (B, S), False = the token reads but is not stored. Unlike padding, it counts as a step of
            time. For ridge and Koopman anchors with the plain dot product.
        key_gate: (B, Hkv, S) from 0 to 1, a factor of each key. For the same operators as action_mask.
        query_mass, key_mass: (B, H, T), (B, Hkv, S), >= 0. In a transport plan, the mass that queries give and keys
            receive, as fractions of the document's sum; 0 excludes a token. None = equal masses for all queries that
            see a key and all keys that a query sees. Give padded queries a query_mass of 0.
        start: initial potentials of a plan's iteration (``zonal.potentials``).
        dropout: the share of weights W_ts that are set to zero, drawn from torch's generator; the others are divided by
            1 - dropout, so that the mean of y stays. Only path "dense" holds the weights.

    Returns: y (B, H, T, P) in the dtype of q, or (y, memory). A query that sees no key gets zeros.

    Raises: ArgumentError for arguments that do not fit; PathError for a path that cannot run this operator, naming one
    that can; ConvergenceError when a plan does not converge within its limit of iterations.
    """
    if isinstance(operator, str):
        operator = mechanisms.resolve(operator)
    if path not in _PATHS:  # before any work
        raise unknown_name("attention", "path", path, _PATHS)
    check_switch("attention", "return_memory", return_memory)
    q, k, v = lowered("attention", q, k, v)  # as torch's own attention does
    kind = q.device.type
    if kind == "meta":
        raise ArgumentError(
            "attention: q, k and v on the device meta hold no numbers. zonal.explain plans such a call."
        )
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else contextlib.nullcontext():
        call = prepare(
            operator, q, k, v, causal=causal, key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens, scale=scale,
            log_decay=log_decay, key_bias=key_bias, masses=Masses(query_mass, key_mass, start),
        )  # fmt: skip
        stretch = active()
        # a piece of a text may store none of its tokens: others come before or after it, or are in other ranks
        whole = memory is None and not return_memory and stretch is None
        call = weighted(call, action_mask, key_gate, whole)
        call = thinned(call, dropout)
        _advise(q, k, key_padding_mask, from_start=memory is None and query_mass is None and stretch is None)
        if stretch is not None:
            if memory is not None or return_memory:
                raise ArgumentError(
                    "attention: within sequence_parallel the past is in other ranks, and a call neither takes nor "
                    "leaves a memory. Leave memory and return_memory out (use_cache=False in transformers)."
                )
            return stretch.attend(call, path)
        if memory is None and not return_memory:
            # with nothing to sum, the definition is the answer, which planner, kernels and memories need not know
            return dense(call) if call.empty else run(choose(call, path), call)[0]
        return _with_memory(call, memory, path)


def _with_memory(call: Call, memory: Memory | None, path: str) -> tuple[Tensor, Memory]:
    if torch_func.active():
        raise ArgumentError(
            "attention: memory and return_memory have no meaning under torch.func's transforms, whose tensors cannot "
            "be kept. Leave both out."
        )
    if memory is None:
        check_carried(call, 0)
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
    call = resumed(call, memory)
    y, after = run(choose(call, path), call)
    assert after is not None
    after.warn_of_drift(given.count, stacklevel=_CALLER + 1)
    return y, given.recorded(after, call.new_tokens) if given.parts else after


# no published model has more in one layer
_MOST_HEADS = 128
_CALLER = 4  # frames above: _advise, attention, the check of names


def _advise(q: Tensor, k: Tensor, key_padding_mask: Tensor | None, *, from_start: bool) -> None:
    """Warn when a mask hides every key of a sequence, and when the head and token axes look swapped.

    from_start: no memory precedes the call, and no masses of queries are given. Nothing is checked inside a graph or on
    a GPU, where the check would have to wait for the device. After a memory, a sequence may have no new keys while
    others of its batch continue, so nothing is said then. Axes look swapped when there are more than 128 heads, two
    tokens or more, and at least four heads per token.
    """
    if not from_start or torch.compiler.is_compiling() or torch_func.active():
        return
    heads, tokens = q.shape[1], q.shape[2]
    if heads > _MOST_HEADS and heads >= 4 * tokens > 4 and k.shape[1] > _MOST_HEADS:
        warnings.warn(
            f"attention: q has {heads} heads of {tokens} tokens each, as its axes are (batch, heads, tokens, dim). "
            "For tensors of (batch, tokens, heads, dim) "
            "pass q.transpose(1, 2), and k and v likewise.",
            stacklevel=_CALLER,
        )
    mask = key_padding_mask
    if mask is not None and mask.device.type == "cpu" and tokens and mask.numel():
        hidden = int((~mask.any(1)).sum())
        if hidden:
            warnings.warn(
                f"attention: key_padding_mask hides every key of {hidden} of {len(mask)} sequences, "
                "whose output is zero. This is right where a piece of a text holds padding only. If it is not meant: "
                "True marks real tokens here, and padding in torch's key_padding_mask. Pass ~key_padding_mask.",
                stacklevel=_CALLER,
            )
