"""Which library is the CPU kernel of a link: the one in the user's cache, the one that came with the package, or a new one.

A library in the cache is named after its source, compiler, flags and torch. One that came with the package is named after its source and
flags alone: it has a C interface, uses nothing of torch's but the OpenMP runtime (``library`` checks that it is the same), and its flags
say which processor it needs. Either is loaded only when its checksum is the one written down after it was compiled.
"""

import contextlib
import functools
import os
import warnings
from pathlib import Path

import torch

from zonal.data.cache import cache_folder
from zonal.formula import Formula
from zonal.kernels.cpp import recipe
from zonal.kernels.cpp.recipe import SOURCES, BuildError


@torch.compiler.assume_constant_result
def compiler() -> str | None:
    """The C++ compiler: the one the environment variable CXX names, else g++, clang++ or c++; None when there is none."""
    return recipe.find(os.environ.get("CXX") or None)


def flags(source: str = "tile") -> tuple[str, ...]:
    """Compiler flags for this processor and source."""
    return recipe.flags(source, recipe.is_x86() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"))


def target(code: Formula, source: str = "tile") -> Path:
    """Where the library of a link is kept when it is compiled here, made from one of ``SOURCES``. Raises: BuildError without a compiler."""
    path = compiler()
    if path is None:
        raise BuildError(
            "build: no C++ compiler was found (looked for CXX, g++, clang++, c++). Install one, or do without: torch runs instead."
        )
    return (
        cache_folder()
        / "kernels"
        / recipe.file_name(code, source, flags(source), recipe.version(path), torch.__version__)
    )


def shipped(code: Formula, source: str = "tile") -> Path | None:
    """The library of a link that came with the package, for this processor and from these sources, or None."""
    if not recipe.SHIPPED.is_dir():
        return None
    library = recipe.SHIPPED / recipe.file_name(code, source, flags(source))
    return library if library.exists() else None


@functools.lru_cache(maxsize=64)
def _carried(code: Formula, source: str) -> bool:
    library = shipped(code, source)
    return library is not None and recipe.good(library)


@torch.compiler.assume_constant_result
def carried(code: Formula, source: str = "tile") -> bool:
    """Whether a good library of a link came with the package. Looked for once in a process."""
    return _carried(code, source)


def built(code: Formula, source: str = "tile") -> Path | None:
    """The good library of a link that is there already and would be used, or None.

    One compiled here comes before one that came with the package: it was asked for.
    """
    places = [shipped(code, source)]
    with contextlib.suppress(BuildError):  # without a compiler that runs, what came with the package will do
        places.insert(0, target(code, source))
    return next((library for library in places if library is not None and recipe.good(library)), None)


def build(code: Formula, source: str = "tile", *, again: bool = False) -> Path:
    """The library of a link, compiled unless a good one is there (``again``: compiled anyway).

    Raises: BuildError with the compiler's first words when it fails, or when the cache cannot be written.
    """
    there = None if again else built(code, source)
    if there is not None:
        return there
    damaged = shipped(code, source)
    if not again and damaged is not None:
        warnings.warn(
            f"zonal: the kernel {damaged.name} that came with the package is damaged and is not used. Install the package again.",
            stacklevel=2,
        )
    library = target(code, source)
    if not again and library.exists():
        warnings.warn(f"zonal: the kernel {library.name} in the cache was damaged and is compiled again.", stacklevel=2)
    path = compiler()
    assert path is not None
    try:
        recipe.make(path, code, source, flags(source), library)
    except OSError as error:
        raise BuildError(
            f"build: the kernel could not be written to {library.parent} ({error}). Set ZONAL_CACHE to a folder that can be written."
        ) from error
    return library


__all__ = ["SOURCES", "BuildError", "build", "built", "carried", "compiler", "flags", "shipped", "target"]
