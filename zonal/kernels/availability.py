"""Whether a compiled kernel can be had: the questions that every family of kernels asks in the same way."""

import os
from collections.abc import Sequence

import torch

from zonal.formula import Formula
from zonal.kernels.cpp import build, library

VARIABLE = "ZONAL_KERNELS"


def unfit(device: str, dtype: torch.dtype, devices: Sequence[str] = ("cpu", "cuda", "meta")) -> str | None:
    """Why no kernel runs on this device and dtype, or None; what a family says of a call's operator comes after it."""
    if os.environ.get(VARIABLE) == "off":
        return f"the environment says {VARIABLE}=off"
    if device not in devices:
        return f"there is no kernel for device {device!r}"
    return "the kernel is for float32 and shorter, the call is in float64" if dtype == torch.float64 else None


def missing(code: Formula, source: str) -> str | None:
    """Why the library of a link on the CPU cannot be had, or None: it is compiled here, or came with the package. It is not loaded yet."""
    if build.compiler() is None and not build.carried(code, source):
        return (
            "no C++ compiler was found (set CXX, or install g++ or clang++) and no good library "
            f"of source {source!r} for link {code.name!r} came with the package"
        )
    if torch.compiler.is_compiling():  # a traced graph has the kernel in it and says so when it cannot be had
        return None
    failure = library.failure(code, source)
    return None if failure is None else f"the kernel could not be had ({failure})"


__all__ = ["VARIABLE", "missing", "unfit"]
