"""What this machine can do: five numbers measured once, by which the planner turns work into seconds.

``machine_for(device)`` reads them from the user's cache folder (ZONAL_CACHE names another one) or measures them in
about a second and stores them, by machine, threads and torch version. The first process to finish wins and all use its
numbers, so that the same call takes the same path in every process. Two machines of one kind still measure different
numbers, and so does one machine under another load. Where the same path is needed everywhere, ``typical_rates`` plans
with typical numbers instead. The caller's random numbers, gradients and saved-tensor hooks are never touched.
"""

import contextlib
import functools
import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from zonal import store
from zonal.algebra import Operator
from zonal.algebra.anchor import Count
from zonal.algebra.link import Gegenbauer
from zonal.algebra.score import Cosine
from zonal.cache import VARIABLE, cache_folder
from zonal.errors import ArgumentError, FileFormatError
from zonal.execution.call import prepare
from zonal.execution.paths import tile
from zonal.kernels import choice
from zonal.kernels.build import BuildError
from zonal.typed import made

SCHEMA = 6
LARGE = 32 << 20
"""Bytes of a buffer from which on the C library takes it from the system anew each time, page by page."""
# a torch call with the Python around it takes so many times a view, measured on short calls of every path
_AROUND = 5.0


@dataclass(frozen=True)
class Machine:
    """Speeds of one machine for float32 work.

    name: of the processor or accelerator. threads: of torch on a CPU, multiprocessors of a CUDA device. torch: its
    version. products, compiled: multiply-adds per second of torch's matrix products and of compiled kernels, with all
    threads. bandwidth: bytes per second of torch's elementwise operations, read and written, on buffers below
    ``LARGE``; fresh: the same above it. call: seconds of a torch call that moves nothing, with the Python around it.
    contended: the processor was busy, so that speeds of several threads are those of one thread scaled up.
    memory_bytes: what the device has. note: where the numbers come from; it does not count in comparisons.
    """

    name: str
    threads: int
    torch: str
    products: float
    compiled: float
    bandwidth: float
    fresh: float
    call: float
    contended: bool
    memory_bytes: int
    note: str = field(default="", compare=False)

    def rate(self, typical: float, compiled: bool) -> float:
        """Multiply-adds a second here of what does ``typical`` of them on the typical processor."""
        if compiled:
            return typical * self.compiled / TYPICAL_CPU.compiled
        return typical * self.products / TYPICAL_CPU.products

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"schema": SCHEMA, **{name: value for name, value in asdict(self).items() if name != "note"}}

    @staticmethod
    def from_dict(read: Any, note: str = "") -> "Machine":
        """The machine that ``to_dict`` wrote.

        Raises: FileFormatError when a number is missing or not positive.
        """
        if not isinstance(read, dict) or read.get("schema") != SCHEMA:
            raise FileFormatError(f"machine: a file of schema {SCHEMA} is required.")
        try:
            found = made(Machine, {**read, "note": note}, "machine")
        except ArgumentError as error:
            raise FileFormatError(str(error)) from error
        for name, value in asdict(found).items():
            if not isinstance(value, str | bool) and value <= 0:
                raise FileFormatError(f"machine: {name} must be a number > 0, found {value!r}.")
        return found


# A server processor with two threads, and a data-centre accelerator. They are used where nothing can be measured or
# stored, so that the choice is still the same each time.
TYPICAL_CPU = Machine("a typical processor", 2, "", 5e10, 8e10, 3e10, 4e9, 8e-6, False, 8 << 30)
TYPICAL_GPU = Machine("a typical accelerator", 1, "", 1e13, 1e13, 1e12, 1e12, 1e-5, False, 16 << 30)


def typical(device: torch.device, note: str) -> Machine:
    """Typical speeds of a kind of device."""
    return replace(TYPICAL_CPU if device.type == "cpu" else TYPICAL_GPU, note=note)


