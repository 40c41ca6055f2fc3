"""Anchors: from kernel blocks to weights, W = A(K_qk, K_kk, visible); the output is y = W V.

Row, Count and Raw read only a query's own row of K, and reduce it key by key. Their ``reduction`` is a monoid (init,
absorb, combine, finalise), which the tiled, chunked and streaming drivers use. TopK is Row once the smallest kept value
of each row is known. Ridge and Koopman solve a linear system with the kernel among keys (``solves``), which is not such
a reduction.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from zonal.algebra.declaration import Declaration, Derived, Move, require, require_whole
from zonal.algebra.hashing import Search
from zonal.algebra.prior import Visibility
from zonal.algebra.score import Params


class Potentials(NamedTuple):
    """State of a plan's iteration: f (B, H, T), g (B, H, S), the number of iterations, and the largest last change.

    The change is the part of a head's mass that the last iteration moved.
    """

    query: Tensor
    key: Tensor
    iterations: int
    error: float


class Marginals(NamedTuple):
    """Log masses that queries give, (B, H, T), and keys receive, (B, H, S), in plans; they sum to one per document.

    ``plan.ABSENT`` excludes a token. start: initial potentials of the iteration, None = zero."""

    query: Tensor
    key: Tensor
    start: Potentials | None = None


class Blocks(NamedTuple):
    """What an anchor may read. Blocks of K are at least float32, and zero where forbidden (-inf for log K).

    qk: (B, H, T, S) kernel, or its logarithm when ``log`` is True. kk: (B, H, S, S), for anchors that solve. visible:
    bool, broadcastable to qk. visibility: the same as intervals. params: learned parameters of the anchor. q (B, H, T,
    D), k (B, H, S, D): prepared vectors, for anchors that solve. log_decay (B or 1, H, S): their decay of the past, if
    any. marginals: the masses of queries and keys, for anchors that couple queries.
    """

    qk: Tensor
    log: bool
    kk: Tensor | None
    visible: Tensor
    visibility: Visibility
    params: Params
    q: Tensor | None = None
    k: Tensor | None = None
    log_decay: Tensor | None = None
    marginals: Marginals | None = None


ROW_GAUGE = Derived("row gauge", "hence K and a K (any positive a_t) are the same operator: row gauge")
_NO_GAUGE = Derived("no gauge", "hence a factor a row of K is one of its output: no gauge")


class State(NamedTuple):
    """A partial sum over keys: total (B, H, T, P) = sum K v, mass (B, H, T, 1) = sum K, top = the maximum of log K.

    total and mass are relative to exp(top).
    """

    total: Tensor
    mass: Tensor
    top: Tensor


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total += a @ b in place, without a buffer for the product.

    total is contiguous (B, H, T, P), a (B, H, T, S), b (B, H, S, P).
    """
    total.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1))
    return total


class Anchor(Declaration, abstract=True):
    """Base of anchors, which make weights of a kernel.

    Class attributes:
    ``solves``: needs the kernel among keys. ``normalises``: divides by the sum of a row.
    ``include_self``: whether a causal query sees its own key by default.
    ``couples``: the weights of a query depend on the other queries.
    ``family``: "sums" (over the keys of a row), "ridge" (solves), "window" (sums over two kernels), "plan", "tree", or
    "" (none of these). It decides which execution paths apply.
    ``reduction``: the name of the anchor in compiled kernels, None = they do not have it.
    ``top``: how many keys a row keeps, 0 = all. ``shifts``: the largest number of Koopman steps.
    ``by_query``: each query needs its own inverse.
    ``window``: how many of the last keys a query weighs by the operator's score and link. Earlier keys have the kernel
    that ``LocalGlobal`` declares. 0 = all keys have one kernel.
    """

    slot = "anchor"
    reserved = ("family", "reduction", "top", "shifts", "by_query", "window")
    family: ClassVar[Literal["sums", "ridge", "window", "plan", "tree", ""]] = ""
    reduction: ClassVar[Literal["row", "count", "raw", "ridge", None]] = None
    solves: ClassVar[bool] = False
    normalises: ClassVar[bool] = False
    couples: ClassVar[bool] = False
    include_self: ClassVar[bool] = True
    top: ClassVar[int] = 0
    shifts: ClassVar[int] = 0
    by_query: ClassVar[bool] = False
    window = 0

    def sized(self, dim: int, heads: int) -> "Anchor":
        """The anchor for heads of size ``dim`` and a number of key heads, with open sizes filled in."""
        return self

    def started(self, entry: float, seed: int) -> dict[str, Tensor]:
        """As ``Score.started``, for an anchor that a layer has sized."""
        return {}

    def weights(self, blocks: Blocks) -> Tensor:
        """W (B, H, T, S): the definition."""
        raise NotImplementedError(f"{type(self).__name__}.weights")

    def output_scale(self, params: Params, heads: int) -> Tensor | None:
        """A factor of y per head, (H or 1,), or None."""
        return None


