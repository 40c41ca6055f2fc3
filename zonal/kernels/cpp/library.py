"""Calls the compiled kernel on tensors: float32 on the CPU, or bfloat16 where the processor has it; any strides but the last."""

import ctypes
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from zonal.formula import Formula
from zonal.kernels import native
from zonal.kernels.build import BuildError
from zonal.kernels.spec import TileSpec

_ANCHORS = {"row": 0, "count": 1, "raw": 2}
_POINTERS = ("q", "k", "v", "scale", "coefficients", "key_mask", "edges")
_SIZES = (
    "B", "H", "Hkv", "T", "S", "D", "P", "documents", "causal", "include_self", "chunk", "left", "right", "numbers", "learned", "anchor", "normalise",
)  # fmt: skip
_RESULTS = ("y", "rest", "factor", "dy", "dq", "dk", "dv", "sums", "dscale", "dcoefficients")


class Strides(ctypes.Structure):
    """``Strides`` of common.hpp."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "token")]


class Fields(ctypes.Structure):
    """``Call`` of common.hpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS), *((name, Strides) for name in ("qs", "ks", "vs", "dys")),
        *((name, ctypes.c_int64) for name in _SIZES), ("eps", ctypes.c_float), *((name, ctypes.c_void_p) for name in _RESULTS),
        ("split", ctypes.c_int64), ("places", ctypes.c_int64),
    ]  # fmt: skip


def _in_pairs(*tensors: Tensor, link: Formula) -> ctypes.CDLL | None:
    """The kernel for bfloat16 products where it applies: all in bfloat16 with an even last axis, and the processor's instructions."""
    if any(x.dtype != torch.bfloat16 for x in tensors) or any(x.shape[3] % 2 for x in tensors[:1] + tensors[2:]):
        return None
    if not native.load(link).zonal_has_bf16():
        return None
    known = native.failure(link, "tile_bf16") is not None
    try:
        return native.load(link, "tile_bf16")
    except BuildError as error:
        if not known:
            warnings.warn(f"zonal: bfloat16 runs through the float32 kernel, twice as slow. {error}", stacklevel=2)
        return None


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A buffer of the CPU that a kernel fills. Neither the default dtype nor the default device of torch changes it."""
    return torch.empty(shape, dtype=dtype, device="cpu")


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A buffer of zeros, as ``empty`` makes them."""
    return torch.zeros(shape, dtype=dtype, device="cpu")


def address(x: Tensor | None, dtype: torch.dtype, shape: Sequence[int], *, strided: bool = False) -> int:
    """Where a buffer lies, once it is what the kernel takes it for: a kernel that is told otherwise writes past its end. 0 for None.

    strided: only the last axis has to be contiguous.

    Raises: TypeError for another dtype, device, shape or layout, which is a defect of the caller.
    """
    if x is None:
        return 0
    if (
        x.dtype is dtype
        and x.shape == shape
        and x.is_cpu
        and (x.is_contiguous() or (strided and (shape[-1] <= 1 or x.stride(-1) == 1)))
    ):
        return x.data_ptr()
    raise TypeError(
        f"kernel: a buffer must be {dtype} of shape {tuple(shape)} on the CPU and {'contiguous in its last axis' if strided else 'contiguous'}, "
        f"received {x.dtype} of shape {tuple(x.shape)} on {x.device} with strides {x.stride()}."
    )


