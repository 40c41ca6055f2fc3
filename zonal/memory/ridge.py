"""GramStatistics: G = sum z z^T, M = sum z_t z_{t-1}^T and C = sum v z^T over keys z, with or without a decay.

They are all that ridge and Koopman read-outs need of the past. They are float64 for every type of keys and values,
because a read-out divides by rho in the directions that no key has: the error of G counts relative to rho, and that of
C times 1 / rho. In float32, 1e4 tokens along few directions lose every digit, and G + rho I soon stops being positive
definite. In float64 the same error is 1e-16 |G| / rho.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.anchor import Ridge
from zonal.algebra.operator import Bound
from zonal.algebra.primal import contraction, factorised, on_heads
from zonal.errors import ArgumentError
from zonal.memory import marks
from zonal.memory.base import Form
from zonal.memory.criterion import ratio
from zonal.memory.fading import directions, given_back, turned
from zonal.memory.inverse import REMAKE, Inverse, kept_inverse, positive_inverse, ridge_version, with_ridge
from zonal.memory.seams import bordered, holds, outer, places, taken_out
from zonal.memory.summed import Summed
from zonal.memory.tokens import Tokens
from zonal.memory.whitened import WhitenedFeatures, harmonics_of, width_of
from zonal.tracing import recorded


def anchor_of(operator: Operator) -> Ridge:
    """The operator's anchor, which solves."""
    assert isinstance(operator.anchor, Ridge)
    return operator.anchor


def ridge_of(anchor: Ridge, rho: Tensor, gram: Tensor, peak: Tensor | None) -> Tensor:
    """rho (…, 1, 1) for keys with sum ``gram`` (…, r, r) and largest z.z ``peak`` (…, 1, 1). It may follow them."""
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    return anchor.moved(rho, peak, trace, gram.shape[-1])


def previous_keys(z: Tensor, mask: Tensor | None, before: Tensor) -> Tensor:
    """The key of the real token before each token: z (B, Hkv, n, r), zero on padding; before (B, Hkv, r) comes first of
    all.
    """
    shifted = torch.cat([before.unsqueeze(2).to(z), z], 2)
    if mask is None:
        return shifted[:, :, :-1]
    place = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    index = torch.where(mask, place, 0).cummax(-1).values
    index = torch.nn.functional.pad(index[:, :-1], (1, 0))[:, None, :, None].expand(z.shape)
    return shifted.gather(2, index).masked_fill(~mask[:, None, :, None], 0)


def first_key(z: Tensor, mask: Tensor | None) -> Tensor:
    """The first real key of each row, zero where there is none."""
    if mask is None:
        return z[:, :, 0]
    index = mask.to(torch.int8).argmax(-1)[:, None, None, None].expand(-1, z.shape[1], 1, z.shape[3])
    return z.gather(2, index)[:, :, 0]


def last_key(z: Tensor, mask: Tensor | None, before: Tensor) -> Tensor:
    """A copy of the last real key of each row, ``before`` where there is none."""
    if mask is None:
        return z[:, :, -1].to(before, copy=True)
    place = torch.arange(1, mask.shape[1] + 1, device=mask.device)
    index = torch.where(mask, place, 0).amax(-1)[:, None, None, None].expand(-1, z.shape[1], 1, z.shape[3])
    return torch.cat([before.unsqueeze(2).to(z), z], 2).gather(2, index)[:, :, 0].to(before)


def read_out(
    q: Tensor, bound: Bound, inverse: Tensor, shift: Tensor | None, cross: Tensor, contracted: Tensor | None = None
) -> Tensor:
    """C P (M P)^power q: prepared q (B, H, T, r); P, M (B, Hkv, r, r), C (B, Hkv, P, r); contracted (B, Hkv): a factor
    on each step. In the type of q.
    """
    anchor, (batch, heads, queries, dim) = bound.anchor, q.shape
    assert isinstance(anchor, Ridge)
    x = q.to(inverse).reshape(batch, bound.kv_heads, bound.groups * queries, dim) @ inverse
    for step in range(anchor.shifts):
        assert shift is not None
        further = x @ shift.mT @ inverse
        if contracted is not None:
            further = further * contracted[..., None, None]
        which = on_heads(anchor.powers(heads), step, q.device)
        x = further if which is None else torch.where(rows_of(which, bound.groups, queries), further, x)
    return (x @ cross.mT).view(batch, heads, queries, cross.shape[-2]).to(q.dtype)


