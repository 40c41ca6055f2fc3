"""The kernel for a few tokens after a memory of sums (decode.cpp): float32 or bfloat16, CPU, contiguous last axis."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from zonal.formula import FORMULAS
from zonal.kernels import abi
from zonal.kernels.abi import Arguments, address, dense_last, empty
from zonal.kernels.native import Family
from zonal.kernels.sums import tables

FAMILY = Family("decode", FORMULAS["identity"], cuda=False)
DTYPES = (torch.float32, torch.bfloat16)
_SHAPES = {"scale": "H", "weights": "rows F", "roots": "roots", "tails": "powers D"}
_DECODER, _STEP = abi.Struct("decode.cpp", "Decoder", _SHAPES), abi.Struct("decode.cpp", "Step")
_OFF = 2


@dataclass(frozen=True)
class DecodeSpec:
    """The rules of a decoder: y_t = factor_t sum_s D_ts l(S_ts) v_s, over the tokens of a memory and those up to t.

    D_ts is the product of what the tokens after s leave of the past, 1 where nothing fades.

    Token t itself is included with include_self only.

    shape: (B, H, Hkv, D, P). degree, lowest: of the powers of S in l. anchor, normalise: as in ``TileSpec``.
    positive: whether l >= 0 everywhere; a row with a negative sum is then NaN.
    """

    shape: tuple[int, int, int, int, int]
    degree: int
    lowest: int
    anchor: Literal["row", "count", "raw"]
    positive: bool
    include_self: bool
    normalise: bool = False


class Decoder:
    """The kernel with the rules and numbers that stay from token to token. It may be used by several threads.

    scale (H,): of S_ts = scale_h f(q_t) . f(k_s). weights (H or 1, features): the link's coefficient per feature.

    Raises: BuildError when the kernel does not compile.
    """

    def __init__(self, spec: DecodeSpec, scale: Tensor, weights: Tensor) -> None:
        batch, heads, kv_heads, dim, value_dim = spec.shape
        self.spec = spec
        roots = tails = None
        if spec.degree > 2:
            table = tables(spec.degree, spec.lowest, dim)
            roots = (
                empty(table.roots.shape[0])
                .scatter_(0, table.place.long(), table.roots)[1 - spec.lowest + dim :]
                .clone()
            )
            counts = [
                [math.comb(dim - i + power - 2, power - 1) for i in range(dim)] for power in range(2, spec.degree + 1)
            ]
            tails = torch.tensor(counts, dtype=torch.int32, device="cpu")
        call = Arguments(_DECODER, {
            "B": batch, "H": heads, "Hkv": kv_heads, "D": dim, "P": value_dim, "F": weights.shape[1],
            "degree": spec.degree, "lowest": spec.lowest, "heads_weigh": weights.shape[0] > 1,
            "anchor": abi.ANCHORS[spec.anchor], "positive": spec.positive, "normalise": spec.normalise,
            "include_self": spec.include_self,
        }, {
            "rows": weights.shape[0], "roots": 0 if roots is None else roots.shape[0], "powers": spec.degree - 1,
        })  # fmt: skip
        for name, x in (("scale", scale), ("weights", weights), ("roots", roots), ("tails", tails)):
            call.point(name, x)
        self._kept, self._rules = call, call.packed()
        self._square = dim == value_dim
        self._state = batch, kv_heads, weights.shape[1], value_dim + (spec.anchor == "row")
        self._function = FAMILY.load().zonal_decode

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Tensor,
        count: int,
        padding: Tensor,
        into: Tensor | None = None,
        keep: Tensor | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """y (B, H, T, P) in the type of q, and the state after the tokens, in a new tensor or ``into`` another.

        None when the environment says ZONAL_KERNELS=off. The kernel reads the variable itself, ten times faster than
        ``os.environ``.

        q (B, H, T, D), k (B, Hkv, T, D), v (B, Hkv, T, P), all of one of ``DTYPES``; state (B, Hkv, features, P,
        or P + 1 with the row anchor) float32 and padding (B,) int64, contiguous. count: tokens in the state, padding
        included. into: like the state, and may be the state itself. keep (B, Hkv, T) float32, contiguous: what each
        token leaves of the state before it; None where nothing fades.
        """
        qs, ks, vs, (batch, heads, tokens, _) = q.stride(), k.stride(), v.stride(), q.shape
        if not qs[3] == ks[3] == vs[3] == 1:
            q, k, v = (dense_last(x, x.dtype) for x in (q, k, v))
            qs, ks, vs = q.stride(), k.stride(), v.stride()
        # Allocated first, in the memory of the state before the last. A small y there would move states to new pages.
        after = torch.empty_like(state) if into is None else into
        # like another tensor is made in half the time, which is a good part of a short step
        y = (
            torch.empty_like(q)
            if self._square and q.is_contiguous()
            else empty(batch, heads, tokens, self.spec.shape[4], dtype=q.dtype)
        )
        dtype, (_, _, kv_heads, dim, value_dim) = q.dtype, self.spec.shape
        step = _STEP.pack(
            address(q, dtype, (batch, heads, tokens, dim), strided=True),
            address(k, dtype, (batch, kv_heads, tokens, dim), strided=True),
            address(v, dtype, (batch, kv_heads, tokens, value_dim), strided=True), *qs, *ks, *vs, tokens,
            dtype is torch.bfloat16, address(state, torch.float32, self._state),
            address(after, torch.float32, self._state), count, address(padding, torch.int64, (batch,)),
            address(y, dtype, (batch, heads, tokens, value_dim)),
            address(keep, torch.float32, (batch, kv_heads, tokens)),
        )  # fmt: skip
        failed = self._function(self._rules, step)
        if not failed:
            return y, after
        if failed == _OFF:
            return None
        raise MemoryError("attention: the CPU kernel could not allocate its buffers.")


__all__ = ["DTYPES", "FAMILY", "DecodeSpec", "Decoder"]
