"""Steps over ridge statistics: each takes O(r^2)."""

from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor

from zonal.algebra.anchor import Ridge
from zonal.algebra.score import Clipped
from zonal.execution.call import Call
from zonal.execution.paths.ridge import clipped_of, multiplied, other_ridge, query_scale
from zonal.execution.paths.steps.base import Steps, refusal
from zonal.kernels.abi import empty
from zonal.kernels.native import Reason
from zonal.kernels.ridge_decode import DTYPES, FAMILY, LATE, Stepper
from zonal.memory.inverse import REMAKE, Inverse, ridge_version
from zonal.memory.ridge import GramStatistics
from zonal.memory.whitened import width_of
from zonal.tracing import recorded

MOST_FADED = 12.0
"""After more nats of decay than this in one call torch's steps run: what is left is too small for updates."""
_SETTLE = 6.0  # nats of decay after which pending updates are added to the sums


def ridge_refusal(call: Call) -> Reason:
    """Why the kernel of ridge statistics does not take a few tokens after a memory, or None."""
    if isinstance(call.memory, GramStatistics) and recorded([call.memory.gram, call.memory.cross]):
        return "it has no gradients, and the memory may be asked for some"
    return refusal(FAMILY, call, ("ridge", "fading"), other_ridge)


class Sums(NamedTuple):
    """float64, contiguous: gram, inverse (B, Hkv, r, r), cross (B, Hkv, P, r), for powers past 0 shift (B, Hkv, r, r),
    first and last key (B, Hkv, r), and level (B, Hkv, r) where the past fades.
    """

    gram: Tensor
    cross: Tensor
    inverse: Tensor
    shift: Tensor | None
    first: Tensor | None
    last: Tensor | None
    level: Tensor | None

    def contiguous(self) -> "Sums":
        """The same, each in one piece."""
        return Sums(*(None if x is None else x.contiguous() for x in self))  # type: ignore[arg-type]

    def like(self) -> "Sums":
        """Sums for which there is memory and no numbers yet."""
        return Sums(*(None if x is None else torch.empty_like(x) for x in self))  # type: ignore[arg-type]


class RidgeSteps(Steps):
    """Ridge statistics in the hands of the kernel.

    To write all sums at each token takes several times as long as to read them. So the last few tokens stay beside the
    sums as pending updates, through which a read-out goes as well, and only every 16 tokens they are added to the sums,
    in a new place.

    Raises: BuildError when the kernel does not compile.
    """

    def __init__(self, call: Call, memory: GramStatistics) -> None:
        super().__init__(call, memory)
        bound, anchor, self._clipped = call.bound, cast(Ridge, call.bound.anchor), clipped_of(call)
        batch, kv_heads, _, value_dim = self.sizes
        clipped = self._clipped or Clipped(1.0, None)
        shape = batch, self.heads, kv_heads, width_of(bound, call.head_dim), value_dim
        powers = torch.tensor(anchor.powers(self.heads), dtype=torch.int64, device="cpu")
        with torch.no_grad():
            scale = query_scale(call, anchor, clipped).contiguous()
            rho = anchor.ridge(bound.anchor_params, kv_heads).double().contiguous() if memory.fades else None
            self._stepper = Stepper(
                shape, anchor.shifts > 0, scale, powers, clipped.limit or 0.0, call.tags.includes_self, rho
            )
            self._version, inverse = ridge_version(call.operator), memory.inverse
            if inverse is None or inverse.version != self._version:
                inverse = Inverse(memory.solved(bound), 0, self._version)
        self._before, self._padding, self._total = memory, memory.padding.contiguous(), memory.total
        self._declared = None if bound.log_decay is None else bound.log_decay.double().view(1, -1, 1)
        sums = memory.gram, memory.cross, inverse.matrix, memory.shift, memory.first, memory.last, memory.level
        self._settled(Sums(*sums).contiguous(), memory.count, inverse.age)

    def _settled(self, sums: Sums, count: int, age: int) -> None:
        """From now on these are the sums, of ``count`` tokens, and nothing is pending."""
        self._sums, self._count, self._age, self._faded = sums, count, age, 0.0
        self._places = self._stepper.places(sums)
        self._rows: list[Tensor] = []
        self._rows_at: tuple[int, ...] = ()

    def prepared(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return super().prepared(q, k, v) if self._clipped is None else (q, multiplied(k, self._clipped), v)

    def run(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None = None) -> Tensor | None:
        if self._clipped is None:
            q, k = self._before.featured(q), self._before.featured(k)
        if q.dtype not in DTYPES:
            q, k, v = q.float(), k.float(), v.float()
        tokens, pending, after, faded = q.shape[2], len(self._rows_at), None, 0.0
        if self._total is not None:
            given = self._declared if log_decay is None else log_decay.double()
            assert given is not None
            log_decay = given.expand(q.shape[0], -1, tokens).contiguous()
            faded = -float(log_decay.sum(-1).amin())
            if faded > MOST_FADED:
                return None
        if self._age + pending + tokens > REMAKE:
            with torch.no_grad():
                memory = self.memory()
                self._settled(self._sums._replace(inverse=memory.made(self.bound).contiguous()), self._count, 0)
            pending = 0
        if pending + tokens >= LATE or self._faded + faded > _SETTLE:
            after = self._sums.like()
        found = self._stepper(q, k, v, self._places, self._rows_at, self._count, self._padding, after, log_decay)
        if found is None:
            return None
        y, rows = found
        if self._total is not None and log_decay is not None:
            self._total = self._total + log_decay.sum(-1)
        if after is not None:
            self._settled(after, self._count + pending + tokens, self._age + pending + tokens)
        elif rows is not None:
            start, step = rows.data_ptr(), rows.stride(0) * 8
            self._rows.append(rows)
            self._rows_at += tuple(start + t * step for t in range(tokens))
            self._faded += faded
        return y if y.dtype is self.dtype else y.to(self.dtype)

    @property
    def count(self) -> int:
        return self._count + len(self._rows_at)

    def memory(self) -> GramStatistics:
        if self._rows_at:
            batch, heads, kv_heads, dim, value_dim = self._stepper.shape
            pending, after = len(self._rows_at), self._sums.like()
            none = empty(batch, heads, 0, dim), empty(batch, kv_heads, 0, dim), empty(batch, kv_heads, 0, value_dim)
            self._stepper(*none, self._places, self._rows_at, self._count, self._padding, after)
            self._settled(after, self._count + pending, self._age + pending)
        gram, cross, inverse, shift, first, last, level = self._sums
        return replace(
            self._before, count=self._count, gram=gram, cross=cross, shift=shift, first=first, last=last, level=level,
            total=self._total, inverse=Inverse(inverse, self._age, self._version),
        )  # fmt: skip


__all__ = ["MOST_FADED", "RidgeSteps", "ridge_refusal"]
