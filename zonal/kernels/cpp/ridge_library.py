"""Calls the compiled kernel for ridge and Koopman read-outs (ridge.cpp) on float32 tensors of the CPU; any strides but the last."""

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zonal.errors import NonFiniteError
from zonal.formula import FORMULAS
from zonal.kernels import native
from zonal.kernels.cpp import library
from zonal.kernels.cpp.sums_library import Places, plain

SOURCE = "ridge"
CODE = FORMULAS["identity"]
"""It knows no link, so that one library serves all."""
_GOOD, DOUBLE, _INDEFINITE = range(3)
_OFF = 3
_KEPT = (torch.float32, torch.float64, torch.int64, *(torch.int32,) * 4, *(torch.float64,) * 4)
_RESULTS = (torch.float32, torch.int32, *(torch.float32,) * 3, *(torch.float64,) * 6)
_CALL = struct.Struct("=36qd12q")
"""``Ridge`` of ridge.cpp, packed at once: field by field it takes five times as long, a good part of a short call."""


@functools.lru_cache(maxsize=64)
def _powers(powers: tuple[int, ...]) -> Tensor:
    return torch.tensor(powers, dtype=torch.int64, device="cpu")


class Before(NamedTuple):
    """A memory before the first key, float64: gram (B, Hkv, r, r), cross (B, Hkv, P, r), and for powers past 0 shift (B, Hkv, r, r) and last (B, Hkv, r)."""

    gram: Tensor | None = None
    cross: Tensor | None = None
    shift: Tensor | None = None
    last: Tensor | None = None


class Reader:
    """The kernel with what stays from call to call: scale (H,) of the queries, ridge (Hkv,), who sees whom, the memory before the first key, the
    powers (H,), and what longer keys are shortened to (0: none are). It may be used by several threads.

    Raises: BuildError when the kernel does not compile.
    """

    def __init__(
        self, scale: Tensor, ridge: Tensor, seen: Places, before: Before, powers: Sequence[int], limit: float
    ) -> None:
        memory = (None if x is None else plain(x, torch.float64) for x in before)
        self._kept = (
            plain(scale, torch.float32),
            plain(ridge, torch.float64),
            _powers(tuple(powers)),
            seen.index,
            seen.lo,
            seen.hi,
            seen.edges,
            *memory,
        )
        self._shapes = tuple(
            None if x is None else tuple(x.shape) for x in self._kept
        )  # compared at the call, which knows its sizes
        self._addresses = tuple(
            library.address(x, dtype, shape or ())
            for x, dtype, shape in zip(self._kept, _KEPT, self._shapes, strict=True)
        )
        self.segments = seen.edges.shape[0] - 1
        self._rules = (self.segments, seen.lo.shape[0] > 1, max(powers), limit)
        loaded = native.load(CODE, SOURCE)
        self._again, self._forward, self._backward = (
            loaded.zonal_ridge_again,
            loaded.zonal_ridge_forward,
            loaded.zonal_ridge_backward,
        )
        for function in (self._again, self._forward, self._backward):
            function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """y of ``forward``. None where the environment says ZONAL_KERNELS=off: the kernel looks there by itself, in a tenth of the time that ``os.environ`` takes."""
        y = library.empty(*q.shape[:3], v.shape[3])
        return None if self._run(self._again, q, k, v, None, (y,)) == _OFF else y

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """``forward`` whatever the environment says."""
        y = library.empty(*q.shape[:3], v.shape[3])
        outcome = library.empty(k.shape[0] * k.shape[1] * self.segments, dtype=torch.int32)
        self._run(self._forward, q, k, v, None, (y, outcome))
        return y, outcome

    def backward(self, dy: Tensor, q: Tensor, k: Tensor, v: Tensor, results: Sequence[Tensor | None]) -> None:
        """results: outcome as forward left it, and what is filled in, as ``Ridge`` of ridge.cpp names it."""
        self._run(self._backward, q, k, v, library.dense_last(dy, torch.float32), (None, *results))

    def _run(
        self,
        function: Callable[[bytes], Any],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dy: Tensor | None,
        results: Sequence[Tensor | None],
    ) -> int:
        qs, ks, vs = q.stride(), k.stride(), v.stride()
        if not (q.dtype is k.dtype is v.dtype is torch.float32 and qs[3] == ks[3] == vs[3] == 1):
            q, k, v = (library.dense_last(x, torch.float32) for x in (q, k, v))
            qs, ks, vs = q.stride(), k.stride(), v.stride()
        (batch, heads, queries, dim), (_, kv_heads, keys, value_dim) = q.shape, v.shape
        places, pair, tasks = self._shapes[3][0], (batch, kv_heads), batch * kv_heads * self.segments  # type: ignore[index]
        memory = ((*pair, dim, dim), (*pair, value_dim, dim), (*pair, dim, dim), (*pair, dim))
        kept = (
            (heads,),
            (kv_heads,),
            (heads,),
            (places, keys),
            (places, queries),
            (places, queries),
            (self.segments + 1,),
            *memory,
        )
        if any(have is not None and have != wanted for have, wanted in zip(self._shapes, kept, strict=True)):
            raise TypeError(f"kernel: a ridge call of shapes {kept} is required, received {self._shapes}.")
        rows, by_key, by_value = (batch, heads, queries), (*pair, keys, dim), (*pair, keys, value_dim)
        shapes = (
            (*rows, value_dim),
            (tasks,),
            (*rows, dim),
            by_key,
            by_value,
            (tasks, heads // kv_heads),
            (tasks,),
            *memory,
        )
        found = [library.address(x, dtype, shape) for x, dtype, shape in zip(results, _RESULTS, shapes, strict=False)]
        y, outcome, *gradients = *found, *(0,) * (len(_RESULTS) - len(found))  # those that only backward fills in
        code = function(
            _CALL.pack(
                *(library.address(x, torch.float32, shape, strided=True) for x, shape in ((q, (*rows, dim)), (k, by_key), (v, by_value))),
                *self._addresses, *qs[:3], *ks[:3], *vs[:3], *((0, 0, 0) if dy is None else dy.stride()[:3]),
                batch, heads, kv_heads, queries, keys, dim, value_dim, *self._rules, y, outcome,
                library.address(dy, torch.float32, (*rows, value_dim), strided=True), *gradients,
            )
        )  # fmt: skip
        if code == 1:
            raise MemoryError("attention: the CPU kernel could not allocate its buffers.")
        if code == _INDEFINITE:
            raise NonFiniteError(
                "attention: kernel + ridge is not positive definite in float64 (or not finite). Look for keys that are not finite, or raise the ridge."
            )
        return code


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    ridge: Tensor,
    seen: Places,
    before: Before,
    powers: Sequence[int],
    limit: float,
) -> tuple[Tensor, Tensor]:
    """(y (B, H, T, P) float32, int32 (B * Hkv * documents,): ``DOUBLE`` for those that ran in float64, because float32 would have lost three digits).

    y_t = C_t P_t (M_t P_t)^powers_h scale_h q_t over the keys that each query sees, P = (G + ridge I)^-1; keys longer than ``limit``
    are shortened to it (0: none are). scale (H,), ridge (Hkv,).

    Raises: NonFiniteError when G + ridge I is not positive definite, which keys that are not finite cause.
    """
    return Reader(scale, ridge, seen, before, powers, limit).forward(q, k, v)


