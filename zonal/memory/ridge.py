"""RidgeStatistics: G = sum z z^T, M = sum z_t z_{t-1}^T, C = sum v z^T, all of the past of ridge and Koopman read-outs.

They are float64 whatever comes in. A read-out divides by what keys have left unseen: rounding of G enters relative to
rho, and that of C times 1 / rho. In float32, 1e4 tokens along few directions are enough to lose every digit, and soon G
+ rho I is no longer positive; in float64 the same error is 1e-16 |G| / rho.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.anchor import Ridge
from zonal.algebra.operator import Bound
from zonal.algebra.primal import contraction, on_heads
from zonal.errors import ArgumentError
from zonal.memory.base import Form, Memory
from zonal.memory.criterion import ratio
from zonal.memory.inverse import positive_inverse, with_ridge
from zonal.memory.seams import Seam, bordered, holds, named, outer, places, restored, taken_out
from zonal.memory.spans import Part
from zonal.memory.sums import restored_pending, unpadded
from zonal.memory.tokens import Tokens, joined
from zonal.memory.whitened import WhitenedFeatures, harmonics_of, width_of

REMAKE = 1024
"""After so many tokens of updates the inverse is made again from G, which bounds its drift."""


class Inverse(NamedTuple):
    """P = (G + rho I)^-1, the tokens it was updated by since it was made from G, and the values of rho it was made
    with.
    """

    matrix: Tensor
    age: int
    version: tuple[float, ...] | None


def anchor_of(operator: Operator) -> Ridge:
    """The operator's anchor, which solves."""
    assert isinstance(operator.anchor, Ridge)
    return operator.anchor


def ridge_version(operator: Operator) -> tuple[float, ...] | None:
    """Changes whenever the learned ridge or kernel does: on the CPU its numbers, as nobody counts what is written
    through ``.data``. Elsewhere that would wait for the device, and what is counted has to do."""
    # the ridge, and the weights of features
    values = [
        value
        for name, value in operator.learned_parts.items()
        if name == "anchor_raw_ridge" or name.startswith("link_")
    ]
    if not values:
        return None
    if all(type(value) is torch.nn.Parameter and value.is_cpu for value in values):
        return tuple(number for value in values for number in value.detach().flatten().tolist())
    return tuple(number for value in values for number in (value.data_ptr(), value._version))


def kept_inverse(given: Sequence[Inverse | None], rows: Callable[[list[Tensor]], Tensor]) -> Inverse | None:
    """The inverses of several memories as rows of one. None when a memory has no inverse, or rho differs."""
    found = [inverse for inverse in given if inverse is not None]
    if len(found) < len(given) or any(inverse.version != found[0].version for inverse in found):
        return None
    return Inverse(rows([inverse.matrix for inverse in found]), max(inverse.age for inverse in found), found[0].version)


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
    """The last real key of each row, ``before`` where there is none."""
    if mask is None:
        return z[:, :, -1].to(before)
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
    """What holds of query heads (H,), for rows that stand by key head, group and query: (Hkv, G T, 1)."""
    return which.view(-1, groups).repeat_interleave(queries, 1).unsqueeze(-1)