def dense_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype`` with a last axis of stride 1, as the kernels read it. What is expanded stays so along the other axes."""
    x = x.to(dtype)
    if x.shape[-1] <= 1 or x.stride(-1) == 1:
        return x
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride()[:-1])
    return x[once].contiguous().expand_as(x)


class Arguments:
    """A filled-in ``Fields`` and the tensors it points to, which must live as long."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, key_mask: Tensor | None, cu_seqlens: Tensor | None,
        spec: TileSpec, dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        batch, heads, queries, dim = q.shape
        keys, value_dim = k.shape[2], v.shape[3]
        q, k, v = (dense_last(x, dtype) for x in (q, k, v))
        self.kept: list[Tensor | None] = []
        self.call = Fields(
            qs=Strides(*q.stride()[:3]), ks=Strides(*k.stride()[:3]), vs=Strides(*v.stride()[:3]), B=batch, H=heads, Hkv=k.shape[1], T=queries,
            S=keys, D=dim, P=value_dim, documents=0 if cu_seqlens is None else cu_seqlens.shape[0] - 1, causal=spec.causal,
            include_self=spec.include_self, chunk=spec.chunk, left=-1 if spec.left is None else spec.left, right=keys + queries if spec.right is None else spec.right,
            numbers=coefficients.shape[1], anchor=_ANCHORS[spec.anchor], normalise=spec.normalise, eps=spec.eps, split=1, places=torch.get_num_threads(),
        )  # fmt: skip
        self.point("q", q, dtype, (batch, heads, queries, dim), strided=True)
        self.point("k", k, dtype, (batch, k.shape[1], keys, dim), strided=True)
        self.point("v", v, dtype, (batch, k.shape[1], keys, value_dim), strided=True)
        self.point("scale", scale.float().contiguous(), torch.float32, (heads,))
        self.point("coefficients", coefficients.float().contiguous(), torch.float32, (heads, coefficients.shape[1]))
        self.point("key_mask", None if key_mask is None else key_mask.contiguous(), torch.bool, (batch, keys))
        self.point(
            "edges",
            None if cu_seqlens is None else cu_seqlens.to("cpu", torch.int64).contiguous(),
            torch.int64,
            (self.call.documents + 1,),
        )

    def point(
        self, name: str, x: Tensor | None, dtype: torch.dtype, shape: Sequence[int], *, strided: bool = False
    ) -> None:
        """Let a field of the call point to a tensor, which ``address`` checks."""
        setattr(self.call, name, address(x, dtype, shape, strided=strided))
        self.kept.append(x)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: Tensor,
    coefficients: Tensor,
    key_mask: Tensor | None,
    cu_seqlens: Tensor | None,
    spec: TileSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y (B, H, T, P), factor (B, H, T), rest): the row's factor, in log space with the row anchor log sum_s K. y is in the type of q;
    ``rest`` is what rounding it to 16 bits left, for backward, which takes dy . y from it: a rounded y would spoil gradients that
    cancel. It is empty in float32 and where no gradient is asked for.

    key_mask: bool (B, S). cu_seqlens: borders of packed documents. scale (H,), coefficients (H, n).
    """
    shape = (*q.shape[:3], v.shape[3])
    factor = empty(*shape[:3])
    kept = not spec.inference and q.dtype != torch.float32
    in_pairs = _in_pairs(q, k, v, link=spec.link)
    if in_pairs is None:
        y = empty(*shape)
        arguments = Arguments(q, k, v, scale, coefficients, key_mask, cu_seqlens, spec)
        arguments.point("y", y, torch.float32, shape)
        arguments.point("factor", factor, torch.float32, shape[:3])
        run(native.load(spec.link).zonal_forward, arguments)
        rounded = y.to(q.dtype)
        return rounded, factor, (y - rounded).to(q.dtype) if kept else q.new_empty(0)
    y, rest = q.new_empty(shape), q.new_empty(shape if kept else 0)
    arguments = Arguments(q, k, v, scale, coefficients, key_mask, cu_seqlens, spec, torch.bfloat16)
    arguments.point("y", y, torch.bfloat16, shape)
    arguments.point("rest", rest if kept else None, torch.bfloat16, shape)
    arguments.point("factor", factor, torch.float32, shape[:3])
    run(in_pairs.zonal_forward, arguments)
    return y, factor, rest


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, rest: Tensor, scale: Tensor, coefficients: Tensor,
    key_mask: Tensor | None, cu_seqlens: Tensor | None, spec: TileSpec, learned: int, scaled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v as they came, of scale (H,) when ``scaled``, and of the first ``learned`` coefficients (H, learned) in float64."""
    batch, heads, queries, dim = q.shape
    kv_heads, keys, value_dim = k.shape[1], k.shape[2], v.shape[3]
    in_pairs = _in_pairs(q, k, v, dy, link=spec.link)
    if scaled and in_pairs is not None and bool((scale == 0).any()):
        in_pairs = None  # it takes the scale's gradient from the scores
    dtype = torch.float32 if in_pairs is None else torch.bfloat16
    if in_pairs is None:
        y = y.float() + rest.float() if rest.numel() else y.float()
    # with fewer heads than threads the queries are split as well, at the price of sums of their own
    split = max(1, min(-(-torch.get_num_threads() // max(batch * kv_heads, 1)), -(-queries // 64)))
    places = torch.get_num_threads() if split == 1 else split * batch * kv_heads
    dq, dk, dv = (empty(*x.shape, dtype=dtype) for x in (q, k, v))
    dscale = zeros(split, batch, heads, dtype=torch.float64) if scaled else None
    dcoefficients = zeros(split, batch, heads, learned, dtype=torch.float64) if learned else None
    arguments = Arguments(q, k, v, scale, coefficients, key_mask, cu_seqlens, spec, dtype)
    dy = dense_last(dy, dtype)
    arguments.call.learned, arguments.call.split, arguments.call.dys = learned, split, Strides(*dy.stride()[:3])
    shape = (batch, heads, queries, value_dim)
    arguments.point("y", y, dtype, shape)
    arguments.point("rest", rest if rest.numel() and in_pairs is not None else None, dtype, shape)
    arguments.point("factor", factor, torch.float32, shape[:3])
    arguments.point("dy", dy, dtype, shape, strided=True)
    for name, gradient, x in (("dq", dq, q), ("dk", dk, k), ("dv", dv, v)):
        arguments.point(name, gradient, dtype, x.shape)
    arguments.point("sums", empty(places, keys, dim + value_dim), torch.float32, (places, keys, dim + value_dim))
    arguments.point("dscale", dscale, torch.float64, (split, batch, heads))
    arguments.point("dcoefficients", dcoefficients, torch.float64, (split, batch, heads, learned))
    run((native.load(spec.link) if in_pairs is None else in_pairs).zonal_backward, arguments)
    sums = None if dcoefficients is None else dcoefficients.sum((0, 1))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None if dscale is None else dscale.sum((0, 1)), sums


def run(function: object, arguments: Arguments) -> None:
    """Call a kernel. Raises: MemoryError when it could not allocate its buffers."""
    if function(ctypes.byref(arguments.call)):  # type: ignore[operator]
        raise MemoryError("attention: the CPU kernel could not allocate its buffers.")


__all__ = [
    "Arguments",
    "Fields",
    "Strides",
    "address",
    "backward",
    "dense_last",
    "empty",
    "forward",
    "run",
    "zeros",
]
