"""Seams: borders at which memories of ridge statistics were merged, recorded so that a span can be taken out again.

M = sum z_t z_{t-1}^T holds the transitions within each span, and one product right left^T per seam: of the first key
after it and the last real key before it. A span without a real token in a row leaves no key there, and the row's next
span continues from the same left key.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Seam(NamedTuple):
    """A border ``at`` tokens from the start. left (B, Hkv, r): the last real key before it. right (B, Hkv, r): the
    first real key of the span that follows it. before (B,): how many real tokens come before it. after (B,) bool:
    whether the span that follows had a real token when it was merged. Keys are zero where there is none."""

    at: int
    left: Tensor
    right: Tensor
    before: Tensor
    after: Tensor


class Rest(NamedTuple):
    """What is left when a span is taken out: M, the first and the last real key, and the seams."""

    shift: Tensor
    first: Tensor
    last: Tensor
    seams: tuple[Seam, ...]


def outer(a: Tensor, b: Tensor) -> Tensor:
    """a b^T of vectors (…, r): (…, r, r)."""
    return a[..., :, None] * b[..., None, :]


def bordered(
    mine: Sequence[Seam],
    count: int,
    real: Tensor,
    last: Tensor,
    others: Sequence[Seam],
    first: Tensor,
    other_real: Tensor,
) -> tuple[Seam, ...]:
    """The seams of a memory of ``count`` tokens, ``real`` (B,) of them real, that ends with the key ``last``, and of
    one that follows it: its seams, its first key, its real tokens."""
    present = (others[0].before if others else other_real) > 0
    border = Seam(count, last, torch.where(_rows(present), first, 0), real, present)
    moved = (
        Seam(s.at + count, torch.where(_rows(s.before > 0), s.left, last), s.right, s.before + real, s.after)
        for s in others
    )
    return (*mine, border, *moved)


def taken_out(
    seams: Sequence[Seam], real: Tensor, start: int, stop: int, shift: Tensor, first: Tensor, last: Tensor, gone: Tensor
) -> Rest | None:
    """What is left without the tokens [start, stop), which begin and end at seams or with the memory; None where a key
    beside them is unknown.

    real (B,): tokens in the sums; gone (B,): those of the span. shift: M without what the span has of its own. first
    and last: of the whole.
    """
    left = next((seam for seam in seams if seam.at == start), None) if start else None
    key, begun = torch.zeros_like(first), torch.zeros_like(real, dtype=torch.bool)
    if left is not None:
        key, begun = left.left, left.before > 0
        for seam in seams:
            # to the span's first real key, behind whichever seam that is; what follows it is of its own
            if start <= seam.at < stop:
                shift = shift - outer(torch.where(_rows(seam.before == left.before), seam.right, 0), key)
    kept = [seam for seam in seams if seam.at < start]
    later = [seam for seam in seams if seam.at >= stop]
    through = torch.ones_like(begun)  # rows without a real token since the span
    for index, seam in enumerate(later):
        present = (later[index + 1].before if index + 1 < len(later) else real) > seam.before
        if bool((through & present & ~seam.after).any()):
            return None  # its first real token was absorbed, and only a merge writes down a key
        moved = torch.where(_rows(through), key, seam.left)
        shift = shift + outer(seam.right, moved - seam.left)
        first = torch.where(_rows(through & present & ~begun), seam.right, first)
        if start or seam.at > stop:
            kept.append(Seam(seam.at - (stop - start), moved, seam.right, seam.before - gone, seam.after))
        through = through & ~present
    first, last = torch.where(_rows(through & ~begun), 0, first), torch.where(_rows(through), key, last)
    return Rest(shift, first, last, tuple(kept))


def places(seams: Sequence[Seam], tokens: int, count: int) -> list[tuple[int, int]]:
    """[start, stop) of ``count`` tokens that begin and end at seams, or with the memory of ``tokens`` tokens."""
    borders = [0, *(seam.at for seam in seams), tokens]
    return [(start, start + count) for start in borders if start + count in borders]


def holds(
    seams: Sequence[Seam],
    real: Tensor,
    first: Tensor,
    last: Tensor,
    start: int,
    stop: int,
    given: tuple[Tensor | None, Tensor, Tensor],
) -> bool:
    """Whether the tokens [start, stop) can be those of a memory with the first and last key and the number of real
    tokens ``given``; its first key may be None, unknown."""
    ends = {seam.at: seam for seam in seams}
    before = ends[start].before if start else torch.zeros_like(real)
    until, final = (ends[stop].before, ends[stop].left) if stop in ends else (real, last)
    if not torch.equal(until - before, given[2]):
        return False
    key, found = torch.zeros_like(first), torch.zeros_like(real, dtype=torch.bool)
    if not start:
        key, found = first, (seams[0].before if seams else real) > 0
    for seam in seams:
        if start <= seam.at < stop:
            key = torch.where(_rows(seam.after & ~found), seam.right, key)
            found = found | seam.after
    rows = given[2] > 0
    return torch.equal(final[rows], given[1][rows]) and (given[0] is None or torch.equal(key[rows], given[0][rows]))


def _rows(which: Tensor) -> Tensor:
    """(B,) -> (B, 1, 1)."""
    return which[:, None, None]


__all__ = ["Rest", "Seam", "bordered", "holds", "outer", "places", "taken_out"]
