"""Keys and values of earlier stretches: each rank sends its own to the later ranks that see them.

A rank holds the keys and values of one other rank at a time. It adds up what its queries read of each with the running
sums of their rows (their logarithms for kernels in log space), and makes each tile again in the backward pass. The
gradients of keys and values go back to the rank that they came from.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zonal.algebra.prior import Intervals, intervals_of
from zonal.distributed import carried
from zonal.distributed.blocks import Block, BlockRules, Keys, Part
from zonal.distributed.layout import Layout
from zonal.distributed.ranks import Ranks, check_inside
from zonal.errors import ArgumentError
from zonal.execution.call import Call
from zonal.execution.paths import tile, tiled
from zonal.kernels.tile import TileSpec
from zonal.stretch import Tensors


def attended(ranks: Ranks, place: Layout, call: Call, path: str) -> Tensor:
    """y (B, H, T, P) of a call whose operator needs the keys themselves."""
    _check(call, path)
    row, col = _bias(ranks, place, call)
    mask = call.visibility.key_mask
    mask = call.k.new_ones(call.k.shape[0], call.k.shape[2], dtype=torch.bool) if mask is None else mask
    rules = BlockRules(tiled.parts_of(call), _compiled(call), place.inside)
    work = _Work(ranks, place, rules, _rows(place, call), _reach(place, call))
    y = _Attention.apply(work, mask[:, None], call.q, call.k, call.v, call.coefficients, row, col)
    assert isinstance(y, Tensor)
    return call.scaled(y)


def _compiled(call: Call) -> TileSpec | None:
    """The rules of the kernel of tiles for this rank's own keys; None where torch's tiles run."""
    code = tile.code_of(call.bound.link)
    if code is None or not call.bound.score.bilinear or call.chunk is not None or tile.refusal(call) is not None:
        return None
    return tile.rules(call, code)


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
    bias = call.bias
    row, col = bias.row, bias.col
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
    rules = call.bound.priors, call.causal, call.tags.includes_self
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


@dataclass(frozen=True)
class _Work:
    """A call over several stretches. rows: the keys that each query sees. reach: the first rank that each rank sees."""

    ranks: Ranks
    place: Layout
    rules: BlockRules
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

    def fetched(self, keys: Keys, distance: int) -> Keys | None:
        """The keys of the rank ``distance`` before this one; None where this rank sees none of them."""
        if not distance:
            return keys
        source = self.source(distance)
        count = 0 if source is None else self.place.lengths[source]
        shapes = [torch.Size((*x.shape[:2], count, *x.shape[3:])) for x in keys]
        return self.ranks.exchange(keys, self.reader(distance), shapes, source)

    def returned(self, found: Tensors | None, like: Tensors, distance: int) -> Tensors | None:
        """Send the gradients of fetched keys to where these came from; those of this rank's keys from their reader."""
        sent = like if found is None else found
        receiver = None if found is None else self.source(distance)
        return self.ranks.exchange(sent, receiver, [x.shape for x in like], self.reader(distance))

    def block(self, keys: Keys, distance: int) -> Block:
        """This rank's queries and the keys of the rank ``distance`` before it."""
        begin, count = self.place.begin(self.place.rank - distance), keys[1].shape[2]
        lo, hi, start = ((x - begin).clamp(0, count) for x in self.rows[:3])
        return Block(self.rules, keys, Intervals(lo, hi, start, self.rows.position - begin), distance == 0)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, work: _Work, mask: Tensor, q: Tensor, k: Tensor, v: Tensor, c: Tensor, row: Tensor | None,
        col: Tensor | None,
    ) -> Tensor:  # fmt: skip
        keys = (mask, k, v) if col is None else (mask, k, v, col)
        whole: Part | None = None
        for distance in range(work.steps + 1):
            found = work.fetched(keys, distance)
            if found is not None:
                part = work.block(found, distance).forward(q, c, row)
                whole = part if whole is None else work.rules.joined(whole, part)
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
        keys = (mask, k, v) if col is None else (mask, k, v, col)
        dq, dc = torch.zeros_like(q), torch.zeros_like(c, dtype=torch.float64)
        drow = None if row is None else torch.zeros_like(row)
        own = tuple(torch.zeros_like(x) for x in keys[1:])  # of k, v and col
        for distance in range(work.steps + 1):
            fetched, found = work.fetched(keys, distance), None
            if fetched is not None:
                block = work.block(fetched, distance)
                part = block.backward((q, c, row), Part(y, factor), dy, ctx.needs_input_grad[5])
                dq[:, :, : part.q.shape[2]] += part.q
                dc += 0 if part.c is None else part.c
                if drow is not None and part.row is not None:
                    drow[..., : part.row.shape[-1]] += part.row
                found = (part.k, part.v) if part.col is None else (part.k, part.v, part.col)
            found = work.returned(found, own, distance) if distance else found
            for total, more in zip(own, found or (), strict=False):
                total += more
        return None, None, dq, *own[:2], dc.to(c), drow, own[2] if len(own) > 2 else None


__all__ = ["attended"]
