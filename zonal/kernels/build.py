"""How the CPU kernels of a link are compiled: sources, instruction sets, compiler, and the record of each library.

It does not import torch, as wheels are built with it.
"""

import contextlib
import functools
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zonal.errors import ZonalError
from zonal.formula import Formula

FOLDER = Path(__file__).parent / "cpp"
SOURCES = ("tile", "sums", "decode", "ridge", "ridge_decode", "mixer", "distance", "sparse", "features")


@dataclass(frozen=True)
class InstructionSet:
    """What a library may use of a processor. Widths that follow from it are in ``simd.hpp``.

    name: in file names and in ZONAL_ISA. label: for people. flags: of g++ and clang++. needs: what the processor must
    report, in the words of Linux. pairs: bfloat16 is multiplied in pairs; only the source
    ``tile`` has such products, so that no other is compiled for this set.
    """

    name: str
    label: str
    flags: tuple[str, ...] = ()
    needs: frozenset[str] = frozenset()
    pairs: bool = False

    def compiles(self, source: str) -> bool:
        """Whether a source is compiled for this set."""
        return (is_x86() or not self.needs) and (source == "tile" or not self.pairs)


_AVX2 = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe", "abm"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_AMX = _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}
_V4 = "-march=x86-64-v4"
_PAIRS = (_V4, "-mavx512bf16")
SETS = (
    InstructionSet("amx_bf16", "AMX BF16", (*_PAIRS, "-mamx-tile", "-mamx-bf16"), _AMX, pairs=True),
    InstructionSet("avx512_bf16", "AVX-512 BF16", _PAIRS, _AVX512 | {"avx512_bf16"}, pairs=True),
    InstructionSet("avx512", "AVX-512", (_V4,), _AVX512),
    InstructionSet("avx2", "AVX2", ("-march=x86-64-v3",), _AVX2),
    InstructionSet("portable", "portable"),
)
"""The instruction sets, the highest first. The last one runs on every processor of its kind."""
# of the library's own links, those whose kernel is a polynomial: sums over features serve them
_POLYNOMIALS = ("identity", "polynomial", "squared_affine", "polynomial_square")
# The links that a source is compiled for, if not for all. A source that does not use links is compiled for one of them.
_LINKS: dict[str, tuple[str, ...]] = {"sums": _POLYNOMIALS, "distance": ("exp",)}
_LINKS |= dict.fromkeys(("decode", "ridge", "ridge_decode", "mixer", "sparse", "features"), ("identity",))
SHIPPED = FOLDER / "shipped"  # where a wheel has its libraries
_NAMES = ("g++", "clang++", "c++")


class BuildError(ZonalError, RuntimeError):
    """The kernel could not be compiled or loaded; torch's path runs in its place."""


@functools.lru_cache(maxsize=8)
def find(chosen: str | None) -> str | None:
    """The command of the C++ compiler: ``chosen``, a program and its options, or else g++, clang++ or c++; None when
    there is none.
    """
    for command in (chosen,) if chosen else _NAMES:
        with contextlib.suppress(ValueError):  # an open quotation
            name, *options = [command] if shutil.which(command) else shlex.split(command)
            found = shutil.which(name)
            if found is not None:
                return shlex.join([found, *options])
    return None


def is_x86() -> bool:
    """Whether processors of this kind may have AVX."""
    return platform.machine().lower() in ("x86_64", "amd64")


