"""CompactStatistics: what ridge and Koopman read-outs need of the past in the least memory, in float32.

The sums themselves lose their small directions in float32, by which a read-out divides. Their factor does not: with
A = G + eps I = L L^T, C^T = L S and M = L N L^T, the memory keeps L, S and N. A rounding of L by u changes x^T A x by
at most 2 u |L^T x| |L| |x|, so that the error of a read-out grows with the root of the condition number, and G + rho I
stays positive definite. Each operation multiplies out in float64, works on the sums, and factorises them again.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
from torch import Tensor

from zonal.algebra import Operator
from zonal.algebra.operator import Bound
from zonal.algebra.primal import factorised
from zonal.memory.base import Form, Memory
from zonal.memory.inverse import with_ridge
from zonal.memory.ridge import GramStatistics, RidgeStatistics, anchor_of
from zonal.memory.summed import Summed
from zonal.memory.tokens import Tokens
from zonal.memory.whitened import width_of


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class CompactStatistics(Summed):
    """``RidgeStatistics`` as a factor, in float32 or, of float64 tokens, in float64. Nothing is kept beside it: each
    read factorises and solves.

    cross S (r, P); factor: the lower triangle of L, row by row (r (r + 1) / 2). For powers past 0 also shift N (r, r),
    and first and last (r), as they are there. eps is that of the declaration, whatever has been learned since.

    ``drift`` is relative to |x| |y| for an entry x . y of G or C, where keys have sqrt(eps) as one more number; for M
    it is sqrt(r) times that.
    """

    kind: ClassVar[str] = "compact"
    roundings: ClassVar[int] = 3
    fades: ClassVar[bool] = False

    cross: Tensor
    factor: Tensor
    shift: Tensor | None = None
    first: Tensor | None = None
    last: Tensor | None = None

    @classmethod
    def start(cls, operator: Operator, form: Form) -> Self:
        empty = super().start(operator, form)
        rows = torch.arange(empty.cross.shape[2], device=form.device)
        root = anchor_of(operator).eps ** 0.5
        return replace(empty, factor=empty.factor.index_fill(-1, rows * (rows + 3) // 2, root))

    @classmethod
    def shapes(cls, operator: Operator, form: Form) -> dict[str, tuple[int, ...]]:
        r, rows = width_of(operator, form.key_dim), (form.batch, form.heads)
        found: dict[str, tuple[int, ...]] = {"cross": (*rows, r, form.value_dim), "factor": (*rows, r * (r + 1) // 2)}
        if anchor_of(operator).shifts:
            found |= {"shift": (*rows, r, r), "first": (*rows, r), "last": (*rows, r)}
        return found

    def whole(self) -> RidgeStatistics:
        """The sums, multiplied out."""
        if not self.count:
            return RidgeStatistics.start(self.operator, self.form)
        r = self.cross.shape[2]
        at = torch.tril_indices(r, r, device=self.factor.device)
        lower = torch.zeros(*self.factor.shape[:2], r, r, dtype=torch.float64, device=self.factor.device)
        lower[..., at[0], at[1]] = self.factor.double()
        return RidgeStatistics(
            self.operator, self.form, self.count, padding=self.padding, seams=self.seams, pending=self.pending,
            gram=with_ridge(lower @ lower.mT, -self._level), cross=(lower @ self.cross.double()).mT,
            shift=None if self.shift is None else lower @ self.shift.double() @ lower.mT,
            first=None if self.first is None else self.first.double(),
            last=None if self.last is None else self.last.double(),
        )  # fmt: skip

    def holding(self, whole: Memory) -> Self:
        """This memory with other sums, their tokens and their borders.

        Raises: NonFiniteError where what was taken out leaves no positive definite G + eps I.
        """
        assert isinstance(whole, RidgeStatistics)
        dtype, r = self.form.statistics, whole.gram.shape[-1]
        lower = factorised(with_ridge(whole.gram, self._level), "Memory").to(dtype)
        at, wide = torch.tril_indices(r, r, device=lower.device), lower.double()

        def solved(x: Tensor) -> Tensor:
            return torch.linalg.solve_triangular(wide, x, upper=False)

        return replace(
            self, count=whole.count, padding=whole.padding, seams=whole.seams, pending=whole.pending,
            factor=lower[..., at[0], at[1]], cross=solved(whole.cross.mT).to(dtype),
            shift=None if whole.shift is None else solved(solved(whole.shift).mT).mT.to(dtype),
            first=None if whole.first is None else whole.first.to(dtype),
            last=None if whole.last is None else whole.last.to(dtype),
        )  # fmt: skip

    @property
    def _level(self) -> Tensor:
        return torch.tensor(anchor_of(self.operator).eps, dtype=torch.float64, device=self.form.device)

    # --- sums: those of RidgeStatistics -------------------------------------------------------------------------------

    def with_terms(self, tokens: Tokens) -> Self:
        return self.holding(self.whole().with_terms(tokens))

    def added(self, other: Self, whole: Self) -> Self:
        if other.count == 0 or self.count == 0:
            return self if other.count == 0 else replace(other, operator=self.operator)
        return self.holding(self.whole().followed_by(other.whole()))

    def taken(self, other: Self, rest: Self) -> Self:
        return rest.holding(self.whole().without(other.whole()))

    # --- read-outs ----------------------------------------------------------------------------------------------------

    def lookup(self, q: Tensor, bound: Bound) -> Tensor:
        return self.whole().lookup(q, bound)

    @property
    def evidence_refusal(self) -> str | None:
        return None

    def spanned(self, home: Tensor, bound: Bound) -> Tensor:
        return self.whole().spanned(home, bound)


def statistics_of(memory: Memory | None) -> GramStatistics | None:
    """The sums of a memory that has those of a ridge, multiplied out; None for others."""
    if isinstance(memory, CompactStatistics):
        return memory.whole()
    return memory if isinstance(memory, GramStatistics) else None


__all__ = ["CompactStatistics", "statistics_of"]
