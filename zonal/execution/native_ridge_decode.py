"""Steps of a decoder by a compiled kernel on the CPU: a few tokens absorbed into ridge statistics and read, in O(r^2)
each.
"""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from zonal.algebra.anchor import Koopman, Ridge
from zonal.algebra.score import Clipped
from zonal.execution import native
from zonal.execution.call import Call
from zonal.execution.native_decode import MOST_TOKENS, Compiled
from zonal.execution.native_ridge import clipped_of, multiplied, query_scale
from zonal.kernels import transforms
from zonal.kernels.native import Reason
from zonal.kernels.ridge_decode import DTYPES, FAMILY, LATE, Stepper
from zonal.memory import RidgeStatistics
from zonal.memory.ridge import REMAKE, Inverse, ridge_version
from zonal.memory.whitened import width_of


def refusal(call: Call, kind: str) -> Reason:
    """Why torch's verbs of a memory of this kind run in the kernel's place, or None."""
    return FAMILY.refusal(call.device.type, call.coefficients.dtype, lambda: _unfit(call, kind))


def _unfit(call: Call, kind: str) -> Reason:
    if torch.compiler.is_compiling() or transforms.active():
        return "a call that is traced or transformed needs operations of torch"
    bound, (queries, keys) = call.bound, call.shape[2:4]
    anchor = bound.anchor
    if kind != "ridge":
        return f"a memory of kind {kind!r} is not in it"
    if type(anchor) not in (Ridge, Koopman) or (isinstance(anchor, Ridge) and anchor.by_query):
        return "a ridge that follows the keys, a step divided by its norm, or another anchor, is not in it"
    if call.chunk is not None:
        return "a memory that waits for whole chunks is not in it"
    if not call.bias.empty or call.visibility.key_mask is not None or call.visibility.packed:
        return "log priors, key masks and packed documents are not in it"
    if not 1 <= queries <= MOST_TOKENS or queries != keys:
        return (
            f"it takes 1 to {MOST_TOKENS} new tokens with a query each, this call has {queries} queries and {keys} keys"
        )
    if native.empty_rows(call):
        return native.empty_rows(call)
    if torch.is_grad_enabled() and (
        call.requires_grad
        or call.coefficients.requires_grad
        or any(p.requires_grad for p in bound.anchor_params.values())
    ):
        return "it has no gradients, and this call may be asked for some (torch.no_grad says that it is not)"
    return None


class Sums(NamedTuple):
    """float64, contiguous: gram, inverse (B, Hkv, r, r), cross (B, Hkv, P, r), and for powers past 0 shift (B, Hkv, r,
    r), first and last key (B, Hkv, r).
    """

    gram: Tensor
    cross: Tensor
    inverse: Tensor
    shift: Tensor | None
    first: Tensor | None
    last: Tensor | None

    def contiguous(self) -> "Sums":
        """The same, each in one piece."""
        return Sums(*(None if x is None else x.contiguous() for x in self))  # type: ignore[arg-type]

    def updated(self, rows: list[Tensor], begun: Tensor) -> "Sums":
        """With pending updates: rows (T, B, Hkv, 2 r + P) of key z, value v, and P z / sqrt(1 + z . P z) with the
        inverse P before z.

        begun (B,): whether the sums held a token before.
        """
        if not rows:
            return self
        dim, value_dim = self.gram.shape[-1], self.cross.shape[-2]
        z, v, half = torch.cat(rows).permute(1, 2, 0, 3).split([dim, value_dim, dim], -1)
        gram, cross, inverse = self.gram + z.mT @ z, self.cross + v.mT @ z, self.inverse - half.mT @ half
        if self.shift is None or self.first is None or self.last is None:
            return Sums(gram, cross, inverse, None, None, None)
        earlier = torch.cat([self.last.unsqueeze(2), z[:, :, :-1]], 2)
        first = torch.where(begun[:, None, None], self.first, z[:, :, 0])
        return Sums(gram, cross, inverse, self.shift + z.mT @ earlier, first, z[:, :, -1].clone())


