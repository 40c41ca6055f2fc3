"""Which instruction set the CPU kernels use: what the processor has, what is asked for, and what is fastest.

The sets are ``zonal.kernels.build.SETS``. Where a processor has several, each family of kernels is timed once with each
of them, for each type, and the fastest is kept in the folder ``machine`` of the cache. ZONAL_ISA names a set to use
instead, such as ``avx2``.
"""

import contextlib
import ctypes
import functools
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from zonal import store
from zonal.cache import cache_folder
from zonal.errors import FileFormatError, FileWriteError
from zonal.formula import Formula
from zonal.kernels import build as recipe
from zonal.kernels.build import SETS, InstructionSet

VARIABLE = "ZONAL_ISA"
Trial = Callable[[Formula, torch.dtype], object]
"""Runs a call of a kernel with a link, in a type."""
SCHEMA = 1
_ROUNDS = 5


@functools.lru_cache(maxsize=1)
def features() -> frozenset[str]:
    """Instructions of this processor, as Linux names them; on other systems, those that torch reports."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
                if line.startswith("flags"):
                    found = frozenset(line.split(":", 1)[1].split())
                    return found if "amx_tile" not in found or _tiles_granted() else found - {"amx_tile"}
    known = {"AVX512": "avx512", "AVX2": "avx2"}.get(torch.backends.cpu.get_cpu_capability())
    return next((isa.needs for isa in SETS if isa.name == known), frozenset())


def _tiles_granted() -> bool:
    """Whether Linux lets this process use the tile registers of AMX, for which every process has to ask."""
    ask, number, tile_data = 158, 0x1023, 18  # arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return ctypes.CDLL(None).syscall(ctypes.c_long(ask), ctypes.c_long(number), ctypes.c_long(tile_data)) == 0


@functools.lru_cache(maxsize=1)
def processor() -> str:
    """The name of the processor."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
                if line.startswith("model name"):
                    return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def say(text: str) -> None:
    """Warn once in a process."""
    warnings.warn(text, stacklevel=3)


def usable(source: str, dtype: torch.dtype = torch.float32) -> tuple[list[InstructionSet], bool]:
    """(The sets of this processor for a source and a type, the highest first; whether ZONAL_ISA asks for the first.)

    If ZONAL_ISA names a set that is unknown or missing, it warns once and uses the next lower one.
    """
    sets = [isa for isa in SETS if isa.compiles(source) and (dtype == torch.bfloat16 or not isa.pairs)]
    able = [isa for isa in sets if isa.needs <= features()]
    asked = os.environ.get(VARIABLE)
    if not asked:
        return able, False
    rank = {isa.name: place for place, isa in enumerate(SETS)}
    if asked not in rank:
        say(f"zonal: {VARIABLE}={asked} names no instruction set; {able[0].name} is used. Known are {', '.join(rank)}.")
        return able, False
    lower = [isa for isa in able if rank[isa.name] >= rank[asked]]
    lacks = SETS[rank[asked]].needs - features()
    if lacks:
        say(
            f"zonal: {VARIABLE}={asked} asks for what this processor does not report ({', '.join(sorted(lacks))}); "
            f"{lower[0].name} is used."
        )
    return lower, True


trying: ContextVar[InstructionSet | None] = ContextVar("trying", default=None)
"""The set that is being timed."""
measured: ContextVar[bool] = ContextVar("measured", default=True)
"""Whether the fastest set is used; otherwise the highest one, which is the same on all processors of a kind."""


def fastest(
    source: str, candidates: Sequence[InstructionSet], trial: Trial, code: Formula, dtype: torch.dtype
) -> InstructionSet:
    """The fastest of some sets by ``trial``, as it is kept, or timed now and kept. A single one is not timed.

    The first process to finish wins, so that all of them use the same set.
    """
    names = [isa.name for isa in candidates]
    if len(names) == 1:
        return candidates[0]
    key = " ".join([source, str(dtype).removeprefix("torch."), *names])
    path = _path()
    found = _read(path).get(key)
    if found not in names:
        times = seconds(candidates, lambda: trial(code, dtype))
        found = min(times, key=lambda isa: times[isa]).name
        with contextlib.suppress(OSError, FileWriteError), recipe.alone(path):  # what cannot be kept is timed again
            there = _read(path)
            if there.get(key) not in names:
                store.write_checked(path, {"schema": SCHEMA, "processor": processor(), "sets": {**there, key: found}})
            found = _read(path).get(key, found)
    return candidates[names.index(found)]


def timed(source: str, dtype: torch.dtype) -> frozenset[str]:
    """The names of the sets that were found to be the fastest for a source and a type, and are kept."""
    start = f"{source} {str(dtype).removeprefix('torch.')} "
    return frozenset(name for key, name in _read(_path()).items() if key.startswith(start))


def _path() -> Path:
    return cache_folder() / "machine" / "instruction-sets.json"


def _read(path: Path) -> dict[str, Any]:
    """What a file keeps of this processor, by key."""
    try:
        read = store.checked(path, store.read_json(path))
    except FileFormatError:
        return {}
    good = isinstance(read, dict) and read.get("schema") == SCHEMA and read.get("processor") == processor()
    return read["sets"] if good and isinstance(read.get("sets"), dict) else {}


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Within it torch has one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seconds(candidates: Sequence[InstructionSet], run: Callable[[], object]) -> dict[InstructionSet, float]:
    """The least time of a run with each set, in turns, by one thread.

    Other programs do not count: the time is what the thread runs, without the time in which they have its core.
    """
    best: dict[InstructionSet, float] = {}
    plain = torch.autocast("cpu", enabled=False)
    with one_thread(), torch.inference_mode(False), torch.no_grad(), plain, _disable_current_modes():
        for turn in range(_ROUNDS + 1):  # the first one loads the library
            for isa in candidates:
                token = trying.set(isa)
                try:
                    start = time.thread_time()
                    run()
                    took = time.thread_time() - start
                finally:
                    trying.reset(token)
                best[isa] = took if turn < 2 else min(best[isa], took)
    return best


__all__ = [
    "VARIABLE",
    "Trial",
    "fastest",
    "features",
    "measured",
    "one_thread",
    "processor",
    "say",
    "seconds",
    "timed",
    "trying",
    "usable",
]
