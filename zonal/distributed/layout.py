"""Which tokens of the whole sequence each rank holds, and where documents begin."""

import bisect
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from zonal.errors import ArgumentError
from zonal.stretch import Cut


@dataclass(frozen=True)
class Layout:
    """Consecutive stretches of ``lengths`` tokens, one per rank. edges: where documents begin, and the end."""

    lengths: tuple[int, ...]
    rank: int
    edges: tuple[int, ...]

    @staticmethod
    def of(lengths: tuple[int, ...], rank: int, edges: tuple[int, ...] | None) -> "Layout":
        """edges: None for one document in each sequence. Raises: ArgumentError for documents that do not fit."""
        total = sum(lengths)
        edges = (0, total) if edges is None else edges
        if edges[0] != 0 or edges[-1] != total or any(b <= a for a, b in itertools.pairwise(edges)):
            raise ArgumentError(
                f"sequence_parallel: cu_seqlens must rise strictly from 0 to the {total} tokens of all ranks, received "
                f"{edges[0]} … {edges[-1]} ({len(edges)} offsets). Pass the same offsets of the whole sequence to "
                "every rank."
            )
        return Layout(lengths, rank, edges)

    def begin(self, rank: int) -> int:
        """The place of the first token of a rank."""
        return sum(self.lengths[:rank])

    def start(self, rank: int) -> int:
        """The place where the document of a rank's first token begins."""
        return self.edges[bisect.bisect_right(self.edges, self.begin(rank)) - 1]

    def holder(self, place: int) -> int:
        """The rank that holds a token."""
        return bisect.bisect_right([*itertools.accumulate(self.lengths)], place)

    def earlier(self, rank: int, ranks: int) -> int:
        """How many tokens of the document of a rank's first token the ``ranks`` ranks before it hold."""
        return 0 if rank < 0 else self.begin(rank) - max(self.start(rank), self.begin(max(rank - ranks, 0)))

    @property
    def inside(self) -> tuple[int, ...]:
        """Offsets of the documents within this rank's stretch, from 0 to its length."""
        begin, length = self.begin(self.rank), self.lengths[self.rank]
        borders = self.edges[bisect.bisect_right(self.edges, begin) : bisect.bisect_left(self.edges, begin + length)]
        return (0, *(edge - begin for edge in borders), length)

    @property
    def goes_on(self) -> bool:
        """Whether the last document of the stretch goes on in the next one."""
        return self.begin(self.rank + 1) not in self.edges

    @property
    def cut(self) -> Cut:
        _, head, *rest = self.inside
        offsets = torch.tensor([0, *(edge - head for edge in rest)], dtype=torch.int64) if rest else None
        return Cut(head, offsets, self.inside[-2] if self.goes_on else self.inside[-1])

    def check_local(self, cu_seqlens: Tensor | None) -> None:
        """Raises: ArgumentError for offsets of a call other than those of this rank's documents."""
        if cu_seqlens is not None and tuple(cu_seqlens.tolist()) != self.inside:
            raise ArgumentError(
                f"sequence_parallel: documents of the whole sequence are given once, as "
                f"sequence_parallel(group, cu_seqlens=…). A call may leave cu_seqlens out, or pass those of this "
                f"rank's stretch, {list(self.inside)}; received {cu_seqlens.tolist()}."
            )


__all__ = ["Layout"]
