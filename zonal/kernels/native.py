"""Compiled kernels of the CPU: whether a kernel is available, which library it is, and loading it, for all families.

A library is in the user's cache, came with the package, or is compiled now. The name of a cached library includes its
source, compiler, flags and torch. The name of a shipped library includes its source and flags only: it has a C
interface, uses nothing of torch but the OpenMP runtime (loading checks that it is the same), and its flags say which
processor it needs. A library is loaded only when its checksum equals the one recorded after it was compiled, and when
the processor has the instruction set that it was compiled for. Which of several sets a family uses is in ``choice.py``.
"""

import contextlib
import ctypes
import functools
import importlib.util
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch

from zonal.cache import VARIABLE as CACHE
from zonal.cache import cache_folder
from zonal.errors import MissingKernelsWarning
from zonal.formula import Formula
from zonal.kernels import build as recipe
from zonal.kernels import choice
from zonal.kernels.build import BuildError, InstructionSet
from zonal.kernels.op import decode, encode
from zonal.tracing import constant

VARIABLE = "ZONAL_KERNELS"
LARGEST = 256
"""The largest key and value dimensions of the kernels that hold whole rows in registers."""
_VERSION = 8
Reason = str | None


@dataclass(frozen=True)
class Family:
    """The kernels of one C++ source. code: the link of its only library; None when every link has a library.

    cuda: Triton kernels do the same on CUDA. trial: runs a call of about a millisecond, by which instruction sets are
    compared; without it the highest set is used, as for kernels that wait for memory.
    """

    source: str
    code: Formula | None = None
    cuda: bool = True
    trial: choice.Trial | None = None

    def isa(self, code: Formula | None = None, dtype: torch.dtype = torch.float32) -> InstructionSet:
        """The instruction set whose library runs calls of a type."""
        return choice.trying.get() or _chosen(
            self, self._of(code), dtype, choice.measured.get(), *map(os.environ.get, _VARIABLES)
        )

    def load(self, code: Formula | None = None) -> ctypes.CDLL:
        """The library that runs calls in float32. code: of the link, where every link has one."""
        return load(self._of(code), self.source, self.isa(code))

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
        return missing(self._of(code), self.source)


_portable: ContextVar[bool] = ContextVar("portable", default=False)


@contextlib.contextmanager
def portable() -> Iterator[None]:
    """Within this context torch runs in the place of all compiled kernels, as with ``ZONAL_KERNELS=off``.

    A program that is exported within it has only operators of torch, and runs without this library. What
    ``torch.compile`` has traced before keeps its kernels.
    """
    token = _portable.set(True)
    try:
        yield
    finally:
        _portable.reset(token)


@constant  # torch.compile cannot read a ContextVar
def _portably() -> bool:
    return _portable.get()


def switched_off() -> bool:
    """Whether torch is asked for in the place of all compiled kernels."""
    return _portably() or os.environ.get(VARIABLE) == "off"


def unfit(device: str, dtype: torch.dtype, devices: Sequence[str] = ("cpu", "cuda", "meta")) -> Reason:
    """Why no kernel runs on this device and dtype, or None."""
    if switched_off():
        return "zonal.portable() asks for torch" if _portably() else f"the environment says {VARIABLE}=off"
    if device not in devices:
        return f"there is no kernel for device {device!r}"
    return "the kernel is for float32 and shorter, the call is in float64" if dtype == torch.float64 else None


_TRITON = importlib.util.find_spec("triton") is not None


def has_triton() -> bool:
    """Whether triton can be imported. The search is made ahead of calls, since torch.compile does not trace it."""
    return _TRITON


@functools.cache
def say_once() -> None:
    """Warn that torch runs in the place of compiled kernels, at the first call that would have had one."""
    warnings.warn(
        f"zonal: no C++ compiler was found ({_looked_for()}), so torch runs in place of compiled CPU kernels, up to 8 "
        "times slower. Install g++ or clang++ (or let CXX name a compiler), or install a wheel that carries the "
        f"kernels (pip wheel .). {VARIABLE}=off runs torch without this warning.",
        MissingKernelsWarning,
        stacklevel=3,
    )


def missing(code: Formula, source: str) -> Reason:
    """Why the CPU library of a link is unavailable, or None: it can be compiled, or was shipped. It is not loaded."""
    if compiler() is None and not carried(code, source):
        if not torch.compiler.is_compiling():
            say_once()
        return (
            f"no C++ compiler was found ({_looked_for()}; set CXX, or install g++ or clang++) and no good library "
            f"of source {source!r} for link {code.name!r} came with the package"
        )
    if torch.compiler.is_compiling():  # a traced graph contains the kernel, and reports when it is missing
        return None
    found = failure(code, source) or _no_library(code, source)
    return None if found is None else f"the kernel could not be had ({found})"


