"""Calls the compiled kernel for attention by distance (distance.cpp) on tensors of the CPU, in float32; any strides but the last."""

import ctypes

import torch
from torch import Tensor

from zonal.formula import FORMULAS
from zonal.kernels import native
from zonal.kernels.cpp import library
from zonal.kernels.distance_spec import DistanceSpec

CODE = FORMULAS["exp"]
"""Its weights are exponentials, whatever the distances."""
_KINDS = {"euclidean": 0, "squared": 1, "sphere": 2, "hyperbolic": 3, "product": 4}


@torch.compiler.assume_constant_result
def source() -> str:
    """The source for this processor: the one in vectors of sixteen where it has AVX-512."""
    return "distance_wide" if torch.backends.cpu.get_cpu_capability() == "AVX512" else "distance"


class _Term(ctypes.Structure):
    """``Term`` of distance.cpp."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("kind", "start", "size")),
        *((name, ctypes.c_double) for name in ("eps", "scale")),
    ]


class _Distance(ctypes.Structure):
    """``Distance`` of distance.cpp."""

    _fields_ = [
        ("call", library.Fields), ("terms", ctypes.c_void_p), ("weights", ctypes.c_void_p), ("weighs", library.Strides),
        *((name, ctypes.c_int64) for name in ("count", "dim", "waves")), ("dweights", ctypes.c_void_p),
    ]  # fmt: skip


class _Arguments(library.Arguments):
    """A filled-in ``_Distance`` and what it points to."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weights: Tensor,
        coefficients: Tensor,
        key_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        spec: DistanceSpec,
    ) -> None:
        super().__init__(
            q,
            k,
            v,
            torch.ones(q.shape[1], dtype=torch.float32, device="cpu"),
            coefficients,
            key_mask,
            cu_seqlens,
            spec.rules,
        )
        weights = library.dense_last(weights, torch.float32)
        self.terms = (_Term * len(spec.terms))(*((_KINDS[term.kind], *term[1:]) for term in spec.terms))
        self.whole = _Distance(
            terms=ctypes.addressof(self.terms), weights=library.address(weights, torch.float32, (*q.shape[:3], len(spec.terms)), strided=True), weighs=library.Strides(*weights.stride()[:3]), count=len(spec.terms),
            dim=q.shape[3], waves=spec.waves,
        )  # fmt: skip
        self.kept.append(weights)
        self.function = native.load(CODE, source())
        self.width = int(self.function.zonal_distance_width(ctypes.byref(self.whole)))

    def run(self, name: str) -> None:
        self.call.D = self.width
        self.whole.call = self.call
        if getattr(self.function, name)(ctypes.byref(self.whole)):
            raise MemoryError("attention: the CPU kernel for distances could not allocate its buffers.")


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: Tensor,
    coefficients: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: DistanceSpec,
) -> tuple[Tensor, Tensor]:
    """(y (B, H, T, P), factor (B, H, T)), float32: with the row anchor factor is log sum_s K, as ``library.forward`` has it.

    q (B, H, T, D), k (B, Hkv, S, D): points. weights (B, H, T, terms). coefficients (H, 3 waves). key_mask, cu_seqlens: as ``library.forward``.
    """
    rows, value_dim = q.shape[:3], v.shape[3]
    y, factor = library.empty(*rows, value_dim), library.empty(*rows)
    arguments = _Arguments(q, k, v, weights, coefficients, key_mask, cu_seqlens, spec)
    arguments.point("y", y, torch.float32, (*rows, value_dim))
    arguments.point("factor", factor, torch.float32, rows)
    arguments.run("zonal_distance_forward")
    return y, factor


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, weights: Tensor, coefficients: Tensor, key_mask: Tensor | None,
    cu_seqlens: Tensor | None, spec: DistanceSpec, learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v and weights, float32, and of the coefficients (H, 3 waves) in float64 where they are ``learned``."""
    batch, heads, queries, _ = q.shape
    kv_heads, keys, value_dim = k.shape[1], k.shape[2], v.shape[3]
    # with fewer heads than threads the queries are split as well, at the price of sums of their own
    split = max(1, min(-(-torch.get_num_threads() // max(batch * kv_heads, 1)), -(-queries // 64)))
    places = torch.get_num_threads() if split == 1 else split * batch * kv_heads
    dq, dk, dv, dweights = (library.empty(*x.shape) for x in (q, k, v, weights))
    numbers = 3 * spec.waves if learned else 0
    dcoefficients = library.zeros(split, batch, heads, numbers, dtype=torch.float64) if numbers else None
    arguments = _Arguments(q, k, v, weights, coefficients, key_mask, cu_seqlens, spec)
    dy = library.dense_last(dy, torch.float32)
    arguments.call.learned, arguments.call.split, arguments.call.places, arguments.call.dys = (
        numbers,
        split,
        places,
        library.Strides(*dy.stride()[:3]),
    )
    shape, sums = (batch, heads, queries, value_dim), (places, keys, arguments.width + value_dim)
    arguments.point("y", y, torch.float32, shape)
    arguments.point("factor", factor, torch.float32, shape[:3])
    arguments.point("dy", dy, torch.float32, shape, strided=True)
    for name, gradient, x in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        arguments.point(name, gradient, torch.float32, x.shape)
    arguments.point("dcoefficients", dcoefficients, torch.float64, (split, batch, heads, numbers))
    arguments.point("sums", library.empty(*sums), torch.float32, sums)
    arguments.whole.dweights = library.address(dweights, torch.float32, weights.shape)
    arguments.run("zonal_distance_backward")
    return dq, dk, dv, dweights, None if dcoefficients is None else dcoefficients.sum((0, 1))


__all__ = ["CODE", "backward", "forward", "source"]