def flags(isa: InstructionSet) -> tuple[str, ...]:
    """Compiler flags of an instruction set. -march=native is slower than these, measured on Zen 4."""
    common = ("-O3", "-std=c++17", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math", *isa.flags)
    # the team of threads is torch's own: its OpenMP library is in the process already
    return common if sys.platform == "darwin" else (*common, "-fopenmp")


@functools.lru_cache(maxsize=32)
def understands(compiler: str, isa: InstructionSet) -> bool:
    """Whether a compiler knows an instruction set: not when it takes nothing with its flags and something without."""

    def takes(*flags: str) -> bool:
        command = [*shlex.split(compiler), *flags, "-fsyntax-only", "-x", "c++", os.devnull]
        return subprocess.run(command, capture_output=True, timeout=30, check=False).returncode == 0

    try:
        return takes(*isa.flags) or not takes()
    except (OSError, subprocess.SubprocessError):
        return True  # it does not run, which compiling reports


@functools.lru_cache(maxsize=8)
def broken(compiler: str) -> str | None:
    """Why a compiler makes no library at all, or None: it was given a source with a header and nothing else."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            text = Path(folder) / "header.cpp"
            text.write_text("#include <cmath>\n", encoding="utf-8")
            _compiled(compiler, flags(SETS[-1]), text, text.with_suffix(".so"), "a source with nothing but <cmath>")
    except BuildError as error:
        return str(error)
    except OSError:  # no place for the source: not known
        pass
    return None


def _compiled(compiler: str, options: Sequence[str], text: Path, made: Path, what: str) -> None:
    """Compile a file. what: its name in errors. Raises: BuildError with the compiler's first words when it fails."""
    try:
        command = [*shlex.split(compiler), *options, str(text), "-o", str(made)]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(f"build: {compiler} did not finish ({error}).") from error
    if ran.returncode:
        first = next((line for line in ran.stderr.splitlines() if "error" in line), ran.stderr[:300].strip())
        raise BuildError(f"build: {compiler} failed on {what} (exit {ran.returncode}): {first}")


def defines(code: Formula) -> str:
    """The link as what stands in front of the template."""
    low, high = code.domain or (0.0, 0.0)
    lines = {
        "ZONAL_LOG": str(int(code.log)), "ZONAL_MAP": str(int(code.log and bool(code.cpp_value))),
        "ZONAL_CLAMP": str(int(code.domain is not None)), "ZONAL_LOW": f"{low!r}f",
        "ZONAL_HIGH": f"{high!r}f", "ZONAL_VALUE": code.cpp_value or "x",
        "ZONAL_DERIVATIVE": code.cpp_derivative or "spread(1.f)", "ZONAL_BASE": code.cpp_base or "1.f",
    }  # fmt: skip
    if code.cpp_value == "horner(x, c, n)":
        lines["ZONAL_HORNER"] = "1"
    return "".join(f"#define {name} {value}\n" for name, value in lines.items())


def sources(code: Formula) -> tuple[str, ...]:
    """What is compiled for one of the library's own links ahead of its first use."""
    return tuple(source for source in SOURCES if code.name in _LINKS.get(source, (code.name,)))


def carried(source: str) -> tuple[InstructionSet, ...]:
    """The sets that a wheel has a source for: all but the portable one, where it is not the only one."""
    sets = [isa for isa in SETS if isa.compiles(source)]
    return tuple(isa for isa in sets if isa.needs) or tuple(sets)


def _text(name: str) -> str:
    """A source with the headers that it includes."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return "\0".join([text, *(_text(header) for header in re.findall(r'^#include "(.*)"', text, re.MULTILINE))])


def file_name(code: Formula, source: str, isa: InstructionSet, *more: str) -> str:
    """The name of a library: its link, source and set, and a digest of its texts, its flags, and ``more``."""
    parts = (_text(f"{source}.cpp"), defines(code), " ".join(flags(isa)), sys.platform, platform.machine(), *more)
    name = re.sub(r"\W", "_", code.name)[:64]  # it is any text
    return f"{name}-{source}-{isa.name}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"


@functools.lru_cache(maxsize=8)
def version(compiler: str) -> str:
    """What the compiler says of itself. Raises: BuildError when it does not run."""
    try:
        command = [*shlex.split(compiler), "--version"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(
            f"build: the C++ compiler {compiler} does not run ({error}). Set CXX to one that does."
        ) from error


def good(library: Path) -> bool:
    """Whether a library is there and is, to the bit, what was written down when it was compiled."""
    try:
        record = json.loads(library.with_suffix(".json").read_text(encoding="utf-8"))
        return isinstance(record, dict) and record.get("sha256") == hashlib.sha256(library.read_bytes()).hexdigest()
    except (OSError, ValueError):
        return False


@contextlib.contextmanager
def alone(library: Path) -> Iterator[None]:
    """Held by one process at a time for each library, so that processes that start together compile it once.

    The lock ends with the process that holds it. On Windows there is none: both compile. Raises: OSError when the
    folder cannot be written.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    if sys.platform == "win32":
        yield
        return
    import fcntl

    with library.with_suffix(".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def make(compiler: str, code: Formula, source: str, isa: InstructionSet, library: Path) -> None:
    """Compile a link's library, held by ``alone``. Each file appears whole.

    Raises: BuildError with the compiler's first words when it fails; OSError when the folder cannot be written.
    """
    library.parent.mkdir(parents=True, exist_ok=True)
    begun = f".{library.stem}."
    for left in library.parent.glob(f"{begun}*") if sys.platform != "win32" else ():  # of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix=begun) as folder:
        text, made, record = (Path(folder) / f"link{suffix}" for suffix in (".cpp", ".so", ".json"))
        text.write_text(defines(code) + f'#include "{FOLDER / source}.cpp"\n', encoding="utf-8")
        _compiled(compiler, flags(isa), text, made, f"link {code.name!r}")
        digest = hashlib.sha256(made.read_bytes()).hexdigest()
        about = {
            "sha256": digest,
            "link": code.name,
            "compiler": version(compiler).splitlines()[0],
            "flags": list(flags(isa)),
        }
        record.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        # the record last: a library without one is not used
        for file, place in ((made, library), (record, library.with_suffix(".json"))):
            os.replace(file, place)


__all__ = [
    "FOLDER",
    "SETS",
    "SHIPPED",
    "SOURCES",
    "BuildError",
    "InstructionSet",
    "alone",
    "broken",
    "carried",
    "defines",
    "file_name",
    "find",
    "flags",
    "good",
    "is_x86",
    "make",
    "sources",
    "understands",
    "version",
]