@constant
def compiler() -> str | None:
    """The command in the environment variable CXX, else g++, clang++ or c++; None when there is no such program."""
    return recipe.find(os.environ.get("CXX") or None)


@constant
def _looked_for() -> str:
    """Where there is no compiler: what was looked for."""
    chosen = os.environ.get("CXX")
    return f"CXX={chosen!r} is no program on the PATH" if chosen else "looked for g++, clang++, c++"


# what a choice follows from, beside the family, the type and the files that are there
_VARIABLES = (choice.VARIABLE, "CXX", CACHE)


@functools.lru_cache(maxsize=256)
def _chosen(
    family: Family, code: Formula, dtype: torch.dtype, measured: bool, *_variables: str | None
) -> InstructionSet:
    found = candidates(code, family.source, dtype)
    if family.trial is None or not measured:
        return found[0]
    return choice.fastest(family.source, found, family.trial, code, dtype)


def candidates(code: Formula, source: str = "tile", dtype: torch.dtype = torch.float32) -> list[InstructionSet]:
    """The sets that a library may be for, the highest first: those of the processor that can be compiled or came.

    Of processors with vectors of eight floats or more the portable set is none. There is always one; without a compiler
    and a library it is the one that was wanted.
    """
    able, forced = choice.usable(source, dtype)
    found = [isa for isa in able if _obtainable(code, source, isa)] or able[:1]
    return found[:1] if forced else [isa for isa in found if isa.needs] or found[:1]


def shown(source: str, dtype: torch.dtype) -> InstructionSet:
    """The set that calls of a type use, as far as it is known without timing or compiling."""
    able, forced = choice.usable(source, dtype)
    path = compiler()
    found = [
        isa
        for isa in able
        if (path is not None and recipe.understands(path, isa))
        or any(recipe.SHIPPED.glob(f"*-{source}-{isa.name}-*.so"))
    ] or able
    kept = choice.timed(source, dtype) if choice.measured.get() and not forced else ()
    return next((isa for isa in found if isa.name in kept), found[0])


def _obtainable(code: Formula, source: str, isa: InstructionSet) -> bool:
    path = compiler()
    if path is not None and (target(code, source, isa).exists() or recipe.understands(path, isa)):
        return True
    if _carried(code, source, isa):
        return True
    if path is not None:
        choice.say(
            f"zonal: the compiler {path} does not know {isa.label} ({' '.join(isa.flags)}), so that kernels for the "
            "next lower instruction set run. Install a newer g++ or clang++, or let CXX name one."
        )
    return False


def target(code: Formula, source: str = "tile", isa: InstructionSet | None = None) -> Path:
    """Where the library of a link is kept when it is compiled here. isa: None = the first candidate, here and below.

    Raises: BuildError without a compiler.
    """
    path = compiler()
    if path is None:
        raise BuildError(
            f"build: no C++ compiler was found ({_looked_for()}). Install one, or do without: torch runs instead."
        )
    isa = isa or candidates(code, source)[0]
    options = shlex.split(path)[1:]
    name = recipe.file_name(code, source, isa, recipe.version(path), torch.__version__, *options)
    return cache_folder() / "kernels" / name


def shipped(code: Formula, source: str = "tile", isa: InstructionSet | None = None) -> Path | None:
    """The library of a link that came with the package, for a set and from these sources, or None."""
    if not recipe.SHIPPED.is_dir():
        return None
    library = recipe.SHIPPED / recipe.file_name(code, source, isa or candidates(code, source)[0])
    return library if library.exists() else None


@functools.lru_cache(maxsize=64)
def _carried(code: Formula, source: str, isa: InstructionSet) -> bool:
    library = shipped(code, source, isa)
    return library is not None and recipe.good(library)


def carried(code: Formula, source: str = "tile") -> bool:
    """Whether a good library of a link came with the package for this processor. Looked for once in a process."""
    return _any_carried(encode(code), source)


@constant
def _any_carried(code: str, source: str) -> bool:
    """``carried`` of an encoded link: torch.compile cannot hand an object over that its trace has made."""
    return any(_carried(decode(Formula, code), source, isa) for isa in choice.usable(source)[0])


