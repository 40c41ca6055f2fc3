"""One call of attention, checked and prepared: what every path receives."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from zonal.algebra import Operator, Tags
from zonal.algebra.anchor import Marginals
from zonal.algebra.bound import Bound, expanded
from zonal.algebra.named import operator_of
from zonal.algebra.prior import Bias, ChunkCausal, Visibility, Window, visibility
from zonal.algebra.score import Fused
from zonal.algebra.score.base import prepared_keys
from zonal.errors import ArgumentError
from zonal.execution.mask import NO_MASSES, Masses, log_decay_of, marginals_of
from zonal.execution.refusals import check_order, check_packing, check_taken, check_tokens
from zonal.memory import KeyValues, Memory, Tokens
from zonal.memory.tokens import joined
from zonal.memory.weights import check_weights, weighed
from zonal.tracing import recorded
from zonal.typed import check_switch, check_tensors

Result = tuple[Tensor, Memory | None]
"""y (B, H, T, P), and the memory after the call's tokens where the call goes on from one."""
_LARGEST = torch.finfo(torch.float32).max


class Raw(NamedTuple):
    """Queries, keys and values as they came, and the caller's scale.

    shared: the queries and keys of one head that all heads share, before they were expanded; or None.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float | None
    shared: tuple[Tensor, Tensor] | None


class Prepared(NamedTuple):
    """Queries and keys after the score has prepared them, and values, in the computing type (float32 or better)."""

    q: Tensor
    k: Tensor
    v: Tensor


class Sizes(NamedTuple):
    """B, H, T, S, D of prepared queries and keys, and P."""

    batch: int
    heads: int
    queries: int
    keys: int
    dim: int
    value_dim: int


class Held(NamedTuple):
    """What a call goes on from: the kind of memory and how many tokens it holds (for a window of keys: still holds)."""

    kind: str
    tokens: int


@dataclass(frozen=True)
class Call:
    """A checked call. The score has prepared q (B, H, T, D) and k (B, Hkv, S, D); v is (B, Hkv, S, P). All are in the
    computing type (float32 or better).

    q, k and v are prepared when a path asks for them. A kernel that prepares them itself takes ``raw`` (None once
    tokens have been replaced).

    coefficients: the link's, in the computing type, (n, H or 1, 1, 1).
    log_decay: (B or 1, Hkv, S) float64 or None; 0 on padding.
    marginals: the masses of queries and keys, for anchors that couple queries.
    causal: whether queries have positions at all, declared by the operator or requested by the call.
    held: what the call continues from; None means nothing, and that no memory is returned.
    memory: the memory that the call continues from; None when only the plan of such a call is wanted.
    place: the device that the call is planned for; None is that of its tensors.
    dropout: the share of weights that are set to zero.
    """

    operator: Operator
    bound: Bound
    tags: Tags
    raw: Raw | None
    prepared: Prepared | None
    coefficients: Tensor
    visibility: Visibility
    log_decay: Tensor | None
    key_bias: Tensor | None
    causal: bool
    dtype: torch.dtype  # of the result
    head_dim: int  # of queries and keys as they came
    marginals: Marginals | None = None
    held: Held | None = None
    memory: Memory | None = None
    place: torch.device | None = None
    dropout: float = 0.0
    _kept: list[Prepared] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def tokens(self) -> Prepared:
        """Queries, keys and values prepared, once."""
        if self.prepared is not None:
            return self.prepared
        # kept by hand: a cached_property takes a lock, which tracing does not know
        if not self._kept:
            self._kept.append(self._prepare())
        return self._kept[0]

    def _prepare(self) -> Prepared:
        assert self.raw is not None
        q, k, v, scale, _ = self.raw
        compute = torch.promote_types(q.dtype, torch.float32)
        score, params = self.bound.score, self.bound.score_params
        query, key = score.prepare_query(q.to(compute), params, scale), prepared_keys(score, k.to(compute), params)
        return Prepared(query, key, v.to(compute))

    @property
    def q(self) -> Tensor:
        return self.tokens.q

    @property
    def k(self) -> Tensor:
        return self.tokens.k

    @property
    def v(self) -> Tensor:
        return self.tokens.v

    @property
    def given(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values as they came, or prepared where tokens have been replaced."""
        return self.tokens if self.raw is None else self.raw[:3]

    @property
    def fused(self) -> Fused | None:
        """The score as kernels compute it from tokens as they came; None = they get prepared ones."""
        if self.raw is None:
            return None
        return self.bound.score.fused(self.bound.score.width(self.head_dim), self.bound.score_params, self.raw.scale)

    @property
    def shape(self) -> Sizes:
        q, k, v = self.given
        dim = q.shape[3] if self.raw is None else self.bound.score.width(q.shape[3])
        return Sizes(q.shape[0], q.shape[1], q.shape[2], k.shape[2], dim, v.shape[3])

    @property
    def biased(self) -> bool:
        """Whether scores get log priors: those of the call, or decays and biases of the keys that its memory holds."""
        priors = self.log_decay, self.key_bias, self.bound.slopes
        own = not self.tags.solves and any(x is not None for x in priors)
        return own or (isinstance(self.memory, KeyValues) and self.memory.biased)

    @property
    def bias(self) -> Bias:
        """What is added to log K, made anew each time."""
        return self.bound.bias(self.visibility, self.log_decay, self.key_bias)

    @property
    def empty(self) -> bool:
        """Whether keys or values have no numbers."""
        return min(self.head_dim, self.shape.value_dim) == 0

    @property
    def recorded(self) -> bool:
        """Whether gradients flow to anything that the call is made from."""
        bound = self.bound
        own = self.coefficients, self.log_decay, self.key_bias
        return recorded((*self.given, *own, *bound.score_params.values(), *bound.anchor_params.values()))

    @property
    def kind(self) -> str:
        """Of the memory that the call goes on from; else of the smallest exact one of its operator."""
        return Memory.kind_for(self.operator, self.head_dim) if self.held is None else self.held.kind

    @property
    def device(self) -> torch.device:
        return self.given[0].device if self.place is None else self.place

    @property
    def chunk(self) -> int | None:
        """The chunk of a declared ChunkCausal prior."""
        return next((p.size for p in self.bound.priors if isinstance(p, ChunkCausal)), None)

    @property
    def window(self) -> Window | None:
        """A declared Window prior."""
        return next((p for p in self.bound.priors if isinstance(p, Window)), None)

    @property
    def new_tokens(self) -> Tokens:
        """The call's keys and values, as a memory takes them in."""
        return Tokens(self.k, self.v, self.visibility.key_mask, self.log_decay, self.key_bias)

    def seen(self, queries: int, keys: int, mask: Tensor | None, cu_seqlens: Tensor | None = None) -> Visibility:
        """The visibility of other queries and keys by the rules of the call. mask: bool (B, S), False = padding."""
        return visibility(
            queries, keys, self.bound.priors, causal=self.causal, include_self=self.tags.includes_self,
            key_padding_mask=mask, cu_seqlens=cu_seqlens,
        )  # fmt: skip

    def expand(self, x: Tensor) -> Tensor:
        """(B, Hkv, …) -> (B, H, …): each key head serves ``groups`` neighbouring query heads."""
        return expanded(x, self.bound.groups)

    def scaled(self, y: Tensor) -> Tensor:
        """y times the anchor's factor a head, in the type of the result.

        With an anchor that has a window, which ends with the query's own key, queries whose key is padding get zeros.
        """
        mask = self.visibility.key_mask
        if self.tags.window and mask is not None and mask.shape[1]:
            real = mask[:, self.visibility.position.clamp_min(0).to(mask.device)]
            y = y.masked_fill(~real[:, None, :, None], 0)
        factor = self.bound.anchor.output_scale(self.bound.anchor_params, self.bound.heads)
        if factor is not None:
            y = y * factor.to(y).view(1, -1, 1, 1)
        return y.to(self.dtype)