class SumAnchor(Anchor, abstract=True):
    """Base of anchors whose weights are K_ts times a factor of the row. They reduce a row key by key."""

    family = "sums"

    def init(self, shape: tuple[int, int, int], value_dim: int, like: Tensor) -> State:
        """The empty sum for (B, H, T) queries."""
        return State(
            like.new_zeros(*shape, value_dim), like.new_zeros(*shape, 1), like.new_full((*shape, 1), float("-inf"))
        )

    def absorb(self, state: State, kernel: Tensor, v: Tensor, log: bool) -> State:
        """Add the keys of one tile to the state, in place. The kernel's buffer is overwritten.

        With ``log`` the kernel is log K and the running maximum is subtracted (online softmax). Only anchors that
        normalise keep mass.
        """
        if not log:
            mass = state.mass.add_(kernel.sum(-1, keepdim=True)) if self.normalises else state.mass
            return State(_add_product(state.total, kernel, v), mass, state.top)
        top = torch.maximum(state.top, kernel.amax(-1, keepdim=True))
        safe = top.masked_fill(top == float("-inf"), 0)
        part = kernel.sub_(safe).exp_()
        keep = (state.top - safe).exp_()
        total = _add_product(state.total.mul_(keep), part, v)
        return State(total, state.mass.mul_(keep).add_(part.sum(-1, keepdim=True)), top)

    def combine(self, a: State, b: State, log: bool) -> State:
        """The sum over both sets of keys. Associative and commutative."""
        if not log:
            return State(a.total + b.total, a.mass + b.mass, a.top)
        top = torch.maximum(a.top, b.top)
        safe = top.masked_fill(top == float("-inf"), 0)
        keep_a, keep_b = (a.top - safe).exp(), (b.top - safe).exp()
        return State(a.total * keep_a + b.total * keep_b, a.mass * keep_a + b.mass * keep_b, top)

    def factor(self, state: State, count: Tensor) -> Tensor:
        """The factor of each row of K, (B, H, T, 1)."""
        raise NotImplementedError(f"{type(self).__name__}.factor")

    def finalise(self, state: State, count: Tensor, log: bool) -> tuple[Tensor, Tensor]:
        """(y, factor of the row) from the whole sum; with ``log`` the factor's negative logarithm, +inf for empty rows.

        ``count`` (B or 1, 1, T, 1): visible keys. Empty rows give 0.
        """
        if log:
            y = state.total * torch.where(state.mass > 0, 1 / state.mass, 0)
            return y, torch.where(state.mass > 0, state.top + state.mass.log(), float("inf"))
        factor = self.factor(state, count)
        return state.total * factor, factor


def no_sum(mass: Tensor) -> Tensor:
    """Which sums of rows count as zero: below the smallest normal number they have few digits and no inverse."""
    return mass.abs() < torch.finfo(mass.dtype).tiny


@dataclass(frozen=True)
class Row(SumAnchor):
    """W = K / sum over visible keys of K.

    Empty rows give 0, and so do rows whose sum is zero or below the normal numbers of its type (1e-38 in float32).
    allow_signed: accept a kernel with negative values, which is an error otherwise. The sum of a row may then be close
    to zero and its output very large. A negative sum flips the signs of the row. There is no warning.

    Raises: ArgumentError when an operator with a signed kernel runs without ``allow_signed``.
    """

    normalises = True
    reduction = "row"

    allow_signed: bool = False

    def factor(self, state: State, count: Tensor) -> Tensor:
        empty = no_sum(state.mass)
        return torch.where(empty, 0, 1 / torch.where(empty, 1, state.mass))

    def weights(self, blocks: Blocks) -> Tensor:
        if blocks.log:
            log = blocks.qk
            top = log.amax(-1, keepdim=True) if log.shape[-1] else log.new_zeros(*log.shape[:-1], 1)
            kernel = (log - top.masked_fill(top == float("-inf"), 0).detach()).exp()
        else:
            kernel = blocks.qk
        mass = kernel.sum(-1, keepdim=True)
        # the inner where keeps 1/0 out of the backward pass, where it would be 0 * inf
        empty = no_sum(mass)
        return torch.where(empty, 0, kernel / torch.where(empty, 1, mass))

    def moves(self) -> tuple[Move, ...]:
        mean = Derived("means of values", "hence outputs are weighted means of values")
        signed = Derived("", "hence a row's sum may come near zero, and its output grow without bound")
        probe = self.move("quotient", "row probe", "only the row-conditional of K is observed", ROW_GAUGE)
        section = "rows of sum one", "of all a K the one whose rows sum to one"
        if not self.allow_signed:
            return (probe, self.move("section", *section, mean))
        accepted = self.move("restriction", "signed rows", "K may be negative (allow_signed)", signed)
        return (accepted, probe, self.move("section", *section))


