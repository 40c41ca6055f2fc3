"""Compiled kernels of the CPU: whether a kernel is available, which library it is, and loading it, for all families.

A library is in the user's cache, came with the package, or is compiled now. The name of a cached library includes its
source, compiler, flags and torch. The name of a shipped library includes its source and flags only: it has a C
interface, uses nothing of torch but the OpenMP runtime (loading checks that it is the same), and its flags say which
processor it needs. A library is loaded only when its checksum equals the one recorded after it was compiled.
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from zonal.cache import cache_folder
from zonal.errors import MissingKernelsWarning
from zonal.formula import Formula
from zonal.kernels import build as recipe
from zonal.kernels.build import BuildError

VARIABLE = "ZONAL_KERNELS"
LARGEST = 256
"""The largest key and value dimensions of the kernels that hold whole rows in registers."""
_VERSION = 6
Reason = str | None


@dataclass(frozen=True)
class Family:
    """The kernels of one C++ source. code: the link of its only library; None when every link has a library.

    wide: there is a second source, ``<source>_wide``, for processors with AVX-512. cuda: Triton kernels do the same on
    CUDA.
    """

    source: str
    code: Formula | None = None
    wide: bool = False
    cuda: bool = True

    @property
    def chosen(self) -> str:
        """The source for this processor."""
        return f"{self.source}_wide" if self.wide and has_avx512() else self.source

    def load(self, code: Formula | None = None) -> ctypes.CDLL:
        """``load`` of this family's library. code: of the link, where every link has one."""
        return load(self._of(code), self.chosen)

    def _of(self, code: Formula | None) -> Formula:
        found = self.code or code
        assert found is not None
        return found

    def refusal(
        self,
        device: str,
        dtype: torch.dtype,
        special: Callable[[], Reason],
        *,
        cuda: Callable[[], Reason] = lambda: None,
        code: Formula | None = None,
    ) -> Reason:
        """Why no kernel of this family runs a call, or None.

        Checked in order, up to the first refusal: the environment, the device, the type, ``special`` of the family, on
        CUDA triton and else the compiler or shipped library, and a build that failed before.
        """
        reason = unfit(device, dtype, ("cpu", "meta", *(("cuda",) if self.cuda else ()))) or special()
        if reason is not None:
            return reason
        if device == "cuda":
            return cuda() or (None if has_triton() else "triton is not installed (pip install triton)")
        return missing(self._of(code), self.chosen)


def switched_off() -> bool:
    """Whether the environment asks for torch in the place of all compiled kernels."""
    return os.environ.get(VARIABLE) == "off"


def unfit(device: str, dtype: torch.dtype, devices: Sequence[str] = ("cpu", "cuda", "meta")) -> Reason:
    """Why no kernel runs on this device and dtype, or None."""
    if switched_off():
        return f"the environment says {VARIABLE}=off"
    if device not in devices:
        return f"there is no kernel for device {device!r}"
    return "the kernel is for float32 and shorter, the call is in float64" if dtype == torch.float64 else None


@functools.lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether triton can be imported."""
    return importlib.util.find_spec("triton") is not None


@torch.compiler.assume_constant_result
def has_avx512() -> bool:
    """Whether this processor has vectors of sixteen floats."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


@functools.cache
def say_once() -> None:
    """Warn that torch runs in the place of compiled kernels, at the first call that would have had one."""
    warnings.warn(
        "zonal: no C++ compiler was found, so torch runs in place of compiled CPU kernels, up to 8 times slower. "
        "Install g++ or clang++ (or let CXX name a compiler), or install a wheel that carries the kernels "
        "(pip wheel .). "
        f"{VARIABLE}=off runs torch without this warning.",
        MissingKernelsWarning,
        stacklevel=3,
    )


def missing(code: Formula, source: str) -> Reason:
    """Why the CPU library of a link is unavailable, or None: it can be compiled, or was shipped. It is not loaded."""
    if compiler() is None and not carried(code, source):
        if not torch.compiler.is_compiling():
            say_once()
        return (
            "no C++ compiler was found (set CXX, or install g++ or clang++) and no good library "
            f"of source {source!r} for link {code.name!r} came with the package"
        )
    if torch.compiler.is_compiling():  # a traced graph has the kernel in it and says so when it cannot be had
        return None
    found = failure(code, source)
    return None if found is None else f"the kernel could not be had ({found})"


