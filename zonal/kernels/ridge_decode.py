"""The kernel for few tokens after a memory of ridge read-outs (ridge_decode.cpp), in float32 or bfloat16 on the CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from zonal.formula import FORMULAS
from zonal.kernels import abi
from zonal.kernels.abi import address, dense_last, empty
from zonal.kernels.native import Family

FAMILY = Family("ridge_decode", FORMULAS["identity"], cuda=False)
DTYPES = (torch.float32, torch.bfloat16)
LATE = 16
"""After so many tokens they are added to the sums."""
_STEP = abi.Struct("ridge_decode.cpp", "Step")
_NONE = (0,) * LATE
_OFF = 2


class Stepper:
    """The kernel with what stays from token to token. It may be used by several threads.

    shape: (B, H, Hkv, r, P). moves: whether any power is above 0. scale (H,) float64 and powers (H,) int64: of the
    queries. limit: longer keys are shortened to it (0: none). include_self: whether a query sees its own key. ridge:
    (Hkv,) float64 where the past fades, else None.

    Raises: BuildError when the kernel does not compile.
    """

    def __init__(
        self,
        shape: tuple[int, int, int, int, int],
        moves: bool,
        scale: Tensor,
        powers: Tensor,
        limit: float,
        include_self: bool,
        ridge: Tensor | None,
    ) -> None:
        self.shape, self._kept = shape, (scale, powers, ridge)
        self._moves, self._include_self = moves, include_self
        self._width = 2 * shape[3] + shape[4] + (0 if ridge is None else shape[3] + 2)
        heads = (shape[1],)
        self._rules = (limit, address(scale, torch.float64, heads), address(powers, torch.int64, heads))
        self._ridge = address(ridge, torch.float64, shape[2:3])
        self._function = FAMILY.load().zonal_ridge_step

    def places(self, sums: Sequence[Tensor | None]) -> tuple[int, ...]:
        """Where gram, cross, inverse, shift, first, last and level lie, each checked; 0 for None."""
        batch, _, kv_heads, dim, value_dim = self.shape
        square, cross, row = (batch, kv_heads, dim, dim), (batch, kv_heads, value_dim, dim), (batch, kv_heads, dim)
        shapes = square, cross, square, square, row, row, row
        return tuple(address(x, torch.float64, shape) for x, shape in zip(sums, shapes, strict=True))

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sums: tuple[int, ...],
        late: tuple[int, ...],
        count: int,
        padding: Tensor,
        after: tuple[Tensor | None, ...] | None,
        decay: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None] | None:
        """y (B, H, T, P) in the type of q, and the tokens' rows (T, B, Hkv, width); None if they went to ``after``.

        None in place of both when the environment says ZONAL_KERNELS=off. The kernel reads the variable itself, ten
        times faster than ``os.environ``.

        q (B, H, T, r), k (B, Hkv, T, r), v (B, Hkv, T, P), of one of ``DTYPES`` and of at most 16 tokens; without any,
        the late rows go to ``after``. decay (B, Hkv, T): their log rates, float64, where the past fades.
        sums: addresses of gram (B, Hkv, r, r), cross (B, Hkv, P, r), inverse (B, Hkv, r, r), and for powers above 0 of
        shift (B, Hkv, r, r), first and last (B, Hkv, r), float64 and contiguous, else 0; of level (B, Hkv, r) where the
        past fades.
        late: addresses of the fewer than ``LATE`` rows that follow them.
        count: tokens of the sums, of which padding (B,) int64 are not real.
        """
        batch, heads, kv_heads, dim, value_dim = self.shape
        tokens, qs, ks, vs = q.shape[2], q.stride(), k.stride(), v.stride()
        if not qs[3] == ks[3] == vs[3] == 1 or q.is_neg() or k.is_neg() or v.is_neg():
            q, k, v = (dense_last(x, x.dtype) for x in (q, k, v))
            qs, ks, vs = q.stride(), k.stride(), v.stride()
        rows = empty(tokens, batch, kv_heads, self._width, dtype=torch.float64) if after is None else None
        y, dtype = empty(batch, heads, tokens, value_dim, dtype=q.dtype), q.dtype
        step = _STEP.pack(
            address(q, dtype, (batch, heads, tokens, dim), strided=True),
            address(k, dtype, (batch, kv_heads, tokens, dim), strided=True),
            address(v, dtype, (batch, kv_heads, tokens, value_dim), strided=True), *qs, *ks, *vs, batch, heads,
            kv_heads, tokens, dim, value_dim, self._moves, q.dtype is torch.bfloat16,
            self._include_self, *self._rules, self._ridge, address(decay, torch.float64, (batch, kv_heads, tokens)),
            *sums, *(_NONE[:7] if after is None else self.places(after)), count,
            address(padding, torch.int64, (batch,)), len(late), *late, *_NONE[len(late) :],
            0 if rows is None else rows.data_ptr(), y.data_ptr(),
        )  # fmt: skip
        failed = self._function(step)
        if not failed:
            return y, rows
        if failed == _OFF:
            return None
        raise MemoryError("attention: the CPU kernel could not allocate its buffers.")


__all__ = ["DTYPES", "FAMILY", "LATE", "Stepper"]