def built(code: Formula, source: str = "tile", isa: InstructionSet | None = None) -> Path | None:
    """The good library of a link that is there already and would be used, or None.

    One compiled here comes before one that came with the package: it was asked for.
    """
    places: Sequence[Path | None] = [shipped(code, source, isa)]
    with contextlib.suppress(BuildError):  # without a compiler that runs, what came with the package will do
        places = [target(code, source, isa), *places]
    return next((library for library in places if library is not None and recipe.good(library)), None)


def build(code: Formula, source: str = "tile", isa: InstructionSet | None = None, *, again: bool = False) -> Path:
    """The library of a link, compiled unless a good one is there (``again``: compiled anyway).

    Raises: BuildError with the compiler's first words when it fails, or when the cache cannot be written.
    """
    isa = isa or candidates(code, source)[0]
    there = None if again else built(code, source, isa)
    if there is not None:
        return there
    damaged = shipped(code, source, isa)
    if not again and damaged is not None:
        warnings.warn(
            f"zonal: the kernel {damaged.name} that came with the package is damaged and is not used. "
            "Install the package again.",
            stacklevel=2,
        )
    library, path = target(code, source, isa), compiler()
    assert path is not None
    try:
        with recipe.alone(library):
            if not again and recipe.good(library):  # another process has compiled it meanwhile
                return library
            if not again and library.exists():
                warnings.warn(
                    f"zonal: the kernel {library.name} in the cache was damaged and is compiled again.", stacklevel=2
                )
            recipe.make(path, code, source, isa, library)
    except OSError as error:
        raise BuildError(
            f"build: the kernel could not be written to {library.parent} ({error}). "
            "Set ZONAL_CACHE to a folder that can be written."
        ) from error
    return library


# kernels that could not be had in this process, with the reason: they are not tried at every call
_failed: dict[tuple[Formula, str], str] = {}


def forget() -> None:
    """Forget which libraries were found, as a new process would; tests move them."""
    for cached in (_chosen, _carried, _loaded, choice.say, recipe.broken):
        cached.cache_clear()
    _failed.clear()


def failure(code: Formula, source: str = "tile") -> str | None:
    """Why an earlier attempt to load a link's kernel failed, or None."""
    return _failed.get((code, source))


def _no_library(code: Formula, source: str) -> str | None:
    """Why a library that was not tried cannot be had, or None: another one has failed, and the compiler makes none."""
    path = compiler() if _failed else None
    found = None if path is None else recipe.broken(path)
    return None if found is None or built(code, source) is not None else found


def load(code: Formula, source: str = "tile", isa: InstructionSet | None = None) -> ctypes.CDLL:
    """The library of a link, compiled if it is missing.

    Raises: BuildError, at the first failure and ever after; and for a set that the processor does not have.
    """
    if (code, source) in _failed:
        raise BuildError(_failed[code, source])
    try:
        return _loaded(code, source, isa or candidates(code, source)[0])
    except BuildError as error:
        _failed[code, source] = str(error)
        raise


@functools.lru_cache(maxsize=64)
def _loaded(code: Formula, source: str, isa: InstructionSet) -> ctypes.CDLL:
    lacks = ", ".join(sorted(isa.needs - choice.features()))
    if lacks:
        raise BuildError(f"build: a kernel for {isa.label} is not loaded: this processor does not report {lacks}.")
    # said, or the call would seem to hang; a service may have no stderr
    if sys.stderr and sys.stderr.isatty() and built(code, source, isa) is None:
        sys.stderr.write(
            f"zonal: compiling a CPU kernel ({code.name}, {source}, {isa.label}), which takes some seconds, once. "
            "`zonal build` compiles all of them ahead of time.\n"
        )
    path = build(code, source, isa)
    if path.parent != recipe.SHIPPED:
        library = _opened(path)
        if not _torchs_threads(library):
            choice.say(
                f"zonal: what {compiler()} compiles has another OpenMP runtime than torch, so that both start threads "
                "and slow each other down. Let CXX name a compiler that has torch's (g++ for wheels of PyPI)."
            )
        return library
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
        return _opened(build(code, source, isa, again=True))
    return library


def _torchs_threads(library: ctypes.CDLL) -> bool:
    """Whether a library's OpenMP runtime is the one that torch has loaded: the same function at the same place.

    Also where that is not known: neither may have one, and torch may lie elsewhere.
    """
    try:
        torchs = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        found = {ctypes.cast(there.omp_get_max_threads, ctypes.c_void_p).value for there in (library, torchs)}
    except (OSError, AttributeError):
        return True
    return len(found) == 1


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
    "candidates",
    "carried",
    "compiler",
    "failure",
    "forget",
    "has_triton",
    "load",
    "missing",
    "say_once",
    "shipped",
    "shown",
    "switched_off",
    "target",
    "unfit",
]