def autocast(x: Tensor, kind: str) -> Tensor:
    """In the type of torch.autocast, which leaves float64 and whole numbers as they are."""
    return x.to(torch.get_autocast_dtype(kind)) if x.is_floating_point() and x.dtype != torch.float64 else x


def lowered(call: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in the type of torch.autocast where it is on.

    Raises: ArgumentError, which begins with ``call``, for what is no dense tensor.
    """
    check_tensors(call, {"q": q, "k": k, "v": v})
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):  # torch refuses to answer for meta
        return q, k, v
    return autocast(q, kind), autocast(k, kind), autocast(v, kind)


def spread(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys of one head each for all heads of values, without a copy; others as they are."""
    if not (q.ndim == k.ndim == v.ndim == 4 and q.shape[1] == k.shape[1] == 1 < v.shape[1]):
        return q, k
    return q.expand(-1, v.shape[1], -1, -1), k.expand(-1, v.shape[1], -1, -1)


def prepare(
    operator: Operator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    log_decay: Tensor | None = None,
    key_bias: Tensor | None = None,
    masses: Masses = NO_MASSES,
) -> Call:
    """Check the arguments against the operator, and prepare queries, keys, masks and biases.

    They are those of ``zonal.attention``; action_mask and key_gate follow by ``weighted``.
    """
    check_switch("attention", "causal", causal)
    if scale is not None and not (isinstance(scale, int | float) and -_LARGEST < scale < _LARGEST):
        raise ArgumentError(f"attention: scale must be a finite number or None, received {scale!r}.")
    check_tensors("attention", {"cu_seqlens": cu_seqlens}, optional=True)
    shared, (q, k) = (q, k), spread(q, k, v)
    check_tokens(q, k, v, key_padding_mask, log_decay, key_bias)
    if key_padding_mask is not None:  # whatever padding holds, NaN included, is in no product, here or in the gradients
        hidden = ~key_padding_mask[:, None, :, None]
        shared, v = (shared[0], shared[1].masked_fill(hidden, 0)), v.masked_fill(hidden, 0)
        k = spread(*shared, v)[1]
        key_bias = None if key_bias is None else key_bias.masked_fill(hidden[..., 0], 0)
    operator = operator_of("attention", operator).for_dim(q.shape[3])
    operator.check("attention", q.shape[3])
    tags = operator.tags
    bound = operator.bind(q.shape[1], k.shape[1])
    check_packing(cu_seqlens, q.shape[0])
    check_taken(operator, tags, scale, log_decay, key_bias)
    compute = torch.promote_types(q.dtype, torch.float32)
    seen = visibility(
        q.shape[2], k.shape[2], bound.priors, causal=causal, include_self=tags.includes_self,
        key_padding_mask=key_padding_mask, cu_seqlens=cu_seqlens,
    )  # fmt: skip
    decay = log_decay_of(bound, k, key_padding_mask, log_decay)
    tied = causal or any(p.orders for p in bound.priors)
    check_order(operator, tags, tied, fades=decay is not None)
    return Call(
        operator=operator,
        bound=bound,
        tags=tags,
        raw=Raw(q, k, v, None if scale is None else float(scale), shared if shared[0] is not q else None),
        prepared=None,
        coefficients=bound.coefficients.to(q.device, compute),
        visibility=seen,
        log_decay=decay,
        key_bias=key_bias,
        causal=tied,
        dtype=q.dtype,
        head_dim=q.shape[3],
        marginals=marginals_of(
            operator, seen, (q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2]), q.device, compute, masses
        ),
    )