# -- measuring -------------------------------------------------------------------------------------


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds(
    device: torch.device, work: Callable[[], object], repeat: int = 1, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Seconds of ``repeat`` runs one after the other, until all of them are done. clock: what tells the time on a CPU.

    On CUDA the time is between events on the stream of the work. It leaves out the wait for the device, but includes
    the time in which the device waits for the next launch, as any call does.
    """
    if device.type == "cuda":
        stream = torch.cuda.current_stream(device)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record(stream)
        for _ in range(repeat):
            work()
        end.record(stream)
        synchronise(device)
        return begin.elapsed_time(end) * 1e-3
    start = clock()
    for _ in range(repeat):
        work()
    synchronise(device)
    return clock() - start


def _fastest(device: torch.device, work: Callable[[], object], budget: float) -> float:
    """The least seconds of a run, as other load only adds time. Short work is timed many times, at least three.

    Work of one thread is timed by what the thread runs: the time in which other programs have its core does not count.
    """
    clock = time.thread_time if device.type == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    work()
    synchronise(device)
    repeat, best, samples, start = 1, math.inf, 0, time.perf_counter()
    while samples < 3 or time.perf_counter() - start < budget:
        took = seconds(device, work, repeat, clock)
        if took < 5e-5 and repeat < 1 << 12:
            repeat *= 4  # too short for the clock: this sample does not count
            continue
        best, samples = min(best, took / repeat), samples + 1
    return best


def measure(device: torch.device, budget: float = 0.02) -> Machine:
    """Measure a device. ``budget``: seconds for one number. Nothing random is drawn."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        x = torch.full((8, 512, 64), 0.5, device=device, dtype=torch.float32)
        large = torch.full((LARGE // 2,), 0.5, device=device, dtype=torch.float32)
        numbers = large[: LARGE * 3 // 16]  # as large as buffers come that are used again
        call = _AROUND * _fastest(device, lambda: x[:, :2], budget)
        product, product_contended = _with_threads(device, lambda: torch.matmul(x, x.mT), budget)
        passed, passed_contended = _with_threads(device, lambda: numbers + numbers, budget)
        fresh = _fastest(device, lambda: large + large, budget)
        compiled, compiled_contended = _compiled(device, budget)
    products = 8 * 512 * 512 * 64 / product
    return Machine(
        name(device), threads(device), torch.__version__, products, compiled or products * 1.6,
        8.0 * numbers.numel() / passed, 8.0 * large.numel() / fresh, call,
        product_contended or passed_contended or compiled_contended, memory(device),
    )  # fmt: skip


def _with_threads(device: torch.device, work: Callable[[], object], budget: float) -> tuple[float, bool]:
    """(seconds with all threads, False), or (usual seconds, True) when other work occupies the processor.

    Other work is assumed when all threads are slower than one.
    """
    several, many = _fastest(device, work, budget), torch.get_num_threads()
    if device.type != "cpu" or many == 1:
        return several, False
    with choice.one_thread():
        single = _fastest(device, work, budget)
    # a fork and join of threads costs some microseconds in its own right
    if several <= 1.3 * single + 2e-5:
        return several, False
    return single / (1 + 0.7 * (many - 1)), True


# heads and tokens of a call that keeps every thread or processor busy for some milliseconds
_TILES = {"cpu": (8, 256), "cuda": (32, 2048)}


def _compiled(device: torch.device, budget: float) -> tuple[float, bool]:
    """Multiply-adds per second of the compiled kernel of tiles, built now if it is missing; 0 where it cannot be."""
    if device.type not in _TILES:
        return 0.0, False
    heads, tokens = _TILES[device.type]
    x = torch.full((1, heads, tokens, 64), 0.5, dtype=torch.float32, device=device)
    operator = Operator(score=Cosine(), link=Gegenbauer(learn_weights=False), anchor=Count()).to(device)
    call = prepare(operator, x, x, x, causal=False)
    if tile.refusal(call) is not None:
        return 0.0, False
    try:
        took, contended = _with_threads(device, functools.partial(tile.tiled, call), budget)
    except BuildError:
        return 0.0, False
    return 2.0 * heads * tokens * tokens * 64 / took, contended


# -- the machine -----------------------------------------------------------------------------------


def name(device: torch.device) -> str:
    """The name of the processor or accelerator."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).name
    if device.type != "cpu":
        return device.type
    return f"{choice.processor()} x{os.cpu_count()}"


def threads(device: torch.device) -> int:
    """What works at once on a call: torch's threads, or the multiprocessors of a CUDA device."""
    if device.type == "cuda" and torch.cuda.is_available():
        return torch.cuda.get_device_properties(device).multi_processor_count
    return torch.get_num_threads() if device.type == "cpu" else 1


def memory(device: torch.device) -> int:
    """Bytes of memory the device has (and this process may use, where a container limits it)."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 8 << 30
    with contextlib.suppress(OSError, ValueError):
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii")))
    return total


# -- keeping ---------------------------------------------------------------------------------------


def file_for(device: torch.device, count: int | None = None) -> Path:
    """Where the numbers of this machine, number of threads (None = as torch has it now) and torch version are kept."""
    count = threads(device) if count is None else count
    key = f"{name(device)}|{count}|{torch.__version__}"
    readable = re.sub(r"[^a-z0-9]+", "-", f"{name(device)}-{count}".lower()).strip("-")
    return cache_folder() / "machine" / f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def read(path: Path, device: torch.device) -> Machine:
    """The machine in a file. Raises: FileFormatError when it is missing, damaged, or of another machine."""
    found = Machine.from_dict(store.checked(path, store.read_json(path)), note=f"read from {path}")
    wanted = (name(device), threads(device), torch.__version__)
    if (found.name, found.threads, found.torch) != wanted:
        raise FileFormatError(f"machine: {path} is of {found.name}, {found.threads} threads, torch {found.torch}.")
    return found


def _obtain(device: torch.device) -> Machine:
    """The machine in the file, or measured now and kept there."""
    path, why = file_for(device), ""
    try:
        if path.exists():
            try:
                return read(path, device)
            except FileFormatError as error:
                why = f" because the file there could not be used ({error})"
        # Checked before measuring: numbers that cannot be stored would differ between processes, and so would paths.
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path.parent} is not writable")
        # the first process wins, unless what is there could not be used
        store.write_checked(path, measure(device).to_dict(), over=bool(why))
        kept = read(path, device)
    except (OSError, FileFormatError) as error:
        return typical(
            device,
            f"typical values: nothing could be kept in {path.parent} ({error}); set ZONAL_CACHE to a folder that "
            "can be written",
        )
    return replace(kept, note=f"measured now and kept in {path}{why}")


@functools.lru_cache(maxsize=16)
def _once(device: torch.device, threads: int, folder: str | None) -> Machine:
    return _obtain(device)


_typical: ContextVar[bool] = ContextVar("typical", default=False)


@contextlib.contextmanager
def typical_rates() -> Iterator[None]:
    """Inside the body calls of this thread are planned by typical values, never by measured ones.

    Compiled kernels use the highest instruction set of the processor, not the fastest. Paths and sets differ in the
    last bits of their results. When two paths have nearly equal estimates, the measured speeds decide between them. A
    run that must repeat on another machine of its kind is therefore planned without them.
    """
    tokens = _typical.set(True), choice.measured.set(False)
    try:
        yield
    finally:
        _typical.reset(tokens[0])
        choice.measured.reset(tokens[1])


@functools.lru_cache(maxsize=16)
def _typical_for(device: torch.device) -> Machine:
    return typical(device, "typical values: the run must take the same paths on every machine of its kind")


def machine_for(device: torch.device) -> Machine:
    """The speeds of a device: those of this process, of the cache folder, or measured now.

    Inside ``typical_rates`` they are typical values. Inside a dispatch mode (fake tensors, counters, tracing) nothing
    is measured: a stored file is used, or typical values.
    """
    if _typical.get():
        return _typical_for(device)
    if device.type == "meta":
        return typical(device, "typical values: a meta tensor runs nowhere")
    if device.type == "cuda" and not torch.cuda.is_available():
        return typical(device, "typical values: torch sees no such device here")
    if is_in_torch_dispatch_mode():
        try:
            return read(file_for(device), device)
        except FileFormatError:
            return typical(device, "typical values: nothing is measured while another tool watches torch calls")
    # the variable rather than the folder: finding that takes longer than a short call of attention
    return _once(device, threads(device), os.environ.get(VARIABLE))