class RidgeSteps(Compiled):
    """Ridge statistics in the hands of the kernel.

    To write all sums at each token takes several times as long as to read them. So the last few tokens stay beside the
    sums as pending updates, through which a read-out goes as well, and only every 16 tokens they are added to the sums,
    in a new place.

    Raises: BuildError when the kernel does not compile.
    """

    def __init__(self, call: Call, memory: RidgeStatistics) -> None:
        super().__init__(call)
        bound, anchor, self._clipped = call.bound, call.bound.anchor, clipped_of(call)
        assert isinstance(anchor, Ridge)
        batch, kv_heads, _, value_dim = self.sizes
        clipped, shape = (
            self._clipped or Clipped(1.0, None),
            (batch, self.heads, kv_heads, width_of(bound, call.head_dim), value_dim),
        )
        powers = torch.tensor(anchor.powers(self.heads), dtype=torch.int64)
        with torch.no_grad():
            scale = query_scale(call, anchor, clipped).contiguous()
            self._stepper = Stepper(shape, anchor.shifts > 0, scale, powers, clipped.limit or 0.0, call.include_self)
            self._version, inverse = ridge_version(call.operator), memory.inverse
            if inverse is None or inverse.version != self._version:
                inverse = Inverse(memory.solved(bound), 0, self._version)
        self._before, self._padding = memory, memory.padding.contiguous()
        self._settled(
            Sums(memory.gram, memory.cross, inverse.matrix, memory.shift, memory.first, memory.last).contiguous(),
            memory.count, inverse.age,
        )  # fmt: skip

    def _settled(self, sums: Sums, count: int, age: int) -> None:
        """From now on these are the sums, of ``count`` tokens, and nothing is pending."""
        self._sums, self._count, self._age = sums, count, age
        self._places = self._stepper.places(sums)
        self._rows: list[Tensor] = []
        self._rows_at: tuple[int, ...] = ()

    def step(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """y (B, H, T, P), or None where the environment has switched kernels off, and nothing has changed."""
        if self._clipped is not None:
            return self.run(q, multiplied(k, self._clipped), v)
        score, params = self.bound.score, self.bound.score_params
        with torch.autocast("cpu", enabled=False):
            q, k = score.prepare_query(q.float(), params, self.scale), score.prepare_key(k.float(), params)
            return self.run(q, k, v.float())

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """``step`` of queries and keys as the kernel takes them."""
        if self._clipped is None:
            q, k = self._before.featured(q), self._before.featured(k)
        if q.dtype not in DTYPES:
            q, k, v = q.float(), k.float(), v.float()
        tokens, pending, after = q.shape[2], len(self._rows_at), None
        if self._age + pending + tokens > REMAKE:
            with torch.no_grad():
                memory = replace(self.memory(), inverse=None)
                self._settled(self._sums._replace(inverse=memory.made(self.bound).contiguous()), self._count, 0)
            pending = 0
        if pending + tokens >= LATE:
            after = Sums(*(None if x is None else torch.empty_like(x) for x in self._sums))  # type: ignore[arg-type]
        found = self._stepper(q, k, v, self._places, self._rows_at, self._count, self._padding, after)
        if found is None:
            return None
        y, rows = found
        if after is not None:
            self._settled(after, self._count + pending + tokens, self._age + pending + tokens)
        elif rows is not None:
            start, step = rows.data_ptr(), rows.stride(0) * 8
            self._rows.append(rows)
            self._rows_at += tuple(start + t * step for t in range(tokens))
        return y if y.dtype is self.dtype else y.to(self.dtype)

    @property
    def count(self) -> int:
        """Tokens so far, padding included."""
        return self._count + len(self._rows_at)

    def memory(self) -> RidgeStatistics:
        """The memory after all steps. Later ones leave it as it is."""
        if self._rows:
            pending = len(self._rows_at)
            sums = self._sums.updated(self._rows, self._count > self._padding).contiguous()
            self._settled(sums, self._count + pending, self._age + pending)
        gram, cross, inverse, shift, first, last = self._sums
        return replace(
            self._before, count=self._count, gram=gram, cross=cross, shift=shift, first=first, last=last,
            inverse=Inverse(inverse, self._age, self._version),
        )  # fmt: skip


__all__ = ["RidgeSteps", "refusal"]
