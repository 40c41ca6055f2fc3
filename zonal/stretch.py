"""Sequence parallelism as the rest of the library sees it.

While it is on, the tokens of a call are one stretch of longer sequences, and other processes hold the other stretches.
``zonal.distributed`` makes the active ``Stretch``. Attention, short convolutions and positions ask it for what comes
from the stretches before this one.
"""

import abc
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor

from zonal.errors import ArgumentError

Tensors = tuple[Tensor, ...]
Join = Callable[[Tensors, int, Tensors, int], Tensors]
"""What is carried after two neighbouring pieces of a document, from that of each and their numbers of tokens."""


class Cut(NamedTuple):
    """Where the documents of a stretch begin and end.

    head: the tokens [0, head) belong to the first document, which may have begun in an earlier stretch.
    rest: the offsets of the documents behind it, int64 from 0 to length - head; None where there are none.
    last: the first token of the document that goes on in the next stretch; the length of the stretch where none does.
    """

    head: int
    rest: Tensor | None
    last: int


class Stretch(abc.ABC):
    """The stretch of this process, and the way to what other processes hold. All of them make the same calls."""

    @abc.abstractmethod
    def cut(self, x: Tensor, length: int, cu_seqlens: Tensor | None) -> Cut:
        """The documents of a call of ``length`` tokens. x: any tensor of the call, whose first axis is the batch."""

    @abc.abstractmethod
    def before(self, carried: Tensors, join: Join, tokens: Tensors) -> Tensors:
        """What is carried at the first token of this stretch, of the same shapes; zeros where its document begins here.

        carried: what the last document of this stretch leaves. tokens: what it was made from.
        """

    @abc.abstractmethod
    def positions(self, x: Tensor, key_padding_mask: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """The position of each token of x (B, T, …) in its document, (T,) or (B, T). Padding shifts nothing."""

    @abc.abstractmethod
    def check_positions(self, positions: Tensor, real: Tensor) -> None:
        """Raise ArgumentError, on all ranks, for positions (B or 1, T) that do not go on from stretch to stretch.

        real: bool (B, T), False for padding.
        """

    @abc.abstractmethod
    def attend(self, call: Any, path: str) -> Tensor:
        """y (B, H, T, P) of a prepared call of ``zonal.attention``."""


_ACTIVE: list[Stretch] = []  # of the process, as backward passes may run in other threads


def active() -> Stretch | None:
    """The stretch that calls belong to, or None."""
    return _ACTIVE[0] if _ACTIVE else None


@contextlib.contextmanager
def entered(stretch: Stretch) -> Iterator[None]:
    """Make a stretch the active one. Raises: ArgumentError where there is one."""
    if _ACTIVE:
        raise ArgumentError("sequence_parallel: it is on already. Leave the outer with block first.")
    _ACTIVE.append(stretch)
    try:
        yield
    finally:
        _ACTIVE.clear()


__all__ = ["Cut", "Join", "Stretch", "Tensors", "active", "entered"]
