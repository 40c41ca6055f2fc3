"""What a decoder's steps leave of ridge statistics: sums as they were some tokens ago, and those tokens, so that a step need not write all sums anew."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sums(NamedTuple):
    """float64, contiguous: gram, inverse (B, Hkv, r, r), cross (B, Hkv, P, r), and for powers past 0 shift (B, Hkv, r, r), first and last key (B, Hkv, r)."""

    gram: Tensor
    cross: Tensor
    inverse: Tensor
    shift: Tensor | None
    first: Tensor | None
    last: Tensor | None


class Stepped(NamedTuple):
    """Sums of ``count`` tokens, padding included, and the tokens after them: rows (T, B, Hkv, 2 r + P) float64, one or more, of key z, value v, and
    P z / sqrt(1 + z . P z) with the inverse P that had not seen z.

    sums_at, rows_at: where the sums and each token lie. age, version: of the sums' inverse, as ``Inverse`` has them.
    """

    sums: Sums
    count: int
    age: int
    version: tuple[float, ...] | None
    sums_at: tuple[int, ...]
    rows: tuple[Tensor, ...] = ()
    rows_at: tuple[int, ...] = ()

    @staticmethod
    def of(sums: Sums, count: int, age: int, version: tuple[float, ...] | None) -> "Stepped":
        """Sums with no token after them."""
        sums = Sums(*(None if x is None else x.contiguous() for x in sums))  # type: ignore[arg-type]
        return Stepped(sums, count, age, version, tuple(0 if x is None else x.data_ptr() for x in sums))

    def followed(self, rows: Tensor) -> "Stepped":
        """With rows of more tokens."""
        start, step = rows.data_ptr(), rows.stride(0) * 8
        places = (start,) if rows.shape[0] == 1 else tuple(start + t * step for t in range(rows.shape[0]))
        return Stepped(
            self.sums, self.count, self.age, self.version, self.sums_at, (*self.rows, rows), self.rows_at + places
        )

    def settled(self, padding: Tensor) -> Sums:
        """The sums of all tokens. padding (B,): how many were none."""
        gram, cross, inverse, shift, first, last = self.sums
        if not self.rows:
            return self.sums
        dim, value_dim = gram.shape[-1], cross.shape[-2]
        z, v, half = torch.cat(self.rows).permute(1, 2, 0, 3).split([dim, value_dim, dim], -1)
        gram, cross, inverse = gram + z.mT @ z, cross + v.mT @ z, inverse - half.mT @ half
        if shift is None or first is None or last is None:
            return Sums(gram, cross, inverse, None, None, None)
        earlier = torch.cat([last.unsqueeze(2), z[:, :, :-1]], 2)
        begun = (self.count > padding)[:, None, None]
        return Sums(
            gram, cross, inverse, shift + z.mT @ earlier, torch.where(begun, first, z[:, :, 0]), z[:, :, -1].clone()
        )


__all__ = ["Stepped", "Sums"]
