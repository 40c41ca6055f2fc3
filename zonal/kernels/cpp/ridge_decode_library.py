"""Calls the compiled kernel for few tokens after a memory of ridge read-outs (ridge_decode.cpp), in float32 or bfloat16 on the CPU."""

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zonal.formula import FORMULAS
from zonal.kernels.cpp import library

SOURCE = "ridge_decode"
CODE = FORMULAS["identity"]
"""It knows no link, so that one library serves all."""
DTYPES = (torch.float32, torch.bfloat16)
_STEP = struct.Struct("=24qd17q")  # ``Step`` of ridge_decode.cpp


class Sums(NamedTuple):
    """What a step reads and what it leaves, float64: gram, inverse (B, Hkv, r, r), cross (B, Hkv, P, r), and for powers past 0
    shift (B, Hkv, r, r), first and last key (B, Hkv, r)."""

    gram: Tensor
    cross: Tensor
    inverse: Tensor
    shift: Tensor | None
    first: Tensor | None
    last: Tensor | None


@functools.lru_cache(maxsize=1)
def _function() -> Callable[[bytes], Any]:
    function = library.load(CODE, SOURCE).zonal_ridge_step
    function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    return function


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def step(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, limit: float, powers: Tensor, include_self: bool, before: Sums, count: int, padding: Tensor
) -> tuple[Tensor, Sums]:
    """y (B, H, T, P) in the type of q, and the sums after the tokens; those before them are not changed.

    q (B, H, T, r), k (B, Hkv, T, r), v (B, Hkv, T, P), all of one of ``DTYPES``. scale (H,) float64 and powers (H,) int64 of the queries.
    limit: longer keys are shortened to it (0: none). count: tokens before, of which padding (B,) int64 are none.

    Raises: BuildError when the kernel does not compile.
    """
    function = _function()
    (batch, heads, tokens, dim), kv_heads, value_dim = q.shape, k.shape[1], v.shape[3]
    at = (q.stride(), k.stride(), v.stride())
    if not at[0][3] == at[1][3] == at[2][3] == 1:
        q, k, v = (library.dense_last(x, x.dtype) for x in (q, k, v))
        at = (q.stride(), k.stride(), v.stride())
    before = Sums(*(None if x is None else x.contiguous() for x in before))  # type: ignore[arg-type]
    # first of all, in the place that the sums before the last ones have left: a small y there would push all of them to new pages
    after = Sums(*(None if x is None else torch.empty_like(x) for x in before))  # type: ignore[arg-type]
    y = torch.empty((batch, heads, tokens, value_dim), dtype=q.dtype)
    packed = _STEP.pack(
        q.data_ptr(), k.data_ptr(), v.data_ptr(), *at[0], *at[1], *at[2], batch, heads, kv_heads, tokens, dim, value_dim, before.shift is not None,
        q.dtype == torch.bfloat16, include_self, limit, scale.data_ptr(), powers.data_ptr(), *map(_address, before), *map(_address, after), count, padding.data_ptr(), y.data_ptr(),
    )  # fmt: skip
    if function(packed):
        raise MemoryError("attention: the CPU kernel could not allocate its buffers.")
    return y, after


__all__ = ["CODE", "DTYPES", "SOURCE", "Sums", "step"]
