"""FadingStatistics: the sums of ridge and Koopman read-outs whose past fades by a rate a token, and how much of the
ridge is left.

With the rate l_t = e^{g_t} of token t: G <- l_t G + z z^T, M <- l_t M + z_t z_{t-1}^T, C <- l_t C + v z^T, and for each
direction of the keys its level, D <- l_t D + r (1 - l_t) e_{t mod r} from D = 1: the ridge is rho diag(D), which each
step gives back in one direction what has faded. Nothing of it depends on the learned rho.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.operator import Bound
from zonal.errors import ArgumentError
from zonal.memory import marks
from zonal.memory.base import Form, Memory
from zonal.memory.inverse import positive_inverse
from zonal.memory.marks import Border
from zonal.memory.ridge import (
    anchor_of,
    first_key,
    last_key,
    previous_keys,
    read_out,
    spanned,
)
from zonal.memory.seams import Seam, bordered, holds, named, outer, places, restored, taken_out
from zonal.memory.spans import Part
from zonal.memory.sums import unpadded
from zonal.memory.tokens import Tokens


def directions(mask: Tensor | None, before: Tensor, tokens: int, width: int) -> Tensor:
    """(B, n): the direction t mod r whose ridge each token gives back, t the number of real tokens before it,
    ``before`` (B,) ahead of the first.
    """
    if mask is None:
        place = torch.arange(tokens, device=before.device)[None]
    else:
        place = mask.long().cumsum(-1) - mask.long()
    return (before[:, None] + place) % width


def given_back(direction: Tensor, amount: Tensor, width: int) -> Tensor:
    """sum over the last axis of amount_t e_{direction_t}: amount (…, n), direction as many or fewer -> (…, r)."""
    return amount.new_zeros(*amount.shape[:-1], width).scatter_add(-1, direction.expand(amount.shape), amount)


def turned(back: Tensor, steps: Tensor) -> Tensor:
    """What was given back to each direction (B, Hkv, r), as it were ``steps`` (B,) tokens later."""
    r = back.shape[-1]
    place = (torch.arange(r, device=steps.device) - steps[:, None]) % r
    return back.gather(2, place[:, None].expand(back.shape))


@dataclass(frozen=True, eq=False, repr=False)
class FadingStatistics(Memory):
    """Sums in float64, (B, Hkv, …): gram G (r, r); cross C (P, r); level D (r); total (), the sum of log decays; for
    powers past 0 shift M (r, r), last key (r), and first, the first key faded as everything is. padding (B,): tokens
    that were none, in which no time passes.

    merge(a, b) fades a by what passed in b and turns the levels of b to where they would have been given back: exact,
    associative, not commutative. subtract takes out a beginning: subtract(merge(a, b), a) = b; anything else is
    refused, which ``borders`` tell.
    """

    kind: ClassVar[str] = "fading"
    roundings: ClassVar[int] = 4
    double: ClassVar[bool] = True

    gram: Tensor
    cross: Tensor
    level: Tensor
    total: Tensor
    shift: Tensor | None
    first: Tensor | None
    last: Tensor | None
    padding: Tensor
    seams: tuple[Seam, ...] = ()  # right keys faded as everything is
    borders: tuple[Border, ...] = ()

    @classmethod
    def start(cls, operator: Operator, form: Form) -> Self:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(form.batch, form.heads, *shape, dtype=torch.float64, device=form.device)

        r, moves = operator.score.width(form.key_dim), anchor_of(operator).shifts > 0
        return cls(
            operator, form, 0, zeros(r, r), zeros(form.value_dim, r), zeros(r) + 1, zeros(),
            zeros(r, r) if moves else None, zeros(r) if moves else None, zeros(r) if moves else None,
            torch.zeros(form.batch, dtype=torch.int64, device=form.device),
        )  # fmt: skip

    @property
    def real(self) -> Tensor:
        """Tokens that were not padding, (B,)."""
        return self.count - self.padding

    def extended(self, tokens: Tokens) -> Memory:
        n, r = tokens.length, self.gram.shape[-1]
        if n == 0:
            return self
        absent = tokens.padded()
        silent = tokens.silent()
        z, v = silent.k.double(), silent.v.double()
        decay = z.new_zeros(z.shape[:3]) if tokens.log_decay is None else tokens.log_decay.expand(z.shape[:3])
        later = (decay.flip(-1).cumsum(-1).flip(-1) - decay).exp()  # what is left of each token at the end
        whole = decay.sum(-1)
        keep = whole.exp()[..., None]
        faded = z * later[..., None]
        back = given_back(directions(tokens.mask, self.real, n, r)[:, None], -r * torch.expm1(decay) * later, r)
        changed = {
            "count": self.count + n, "padding": self.padding if absent is None else self.padding + absent,
            "total": self.total + whole, "gram": self.gram * keep[..., None] + faded.mT @ z,
            "cross": self.cross * keep[..., None] + v.mT @ faded, "level": self.level * keep + back,
        }  # fmt: skip
        if self.shift is not None and self.first is not None and self.last is not None:
            changed["shift"] = self.shift * keep[..., None] + faded.mT @ previous_keys(z, tokens.mask, self.last)
            changed["first"] = torch.where(
                (self.real > 0)[:, None, None], self.first * keep, first_key(faded, tokens.mask)
            )
            changed["last"] = last_key(z, tokens.mask, self.last)
            changed["seams"] = tuple(seam._replace(right=seam.right * keep) for seam in self.seams)
        return replace(self, **changed)  # type: ignore[arg-type]

    def levels(self, bound: Bound) -> Tensor:
        """rho D, the diagonal of the ridge as it stands, (B, Hkv, r)."""
        return (
            anchor_of(self.operator).ridge(bound.anchor_params, self.form.heads).to(self.gram).view(1, -1, 1)
            * self.level
        )

    def regularised(self, bound: Bound) -> Tensor:
        """G + rho diag(D)."""
        return self.gram + torch.diag_embed(self.levels(bound))

    def solved(self, bound: Bound) -> Tensor:
        """P = (G + rho diag(D))^-1, made from the sums at each read.

        An inverse that is updated token by token is divided by each rate, and so is its rounding: after 30 nats of
        decay nothing of it is left.
        """
        return positive_inverse(self.regularised(bound), "Memory.read")

    def lookup(self, q: Tensor, bound: Bound) -> Tensor:
        return read_out(q, bound, self.solved(bound), self.shift, self.cross)

    def spanned(self, home: Tensor, bound: Bound) -> Tensor:
        return spanned(home, bound, self.solved(bound), self.levels(bound))

    def followed_by(self, other: Memory) -> Memory:
        assert isinstance(other, FadingStatistics)
        if other.count == 0 or self.count == 0:
            return self if other.count == 0 else replace(other, operator=self.operator)
        keep = other.total.exp()[..., None]
        merged = replace(
            self, count=self.count + other.count, padding=self.padding + other.padding, total=self.total + other.total,
            gram=self.gram * keep[..., None] + other.gram, cross=self.cross * keep[..., None] + other.cross,
            level=self.level * keep + turned(other.level - keep, self.real),
            borders=marks.after_merge(self._marked(), other._marked()),
        )  # fmt: skip
        if (
            self.shift is None
            or self.first is None
            or self.last is None
            or other.shift is None
            or other.first is None
            or other.last is None
        ):
            return merged
        mine, theirs = (self.real > 0)[:, None, None], (other.real > 0)[:, None, None]
        mine_faded = [seam._replace(right=seam.right * keep) for seam in self.seams]
        seams = bordered(mine_faded, self.count, self.real, self.last, other.seams, other.first, other.real)
        return replace(
            merged, seams=seams, shift=self.shift * keep[..., None] + other.shift + outer(other.first, self.last),
            first=torch.where(mine, self.first * keep, other.first), last=torch.where(theirs, other.last, self.last),
        )  # fmt: skip

    def _marked(self) -> marks.Marked:
        return marks.Marked.of(self.count, self.total, [self.gram, self.cross], self.borders)

    def without(self, other: Memory) -> Memory:
        assert isinstance(other, FadingStatistics)
        if bool((other.padding > self.padding).any()):
            raise ArgumentError(
                "Memory.subtract: the other memory holds more padding than this one; it is no part of it."
            )
        if other.count == 0:
            return self
        kept, later = marks.after_subtract(self._marked(), other._marked()), self.total - other.total
        if self.count == other.count:
            return type(self).start(self.operator, self.form)
        keep = later.exp()[..., None]
        rest = replace(
            self, count=self.count - other.count, padding=self.padding - other.padding, total=later,
            gram=self.gram - other.gram * keep[..., None], cross=self.cross - other.cross * keep[..., None],
            level=keep + turned(self.level - other.level * keep, -other.real), borders=kept,
        )  # fmt: skip
        if self.shift is None or self.first is None or self.last is None or other.shift is None or other.last is None:
            return rest
        if (0, other.count) in places(self.seams, self.count, other.count) and holds(
            self.seams, self.real, self.first, self.last, 0, other.count, (None, other.last, other.real)
        ):
            found = taken_out(
                self.seams,
                self.real,
                0,
                other.count,
                self.shift - other.shift * keep[..., None],
                self.first,
                self.last,
                other.real,
            )
            if found is not None:
                return replace(rest, shift=found.shift, first=found.first, last=found.last, seams=found.seams)
        raise ArgumentError(
            "Memory.subtract: the border after these tokens is unknown (this memory did not get them by merge), so "
            "the transition across it cannot be taken out of M. "
            "Keep spans that may have to go as memories of their own and merge them; with power 0 a merged beginning "
            "can always be subtracted."
        )

    def without_span(self, start: int, count: int, kept: Sequence[Part]) -> Self:
        return self.folded(kept)

    def preceded(self, n: int) -> Self:
        # levels stay: directions are counted by real tokens
        seams = tuple(seam._replace(at=seam.at + n) for seam in self.seams)
        return replace(
            self, count=self.count + n, padding=self.padding + n, seams=seams, borders=marks.moved(self.borders, n)
        )

    def trimmed(self) -> Self:
        if self.parts or self.seams:
            return self
        count, padding = unpadded(self.count, self.padding)
        return replace(self, count=count, padding=padding, borders=marks.moved(self.borders, count - self.count))

    def copied(self) -> Self:
        def own(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.clone()

        return replace(
            self, gram=self.gram.clone(), cross=self.cross.clone(), level=self.level.clone(), total=self.total.clone(),
            shift=own(self.shift), first=own(self.first), last=own(self.last), padding=self.padding.clone(),
            seams=tuple(seam.clone() for seam in self.seams), borders=marks.copied(self.borders), parts=(),
        )  # fmt: skip

    def bytes_at(self, length: int) -> int:
        form, r = self.form, self.gram.shape[-1]
        numbers = r * r + form.value_dim * r + r + 1  # G, C, levels, total
        numbers += (r * r + 2 * r if self.shift is not None else 0) + 2 * r * len(self.seams) + 3 * len(self.borders)
        return form.batch * (form.heads * 8 * numbers + 8 + 9 * len(self.seams))

    def tensors(self) -> dict[str, Tensor]:
        names = ("gram", "cross", "level", "total", "shift", "first", "last", "padding")
        return (
            {name: x for name in names if (x := getattr(self, name)) is not None}
            | named(self.seams)
            | marks.named(self.borders)
        )

    def plain(self) -> dict[str, int]:
        return {f"seam{i}": seam.at for i, seam in enumerate(self.seams)} | marks.places(self.borders)

    @classmethod
    def restored(
        cls, operator: Operator, form: Form, count: int, tensors: dict[str, Tensor], plain: dict[str, int]
    ) -> Self:
        empty = cls.start(operator, form)
        for name, x in empty.tensors().items():
            if tensors[name].shape != x.shape or tensors[name].dtype != x.dtype:
                raise ValueError("the tensors do not have the shapes of the header")
        return replace(
            empty,
            count=count,
            **{name: tensors[name] for name in empty.tensors()},
            seams=restored(tensors, plain),
            borders=marks.restored(tensors, plain),
        )


__all__ = ["FadingStatistics", "directions", "given_back", "turned"]
