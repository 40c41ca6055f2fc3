"""Keys and values of earlier stretches: each rank sends its own to the later ranks that see them.

A rank holds the keys and values of one other rank at a time. It adds up what its queries read of each with the running
sums of their rows (their logarithms for kernels in log space), and makes each tile again in the backward pass. The
gradients of keys and values go back to the rank that they came from.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zonal.algebra.anchor import Raw
from zonal.algebra.prior import Bias, Intervals, Visibility, intervals_of
from zonal.distributed import carried
from zonal.distributed.layout import Layout
from zonal.distributed.ranks import Ranks, check_inside
from zonal.errors import ArgumentError
from zonal.execution.call import Call
from zonal.execution.mask import without_bias
from zonal.execution.paths import tiled
from zonal.execution.paths.tiled import Parts


def attended(ranks: Ranks, place: Layout, call: Call, path: str) -> Tensor:
    """y (B, H, T, P) of a call whose operator needs the keys themselves."""
    _check(call, path)
    row, col = _bias(ranks, place, call)
    mask = call.visibility.key_mask
    mask = call.k.new_ones(call.k.shape[0], call.k.shape[2], dtype=torch.bool) if mask is None else mask
    work = _Work(ranks, place, tiled.parts_of(call), _rows(place, call), _reach(place, call))
    y = _Ring.apply(work, mask[:, None], call.q, call.k, call.v, call.coefficients, row, col)
    assert isinstance(y, Tensor)
    return call.scaled(y)


def _check(call: Call, path: str) -> None:
    """Raises: ArgumentError, on every rank, for what is not split over ranks."""
    name, anchor = call.operator.name, type(call.bound.anchor).__name__
    if call.tags.reduction not in ("row", "count", "raw"):
        raise ArgumentError(
            f"sequence_parallel: operator {name!r} keeps no sums of its past, and its anchor {anchor} does not add up "
            "over stretches of keys. Use an operator whose memory is sums, or whose anchor is Row, Count or Raw."
        )
    if path not in ("auto", "tiled"):
        raise ArgumentError(
            f"sequence_parallel: operator {name!r} reads keys and values of other ranks by tiles, and path {path!r} "
            "was asked for. Use path='auto' or 'tiled'."
        )


def _bias(ranks: Ranks, place: Layout, call: Call) -> tuple[Tensor | None, Tensor | None]:
    """The log prior of rows and of columns; running sums of decays begin with the first token of rank 0."""
    row, col = call.bias.row, call.bias.col
    if call.log_decay is None or row is None or col is None:
        return row, col
    whole = (call.log_decay.sum(-1),)
    everything = Layout.of(place.lengths, place.rank, None)
    (before,) = carried.before(ranks, everything, whole, lambda a, _, b, __: (a[0] + b[0],), whole)
    before = call.expand(before)[..., None]
    return row + before, col - before


def _rows(place: Layout, call: Call) -> Intervals:
    """The keys that each query of this rank sees, as places in the whole sequence."""
    begin, length = place.begin(place.rank), place.lengths[place.rank]
    rules = without_bias(call.bound.priors), call.causal, call.include_self
    if len(place.edges) == 2:
        return intervals_of(length, begin + length, *rules)
    edges = torch.tensor(place.edges, dtype=torch.int64)
    found = intervals_of(place.edges[-1], place.edges[-1], *rules, edges)
    return Intervals(*(x[begin : begin + length] for x in found))


def _reach(place: Layout, call: Call) -> tuple[int, ...]:
    """The first rank of whose keys each rank may see some."""
    first = [place.start(rank) for rank in range(len(place.lengths))]
    if call.window is not None and call.chunk is None:
        first = [max(start, place.begin(rank) - call.window.left) for rank, start in enumerate(first)]
    return tuple(place.holder(start) for start in first)


class _Part(NamedTuple):
    """What rows have read of some keys: y (B, H, T, P), and their factor as tiles have it (``SumAnchor.finalise``)."""

    y: Tensor
    factor: Tensor


Block = tuple[Tensor, ...]
"""Of the keys of one rank: mask (B, 1, S), k (B, Hkv, S, D), v (B, Hkv, S, P), and where there is one the log prior (B
or 1, H, S)."""


@dataclass(frozen=True)
class _Work:
    """A call over several stretches. rows: the keys that each query sees. reach: the first rank that each rank sees."""

    ranks: Ranks
    place: Layout
    parts: Parts
    rows: Intervals
    reach: tuple[int, ...]

    @property
    def steps(self) -> int:
        """The largest distance between a rank and one whose keys it sees."""
        return max(rank - first for rank, first in enumerate(self.reach))

    def source(self, distance: int) -> int | None:
        """The rank ``distance`` before this one, if this rank sees its keys."""
        rank = self.place.rank - distance
        return rank if rank >= self.reach[self.place.rank] else None

    def reader(self, distance: int) -> int | None:
        """The rank ``distance`` after this one, if it sees the keys of this one."""
        rank = self.place.rank + distance
        return rank if rank < len(self.reach) and self.reach[rank] <= self.place.rank else None

    def fetched(self, own: Block, distance: int) -> Block | None:
        """The block of the rank ``distance`` before this one; None where this rank sees none of its keys."""
        if not distance:
            return own
        source = self.source(distance)
        keys = 0 if source is None else self.place.lengths[source]
        shapes = [torch.Size((*x.shape[:2], keys, *x.shape[3:])) for x in own]
        return self.ranks.exchange(own, self.reader(distance), shapes, source)

    def returned(self, found: Block | None, like: Block, distance: int) -> Block | None:
        """Send the gradients of a fetched block to where it came from; those of this rank's block from its reader."""
        sent = like if found is None else found
        receiver = None if found is None else self.source(distance)
        return self.ranks.exchange(sent, receiver, [x.shape for x in like], self.reader(distance))

    def seen(self, block: Block, distance: int) -> Parts:
        """The parts of this rank's queries and a block's keys."""
        begin, keys = self.place.begin(self.place.rank - distance), block[1].shape[2]
        lo, hi, start, position = self.rows
        lo, hi, start = ((x - begin).clamp(0, keys) for x in (lo, hi, start))
        made = Intervals(lo, hi, start, position - begin)
        mask = block[0][:, 0]
        return self.parts._replace(visibility=Visibility(made, keys, None if bool(mask.all()) else mask))

    def bias(self, row: Tensor | None, block: Block) -> Bias:
        return Bias(row, block[3] if len(block) > 3 else None, self.parts.slope)

    def joined(self, a: _Part | None, b: _Part) -> _Part:
        """What rows have read of both sets of keys."""
        if a is None:
            return b
        if isinstance(self.parts.anchor, Raw):
            return _Part(a.y + b.y, a.factor)
        if self.parts.log and self.parts.anchor.normalises:  # factors are logarithms of sums, +inf for empty rows
            logs = [x.factor.masked_fill(x.factor == float("inf"), float("-inf")) for x in (a, b)]
            log = torch.logaddexp(*logs)
            empty = log == float("-inf")
            level = log.masked_fill(empty, 0)
            y = a.y * (logs[0] - level).exp() + b.y * (logs[1] - level).exp()
            return _Part(y, log.masked_fill(empty, float("inf")))
        masses = [torch.where(x.factor == 0, 0, 1 / x.factor) for x in (a, b)]
        mass = masses[0] + masses[1]
        factor = torch.where(mass == 0, 0, 1 / mass)
        return _Part((a.y * masses[0] + b.y * masses[1]) * factor, factor)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, work: _Work, mask: Tensor, q: Tensor, k: Tensor, v: Tensor, c: Tensor, row: Tensor | None,
        col: Tensor | None,
    ) -> Tensor:  # fmt: skip
        own = (mask, k, v) if col is None else (mask, k, v, col)
        whole: _Part | None = None
        for distance in range(work.steps + 1):
            block = work.fetched(own, distance)
            if block is not None:
                parts = work.seen(block, distance)
                y, factor, _ = tiled.run_forward(parts, work.bias(row, block), q, block[1], block[2], c)
                whole = work.joined(whole, _Part(y, factor))
        assert whole is not None
        ctx.work = work
        ctx.save_for_backward(mask, q, k, v, c, row, col, *whole)
        return whole.y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        check_inside()
        work: _Work = ctx.work
        mask, q, k, v, c, row, col, y, factor = ctx.saved_tensors
        own = (mask, k, v) if col is None else (mask, k, v, col)
        wanted = (ctx.needs_input_grad[5], row is not None, col is not None)
        dq, dc = torch.zeros_like(q), torch.zeros_like(c, dtype=torch.float64)
        drow = None if row is None else torch.zeros_like(row)
        gathered = tuple(torch.zeros_like(x) for x in own[1:])  # of k, v and col
        for distance in range(work.steps + 1):
            block, found = work.fetched(own, distance), None
            if block is not None:
                tensors = (q, block[1], block[2], c, y, factor, dy, q.new_empty(0))
                part = tiled.run_backward(work.seen(block, distance), work.bias(row, block), tensors, wanted)
                dq += part.q
                dc += 0 if part.c is None else part.c
                drow = drow if part.row is None or drow is None else drow + part.row
                found = (part.k, part.v) if part.col is None else (part.k, part.v, part.col)
            others = found if distance == 0 else work.returned(found, gathered, distance)
            for total, more in zip(gathered, others or (), strict=False):
                total += more
        return None, None, dq, *gathered[:2], dc.to(c), drow, gathered[2] if len(gathered) > 2 else None


__all__ = ["attended"]