@dataclass(frozen=True, eq=False, repr=False)
class RidgeStatistics(Memory):
    """Raw sums in float64, (B, Hkv, …): nothing in them depends on the learned ridge, scale, gain or weights of
    features. z: prepared keys, or their features.

    gram G (r, r); cross C (P, r); shift M (r, r), first and last key (r) for powers past 0, else None; peak (B, Hkv),
    the largest z.z, when the ridge follows it. padding (B,): how many of ``count`` tokens were padding (passed over: no
    token at all). The inverse is derived and made when it is first read; absorbing a few tokens updates it in O(r^2)
    each.

    merge(a, b) adds b.first a.last^T to M and takes the larger peak: associative, not commutative. subtract takes the
    sums apart exactly, up to rounding; the peak stays (it cannot be known again); the transition across the border is
    known, and taken out, where ``merge`` made that border or at the very start, and refused elsewhere for powers past
    0.
    """

    kind: ClassVar[str] = "ridge"
    roundings: ClassVar[int] = 1
    double: ClassVar[bool] = True

    gram: Tensor
    cross: Tensor
    shift: Tensor | None
    first: Tensor | None
    last: Tensor | None
    peak: Tensor | None
    padding: Tensor
    seams: tuple[Seam, ...] = ()
    pending: Tokens | None = None
    inverse: Inverse | None = None

    @classmethod
    def start(cls, operator: Operator, form: Form) -> Self:
        anchor = anchor_of(operator)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(form.batch, form.heads, *shape, dtype=torch.float64, device=form.device)

        r = width_of(operator, form.key_dim)
        moves = anchor.shifts > 0
        return cls(
            operator,
            form,
            0,
            zeros(r, r),
            zeros(form.value_dim, r),
            zeros(r, r) if moves else None,
            zeros(r) if moves else None,
            zeros(r) if moves else None,
            zeros() if anchor.mode == "running_max" else None,
            torch.zeros(form.batch, dtype=torch.int64, device=form.device),
        )

    @property
    def real(self) -> Tensor:
        """Tokens that were not padding, (B,)."""
        return self.count - self.padding

    @property
    def summed(self) -> Tensor:
        """Real tokens that are in the sums and do not wait for their chunk to end, (B,)."""
        if self.pending is None:
            return self.real
        absent = self.pending.padded()
        return self.real - self.pending.length + (0 if absent is None else absent)

    def _begun(self) -> Tensor:
        """(B, 1, 1) bool: rows whose sums hold at least one token."""
        return (self.summed > 0)[:, None, None]

    def _summed(self, tokens: Tokens) -> "RidgeStatistics":
        """The tokens added to the sums; count, padding and pending stay."""
        silent = tokens.silent()
        z, v = self.featured(silent.k.double()), silent.v.double()
        changed = {"gram": self.gram + z.mT @ z, "cross": self.cross + v.mT @ z, "inverse": self._updated(z)}
        if self.shift is not None and self.first is not None and self.last is not None:
            changed["shift"] = self.shift + z.mT @ previous_keys(z, tokens.mask, self.last)
            changed["first"] = torch.where(self._begun(), self.first, first_key(z, tokens.mask))
            changed["last"] = last_key(z, tokens.mask, self.last)
        if self.peak is not None:
            changed["peak"] = torch.maximum(self.peak, z.square().sum(-1).amax(-1))
        return replace(self, **changed)  # type: ignore[arg-type]

    def featured(self, x: Tensor) -> Tensor:
        """Prepared queries or keys as the sums have them."""
        features = harmonics_of(self.operator)
        return x if features is None else features(x)

    def whitened(self, bound: Bound) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """gram, cross, shift and last key, of whitened features where there are features (``WhitenedFeatures``)."""
        white = WhitenedFeatures.of(bound, self.form.key_dim)
        if white is None:
            return self.gram, self.cross, self.shift, self.last
        shift = None if self.shift is None else white.square(self.shift)
        return (
            white.square(self.gram),
            white.columns(self.cross),
            shift,
            None if self.last is None else self.last * white.root.to(self.last),
        )

    def _updated(self, z: Tensor) -> Inverse | None:
        """The inverse after keys z, or None when it had better be made again."""
        inverse, n = self.inverse, z.shape[2]
        if (
            inverse is None
            or torch.compiler.is_compiling()
            or anchor_of(self.operator).moving
            or 2 * n > self.gram.shape[-1]
            or inverse.age + n > REMAKE
            or _recorded(z, self.gram)
        ):
            return None
        if inverse.version != ridge_version(self.operator):
            return None
        zp = z @ inverse.matrix
        if n == 1:
            matrix = inverse.matrix - zp.mT @ (zp / (1 + zp @ z.mT))
        else:
            block = with_ridge(zp @ z.mT, torch.ones((), dtype=z.dtype, device=z.device))
            half = torch.linalg.solve_triangular(torch.linalg.cholesky(block), zp, upper=False)
            matrix = inverse.matrix - half.mT @ half
        return Inverse(matrix, inverse.age + n, inverse.version)

    def ridge(self, bound: Bound) -> Tensor:
        """rho, broadcastable to (B, Hkv, 1, 1)."""
        anchor = anchor_of(self.operator)
        rho = anchor.ridge(bound.anchor_params, self.form.heads).to(self.gram).view(1, -1, 1, 1)
        if not anchor.moving:
            return rho
        trace = self.gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
        return anchor.moved(rho, None if self.peak is None else self.peak[..., None, None], trace, self.gram.shape[-1])

    def solved(self, bound: Bound) -> Tensor:
        """P = (G + rho I)^-1, kept for the next read unless gradients flow through it or it is traced."""
        if torch.compiler.is_compiling():  # a graph cannot ask whether the kept one is of these values
            return self.made(bound)
        version = ridge_version(self.operator)
        recorded = _recorded(self.gram, *self.operator.learned_parts.values())
        if self.inverse is not None and self.inverse.version == version and not recorded:
            return self.inverse.matrix
        matrix = self.made(bound)
        if not recorded:
            # a derived value: what this memory is does not change
            object.__setattr__(self, "inverse", Inverse(matrix, 0, version))
        return matrix

    def made(self, bound: Bound) -> Tensor:
        """P = (G + rho I)^-1, made anew; over features of weights a it is (G + rho diag(1 / a))^-1."""
        white = WhitenedFeatures.of(bound, self.form.key_dim)
        if white is None:
            return positive_inverse(with_ridge(self.gram, self.ridge(bound)), "Memory.read")
        return white.square(positive_inverse(with_ridge(white.square(self.gram), self.ridge(bound)), "Memory.read"))

    def committed(self) -> "RidgeStatistics":
        """The memory up to the last whole chunk: what the next query sees."""
        if self.pending is None:
            return self
        absent = self.pending.padded()
        return replace(
            self,
            count=self.count - self.pending.length,
            padding=self.padding if absent is None else self.padding - absent,
            pending=None,
        )

    def settled(self) -> "RidgeStatistics":
        """All tokens in the sums, pending ones included."""
        return self if self.pending is None else replace(self._summed(self.pending), pending=None)

    def extended(self, tokens: Tokens) -> Memory:
        if tokens.length == 0:
            return self
        absent = tokens.padded()
        count, padding = self.count + tokens.length, self.padding if absent is None else self.padding + absent
        if self.chunk is None:
            return replace(self._summed(tokens), count=count, padding=padding)
        dtype = self.form.statistics
        joint = joined(self.pending, tokens._replace(k=tokens.k.to(dtype), v=tokens.v.to(dtype)))
        whole = joint.length // self.chunk * self.chunk
        summed = self._summed(joint.span(0, whole)) if whole else self
        rest = joint.span(whole, joint.length).map(torch.clone) if whole < joint.length else None
        return replace(summed, count=count, padding=padding, pending=rest)

    def lookup(self, q: Tensor, bound: Bound) -> Tensor:
        return self.settled()._looked_up(q, bound)

    def spanned(self, home: Tensor, bound: Bound) -> Tensor:
        whole, white = self.settled(), WhitenedFeatures.of(bound, self.form.key_dim)
        level = whole.ridge(bound)[..., 0]
        if white is None:
            return spanned(home, bound, whole.solved(bound), level)
        return spanned(
            self.featured(home.to(self.gram)), bound, whole.solved(bound), level / white.root.to(level).square()
        ).to(home.dtype)

    def _looked_up(self, q: Tensor, bound: Bound) -> Tensor:
        contracted = None
        if self.shift is not None and anchor_of(self.operator).spectral:
            contracted = contraction(with_ridge(self.gram, self.ridge(bound)), self.shift, "Memory.read")
        return read_out(
            self.featured(q.to(self.gram)), bound, self.solved(bound), self.shift, self.cross, contracted
        ).to(q.dtype)

    def followed_by(self, other: Memory) -> Memory:
        assert isinstance(other, RidgeStatistics)
        count, padding = self.count + other.count, self.padding + other.padding
        if self.pending is not None:
            if other.count < (self.chunk or 0):
                return self if other.pending is None else self.extended(other.pending)
            raise ArgumentError(
                f"Memory.merge: the first memory ends inside a chunk ({self.count} tokens, chunks of {self.chunk}), "
                "which would move the borders of the second. "
                "Absorb the second one's tokens instead."
            )
        merged = replace(
            self,
            count=count,
            padding=padding,
            gram=self.gram + other.gram,
            cross=self.cross + other.cross,
            pending=other.pending,
            inverse=None,
            peak=None if self.peak is None or other.peak is None else torch.maximum(self.peak, other.peak),
        )
        if (
            self.shift is None
            or self.first is None
            or self.last is None
            or other.shift is None
            or other.first is None
            or other.last is None
        ):
            return merged
        mine, theirs = self._begun(), other._begun()
        seams = self.seams or other.seams
        if self.count and other.count:
            seams = bordered(self.seams, self.count, self.real, self.last, other.seams, other.first, other.summed)
        return replace(
            merged,
            seams=seams,
            shift=self.shift + other.shift + outer(other.first, self.last),
            first=torch.where(mine, self.first, other.first),
            last=torch.where(theirs, other.last, self.last),
        )

    def without(self, other: Memory) -> Memory:
        assert isinstance(other, RidgeStatistics)
        if other.pending is not None:
            raise ArgumentError(
                f"Memory.subtract: the other memory ends inside a chunk ({other.count} tokens, chunks of "
                f"{self.chunk}); only whole chunks can be taken out."
            )
        if bool((other.padding > self.padding).any()):
            raise ArgumentError(
                "Memory.subtract: the other memory holds more padding than this one; it is no part of it."
            )
        if other.count == 0:
            return self
        rest = replace(
            self,
            count=self.count - other.count,
            padding=self.padding - other.padding,
            gram=self.gram - other.gram,
            cross=self.cross - other.cross,
            inverse=None,
        )
        if (
            self.shift is None
            or self.first is None
            or self.last is None
            or other.shift is None
            or other.first is None
            or other.last is None
        ):
            return rest
        if self.count == other.count:
            return replace(
                rest,
                shift=self.shift - other.shift,
                first=torch.zeros_like(self.first),
                last=torch.zeros_like(self.last),
                seams=(),
            )
        tokens = self.count - (0 if self.pending is None else self.pending.length)
        for start, stop in places(self.seams, tokens, other.count):
            if holds(
                self.seams, self.summed, self.first, self.last, start, stop, (other.first, other.last, other.real)
            ):
                found = taken_out(
                    self.seams, self.summed, start, stop, self.shift - other.shift, self.first, self.last, other.real
                )
                if found is not None:
                    return replace(rest, shift=found.shift, first=found.first, last=found.last, seams=found.seams)
        raise ArgumentError(
            "Memory.subtract: the border of these tokens is unknown (this memory did not get them by merge), so the "
            "transition across it cannot be taken out of M. "
            "Keep spans that may have to go as memories of their own and merge them; with power 0 any span can be "
            "subtracted."
        )

    def without_span(self, start: int, count: int, kept: Sequence[Part]) -> Self:
        return self.folded(kept)

    def preceded(self, n: int) -> Self:
        if self.chunk is not None and n % self.chunk:
            raise ArgumentError(
                f"Memory.stack: {n} tokens of padding would move the borders of chunks of {self.chunk}. Pad the "
                "shorter sequences (key_padding_mask) as they come."
            )
        seams = tuple(seam._replace(at=seam.at + n) for seam in self.seams)
        return replace(self, count=self.count + n, padding=self.padding + n, seams=seams)

    def trimmed(self) -> Self:
        if self.parts or self.seams or self.chunk is not None:
            return self
        count, padding = unpadded(self.count, self.padding)
        return replace(self, count=count, padding=padding)

    def keeping(self, sources: Sequence[Self], rows: Callable[[list[Tensor]], Tensor]) -> Self:
        return replace(self, inverse=kept_inverse([memory.inverse for memory in sources], rows))

    def copied(self) -> Self:
        def own(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.clone()

        return replace(
            self,
            gram=self.gram.clone(),
            cross=self.cross.clone(),
            shift=own(self.shift),
            first=own(self.first),
            last=own(self.last),
            peak=own(self.peak),
            padding=self.padding.clone(),
            seams=tuple(seam.clone() for seam in self.seams),
            pending=None if self.pending is None else self.pending.map(torch.clone),
            inverse=None if self.inverse is None else self.inverse._replace(matrix=self.inverse.matrix.clone()),
            parts=(),
        )

    def bytes_at(self, length: int) -> int:
        form, r = self.form, width_of(self.operator, self.form.key_dim)
        numbers = 2 * r * r + form.value_dim * r  # G, its inverse, C
        numbers += r * r + 2 * r if self.shift is not None else 0
        numbers += 1 if self.peak is not None else 0
        numbers += 2 * r * len(self.seams)
        waiting = 0 if self.chunk is None else length % self.chunk
        tokens = waiting * (self.operator.score.width(form.key_dim) + form.value_dim) * form.statistics.itemsize
        return form.batch * (form.heads * (8 * numbers + tokens) + 8 + 9 * len(self.seams))

    def tensors(self) -> dict[str, Tensor]:
        sums = {
            "gram": self.gram,
            "cross": self.cross,
            "shift": self.shift,
            "first": self.first,
            "last": self.last,
            "peak": self.peak,
            "padding": self.padding,
        }
        pending = {} if self.pending is None else {f"pending.{name}": x for name, x in self.pending.named().items()}
        return {name: x for name, x in sums.items() if x is not None} | named(self.seams) | pending

    def plain(self) -> dict[str, int]:
        return {f"seam{i}": seam.at for i, seam in enumerate(self.seams)}

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
            pending=restored_pending(tensors),
        )


def _recorded(*values: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in values)


__all__ = [
    "REMAKE",
    "Inverse",
    "RidgeStatistics",
    "anchor_of",
    "first_key",
    "kept_inverse",
    "last_key",
    "previous_keys",
    "read_out",
    "ridge_version",
    "rows_of",
    "spanned",
]
