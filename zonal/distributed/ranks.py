"""Messages between the ranks of a group, and how gradients go back along them."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from zonal import stretch
from zonal.errors import ArgumentError
from zonal.stretch import Tensors

Shapes = Sequence[torch.Size]


class Ranks:
    """The ranks of a process group, in the order of their stretches. bytes_sent: by this rank, so far."""

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ArgumentError(
                "sequence_parallel: torch.distributed must be initialised. Call "
                "torch.distributed.init_process_group(), and start the program with torchrun."
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ArgumentError(
                    f"sequence_parallel: a DeviceMesh of one dimension is required, received {group.ndim}. Pass one "
                    "dimension of it, such as mesh['sequence']."
                )
            group = group.get_group()
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise ArgumentError(
                "sequence_parallel: this process is not in the group. Pass the group that holds its stretch."
            )
        self.bytes_sent = 0

    def exchange(
        self, sent: Tensors, receiver: int | None, shapes: Shapes, sender: int | None
    ) -> tuple[Tensor, ...] | None:
        """Send tensors to one rank, and receive tensors of the same types with ``shapes`` from another; None: no rank.

        The result is None where nothing is received.
        """
        messages, received = [], None
        if receiver is not None:
            for x in sent:
                plain = x.detach().contiguous()
                plain = plain.to(torch.uint8) if x.dtype == torch.bool else plain
                self.bytes_sent += plain.nbytes
                messages.append(dist.P2POp(dist.isend, plain, group=self.group, group_peer=receiver))
        if sender is not None:
            kinds = [torch.uint8 if x.dtype == torch.bool else x.dtype for x in sent]
            received = [x.new_empty(shape, dtype=kind) for x, shape, kind in zip(sent, shapes, kinds, strict=True)]
            messages += [dist.P2POp(dist.irecv, x, group=self.group, group_peer=sender) for x in received]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()
        return None if received is None else tuple(y.to(x.dtype) for x, y in zip(sent, received, strict=True))

    def gathered(self, x: Tensor) -> Tensor:
        """x of every rank, (ranks, …)."""
        found = [torch.empty_like(x) for _ in range(self.size)]
        self.bytes_sent += x.nbytes * (self.size - 1)
        dist.all_gather(found, x.contiguous(), group=self.group)
        return torch.stack(found)

    def summed(self, x: Tensor) -> Tensor:
        """The sum of x over all ranks."""
        total = x.detach().clone()
        self.bytes_sent += 2 * x.nbytes * (self.size - 1) // self.size  # as a ring of ranks does it
        dist.all_reduce(total, group=self.group)
        return total

    def shifted(self, tensors: Tensors, distance: int) -> Tensors:
        """The tensors of the rank ``distance`` before this one, zeros where there is none. Gradients go back."""
        return _Shift.apply(self, distance, *tensors)  # type: ignore[return-value]


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, distance: int, *tensors: Tensor) -> Tensors:  # type: ignore[override]
        ctx.ranks, ctx.distance = ranks, distance
        ctx.kinds = [(x.shape, x.dtype, x.device) for x in tensors]
        receiver, sender = ranks.rank + distance, ranks.rank - distance
        found = ranks.exchange(
            tensors, receiver if receiver < ranks.size else None, [x.shape for x in tensors],
            sender if sender >= 0 else None,
        )  # fmt: skip
        found = tuple(torch.zeros_like(x) for x in tensors) if found is None else found
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        ranks, distance = ctx.ranks, ctx.distance
        check_inside()
        receiver, sender = ranks.rank - distance, ranks.rank + distance
        moved = [i for i, (_, dtype, _) in enumerate(ctx.kinds) if dtype.is_floating_point]
        sent = tuple(grads[i].to(ctx.kinds[i][1]) for i in moved)
        found = ranks.exchange(
            sent, receiver if receiver >= 0 else None, [x.shape for x in sent],
            sender if sender < ranks.size else None,
        )  # fmt: skip
        whole: list[Tensor | None] = [None] * len(grads)
        for i, x in zip(moved, sent if found is None else found, strict=True):
            whole[i] = torch.zeros_like(x) if found is None else x
        return None, None, *whole


class _Tie(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> Tensors:  # type: ignore[override]
        ctx.others = [(x.shape, x.dtype, x.device) for x in tensors[count:]]
        found = tuple(x.view_as(x) for x in tensors[:count])
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        zeros = (
            torch.zeros(shape, dtype=dtype, device=device) if dtype.is_floating_point else None
            for shape, dtype, device in ctx.others
        )
        return None, *grads, *zeros


def tied(tensors: Tensors, others: Tensors) -> Tensors:
    """The same tensors as a function of others too, with derivative 0.

    Every rank must take part in every message of the backward pass, also where it had no use for what it received, or
    sent what depends on none of its tokens. Autograd leaves such messages out unless the graph holds them.
    """
    return _Tie.apply(len(tensors), *tensors, *others)  # type: ignore[return-value]


def check_inside() -> None:
    """Raises: ArgumentError in a backward pass after the with block."""
    if stretch.active() is None:
        raise ArgumentError(
            "sequence_parallel: the backward pass exchanges gradients between ranks. Call backward() inside the with "
            "block."
        )


__all__ = ["Ranks", "check_inside", "tied"]
