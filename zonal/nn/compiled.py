"""Which layers run the compiled kernels around a recurrence (the short convolution, the gated norm), and how a layer's
call becomes one.
"""

import warnings

import torch
from torch import Tensor

from zonal.execution import native
from zonal.kernels import mixer_ops, transforms
from zonal.kernels import native as native_kernels
from zonal.kernels.build import BuildError
from zonal.kernels.cpp import mixer_library
from zonal.kernels.cpp.mixer_library import Seen


def refusal(*tensors: Tensor | None) -> str | None:
    """Why torch runs in the kernel's place on these tensors, or None. The kernel is compiled at its first use."""
    given = [x for x in tensors if x is not None]
    reason = next(
        (why for x in given if (why := native_kernels.unfit(x.device.type, x.dtype, ("cpu", "meta"))) is not None), None
    )
    if reason is not None:
        return reason
    if any(x.dtype != torch.float32 for x in given):
        return "the kernel is for float32"
    if transforms.active():
        return "a call that is transformed needs operations of torch"
    reason = native_kernels.missing(mixer_library.CODE, mixer_library.SOURCE)
    if reason is not None or torch.compiler.is_compiling():
        return reason
    try:
        native_kernels.load(mixer_library.CODE, mixer_library.SOURCE)
    except BuildError as error:  # once: from now on it is refused
        warnings.warn(f"zonal: convolutions and gated norms run in torch, several times slower. {error}", stacklevel=4)
        return f"the kernel could not be had ({error})"
    return None


def _recorded(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def convolution(
    x: Tensor,
    tail: Tensor | None,
    taps: Tensor,
    bias: Tensor | None,
    seen: Seen,
    silu: bool,
    heads: int,
    parts: list[int],
) -> list[Tensor]:
    """``mixer_library.convolution`` with gradients, for tensors that are not refused."""
    if not _recorded(x, tail, taps, bias) and native.plain(x):
        return mixer_library.convolution(x, tail, taps, bias, seen, silu, heads, parts)
    return list(mixer_ops.short_convolution(x, tail, taps, bias, *seen, silu, heads, parts)[: len(parts)])


def gated_norm(
    y: Tensor, v: Tensor | None, z: Tensor, skip: Tensor | None, gain: Tensor, groups: int, eps: float
) -> Tensor:
    """``mixer_library.gated_norm`` with gradients, for tensors that are not refused."""
    if not _recorded(y, v, z, skip, gain) and native.plain(y, z):
        return mixer_library.gated_norm(y, v, z, skip, gain, groups, eps)
    return mixer_ops.gated_norm(y, v, z, skip, gain, groups, eps)


__all__ = ["convolution", "gated_norm", "refusal"]
