"""Priors B_ts: which keys a query may see and which it favours, independent of the score.

Declared priors (``Causal``, ``ChunkCausal``, ``Window``, ``ALiBi``, ``Decay``) belong to the operator. Key padding,
packed sequences, per-token decays and key biases come with the call. Together they form a ``Visibility`` and a
``Bias``:

* every mask is an interval of keys for each query, [lo_t, hi_t), and a key mask;
* every log prior is row_t + col_s - slope |t - s|. A decay is c_t - c_s with c the running sum of log decays.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from zonal.algebra.declaration import Declaration, Derived, Move, expand_rows, require, require_whole, row
from zonal.errors import ArgumentError

_WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FARTHEST = 2**31
_EARLIER = Derived("no leak", "hence no output depends on a later token")
_SEPARABLE = Derived(
    "separable prior",
    "hence B is a factor of the query times a factor of the key on causal pairs, so that sums over the past can be "
    "carried",
)


class Prior(Declaration, abstract=True):
    """Base of declared masks and biases B_ts of pairs (T, S), per head where they have parameters.

    ``masks``: it forbids pairs. ``orders``: no query sees a later key.
    """

    slot = "prior"
    masks: ClassVar[bool] = False
    orders: ClassVar[bool] = False


@dataclass(frozen=True)
class Causal(Prior):
    """Query t sees keys s <= t (``include_self=True``) or s < t (False). None leaves the choice to the anchor."""

    masks = True
    orders = True

    include_self: bool | None = None

    def moves(self) -> tuple[Move, ...]:
        return (self.move("restriction", "causal", "no query sees a later key", _EARLIER),)


@dataclass(frozen=True)
class ChunkCausal(Prior):
    """Query t sees keys s < size * floor(t / size), which are whole chunks of the past.

    Raises: ArgumentError unless size is a whole number >= 1. Source: Echo (Koopman operators).
    """

    masks = True
    orders = True

    size: int = 16

    def __post_init__(self) -> None:
        require_whole("ChunkCausal: size", self.size, most=_FARTHEST)

    def moves(self) -> tuple[Move, ...]:
        text = f"a query sees only whole chunks of {self.size} tokens before its own"
        return (self.move("restriction", "whole chunks", text, _EARLIER),)


@dataclass(frozen=True)
class Window(Prior):
    """Query t sees keys t - left <= s <= t + right, in tokens.

    right: only used without a causal mask; None = no limit.

    Raises: ArgumentError unless they are whole numbers >= 0.
    """

    masks = True

    left: int = 256
    right: int | None = None

    def __post_init__(self) -> None:
        require_whole("Window: left", self.left, 0, _FARTHEST)
        if self.right is not None:
            require_whole("Window: right", self.right, 0, _FARTHEST)

    def moves(self) -> tuple[Move, ...]:
        reach = Derived("reach", f"hence n layers reach back at most {self.left} n tokens")
        return (self.move("restriction", "window", f"a query sees at most the {self.left} keys before it", reach),)


@dataclass(frozen=True)
class ALiBi(Prior):
    """log B_ts = -slope_h |t - s|, a bias that is linear in the distance of positions.

    slopes: per head; None = 2^(-8 (h + 1) / H).

    Raises: ArgumentError for an empty tuple of slopes. Source: Press et al. 2022.
    """

    slopes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.slopes is not None:
            object.__setattr__(self, "slopes", tuple(float(v) for v in self.slopes))
            require(
                len(self.slopes) > 0,
                "ALiBi: at least one slope is required, received (). Leave slopes out for the usual.",
            )

    def for_heads(self, heads: int) -> Tensor:
        """The slopes (H,)."""
        values = self.slopes
        if values is None:
            values = tuple(2 ** (-8 * (h + 1) / heads) for h in range(heads))
        return expand_rows(torch.tensor(values, dtype=torch.float64), heads, "ALiBi slopes")

    def moves(self) -> tuple[Move, ...]:
        text = "evidence falls exponentially with the distance of positions, at a fixed rate per head"
        return (self.move("restriction", "positions", text, _SEPARABLE),)


@dataclass(frozen=True)
class Decay(Prior):
    """B_ts = rate_h^(t - s) with 0 < rate < 1 per key head, or per token with attention(log_decay=...).

    learn: the rates are learned through log(-log rate). gated: a layer computes the decay of each token from its input,
    and the rates are only the initial values of its gate (``learn`` must be False).

    Raises: ArgumentError for rates out of range.
    """

    rates: tuple[float, ...] = (0.9, 0.97, 0.99, 0.997)
    learn: bool = True
    gated: bool = False

    kv_rows: ClassVar[tuple[str, ...]] = ("log_rate",)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rates", tuple(float(v) for v in self.rates))
        require(
            len(self.rates) > 0 and all(0 < r < 1 for r in self.rates),
            f"Decay: rates must lie in (0, 1), received {self.rates}.",
        )
        require(
            not (self.gated and self.learn),
            "Decay: gated=True takes the decay from a layer's gate, which learns; pass learn=False.",
        )

    def initial(self) -> dict[str, Tensor]:
        return {"log_rate": row(*(math.log(-math.log(r)) for r in self.rates))} if self.learn else {}

    def log_decay(self, params: dict[str, Tensor], heads: int) -> Tensor:
        """log rate (H,) <= 0."""
        if self.learn:
            value = -params["log_rate"].double().exp()
        else:
            value = torch.tensor([math.log(r) for r in self.rates], dtype=torch.float64)
        return expand_rows(value, heads, "Decay rates")

    def moves(self) -> tuple[Move, ...]:
        factor = "a factor that each token sets" if self.gated else "a constant factor"
        return (self.move("restriction", "fading", f"evidence fades by {factor} a step", _SEPARABLE),)


class Intervals(NamedTuple):
    """The keys [lo_t, hi_t) that each query may see, int64 (T,) on the CPU, from which the drivers plan their loops.

    segment_start: first key of the packed document of each query, (T,); 0 without packing. position: absolute position
    of each query among the keys, (T,).
    """

    lo: Tensor
    hi: Tensor
    segment_start: Tensor
    position: Tensor


Rule = tuple[int, int, tuple[Prior, ...], bool, bool]  # queries, keys, priors, causal, include_self


class KeyRange(NamedTuple):
    """Neighbouring queries: the keys [first, last) that any of them may see, and [common, until) that all may see.

    edge: hi of the first query, if hi grows by one per query; else None. The key mask may forbid more."""

    first: int
    last: int
    common: int
    until: int
    edge: int | None

    def all_see(self, s0: int, s1: int) -> bool:
        """Whether the rule forbids nothing among the keys [s0, s1)."""
        return self.common <= s0 and s1 <= self.until

    def diagonal(self, s0: int) -> int | None:
        """The d for which the mask of keys from s0 on is s - s0 <= t - t0 + d, as in ``torch.tril``, or None."""
        return None if self.edge is None or self.common > s0 else self.edge - s0 - 1


@dataclass(frozen=True)
class Visibility:
    """Which keys each query may see: s in [lo_t, hi_t) and key_mask[b, s].

    made: the intervals, or a function that computes them on demand (kernels that know the rules do not need them).
    key_mask: bool (B, S) or None. edges: borders of packed documents, int64 (N + 1,) on the CPU, None without packing.
    rule: plain values that determine the intervals, so that they can be cached between calls (``intervals_of``); else
    None.
    """

    made: Intervals | Callable[[], Intervals]
    keys: int
    key_mask: Tensor | None = None
    edges: Tensor | None = None
    rule: Rule | None = None
    _kept: list[Intervals] = field(default_factory=list, init=False, repr=False, compare=False)

    @property
    def intervals(self) -> Intervals:
        if isinstance(self.made, Intervals):
            return self.made
        if not self._kept:  # by hand: a cached_property takes a lock, which tracing does not know
            self._kept.append(self.made())
        return self._kept[0]

    @property
    def lo(self) -> Tensor:
        return self.intervals.lo

    @property
    def hi(self) -> Tensor:
        return self.intervals.hi

    @property
    def segment_start(self) -> Tensor:
        return self.intervals.segment_start

    @property
    def position(self) -> Tensor:
        return self.intervals.position

    @property
    def borders(self) -> Tensor | None:
        """``edges`` where there are several documents, else None."""
        return self.edges if self.edges is not None and self.edges.shape[0] > 2 else None

    @property
    def packed(self) -> bool:
        """Whether there are several documents."""
        return self.borders is not None

    @property
    def documents(self) -> int:
        """How many documents there are."""
        return 1 if self.borders is None else self.borders.shape[0] - 1

    def tail(self, first: int) -> "Visibility":
        """Without the first queries."""
        return replace(self, made=Intervals(*(x[first:] for x in self.intervals)), rule=None)

    @property
    def nested(self) -> bool:
        """Whether each query sees a prefix of its document, as a solve by leading blocks requires."""
        if torch.compiler.is_compiling():  # a traced graph has no answers that depend on values: by the rule alone
            return self.rule is not None and not any(isinstance(prior, Window) for prior in self.rule[2])
        return bool((self.lo <= self.segment_start).all())

    def rows(self, start: int, stop: int) -> "KeyRange":
        """The interval rule for the queries [start, stop) as plain numbers; all unknown in a traced graph."""
        if torch.compiler.is_compiling():
            return KeyRange(0, self.keys, self.keys, 0, None)
        lo, hi = self.lo[start:stop], self.hi[start:stop]
        open_ = hi > lo
        if not bool(open_.any()):
            return KeyRange(0, 0, 0, 0, None)
        edge = hi - torch.arange(start, stop)
        straight = int(edge[0]) if bool((edge == edge[0]).all()) else None
        return KeyRange(
            int(lo[open_].min()),
            int(hi[open_].max()),
            int(lo.max()),
            int(hi.min()),
            None if straight is None else straight + start,
        )

    def tile(self, t0: int, t1: int, s0: int, s1: int, device: torch.device) -> Tensor | None:
        """The mask of a tile, broadcastable to (B, 1, t, s); None where nothing is forbidden."""
        mask = None
        if not self.rows(t0, t1).all_see(s0, s1):
            s = torch.arange(s0, s1)
            mask = ((s >= self.lo[t0:t1, None]) & (s < self.hi[t0:t1, None])).to(device)[None, None]
        if self.key_mask is not None:
            keys = self.key_mask[:, None, None, s0:s1]
            mask = keys if mask is None else mask & keys
        return mask

    def distance(self, device: torch.device) -> Tensor:
        """How many real keys come after each key up to the query's position, (B or 1, 1, T, S) int64.

        Padding takes no place: a query at padding stands at the last real key before it.
        """
        position = self.position.to(device)
        if self.key_mask is None:
            return (position[:, None] - torch.arange(self.keys, device=device))[None, None]
        rank = torch.nn.functional.pad(self.key_mask.long().cumsum(-1), (1, 0))
        return (rank[:, (position + 1).clamp_min(0), None] - rank[:, None, 1:])[:, None]

    def place(self, device: torch.device) -> Tensor:
        """How many real keys of its document come before each key, (B or 1, 1, 1, S) int64."""
        keys = torch.arange(self.keys)
        start = torch.zeros_like(keys)
        if self.edges is not None:
            start = self.edges[torch.bucketize(keys, self.edges[1:], right=True)]
        if self.key_mask is None:
            return (keys - start).to(device)[None, None, None]
        rank = torch.nn.functional.pad(self.key_mask.long().cumsum(-1), (1, 0))
        return (rank[:, :-1] - rank[:, start.to(device)])[:, None, None]

    def count(self, device: torch.device) -> Tensor:
        """How many keys each query sees, (B or 1, 1, T) int64."""
        lo, hi = self.lo.to(device), torch.maximum(self.hi, self.lo).to(device)
        if self.key_mask is None:
            return (hi - lo)[None, None]
        seen = torch.nn.functional.pad(self.key_mask.long().cumsum(-1), (1, 0))
        return (seen[:, hi] - seen[:, lo])[:, None]


@dataclass(frozen=True)
class Bias:
    """log B_ts = row[b, h, t] + col[b, h, s] - slope[h] |position_t - s|, each part None when absent.

    float64 where it is a running sum.
    """

    row: Tensor | None = None
    col: Tensor | None = None
    slope: Tensor | None = None

    def tile(self, t0: int, t1: int, s0: int, s1: int, position: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The log prior of a tile, broadcastable to (B, H, t, s)."""
        row = None if self.row is None else self.row[..., t0:t1, None]
        col = None if self.col is None else self.col[..., None, s0:s1]
        # both are long running sums, whose difference has its digits only in float64
        total = col if row is None else row if col is None else row + col
        total = None if total is None else total.to(dtype)
        if self.slope is not None:
            distance = (position[t0:t1, None] - torch.arange(s0, s1)).abs().to(self.slope.device)
            alibi = -self.slope.to(dtype)[:, None, None] * distance.to(dtype)
            total = alibi if total is None else total + alibi
        return total