def spanned(q: Tensor, bound: Bound, inverse: Tensor, level: Tensor) -> Tensor:
    """1 - q^T P q / q^T diag(level)^-1 q, (B, H, T) in [0, 1]: prepared q (B, H, T, r), P (B, Hkv, r, r), level (B or
    1, Hkv, r or 1). 0 for q = 0.

    P only shrinks (in the order of definite matrices) as keys come, so that this only grows while the ridge stays.
    """
    batch, heads, queries, dim = q.shape
    rows = q.to(inverse).reshape(batch, bound.kv_heads, bound.groups * queries, dim)
    left, whole = ((rows @ inverse) * rows).sum(-1), (rows.square() / level.unsqueeze(2)).sum(-1)
    return ratio(whole - left, whole).view(batch, heads, queries)


def rows_of(which: Tensor, groups: int, queries: int) -> Tensor:
    """Numbers per query head (H,) -> per row (Hkv, G T, 1), rows ordered by key head, group and query."""
    return which.view(-1, groups).repeat_interleave(queries, 1).unsqueeze(-1)


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class GramStatistics(Summed):
    """Sums in float64, (B, Hkv, …), of z: prepared keys, or their features. Nothing in them depends on the learned
    ridge, scale, gain or weights of features.

    gram G (r, r); cross C (P, r). For powers past 0 also shift M (r, r), last (r), the last key, and first (r), the
    first key, faded as everything is. peak (B, Hkv): the largest z.z, when the ridge follows it. level D (r), where the
    past fades: what is left of the ridge in each direction. inverse: derived from the sums at the
    first read. Absorbing a few tokens updates it in O(r^2) each; where the past fades only a decoder's steps keep it.

    With the rate l_t = e^{g_t} of token t: G <- l_t G + z z^T, M <- l_t M + z_t z_{t-1}^T, C <- l_t C + v z^T, and
    D <- l_t D + r (1 - l_t) e_{t mod r} from D = 1. The ridge is rho diag(D), to which each step gives back in one
    direction what has faded in all.

    merge(a, b) adds b.first a.last^T to M, takes the larger peak, and turns the levels of b to where they would have
    been given back: not commutative. In subtract the peak stays, as it cannot be known again. For powers past 0 the
    transition across the border is taken out where ``merge`` made that border, or at the very start, and refused
    elsewhere.
    """

    double: ClassVar[bool] = True

    gram: Tensor
    cross: Tensor
    level: Tensor | None = None
    shift: Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None
    peak: Tensor | None = None
    inverse: Inverse | None = None

    @classmethod
    def start(cls, operator: Operator, form: Form) -> Self:
        empty = super().start(operator, form)
        return empty if empty.level is None else replace(empty, level=empty.level + 1)

    @classmethod
    def shapes(cls, operator: Operator, form: Form) -> dict[str, tuple[int, ...]]:
        anchor, r, rows = anchor_of(operator), width_of(operator, form.key_dim), (form.batch, form.heads)
        found: dict[str, tuple[int, ...]] = {"gram": (*rows, r, r), "cross": (*rows, form.value_dim, r)}
        if cls.fades:
            found["level"] = (*rows, r)
        if anchor.shifts:
            found |= {"shift": (*rows, r, r), "first": (*rows, r), "last": (*rows, r)}
        if anchor.mode == "running_max":
            found["peak"] = rows
        return found

    # --- sums ---------------------------------------------------------------------------------------------------------

    def featured(self, x: Tensor) -> Tensor:
        """Prepared queries or keys as the sums have them."""
        features = harmonics_of(self.operator)
        return x if features is None else features(x)

    def with_terms(self, tokens: Tokens) -> Self:
        silent = tokens.silent()
        z, v = self.featured(silent.k.double()), silent.v.double()
        earlier, left, level = self, z, self.level
        if tokens.log_decay is not None:
            tokens = tokens._replace(log_decay=tokens.log_decay.expand(z.shape[:3]))
            assert tokens.log_decay is not None
            decay, remains, r = tokens.log_decay, tokens.left_at_end(), z.shape[-1]
            earlier, left = self.faded(decay.sum(-1)), z * remains[..., None]
            assert earlier.level is not None
            direction = directions(tokens.mask, self.real, z.shape[2], r)[:, None]
            level = earlier.level + given_back(direction, -r * torch.expm1(decay) * remains, r)
        after = replace(
            earlier,
            gram=earlier.gram + left.mT @ z,
            cross=earlier.cross + v.mT @ left,
            level=level,
            peak=None if self.peak is None else torch.maximum(self.peak, z.square().sum(-1).amax(-1)),
            inverse=self._updated(z),
        )
        if self.last is None or earlier.first is None or earlier.shift is None:
            return after
        begun = (self.summed > 0)[:, None, None]
        return replace(
            after,
            shift=earlier.shift + left.mT @ previous_keys(z, tokens.mask, self.last),
            first=torch.where(begun, earlier.first, first_key(left, tokens.mask)),
            last=last_key(z, tokens.mask, self.last),
        )

    def faded(self, log_decay: Tensor) -> Self:
        assert self.total is not None
        assert self.level is not None
        keep = log_decay.exp()[..., None]
        return replace(
            self,
            gram=self.gram * keep[..., None],
            cross=self.cross * keep[..., None],
            level=self.level * keep,
            shift=None if self.shift is None else self.shift * keep[..., None],
            first=None if self.first is None else self.first * keep,
            seams=tuple(seam._replace(right=seam.right * keep) for seam in self.seams),
            total=self.total + log_decay,
            inverse=None,
        )

    def added(self, other: Self, whole: Self) -> Self:
        if other.count == 0 or self.count == 0:
            return self if other.count == 0 else replace(other, operator=self.operator, inverse=None)
        merged = replace(
            whole,
            gram=whole.gram + other.gram,
            cross=whole.cross + other.cross,
            peak=None if self.peak is None or other.peak is None else torch.maximum(self.peak, other.peak),
            inverse=None,
        )
        if whole.level is not None and other.level is not None and other.total is not None:
            back = turned(other.level - other.total.exp()[..., None], self.real)
            merged = replace(merged, level=whole.level + back)
        if whole.shift is None or whole.first is None or self.last is None:
            return merged
        assert other.shift is not None
        assert other.first is not None
        assert other.last is not None
        mine, theirs = (self.summed > 0)[:, None, None], (other.summed > 0)[:, None, None]
        return replace(
            merged,
            seams=bordered(whole.seams, self.count, self.real, self.last, other.seams, other.first, other.summed),
            shift=whole.shift + other.shift + outer(other.first, self.last),
            first=torch.where(mine, whole.first, other.first),
            last=torch.where(theirs, other.last, self.last),
        )

    def taken(self, other: Self, rest: Self) -> Self:
        rest = replace(rest, gram=self.gram - other.gram, cross=self.cross - other.cross, inverse=None)
        if rest.total is not None and self.level is not None and other.level is not None:
            back = turned(self.level - other.level, -other.real)
            rest = replace(rest, level=rest.total.exp()[..., None] + back)
        if self.shift is None or self.first is None or self.last is None or other.shift is None or other.last is None:
            return rest
        shift = self.shift - other.shift
        if self.count == other.count:
            zero = torch.zeros_like(self.first)
            return replace(rest, shift=shift, first=zero, last=zero, seams=())
        real = self.summed
        first = None if self.fades else other.first  # the two have not faded alike
        for start, stop in places(self.seams, self.committed().count, other.count):
            if self.fades and start:
                continue
            if holds(self.seams, real, self.first, self.last, start, stop, (first, other.last, other.real)):
                found = taken_out(self.seams, real, start, stop, shift, self.first, self.last, other.real)
                if found is not None:
                    return replace(rest, **found._asdict())
        raise ArgumentError(
            "Memory.subtract: the border of these tokens is unknown (this memory did not get them by merge), so the "
            "transition across it cannot be taken out of M. Keep spans that may have to go as memories of their own "
            f"and merge them; with power 0 {'a merged beginning' if self.fades else 'any span'} can be subtracted."
        )

    def marked(self) -> marks.Marked:
        assert self.total is not None
        return marks.Marked.of(self.count, self.total, [self.gram, self.cross], self.borders)

    # --- read-outs ----------------------------------------------------------------------------------------------------

    def whitened(self, bound: Bound) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """gram, cross, shift and last key, of whitened features where there are features (``WhitenedFeatures``)."""
        white = WhitenedFeatures.of(bound, self.form.key_dim)
        if white is None:
            return self.gram, self.cross, self.shift, self.last
        shift = None if self.shift is None else white.square(self.shift)
        last = None if self.last is None else self.last * white.root.to(self.last)
        return white.square(self.gram), white.columns(self.cross), shift, last

    def ridge(self, bound: Bound) -> Tensor:
        """The diagonal of the ridge, broadcastable to (B, Hkv, r, 1)."""
        anchor = anchor_of(self.operator)
        rho = anchor.ridge(bound.anchor_params, self.form.heads).to(self.gram).view(1, -1, 1, 1)
        if self.level is not None:
            return rho * self.level[..., None]
        if not anchor.moving:
            return rho
        return ridge_of(anchor, rho, self.gram, None if self.peak is None else self.peak[..., None, None])

    def regularised(self, bound: Bound) -> Tensor:
        """G + the ridge, of whitened features where there are features."""
        white = WhitenedFeatures.of(bound, self.form.key_dim)
        return with_ridge(self.gram if white is None else white.square(self.gram), self.ridge(bound))

    def solved(self, bound: Bound) -> Tensor:
        """P = (G + the ridge)^-1, kept for the next read unless gradients flow through it or it is traced.

        Where the past fades it is made at each read. An inverse that is updated per token is divided by each rate, and
        so is what its rounding has left unsymmetric: after 30 nats of decay nothing of it is left. The compiled steps
        of a decoder keep it symmetric, and update theirs.
        """
        if self.fades or torch.compiler.is_compiling():  # a graph cannot check that the kept one is of these values
            return self.made(bound)
        version = ridge_version(self.operator)
        follows = recorded((self.gram, *self.operator.learned_parts.values()))
        if self.inverse is not None and self.inverse.version == version and not follows:
            return self.inverse.matrix
        matrix = self.made(bound)
        if not follows:
            # a derived value: what this memory is does not change
            object.__setattr__(self, "inverse", Inverse(matrix, 0, version))
        return matrix

    def made(self, bound: Bound) -> Tensor:
        """P = (G + the ridge)^-1, from the sums; over features of weights a it is (G + rho diag(1 / a))^-1."""
        inverse = positive_inverse(self.regularised(bound), "Memory.read")
        white = WhitenedFeatures.of(bound, self.form.key_dim)
        return inverse if white is None else white.square(inverse)

    def _updated(self, z: Tensor) -> Inverse | None:
        """The inverse updated by keys z, or None when it should be recomputed at the next read."""
        inverse, n = self.inverse, z.shape[2]
        if (
            inverse is None
            or self.fades
            or torch.compiler.is_compiling()
            or anchor_of(self.operator).moving
            or 2 * n > self.gram.shape[-1]
            or inverse.age + n > REMAKE
            or recorded((z, self.gram))
            or inverse.version != ridge_version(self.operator)
        ):
            return None
        zp = z @ inverse.matrix
        if n == 1:
            matrix = inverse.matrix - zp.mT @ (zp / (1 + zp @ z.mT))
        else:
            block = with_ridge(zp @ z.mT, torch.ones((), dtype=z.dtype, device=z.device))
            half = torch.linalg.solve_triangular(factorised(block, "Memory"), zp, upper=False)
            matrix = inverse.matrix - half.mT @ half
        return Inverse(matrix, inverse.age + n, inverse.version)

    def lookup(self, q: Tensor, bound: Bound) -> Tensor:
        whole, contracted = self.settled(), None
        inverse = whole.solved(bound)
        if whole.shift is not None and anchor_of(self.operator).spectral:
            contracted = contraction(with_ridge(whole.gram, whole.ridge(bound)), whole.shift, "Memory.read")
        features = self.featured(q.to(self.gram))
        return read_out(features, bound, inverse, whole.shift, whole.cross, contracted).to(q.dtype)

    @property
    def evidence_refusal(self) -> str | None:
        return None

    def spanned(self, home: Tensor, bound: Bound) -> Tensor:
        whole, white = self.settled(), WhitenedFeatures.of(bound, self.form.key_dim)
        level = whole.ridge(bound)[..., 0]
        if white is not None:
            level = level / white.root.to(level).square()
        return spanned(self.featured(home.to(self.gram)), bound, whole.solved(bound), level)

    # --- rows and copies ----------------------------------------------------------------------------------------------

    def keeping(self, sources: Sequence[Self], rows: Callable[[list[Tensor]], Tensor]) -> Self:
        return replace(self, inverse=kept_inverse([memory.inverse for memory in sources], rows))

    @property
    def derived_bytes(self) -> int:
        return 0 if self.fades and self.inverse is None else self.gram.nbytes


class RidgeStatistics(GramStatistics):
    """``GramStatistics`` without a decay."""

    kind: ClassVar[str] = "ridge"
    roundings: ClassVar[int] = 1
    fades: ClassVar[bool] = False


class FadingStatistics(GramStatistics):
    """``GramStatistics`` whose past fades by a rate per token, with a constant ridge and keys as they are."""

    kind: ClassVar[str] = "fading"
    roundings: ClassVar[int] = 4
    fades: ClassVar[bool] = True


__all__ = [
    "FadingStatistics",
    "GramStatistics",
    "RidgeStatistics",
    "anchor_of",
    "first_key",
    "last_key",
    "previous_keys",
    "read_out",
    "ridge_of",
    "rows_of",
    "spanned",
]