@torch.compiler.assume_constant_result
def compiler() -> str | None:
    """The C++ compiler named by the environment variable CXX, else g++, clang++ or c++; None when there is none."""
    return recipe.find(os.environ.get("CXX") or None)


def flags(source: str = "tile") -> tuple[str, ...]:
    """Compiler flags for this processor and source."""
    return recipe.flags(source, recipe.is_x86() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"))


def target(code: Formula, source: str = "tile") -> Path:
    """Where the library of a link is kept when it is compiled here. Raises: BuildError without a compiler."""
    path = compiler()
    if path is None:
        raise BuildError(
            "build: no C++ compiler was found (looked for CXX, g++, clang++, c++). "
            "Install one, or do without: torch runs instead."
        )
    name = recipe.file_name(code, source, flags(source), recipe.version(path), torch.__version__)
    return cache_folder() / "kernels" / name


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
    places: Sequence[Path | None] = [shipped(code, source)]
    with contextlib.suppress(BuildError):  # without a compiler that runs, what came with the package will do
        places = [target(code, source), *places]
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
            f"zonal: the kernel {damaged.name} that came with the package is damaged and is not used. "
            "Install the package again.",
            stacklevel=2,
        )
    library, path = target(code, source), compiler()
    assert path is not None
    try:
        with recipe.alone(library):
            if not again and recipe.good(library):  # another process has compiled it meanwhile
                return library
            if not again and library.exists():
                warnings.warn(
                    f"zonal: the kernel {library.name} in the cache was damaged and is compiled again.", stacklevel=2
                )
            recipe.make(path, code, source, flags(source), library)
    except OSError as error:
        raise BuildError(
            f"build: the kernel could not be written to {library.parent} ({error}). "
            "Set ZONAL_CACHE to a folder that can be written."
        ) from error
    return library


# kernels that could not be had in this process, with the reason: they are not tried at every call
_failed: dict[tuple[Formula, str], str] = {}


def failure(code: Formula, source: str = "tile") -> str | None:
    """Why an earlier attempt to load a link's kernel failed, or None."""
    return _failed.get((code, source))


def load(code: Formula, source: str = "tile") -> ctypes.CDLL:
    """The library of a link, compiled if it is missing. Raises: BuildError, at the first failure and ever after."""
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
    if path.parent != recipe.SHIPPED:
        return _opened(path)
    try:
        library = _opened(path)
        if not _torchs_threads(library):
            raise BuildError(
                f"build: the kernel {path} has another OpenMP runtime than torch, so that both would start threads."
            )
    except BuildError as error:
        warnings.warn(
            f"zonal: the kernel that came with the package is not used, one is compiled here. {error}", stacklevel=2
        )
        return _opened(build(code, source, again=True))
    return library


def _torchs_threads(library: ctypes.CDLL) -> bool:
    """Whether a library's OpenMP runtime is the one that torch has loaded: the same function at the same place."""
    if sys.platform == "darwin":  # compiled without
        return True
    torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    return len({ctypes.cast(there.omp_get_max_threads, ctypes.c_void_p).value for there in (library, torchs)}) == 1


def _opened(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        found = library.zonal_version()
    except (OSError, AttributeError) as error:
        raise BuildError(
            f"build: the kernel {path} does not load ({error}). Remove it, or run `zonal build --again`."
        ) from error
    if found != _VERSION:
        raise BuildError(
            f"build: the kernel {path} has version {found}, {_VERSION} was required. "
            "Remove it, or run `zonal build --again`."
        )
    return library


__all__ = [
    "LARGEST",
    "VARIABLE",
    "Family",
    "Reason",
    "build",
    "built",
    "carried",
    "compiler",
    "failure",
    "flags",
    "has_avx512",
    "has_triton",
    "load",
    "missing",
    "say_once",
    "shipped",
    "switched_off",
    "target",
    "unfit",
]
