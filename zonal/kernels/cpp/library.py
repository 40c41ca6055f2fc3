"""Calls the compiled kernel on tensors: float32 on the CPU, or bfloat16 where the processor has it; any strides but the last."""

import ctypes
import functools
import warnings

import torch
from torch import Tensor

from zonal.formula import Formula
from zonal.kernels.cpp.build import BuildError, build
from zonal.kernels.spec import TileSpec

_ABI = 2
_ANCHORS = {"row": 0, "count": 1, "raw": 2}
_POINTERS = ("q", "k", "v", "scale", "coefficients", "index", "lo", "hi")
_SIZES = ("B", "H", "Hkv", "T", "S", "D", "P", "by_batch", "numbers", "learned", "anchor", "normalise")
_RESULTS = ("y", "factor", "dy", "dq", "dk", "dv", "dscale", "dcoefficients")


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "head", "token")]


class _Call(ctypes.Structure):
    """``Call`` of tile.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS), *((name, _Strides) for name in ("qs", "ks", "vs")),
        *((name, ctypes.c_int64) for name in _SIZES), ("eps", ctypes.c_float), *((name, ctypes.c_void_p) for name in _RESULTS),
        ("split", ctypes.c_int64),
    ]  # fmt: skip


# kernels that could not be had in this process, with the reason: they are not tried at every call
_failed: dict[tuple[Formula, str], str] = {}


def failure(code: Formula, source: str = "tile") -> str | None:
    """Why an earlier attempt to load a link's kernel failed, or None."""
    return _failed.get((code, source))


def load(code: Formula, source: str = "tile") -> ctypes.CDLL:
    """The library of a link, compiled first where it is not there yet. Raises: BuildError, the first time and from then on."""
    if (code, source) in _failed:
        raise BuildError(_failed[code, source])
    try:
        return _loaded(code, source)
    except BuildError as error:
        _failed[code, source] = str(error)
        raise


@functools.lru_cache(maxsize=64)
def _loaded(code: Formula, source: str) -> ctypes.CDLL:
    path = build(code, source)
    try:
        library = ctypes.CDLL(str(path))
        found = library.zonal_version()
    except (OSError, AttributeError) as error:
        raise BuildError(f"build: the kernel {path} does not load ({error}). Remove it, or run `zonal build --again`.") from error
    if found != _ABI:
        raise BuildError(f"build: the kernel {path} has version {found}, {_ABI} was required. Remove it, or run `zonal build --again`.")
    return library


def _in_pairs(q: Tensor, k: Tensor, v: Tensor, spec: TileSpec) -> ctypes.CDLL | None:
    """The kernel for bfloat16 products where it applies: all three in bfloat16, an even D, the processor's instructions, no gradient."""
    if not spec.inference or any(x.dtype != torch.bfloat16 for x in (q, k, v)) or q.shape[3] % 2:
        return None
    if not load(spec.link).zonal_has_bf16():
        return None
    known = (spec.link, "tile_bf16") in _failed
    try:
        return load(spec.link, "tile_bf16")
    except BuildError as error:
        if not known:
            warnings.warn(f"zonal: bfloat16 runs through the float32 kernel, twice as slow. {error}", stacklevel=2)
        return None


