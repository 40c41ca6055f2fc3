"""Whether a compiled kernel can be had: the questions that every family of kernels asks in the same way."""

import functools
import os
import warnings
from collections.abc import Sequence

import torch

from zonal.errors import MissingKernelsWarning
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


@functools.cache
def say_once() -> None:
    """Warn that torch runs in the place of compiled kernels, at the first call that would have had one."""
    warnings.warn(
        "zonal: no C++ compiler was found, so torch runs in place of compiled CPU kernels, up to 8 times slower. Install g++ or clang++ (or let CXX name a compiler), "
        f"or install a wheel that carries the kernels (pip wheel .). {VARIABLE}=off runs torch without this warning.",
        MissingKernelsWarning,
        stacklevel=3,
    )


def missing(code: Formula, source: str) -> str | None:
    """Why the library of a link on the CPU cannot be had, or None: it is compiled here, or came with the package. It is not loaded yet."""
    if build.compiler() is None and not build.carried(code, source):
        if not torch.compiler.is_compiling():
            say_once()
        return (
            "no C++ compiler was found (set CXX, or install g++ or clang++) and no good library "
            f"of source {source!r} for link {code.name!r} came with the package"
        )
    if torch.compiler.is_compiling():  # a traced graph has the kernel in it and says so when it cannot be had
        return None
    failure = library.failure(code, source)
    return None if failure is None else f"the kernel could not be had ({failure})"


__all__ = ["VARIABLE", "missing", "say_once", "unfit"]