def visibility(
    queries: int,
    keys: int,
    priors: tuple[Prior, ...],
    *,
    causal: bool,
    include_self: bool,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Visibility:
    """The mask of a call, from those of its priors that mask. With fewer queries than keys, the queries are the last
    positions (as in a cached decoder).
    """
    edges = None
    if cu_seqlens is not None:
        edges = checked_cu_seqlens(cu_seqlens, keys)
        require(
            queries == keys, f"attention: packed sequences need as many queries as keys, received {queries} and {keys}."
        )
    rule = (queries, keys, tuple(p for p in priors if p.masks), causal, include_self)
    return Visibility(
        functools.partial(intervals_of, *rule, edges), keys, key_padding_mask, edges, rule if edges is None else None
    )


def intervals_of(
    queries: int, keys: int, priors: tuple[Prior, ...], causal: bool, include_self: bool, edges: Tensor | None = None
) -> Intervals:
    """The intervals of ``visibility``'s rules. edges: of packed documents."""
    mode: Literal["none", "causal", "chunk"] = "causal" if causal else "none"
    left: int | None = None
    right: int | None = None
    chunk = 1
    for prior in priors:
        if isinstance(prior, Causal):
            mode = "causal" if mode != "chunk" else mode
            include_self = include_self if prior.include_self is None else prior.include_self
        elif isinstance(prior, ChunkCausal):
            mode, chunk = "chunk", prior.size
        elif isinstance(prior, Window):
            left, right = prior.left, prior.right
    position = torch.arange(queries) + keys - queries
    start, end = torch.zeros(queries, dtype=torch.int64), torch.full((queries,), keys, dtype=torch.int64)
    if edges is not None:
        document = torch.bucketize(torch.arange(queries), edges[1:], right=True)
        start, end = edges[:-1][document], edges[1:][document]
    lo, hi = start.clone(), end.clone()
    if mode == "causal":
        hi = torch.minimum(hi, position + (1 if include_self else 0))
    elif mode == "chunk":
        hi = torch.minimum(hi, start + torch.div(position - start, chunk, rounding_mode="floor") * chunk)
    if left is not None:
        lo = torch.maximum(lo, position - left)
        if right is not None:
            hi = torch.minimum(hi, position + right + 1)
    return Intervals(lo, hi.clamp_min(0), start, position)


def relation(
    priors: Prior | tuple[Prior, ...], tokens: int, *, causal: bool = False, include_self: bool = True
) -> Tensor:
    """Which keys each query may see among ``tokens`` tokens, bool (T, T).

    causal, include_self: used where the priors do not set them.
    """
    found = intervals_of(tokens, tokens, priors if isinstance(priors, tuple) else (priors,), causal, include_self)
    place = torch.arange(tokens)
    return (place >= found.lo[:, None]) & (place < found.hi[:, None])


def composed(later: Tensor, earlier: Tensor) -> Tensor:
    """The boolean product of two relations (..., T, T), by counts of paths, which are exact below 2^24."""
    return (later.float() @ earlier.float()) > 0


def checked_cu_seqlens(cu_seqlens: Tensor, total: int, call: str = "attention") -> Tensor:
    """cu_seqlens as int64 on the CPU; must be 1-D, start at 0, strictly increase and end at ``total``."""
    if cu_seqlens.dtype not in _WHOLE or cu_seqlens.device.type == "meta":
        raise ArgumentError(
            f"{call}: cu_seqlens must hold whole numbers, received {cu_seqlens.dtype} on {cu_seqlens.device}."
        )
    edges = cu_seqlens.detach().to("cpu", torch.int64)
    good = (
        edges.ndim == 1
        and edges.numel() >= 2
        and int(edges[0]) == 0
        and int(edges[-1]) == total
        and bool((edges.diff() > 0).all())
    )
    if not good:
        raise ArgumentError(
            f"{call}: cu_seqlens must start at 0, strictly increase and end at the packed length {total}, received "
            f"{cu_seqlens.tolist()}."
        )
    return edges


__all__ = [
    "ALiBi",
    "Bias",
    "Causal",
    "ChunkCausal",
    "Decay",
    "Intervals",
    "Prior",
    "Rule",
    "Visibility",
    "Window",
    "composed",
    "intervals_of",
    "relation",
    "visibility",
]
