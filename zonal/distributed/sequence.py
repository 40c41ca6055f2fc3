"""Sequence parallelism: the ranks of a group hold consecutive stretches of the same sequences."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zonal import stretch
from zonal.distributed import carried, fetched
from zonal.distributed.layout import Layout
from zonal.distributed.ranks import Ranks, check_inside
from zonal.errors import ArgumentError
from zonal.execution.call import Call
from zonal.memory import Memory
from zonal.stretch import Cut, Join, Stretch, Tensors
from zonal.tracing import untraced
from zonal.typed import check_tensors


class SequenceParallel(Stretch):
    """What ``sequence_parallel`` gives: this rank's part of tensors, losses and gradients over all ranks.

    rank, size: this rank in the group, and the number of ranks.
    """

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None, cu_seqlens: Tensor | None) -> None:
        check_tensors("sequence_parallel", {"cu_seqlens": cu_seqlens}, optional=True)
        if cu_seqlens is not None and (
            cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point()
        ):
            raise ArgumentError(
                "sequence_parallel: cu_seqlens must be a 1-d integer tensor of at least 2 offsets of the whole "
                f"sequence, received {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}."
            )
        self.ranks = Ranks(group)
        self._edges = None if cu_seqlens is None else tuple(cu_seqlens.tolist())
        self._place: Layout | None = None
        self._batch = 0

    @property
    def rank(self) -> int:
        return self.ranks.rank

    @property
    def size(self) -> int:
        return self.ranks.size

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent since the block began, gradients included.

        A layer of sums sends a number that does not depend on the tokens; one of keys and values sends its keys and
        values once to each later rank that sees them.
        """
        return self.ranks.bytes_sent

    # --- for programs -----------------------------------------------------------------------------------------------

    def shard(self, x: Tensor) -> Tensor:
        """This rank's stretch of x (B, T, …), which all ranks hold whole. Lengths differ by at most one token.

        Raises: ArgumentError for fewer tokens than ranks.
        """
        if x.dim() < 2 or x.shape[1] < self.size:
            raise ArgumentError(
                f"SequenceParallel.shard: x must be (batch, tokens, …) with at least {self.size} tokens, one per rank, "
                f"received {tuple(x.shape)}."
            )
        return x.tensor_split(self.size, 1)[self.rank].contiguous()

    def mean(self, total: Tensor, count: int | Tensor) -> Tensor:
        """(sum of ``total`` over ranks) / (sum of ``count`` over ranks), the same number on every rank.

        total: a scalar, such as the sum of this rank's losses. count: how many of them, or the sum of their weights;
        where the sum over ranks is 0, it counts as 1. Sums and quotient are in float32 or better, and the mean has the
        dtype of ``total`` (float32 for whole numbers). In the backward pass each rank goes back from its own total; the
        gradients of parameters then have to be added up over ranks (``sum_gradients``).
        """
        wide = torch.promote_types(total.dtype, torch.float32)
        count = self.ranks.summed(torch.as_tensor(count, dtype=wide, device=total.device))
        mean: Any = _Mean.apply(self.ranks, total.to(wide), torch.where(count == 0, 1, count))
        return mean.to(total.dtype) if total.is_floating_point() else mean

    @torch.no_grad()
    def sum_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Add up the gradients of parameters over ranks, in place. A parameter without gradient on any rank keeps none.

        Do not call it for parameters whose gradients DDP or FSDP adds up over the same ranks.
        """
        given = [x for x in parameters if x.requires_grad]
        if not given:
            return
        there = torch.tensor([x.grad is not None for x in given], dtype=torch.int32, device=given[0].device)
        found = [x for x, some in zip(given, self.ranks.summed(there).tolist(), strict=True) if some]
        for dtype in dict.fromkeys(x.dtype for x in found):
            some = [x for x in found if x.dtype == dtype]
            flat = torch.cat([(torch.zeros_like(x) if x.grad is None else x.grad).flatten() for x in some])
            for x, grad in zip(some, self.ranks.summed(flat).split([x.numel() for x in some]), strict=True):
                x.grad = grad.view_as(x).clone()

    # --- for layers -------------------------------------------------------------------------------------------------

    def _layout(self, x: Tensor, length: int) -> Layout:
        """Where the stretches are. Ranks tell each other their lengths at the first call of the with block."""
        if self._place is None:
            own = torch.tensor([x.shape[0], length], dtype=torch.int64, device=x.device)
            batches, lengths = zip(*self.ranks.gathered(own).tolist(), strict=True)
            if len(set(batches)) > 1:
                raise ArgumentError(
                    f"sequence_parallel: all ranks must hold stretches of the same sequences, received batches of "
                    f"{list(batches)}. Shard the same batch on every rank."
                )
            if self._edges is not None and batches[0] != 1:
                raise ArgumentError(
                    f"sequence_parallel: documents packed into one row (cu_seqlens) have batch 1, received "
                    f"{batches[0]}. Flatten the batch first."
                )
            self._batch, self._place = batches[0], Layout.of(tuple(lengths), self.rank, self._edges)
        place = self._place
        if (x.shape[0], length) != (self._batch, place.lengths[self.rank]):
            raise ArgumentError(
                f"sequence_parallel: a with block is for stretches of one size, here {self._batch} x "
                f"{place.lengths[self.rank]} tokens on rank {self.rank}, received {x.shape[0]} x {length}. Enter "
                "another with block for them, on every rank."
            )
        return place

    @untraced
    def cut(self, x: Tensor, length: int, cu_seqlens: Tensor | None) -> Cut:
        place = self._layout(x, length)
        place.check_local(cu_seqlens)
        cut = place.cut
        return cut if cut.rest is None else cut._replace(rest=cut.rest.to(x.device))

    @untraced
    def before(self, carried_here: Tensors, join: Join, tokens: Tensors) -> Tensors:
        assert self._place is not None
        return carried.before(self.ranks, self._place, carried_here, join, tokens)

    @untraced
    def positions(self, x: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        length = x.shape[1]
        place = self._layout(x, length)
        place.check_local(cu_seqlens)
        if self._edges is not None:
            where = torch.arange(length) + place.begin(place.rank)
            edges = torch.tensor(place.edges, dtype=torch.int64)
            return (where - edges[torch.bucketize(where, edges, right=True) - 1]).to(x.device)
        # all ranks ask, as one of them may have padding and pass a mask
        mask = key_padding_mask
        mask = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
        start = self.ranks.gathered(mask.sum(1))[: place.rank].sum(0)
        return (start[:, None] + mask.cumsum(1) - 1).clamp_min(0)

    @untraced
    def check_positions(self, positions: Tensor, real: Tensor) -> None:
        place, positions = self._layout(real, real.shape[1]), positions.expand(real.shape)
        index = torch.arange(real.shape[1], device=real.device).expand(real.shape)
        first = positions.gather(1, real.to(torch.uint8).argmax(1, keepdim=True))
        last = positions.gather(1, torch.where(real, index, 0).amax(1, keepdim=True))
        ends = self.ranks.gathered(torch.cat([first, last, real.any(1, keepdim=True).to(first)], 1))
        next_of: list[int | None] = [None] * real.shape[0]
        for rank, rows in enumerate(ends.tolist()):
            for row, (start, stop, some) in enumerate(rows):
                wanted = next_of[row] if place.earlier(rank, rank) else None
                if some and wanted is not None and start != wanted:
                    raise ArgumentError(
                        f"sequence_parallel: position_ids must go on from one stretch to the next; those of rank "
                        f"{rank} begin with {start} where {wanted} is next. Pass this rank's part of the positions of "
                        "the whole sequence: position_ids=parallel.shard(torch.arange(T)[None])."
                    )
                next_of[row] = stop + 1 if some else next_of[row]

    @untraced
    def attend(self, call: Call, path: str) -> Tensor:
        place = self._layout(call.v, call.shape.keys)
        place.check_local(call.visibility.edges)
        self._check(call, call.shape.queries == call.shape.keys)
        attended = fetched.attended if Memory.kind_for(call.operator, call.head_dim) == "keys" else carried.attended
        return attended(self.ranks, place, call, path)

    def _check(self, call: Call, square: bool) -> None:
        """Raises: ArgumentError for calls that are not split over ranks."""
        name = call.operator.name
        if not call.causal or not square:
            raise ArgumentError(
                f"sequence_parallel: attention of operator {name!r} must be causal, with as many queries as keys. "
                "Encoders and cross-attention are not split over ranks: run them outside of the with block."
            )
        if call.dropout:
            raise ArgumentError(
                "sequence_parallel: dropout of attention weights is not split over ranks. Set dropout to 0, and apply "
                "nn.Dropout to what the layer returns."
            )


@contextlib.contextmanager
def sequence_parallel(
    group: dist.ProcessGroup | DeviceMesh | None = None, *, cu_seqlens: Tensor | None = None
) -> Iterator[SequenceParallel]:
    """Split sequences over ranks: within the block, the tokens of each call are this rank's stretch of them.

    Rank r of the group holds the r-th stretch. Every rank makes the same calls, forward and backward, with the same
    weights; the results are those of one process that holds the whole sequences, to rounding. Operators that keep their
    past as sums send a memory of constant size; others send keys and values. Rotary positions and short convolutions
    continue across borders. Put backward passes into the block. It holds for all threads of the process.

    Args:
        group: a process group, or a DeviceMesh of one dimension. None: all ranks.
        cu_seqlens: (N + 1,) offsets of N documents packed along the whole sequence of all ranks, the same on every
            rank. Documents may cross borders. None: each sequence is one document.

    Yields: the ``SequenceParallel``, which shards tensors and gathers losses and gradients.

    Raises: ArgumentError for groups and offsets that do not fit, and within the block for what is not split over ranks.
    """
    parallel = SequenceParallel(group, cu_seqlens)
    with stretch.entered(parallel):
        yield parallel


class _Mean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, total: Tensor, count: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(count)
        return ranks.summed(total) / count

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:  # type: ignore[override]
        check_inside()
        return None, grad / ctx.saved_tensors[0], None


__all__ = ["SequenceParallel", "sequence_parallel"]