def dense_last(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in ``dtype`` with a last axis of stride 1, as the kernels read it."""
    x = x.to(dtype)
    return x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous()


class _Arguments:
    """A filled-in ``_Call`` and the tensors it points to, which must live as long."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor, spec: TileSpec,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        batch, heads, queries, dim = q.shape
        keys, value_dim = k.shape[2], v.shape[3]
        q, k, v = (dense_last(x, dtype) for x in (q, k, v))
        by_batch = key_mask is not None
        if key_mask is None:
            index, hi = torch.arange(keys, dtype=torch.int32), torch.maximum(lo, hi)
        else:
            # the keys that are there, in order; intervals become intervals of places among them
            index = torch.argsort(~key_mask, dim=1, stable=True).to(torch.int32)
            rank = torch.nn.functional.pad(key_mask.cumsum(1), (1, 0))
            lo, hi = rank[:, lo], rank[:, torch.maximum(lo, hi)]
        tensors = {
            "q": q, "k": k, "v": v, "scale": scale.float().contiguous(), "coefficients": coefficients.float().contiguous(), "index": index,
            "lo": lo.to(torch.int32).contiguous(), "hi": hi.to(torch.int32).contiguous(),
        }  # fmt: skip
        self.kept = tensors
        self.call = _Call(
            **{name: x.data_ptr() for name, x in tensors.items()}, qs=_Strides(*q.stride()[:3]), ks=_Strides(*k.stride()[:3]),
            vs=_Strides(*v.stride()[:3]), B=batch, H=heads, Hkv=k.shape[1], T=queries, S=keys, D=dim, P=value_dim, by_batch=by_batch,
            numbers=coefficients.shape[1], learned=0, anchor=_ANCHORS[spec.anchor], normalise=spec.normalise, eps=spec.eps, split=1,
        )  # fmt: skip

    def point(self, tensors: dict[str, Tensor | None]) -> None:
        for name, x in tensors.items():
            setattr(self.call, name, None if x is None else x.data_ptr())
            self.kept[name] = x  # type: ignore[assignment]


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: Tensor, coefficients: Tensor, key_mask: Tensor | None, lo: Tensor, hi: Tensor, spec: TileSpec
) -> tuple[Tensor, Tensor]:
    """(y (B, H, T, P), factor (B, H, T)): the row's factor, in log space with the row anchor log sum_s K. Both float32, since
    backward takes dy . y from it, and a rounded y would spoil gradients that cancel.

    lo, hi: int64 (T,), the keys each query may see before ``key_mask`` (B, S). scale (H,), coefficients (H, n).
    """
    batch, heads, queries, _ = q.shape
    y = torch.empty(batch, heads, queries, v.shape[3])
    factor = torch.empty(batch, heads, queries)
    in_pairs = _in_pairs(q, k, v, spec)
    arguments = _Arguments(q, k, v, scale, coefficients, key_mask, lo, hi, spec, torch.float32 if in_pairs is None else torch.bfloat16)
    arguments.point({"y": y, "factor": factor})
    _run((load(spec.link) if in_pairs is None else in_pairs).zonal_forward, arguments)
    return y, factor


def backward(
    dy: Tensor, q: Tensor, k: Tensor, v: Tensor, y: Tensor, factor: Tensor, scale: Tensor, coefficients: Tensor, key_mask: Tensor | None,
    lo: Tensor, hi: Tensor, spec: TileSpec, learned: int, scaled: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Gradients of q, k, v as they came, of scale (H,) when ``scaled``, and of the first ``learned`` coefficients (H, learned) in float64."""
    batch, heads, queries, dim = q.shape
    kv_heads, keys, value_dim = k.shape[1], k.shape[2], v.shape[3]
    # with fewer heads than threads the queries are split as well, at the price of sums of their own
    split = max(1, min(-(-torch.get_num_threads() // max(batch * kv_heads, 1)), -(-queries // 64)))
    dq = torch.empty(batch, heads, queries, dim)
    dk, dv = torch.zeros(split, batch, kv_heads, keys, dim), torch.zeros(split, batch, kv_heads, keys, value_dim)
    dscale = torch.zeros(split, batch, heads, dtype=torch.float64) if scaled else None
    dcoefficients = torch.zeros(split, batch, heads, learned, dtype=torch.float64) if learned else None
    arguments = _Arguments(q, k, v, scale, coefficients, key_mask, lo, hi, spec)
    arguments.call.learned, arguments.call.split = learned, split
    arguments.point(
        {
            "y": y, "factor": factor, "dy": dy.float().contiguous(), "dq": dq, "dk": dk, "dv": dv, "dscale": dscale,
            "dcoefficients": dcoefficients,
        }
    )  # fmt: skip
    _run(load(spec.link).zonal_backward, arguments)
    sums = None if dcoefficients is None else dcoefficients.sum((0, 1))
    return dq.to(q.dtype), dk[0].to(k.dtype), dv[0].to(v.dtype), None if dscale is None else dscale.sum((0, 1)), sums


def _run(function: object, arguments: _Arguments) -> None:
    if function(ctypes.byref(arguments.call)):  # type: ignore[operator]
        raise MemoryError("attention: the CPU kernel could not allocate its buffers.")


__all__ = ["backward", "dense_last", "failure", "forward", "load"]