@dataclass(frozen=True)
class TopK(Anchor):
    """W = K / sum over the k largest visible entries of a row, 0 elsewhere: ``Row`` on the k nearest keys per query.

    All keys equal to the k-th largest are kept, so that their order does not matter. A row that sees at most k keys
    keeps them all, as Row does. The selection has no gradient; gradients flow through the weights of the kept keys.

    k: any whole number >= 1. search: how path='sparse' finds candidates; None = no approximation. All other paths visit
    every key and are exact.

    Raises: ArgumentError for k out of range, and for a search of another type.
    """

    family = "sums"
    normalises = True

    k: int = 256
    search: Search | None = None

    def __post_init__(self) -> None:
        require_whole("TopK: k", self.k)
        require(
            self.search is None or isinstance(self.search, Search),
            f"TopK: search must be a search such as hashing.LSH(), or None, received {self.search!r}.",
        )

    @property
    def top(self) -> int:
        return self.k

    def least(self, kernel: Tensor) -> Tensor:
        """The k-th largest entry of each row of K or log K (…, T, S), as a constant (…, T, 1).

        A row with fewer than k entries gives its smallest.
        """
        keys = kernel.shape[-1]
        if keys == 0:
            return kernel.new_full((*kernel.shape[:-1], 1), float("-inf"))
        return kernel.detach().topk(min(self.k, keys), sorted=False).values.amin(-1, keepdim=True)

    def weights(self, blocks: Blocks) -> Tensor:
        # what is not a number is not below anything: a row that sees it is not a number either, as everywhere
        below = blocks.qk < self.least(blocks.qk)
        return Row().weights(blocks._replace(qk=blocks.qk.masked_fill(below, float("-inf") if blocks.log else 0.0)))

    def moves(self) -> tuple[Move, ...]:
        found = () if self.search is None else self.search.moves()
        few = Derived("few keys", "hence no other key has a weight, but for those that equal the least of them")
        text = f"all but the {self.k} largest entries of a row are no evidence"
        return (self.move("restriction", "top k", text, few), *Row().moves(), *found)


@dataclass(frozen=True)
class Count(SumAnchor):
    """W_ts = K_ts / M_t, with M_t the number of keys that query t sees. Rows need not sum to one; empty rows give 0."""

    reduction = "count"

    def factor(self, state: State, count: Tensor) -> Tensor:
        return torch.where(count > 0, 1 / count.to(state.total.dtype), 0)

    def weights(self, blocks: Blocks) -> Tensor:
        kernel = blocks.qk.exp() if blocks.log else blocks.qk
        count = blocks.visible.expand(*blocks.visible.shape[:-1], kernel.shape[-1]).sum(-1, keepdim=True)
        return kernel * torch.where(count > 0, 1 / count.clamp_min(1).to(kernel.dtype), 0)

    def moves(self) -> tuple[Move, ...]:
        repeated = Derived("repeated keys", "hence keys that are all given twice change no output")
        text = "K is read as a density against the counting measure of visible keys"
        return (
            self.move("quotient", "kernel probe", "K itself is observed", _NO_GAUGE),
            self.move("section", "counted", text, repeated),
        )


@dataclass(frozen=True)
class Raw(SumAnchor):
    """W = K, without normalisation: the output is a sum over keys."""

    reduction = "raw"

    def factor(self, state: State, count: Tensor) -> Tensor:
        return torch.ones_like(state.mass)

    def weights(self, blocks: Blocks) -> Tensor:
        return blocks.qk.exp() if blocks.log else blocks.qk

    def moves(self) -> tuple[Move, ...]:
        grows = Derived("added keys", "hence outputs are sums over keys: those of two sets of keys add")
        return (
            self.move("quotient", "kernel probe", "K itself is observed", _NO_GAUGE),
            self.move("section", "raw", "weights are K as it is", grows),
        )


__all__ = [
    "ROW_GAUGE",
    "Anchor",
    "Blocks",
    "Count",
    "Marginals",
    "Potentials",
    "Raw",
    "Row",
    "State",
    "SumAnchor",
    "TopK",
    "no_sum",
]
