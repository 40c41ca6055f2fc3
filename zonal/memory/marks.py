"""Borders at which memories that fade were merged, so that a beginning can be told from an end.

The sums of a beginning have faded and those of an end have not, so that subtracting an end as if it were a beginning
gives meaningless sums. The sums alone do not show which is which. A merge therefore records a mark of the tokens before
its border: two numbers per head.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.errors import ArgumentError

_SAME = 1e-4
"""Marks that differ by less than this part of the sums belong to the same tokens. float32 sums in another order differ
by 1e-6.
"""


class Border(NamedTuple):
    """A border ``at`` tokens from the start. total (B, Hkv): the log decays before it; mark (B, Hkv, 2): of the sums
    before it.
    """

    at: int
    total: Tensor
    mark: Tensor


class Marked(NamedTuple):
    """What identifies a memory that fades. count: its tokens. total: the sum of its log decays. mark: of its sums.
    size: the largest norm of a head's sums. borders: where it was merged.
    """

    count: int
    total: Tensor
    mark: Tensor
    size: Tensor  # ()
    borders: tuple[Border, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, count: int, total: Tensor, sums: Sequence[Tensor], borders: tuple[Border, ...]) -> "Marked":
        """The mark is linear in sums (B, Hkv, …), so that those of neighbours add up as they do."""
        flat = torch.cat([x.double().flatten(2) for x in sums], -1)
        place = torch.arange(1, flat.shape[-1] + 1, dtype=flat.dtype, device=flat.device)
        return cls(count, total, flat @ torch.stack([place.cos(), place.sin()], -1), flat.norm(dim=-1).amax(), borders)


def after_merge(mine: Marked, others: Marked) -> tuple[Border, ...]:
    """The borders of a memory that was followed by another."""
    if not mine.count or not others.count:
        return (*mine.borders, *others.borders)
    moved = (
        Border(b.at + mine.count, mine.total + b.total, mine.mark * b.total.exp()[..., None] + b.mark)
        for b in others.borders
    )
    return (*mine.borders, Border(mine.count, mine.total, mine.mark), *moved)


def after_subtract(mine: Marked, others: Marked) -> tuple[Border, ...]:
    """The borders of a memory without another, which is its beginning.

    Raises: ArgumentError when it is not, or not known to be.
    """
    later = mine.total - others.total
    if bool((later > 1e-9 * (1 + mine.total.abs())).any()):
        raise ArgumentError("Memory.subtract: the other memory has faded more than this one; it is not its beginning.")
    size = torch.maximum(mine.size, others.size)
    if mine.count == others.count and _same(mine.mark, others.mark, size):
        return ()
    if not any(b.at == others.count and _same(b.mark, others.mark, size) for b in mine.borders):
        if any(b.at == mine.count - others.count and _same(_between(b, mine), others.mark, size) for b in mine.borders):
            raise ArgumentError(
                "Memory.subtract: the other memory is the end of this one, and where the past fades only the "
                "beginning can be taken out of sums. "
                "Keep this memory from before the merge, or merge with a name (span=…) and forget it."
            )
        raise ArgumentError(
            "Memory.subtract: the border after these tokens is unknown: where the past fades only a beginning that "
            "this memory got by merge can be taken out of its sums. "
            "Merge memories of these tokens and of the later ones, or absorb them with a name (span=…) and forget it."
        )
    kept = (b for b in mine.borders if b.at > others.count)
    return tuple(
        Border(
            b.at - others.count,
            b.total - others.total,
            b.mark - others.mark * (b.total - others.total).exp()[..., None],
        )
        for b in kept
    )


def _between(border: Border, whole: Marked) -> Tensor:
    """The mark of what follows a border."""
    return whole.mark - border.mark * (whole.total - border.total).exp()[..., None]


def _same(a: Tensor, b: Tensor, size: Tensor) -> bool:
    return bool(((a - b).abs() <= _SAME * size).all())


def moved(borders: Sequence[Border], by: int) -> tuple[Border, ...]:
    """Borders after ``by`` tokens more, or fewer, of padding in front."""
    return tuple(b._replace(at=b.at + by) for b in borders if b.at + by > 0)


__all__ = ["Border", "Marked", "after_merge", "after_subtract", "moved"]