class Gradients(NamedTuple):
    """What ``backward`` returns: of q, k, v (float32), scale (H,) and ridge (Hkv,) (float64), and of the memory where asked for."""

    q: Tensor
    k: Tensor
    v: Tensor
    scale: Tensor
    ridge: Tensor
    before: Before


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, ridge: Tensor, doubled: Tensor, seen: Places, before: Before, powers: Sequence[int],
    limit: float, started: bool,
) -> Gradients:  # fmt: skip
    """The gradients of ``forward``, where ``doubled``, bool (B, Hkv, documents), tells which ran in float64. started: whether the memory gets some."""
    batch, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    reader = Reader(scale, ridge, seen, before, powers, limit)
    tasks = batch * kv_heads * reader.segments
    memory = Before(
        *(library.zeros(*x.shape, dtype=torch.float64) if started and x is not None else None for x in before)
    )
    # an unfinished sum a task, so that the order of threads does not matter
    dscale, dridge = (
        library.zeros(tasks, heads // kv_heads, dtype=torch.float64),
        library.zeros(tasks, dtype=torch.float64),
    )
    # the kernel sets them to zero where it adds to them: to do so here would bring all of them from far away once more
    dq, dk, dv = (library.empty(*x.shape) for x in (q, k, v))
    outcome = torch.where(doubled, DOUBLE, _GOOD).to(torch.int32).flatten()
    reader.backward(dy, q, k, v, (outcome, dq, dk, dv, dscale, dridge, *memory))
    return Gradients(
        dq,
        dk,
        dv,
        dscale.view(batch, kv_heads, -1, heads // kv_heads).sum((0, 2)).view(heads),
        dridge.view(batch, kv_heads, -1).sum((0, 2)),
        memory,
    )


__all__ = ["CODE", "DOUBLE", "SOURCE", "Before", "Gradients", "Reader", "backward", "forward"]
