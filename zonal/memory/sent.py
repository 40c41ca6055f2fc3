"""A memory as tensors whose shapes do not depend on its tokens, as processes send it to one another."""

from dataclasses import replace

from torch import Tensor

from zonal.memory.base import Memory
from zonal.memory.summed import Summed
from zonal.memory.sums import Sums, fading
from zonal.memory.tokens import Tokens
from zonal.memory.windowed import WindowedSums


def blank(memory: Memory, tokens: Tokens) -> Memory:
    """An empty memory of sums as it becomes with such tokens: its sums fade if they bring a decay, and the tokens that
    it keeps have a bias if they bring one.
    """
    if isinstance(memory, Sums) and tokens.log_decay is not None:
        return fading(memory)
    if isinstance(memory, WindowedSums):
        like = tokens._replace(mask=None)
        opening = None if memory.opening is None else memory.opening.completed(like)
        return replace(memory, tokens=memory.tokens.completed(like), opening=opening)
    return memory


def sent(memory: Memory) -> dict[str, Tensor]:
    """The tensors of a memory of sums by name. Borders of earlier merges, which only subtracting needs, are left out.

    A window of keys is filled up with padding.
    """
    if isinstance(memory, WindowedSums):
        kept = memory.tokens.with_mask()
        return replace(memory, tokens=kept.preceded(memory.reach - kept.length)).tensors()
    assert isinstance(memory, Summed)
    return memory.numbers()


def received(empty: Memory, count: int, tensors: dict[str, Tensor]) -> Memory:
    """The memory of ``count`` tokens that ``sent`` gave. empty: like it, before its first token."""
    return empty.restored(empty.operator, empty.form, count, tensors, {})


__all__ = ["blank", "received", "sent"]
