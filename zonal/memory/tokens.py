"""A span of tokens as a memory receives it: prepared keys, values, and what is known about each token."""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Tokens(NamedTuple):
    """k (B, Hkv, n, D) prepared by the score; v (B, Hkv, n, P); mask (B, n) bool, True = real; log_decay, key_bias (B,
    Hkv, n); None = none.
    """

    k: Tensor
    v: Tensor
    mask: Tensor | None = None
    log_decay: Tensor | None = None
    key_bias: Tensor | None = None

    @property
    def length(self) -> int:
        return self.k.shape[2]

    def span(self, start: int, stop: int) -> "Tokens":
        """The tokens [start, stop)."""
        part = slice(start, stop)
        return Tokens(
            self.k[:, :, part],
            self.v[:, :, part],
            None if self.mask is None else self.mask[:, part],
            None if self.log_decay is None else self.log_decay[..., part],
            None if self.key_bias is None else self.key_bias[..., part],
        )

    def silent(self) -> "Tokens":
        """Padding made to zeros in k and v, so that it adds nothing to any sum (whatever it held, NaN included)."""
        if self.mask is None:
            return self
        hidden = ~self.mask[:, None, :, None]
        return self._replace(k=self.k.masked_fill(hidden, 0), v=self.v.masked_fill(hidden, 0))

    def padded(self) -> Tensor | int:
        """How many of the tokens are padding, (B,) int64, or 0 without a mask."""
        return 0 if self.mask is None else (~self.mask).sum(-1)

    def left_at_end(self) -> Tensor:
        """What is left of each token after the decays of those that follow it, (B or 1, Hkv, n); for tokens that
        fade.
        """
        assert self.log_decay is not None
        return (self.log_decay.flip(-1).cumsum(-1).flip(-1) - self.log_decay).exp()

    def map(self, change: Callable[[Tensor], Tensor]) -> "Tokens":
        """Each tensor changed alike."""
        mask, decay, bias = (None if x is None else change(x) for x in self[2:])
        return Tokens(change(self.k), change(self.v), mask, decay, bias)

    def with_mask(self) -> "Tokens":
        """The tokens with a padding mask, which says that all are real where they have none."""
        shape, device = (self.k.shape[0], self.length), self.k.device
        return self if self.mask is not None else self._replace(mask=torch.ones(shape, dtype=torch.bool, device=device))

    def unmasked(self) -> "Tokens":
        """The tokens, without a padding mask where all of them are real."""
        return self._replace(mask=None) if self.mask is not None and bool(self.mask.all()) else self

    def completed(self, other: "Tokens") -> "Tokens":
        """The tokens with every entry that the other ones have: no padding, no decay, no bias."""
        whole = self if other.mask is None else self.with_mask()
        shape = self.k.shape[:3]
        if whole.log_decay is None and other.log_decay is not None:
            whole = whole._replace(log_decay=other.log_decay.new_zeros(shape))
        if whole.key_bias is None and other.key_bias is not None:
            whole = whole._replace(key_bias=other.key_bias.new_zeros(shape))
        return whole

    def alike(self, other: "Tokens") -> Tensor:
        """Which tokens are the other's at the same places, (B, n): all that is known of them, and for padding only that
        it is padding. A single other token is compared with each.
        """
        a, b = self.completed(other).with_mask(), other.completed(self).with_mask()
        assert a.mask is not None
        assert b.mask is not None
        same = (a.k == b.k).all(-1).all(1) & (a.v == b.v).all(-1).all(1)
        for x, y in ((a.log_decay, b.log_decay), (a.key_bias, b.key_bias)):
            if x is not None and y is not None:
                same = same & (x == y).all(1)
        return (a.mask == b.mask) & (same | ~a.mask)

    def preceded(self, n: int) -> "Tokens":
        """The tokens after n of padding."""
        if n == 0:
            return self
        k, v, mask, *extra = self.with_mask()
        assert mask is not None
        decay, bias = (None if x is None else F.pad(x, (n, 0)) for x in extra)
        return Tokens(F.pad(k, (0, 0, n, 0)), F.pad(v, (0, 0, n, 0)), F.pad(mask, (n, 0), value=False), decay, bias)

    def named(self) -> dict[str, Tensor]:
        """The tensors that are there, by name."""
        return {name: x for name, x in zip(self._fields, self, strict=True) if x is not None}

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self if x is not None)


def joined(a: Tokens | None, b: Tokens) -> Tokens:
    """The tokens of a and then those of b; what one of them lacks is filled in."""
    if a is None or a.length == 0:
        return b
    a, b = a.completed(b), b.completed(a)

    def both(x: Tensor | None, y: Tensor | None, axis: int) -> Tensor | None:
        return None if x is None or y is None else torch.cat([x, y], axis)

    k, v = torch.cat([a.k, b.k.to(a.k)], 2), torch.cat([a.v, b.v.to(a.v)], 2)
    return Tokens(k, v, both(a.mask, b.mask, 1), both(a.log_decay, b.log_decay, 2), both(a.key_bias, b.key_bias, 2))


__all__ = ["Tokens", "joined"]