def weighted(call: Call, action_mask: Tensor | None, key_gate: Tensor | None, whole: bool = True) -> Call:
    """The call with weights on its keys: which tokens are stored at all, and how strongly.

    whole: the call has all tokens of its sequences; none were before it, will follow, or are in another process.
    """
    if action_mask is None and key_gate is None:
        return call
    shape = call.shape.batch, call.bound.kv_heads, call.shape.keys
    real = call.visibility.key_mask
    check_weights("attention", call.operator, shape, action_mask, key_gate, real, whole)
    if key_gate is not None and real is not None:  # padding enters no product
        key_gate = key_gate.masked_fill(~real[:, None], 0)
    return replace(call, raw=None, prepared=Prepared(call.q, *weighed(call.k, call.v, action_mask, key_gate)))


def thinned(call: Call, dropout: float) -> Call:
    """The call with a share of its weights set to zero."""
    if not isinstance(dropout, int | float) or not 0 <= dropout < 1:
        raise ArgumentError(f"attention: dropout must be at least 0 and below 1, received {dropout!r}.")
    return replace(call, dropout=dropout) if dropout else call


def resumed(call: Call, memory: Memory) -> Call:
    """The call after the tokens of a memory, which also leaves one with its own."""
    tokens = memory.tokens.length if isinstance(memory, KeyValues) else memory.count
    return replace(call, memory=memory, held=Held(memory.kind, tokens))


