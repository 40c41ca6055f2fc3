"""Which layers run the compiled kernels around a recurrence (the short convolution, the gated norm)."""

import warnings

import torch
from torch import Tensor

from zonal import torch_func
from zonal.kernels.build import BuildError
from zonal.kernels.mixer import FAMILY
from zonal.kernels.native import Reason


def refusal(*tensors: Tensor | None) -> Reason:
    """The reason why torch runs instead of the compiled kernel on these tensors, or None. Compiles the kernel at first
    use.
    """
    given = [x for x in tensors if x is not None]
    reason = FAMILY.refusal(given[0].device.type, given[0].dtype, lambda: _unfit(given))
    if reason is not None or torch.compiler.is_compiling():
        return reason
    try:
        FAMILY.load()
    except BuildError as error:  # once: from now on it is refused
        warnings.warn(f"zonal: convolutions and gated norms run in torch, several times slower. {error}", stacklevel=4)
        return f"the kernel could not be had ({error})"
    return None


def _unfit(given: list[Tensor]) -> Reason:
    if any(x.dtype != torch.float32 or x.device != given[0].device for x in given):
        return "the kernel is for float32, on one device"
    return torch_func.refusal()


__all__ = ["refusal"]
