"""Compiles the CPU kernel for a link and keeps the library: in the user's cache, keyed by source, compiler, flags and torch.

A library is loaded only when its checksum is the one written down after it was compiled; anything else is compiled again.
"""

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import uuid
import warnings
from pathlib import Path

import torch

from zonal import store
from zonal.data.cache import cache_folder
from zonal.errors import FileFormatError, ZonalError
from zonal.formula import Formula

FOLDER = Path(__file__).parent
SOURCES = ("tile", "tile_bf16", "sums")
_NAMES = ("g++", "clang++", "c++")


class BuildError(ZonalError, RuntimeError):
    """The kernel could not be compiled or loaded; torch's path runs in its place."""


@functools.lru_cache(maxsize=8)
def _compiler(chosen: str | None) -> str | None:
    for name in (chosen,) if chosen else _NAMES:
        found = shutil.which(name)
        if found is not None:
            return found
    return None


@torch.compiler.assume_constant_result
def compiler() -> str | None:
    """The C++ compiler: the one the environment variable CXX names, else g++, clang++ or c++; None when there is none."""
    return _compiler(os.environ.get("CXX") or None)


def flags(source: str = "tile") -> tuple[str, ...]:
    """Compiler flags for this processor and source. Vectors of 256 bits are as fast as 512 here, and -march=native is slower (measured)."""
    common = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
    if platform.machine().lower() in ("x86_64", "amd64") and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
        common += ("-march=x86-64-v3",)
        if source == "tile_bf16":
            common += ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16")
    # the team of threads is torch's own: its OpenMP library is in the process already
    return common if sys.platform == "darwin" else (*common, "-fopenmp")


def defines(code: Formula) -> str:
    """The link as what stands in front of the template."""
    low, high = code.domain or (0.0, 0.0)
    lines = {
        "ZONAL_LOG": str(int(code.log)), "ZONAL_CLAMP": str(int(code.domain is not None)), "ZONAL_LOW": f"{low!r}f", "ZONAL_HIGH": f"{high!r}f",
        "ZONAL_VALUE": code.cpp_value or "x", "ZONAL_DERIVATIVE": code.cpp_derivative or "x", "ZONAL_BASE": code.cpp_base or "1.f",
    }  # fmt: skip
    if code.cpp_value == "horner(x, c, n)":
        lines["ZONAL_HORNER"] = "1"
    return "".join(f"#define {name} {value}\n" for name, value in lines.items())


@functools.lru_cache(maxsize=8)
def _version(path: str) -> str:
    try:
        return subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"build: the C++ compiler {path} does not run ({error}). Set CXX to one that does.") from error


def target(code: Formula, source: str = "tile") -> Path:
    """Where the library of a link is kept, made from one of ``SOURCES``. Raises: BuildError without a compiler."""
    path = compiler()
    if path is None:
        raise BuildError("build: no C++ compiler was found (looked for CXX, g++, clang++, c++). Install one, or do without: torch runs instead.")
    texts = [(FOLDER / name).read_text(encoding="utf-8") for name in (f"{source}.cpp", "common.hpp")]
    parts = (*texts, defines(code), _version(path), " ".join(flags(source)), torch.__version__)
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    return cache_folder() / "kernels" / f"{code.name}-{source}-{key}.so"


def _good(library: Path) -> bool:
    record = library.with_suffix(".json")
    if not library.exists() or not record.exists():
        return False
    try:
        read = store.read_json(record)
    except FileFormatError:
        return False
    return isinstance(read, dict) and read.get("sha256") == hashlib.sha256(library.read_bytes()).hexdigest()


def built(code: Formula, source: str = "tile") -> bool:
    """Whether a good library of the link is there."""
    try:
        return _good(target(code, source))
    except BuildError:
        return False


def build(code: Formula, source: str = "tile", *, again: bool = False) -> Path:
    """The library of a link, compiled unless a good one is there. Two processes may do so at once: each file appears whole.

    Raises: BuildError with the compiler's first words when it fails, or when the cache cannot be written.
    """
    library = target(code, source)
    if not again and _good(library):
        return library
    if not again and library.exists():
        warnings.warn(f"zonal: the kernel {library.name} in the cache was damaged and is compiled again.", stacklevel=2)
    path = compiler()
    assert path is not None
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            text, made = Path(folder) / "link.cpp", Path(folder) / "link.so"
            text.write_text(defines(code) + f'#include "{FOLDER / source}.cpp"\n', encoding="utf-8")
            command = [path, *flags(source), str(text), "-o", str(made)]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            if ran.returncode:
                first = next((line for line in ran.stderr.splitlines() if "error" in line), ran.stderr[:300].strip())
                raise BuildError(f"build: {path} failed on link {code.name!r} (exit {ran.returncode}): {first}")
            digest = hashlib.sha256(made.read_bytes()).hexdigest()
            # the record last: a library without one is not used
            staged = library.with_name(f".{library.name}-{uuid.uuid4().hex}")
            shutil.move(made, staged)
            os.replace(staged, library)
            store.write_json(library.with_suffix(".json"), {"sha256": digest, "link": code.name, "compiler": _version(path).splitlines()[0], "flags": list(flags(source))})
    except OSError as error:
        raise BuildError(f"build: the kernel could not be written to {library.parent} ({error}). Set ZONAL_CACHE to a folder that can be written.") from error
    except subprocess.SubprocessError as error:
        raise BuildError(f"build: {path} did not finish ({error}).") from error
    return library


__all__ = ["BuildError", "build", "built", "compiler", "flags", "target"]