def following(call: Call, past: Tokens) -> Call:
    """The call with the tokens of a memory of keys before its own.

    Queries stay where they are, at the end; without causality they see everything.
    """
    if past.length == 0:
        return call
    new = call.new_tokens
    if new.log_decay is not None:
        new = new._replace(log_decay=new.log_decay.expand(new.k.shape[:3]))
    k, v, mask, decay, key_bias = joined(past._replace(k=past.k.to(new.k), v=past.v.to(new.v)), new)
    tokens, seen = Prepared(call.q, k, v), call.seen(call.q.shape[2], k.shape[2], mask)
    return replace(call, raw=None, prepared=tokens, visibility=seen, log_decay=decay, key_bias=key_bias)


def span(call: Call, start: int, stop: int, cu_seqlens: Tensor | None = None) -> Call:
    """The call on its tokens [start, stop) alone, as one document or as those of ``cu_seqlens``; T = S."""

    def cut(x: Tensor) -> Tensor:
        return x[:, :, start:stop]

    raw, prepared = call.raw, None
    if raw is None:
        prepared = Prepared(*map(cut, call.tokens))
    else:
        shared = None if raw.shared is None else (cut(raw.shared[0]), cut(raw.shared[1]))
        raw = Raw(cut(raw.q), cut(raw.k), cut(raw.v), raw.scale, shared)
    mask = call.visibility.key_mask
    seen = call.seen(stop - start, stop - start, None if mask is None else mask[:, start:stop], cu_seqlens)
    decay, key_bias = (None if x is None else cut(x) for x in (call.log_decay, call.key_bias))
    return replace(call, raw=raw, prepared=prepared, visibility=seen, log_decay=decay, key_bias=key_bias)


def without_idle(call: Call, idle: int, run: Callable[[Call], Result]) -> Result:
    """``run`` without the first ``idle`` queries, which come before the first key and see nothing: their y is zero."""
    tokens = Prepared(call.q[:, :, idle:], call.k, call.v)
    y, after = run(replace(call, raw=None, prepared=tokens, visibility=call.visibility.tail(idle)))
    return F.pad(y, (0, 0, idle, 0)), after


def empty_memory(call: Call, dtype: torch.dtype | None = None) -> Memory:
    """The memory of a call's operator before its first token. ``dtype`` of keys and values: by default the result's."""
    shape, heads = call.shape, call.bound.kv_heads
    return Memory.empty(
        call.operator, shape.batch, heads, call.head_dim, shape.value_dim, dtype or call.dtype, call.device
    )


def check_carried(call: Call, count: int) -> None:
    """Raise ArgumentError unless the call can go on from a memory of ``count`` tokens, and leave one."""
    queries, keys = call.shape.queries, call.shape.keys
    if call.tags.couples:
        raise ArgumentError(
            f"attention: operator {call.operator.name!r} reads all queries together, so that a memory read query by "
            "query would give other answers. Leave memory and return_memory out."
        )
    if call.visibility.packed:
        raise ArgumentError(
            "attention: packed documents (cu_seqlens) start afresh and neither take nor leave a memory. "
            "Pass one of the two."
        )
    if call.causal and count and queries != keys:
        raise ArgumentError(
            "attention: with a memory, causal queries are the new tokens themselves: q must have as many tokens as k, "
            f"received {queries} and {keys}."
        )


def check_memory(call: Call, memory: Memory) -> None:
    """Raise ArgumentError unless the call can go on from the memory."""
    check_carried(call, memory.count)
    shape = call.shape
    queries = shape.queries
    if isinstance(memory, KeyValues) and memory.reach is not None and not call.causal:
        first = max(0, memory.count + shape.keys - queries - memory.reach + 1)
        gone = memory.count - (memory.end - memory.begin)
        if first < gone:
            raise ArgumentError(
                f"attention: the first of {queries} queries sees keys from token {first} on, "
                f"but a memory with a window has dropped the first {gone}. "
                "Pass at most as many queries as new keys, or all keys at once without a memory."
            )
    wanted = shape.batch, call.bound.kv_heads, call.head_dim, shape.value_dim
    if tuple(memory.form[:4]) != wanted:
        raise ArgumentError(
            f"attention: the memory holds (batch, key heads, key dim, value dim) = {tuple(memory.form[:4])}, "
            f"the call has {wanted}."
        )
