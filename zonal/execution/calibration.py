"""What this machine can do, measured once: the constants of the cost model.

``constants_for(device)`` reads them from the user's cache folder (ZONAL_CACHE names another one) or measures them in under
two seconds and stores them, by machine, threads and torch version. The first process to finish wins and all use its numbers,
so that the same call takes the same path in every process. Two machines of one kind measure unlike numbers, though, and so does one
machine under another load: where the same path is needed everywhere, ``typical_rates`` sets measured numbers aside.
Random numbers, gradients and saved-tensor hooks of the caller are never touched.
"""

import contextlib
import functools
import hashlib
import math
import os
import platform
import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from zonal import store
from zonal.algebra import Operator
from zonal.algebra.anchor import Count, Row
from zonal.algebra.link import Gegenbauer, SquaredAffine
from zonal.algebra.score import Cosine
from zonal.data.cache import VARIABLE, cache_folder
from zonal.errors import FileFormatError
from zonal.execution import cost_sums, cost_sums_cuda, native, native_sums
from zonal.execution.call import Call, prepare
from zonal.execution.constants import Constants, Curve, default
from zonal.execution.problem import problem_of
from zonal.kernels.build import BuildError

# -- measuring ---------------------------------------------------------------------------------------------------------------

_ELEMENTS = (1 << 6, 1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22)
_PRODUCTS = ((128, 16, 16, 16), (32, 64, 64, 64), (8, 128, 256, 64), (4, 512, 512, 64))
_ORDERS = ((64, 16), (16, 64), (2, 256))


def synchronise(device: torch.device) -> None:
    """Wait until the device has done what was asked of it."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def seconds(device: torch.device, work: Callable[[], object], repeat: int = 1) -> float:
    """Seconds of ``repeat`` runs one after the other, until all of them are done.

    On CUDA by events on the stream that the work is queued on: what waiting for the device costs is not in them, but the time in which
    the device waits for the next launch is, as it is in any call.
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
    start = time.perf_counter()
    for _ in range(repeat):
        work()
    synchronise(device)
    return time.perf_counter() - start


def _fastest(device: torch.device, work: Callable[[], object], budget: float) -> float:
    """The least seconds of one run: others' load only ever adds. Short work is timed many times over; at least three samples."""
    work()
    synchronise(device)
    repeat, best, samples, start = 1, math.inf, 0, time.perf_counter()
    while samples < 3 or time.perf_counter() - start < budget:
        took = seconds(device, work, repeat)
        if took < 5e-5 and repeat < 1 << 12:
            repeat *= 4  # too short for the clock: this sample does not count
            continue
        best, samples = min(best, took / repeat), samples + 1
    return best


class _Rates(NamedTuple):
    """Raw seconds with the threads set: elementwise by kind and size, products, factors and solves, a stream of bytes."""

    kinds: dict[str, tuple[float, ...]]
    products: tuple[float, ...]
    factors: tuple[float, ...]
    solves: tuple[float, ...]
    stream: float


_KINDS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "simple": lambda x, mask: x + x,
    "select": lambda x, mask: x.masked_fill(mask, 0.0),
    "exp": lambda x, mask: x.exp(),
    "reduce": lambda x, mask: x.sum(-1),
}


def _rates(device: torch.device, budget: float) -> _Rates:
    def full(*shape: int) -> Tensor:
        return torch.full(shape, 0.5, device=device, dtype=torch.float32)

    kinds: dict[str, list[float]] = {kind: [] for kind in _KINDS}
    for size in _ELEMENTS:
        x = full(size // 64, 64)
        mask = x > 1
        for kind, work in _KINDS.items():
            kinds[kind].append(_fastest(device, functools.partial(work, x, mask), budget))
    products, factors, solves = [], [], []
    for batch, rows, cols, inner in _PRODUCTS:
        products.append(
            _fastest(
                device, functools.partial(torch.matmul, full(batch, rows, inner), full(batch, cols, inner).mT), budget
            )
        )
    for batch, order in _ORDERS:
        matrix = torch.eye(order, device=device, dtype=torch.float32).expand(batch, order, order) * 2 + 0.1
        lower, right = torch.linalg.cholesky(matrix), full(batch, order, order)
        factors.append(_fastest(device, functools.partial(torch.linalg.cholesky_ex, matrix), budget))
        solves.append(
            _fastest(device, functools.partial(torch.linalg.solve_triangular, lower, right, upper=False), budget)
        )
    # rows times matrices: one pass over 4 MB
    stream = _fastest(device, functools.partial(torch.matmul, full(64, 1, 64), full(64, 64, 256)), budget)
    return _Rates({kind: tuple(v) for kind, v in kinds.items()}, tuple(products), tuple(factors), tuple(solves), stream)


def _together(one: _Rates, many: _Rates, threads: int) -> tuple[_Rates, bool]:
    """Rates of several threads; where they lost to a single one, others had the processor, and the single one's are scaled up."""
    expected = 1 + 0.7 * (threads - 1)
    worse: list[bool] = []

    def pick(single: float, several: float) -> float:
        # a fork and join of threads costs some microseconds in its own right
        worse.append(several > 1.3 * single + 2e-5)
        return single / expected if worse[-1] else several

    def each(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(pick(x, y) for x, y in zip(a, b, strict=True))

    kinds = {kind: each(one.kinds[kind], many.kinds[kind]) for kind in one.kinds}
    # torch runs short elementwise work on one thread: nothing to scale there
    cut = sum(size < 1 << 15 for size in _ELEMENTS)
    kinds = {kind: (*one.kinds[kind][:cut], *values[cut:]) for kind, values in kinds.items()}
    rates = _Rates(
        kinds,
        each(one.products, many.products),
        each(one.factors, many.factors),
        each(one.solves, many.solves),
        pick(one.stream, many.stream),
    )
    return rates, sum(worse) * 5 > len(worse)


def _calls(device: torch.device, budget: float) -> tuple[float, float, float, float, float]:
    """(a view, a recorded call's extra, an empty matrix product, factor, solve). None of these uses a second thread."""
    tiny = torch.eye(4, device=device, dtype=torch.float32)[None]
    call = _fastest(device, lambda: tiny[:, :2], budget)
    product = _fastest(device, lambda: torch.matmul(tiny, tiny), budget)
    factor = _fastest(device, lambda: torch.linalg.cholesky_ex(tiny), budget)
    solve = _fastest(device, lambda: torch.linalg.solve_triangular(tiny, tiny, upper=False), budget)
    x = torch.full((16,), 0.5, device=device, dtype=torch.float32, requires_grad=True)
    length = 24

    def chain() -> Tensor:
        # negation saves no tensor for backward, so that the hooks of a checkpointed region see nothing
        y = x
        for _ in range(length):
            y = -y
        return y

    plain = _fastest(device, chain, budget)
    with torch.enable_grad():
        recorded = _fastest(device, lambda: torch.autograd.grad(chain(), x, torch.ones_like(x)), budget)
    # the kernel of backward itself is counted where backward is counted
    return call, max(recorded - 2 * plain, 0.0) / length, product, factor, solve


def measure(device: torch.device, budget: float = 0.006) -> Constants:
    """Measure the constants of a device. ``budget``: seconds for one number, about eighty of them. Nothing random is drawn."""
    many = threads(device) if device.type == "cpu" else 1  # a device spreads its work itself
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device.type, enabled=False):
        contended = False
        if many > 1:
            try:
                torch.set_num_threads(1)
                calls, one = _calls(device, budget), _rates(device, budget)
            finally:
                torch.set_num_threads(many)
            rates, contended = _together(one, _rates(device, budget), many)
        else:
            calls, rates = _calls(device, budget), _rates(device, budget)
        fresh = _fresh(device)
        tile_call, tile = _tile(device, budget)
        sums_call, sums = _sums(device, budget)
    call, record, product, factor, solve = calls
    stream = 4.0 * (64 * 64 + 64 * 256 * 64)
    traffic = max(rates.stream - product, rates.stream / 4) / stream
    matmul = []
    for (batch, rows, cols, inner), seconds in zip(_PRODUCTS, rates.products, strict=True):
        moved = 4 * batch * (rows * inner + cols * inner + rows * cols)
        # what the call and the traffic leave, and never less than half of what was seen
        matmul.append(max(seconds - product - moved * traffic, seconds / 2) / batch)
    curves = {kind: Curve(tuple(float(n) for n in _ELEMENTS), values) for kind, values in rates.kinds.items()}
    return Constants(
        machine=machine(device),
        threads=threads(device),
        torch=torch.__version__,
        call=call,
        record=record,
        simple=curves["simple"],
        select=curves["select"],
        exp=curves["exp"],
        reduce=curves["reduce"],
        fresh=fresh,
        product=product,
        matmul=Curve(tuple(2.0 * m * n * k for _, m, n, k in _PRODUCTS), tuple(matmul)),
        traffic=traffic,
        cholesky=Curve(
            tuple(n**3 / 3 for _, n in _ORDERS),
            tuple(max(s - factor, s / 2) / b for (b, _), s in zip(_ORDERS, rates.factors, strict=True)),
        ),
        solve=Curve(
            tuple(float(n**3) for _, n in _ORDERS),
            tuple(max(s - solve, s / 2) / b for (b, _), s in zip(_ORDERS, rates.solves, strict=True)),
        ),
        tile=tile,
        tile_call=tile_call,
        sums=sums,
        sums_call=sums_call,
        contended=contended,
        memory_bytes=memory(device),
        note="measured now",
    )


# heads and tokens of a call that keeps every thread or processor busy for some milliseconds
_TILES = {"cpu": (8, 256), "cuda": (32, 2048)}


def _tile(device: torch.device, budget: float) -> tuple[float, float]:
    """(a call, an operation) of the compiled tile kernel."""
    if device.type not in _TILES:
        return 0.0, 0.0
    heads, tokens = _TILES[device.type]

    def work(length: int) -> Callable[[], object] | None:
        x = torch.full((1, heads, length, 64), 0.5, dtype=torch.float32, device=device)
        operator = Operator(score=Cosine(), link=Gegenbauer(learn_weights=False), anchor=Count()).to(device)
        call = prepare(operator, x, x, x, causal=False)
        return functools.partial(native.tiled, call) if native.refusal(call) is None else None

    return _kernel(device, budget, work(1), work(tokens), 4.0 * heads * tokens * tokens * 64)


# heads, tokens and dimension
_SUMS = {"cpu": (8, 2048, 24), "cuda": (32, 8192, 32)}


def _sums(device: torch.device, budget: float) -> tuple[float, float]:
    """(a call, an operation) of the compiled kernel for sums over features."""
    if device.type not in _SUMS:
        return 0.0, 0.0
    heads, tokens, dim = _SUMS[device.type]

    def prepared(length: int) -> Call:
        x = torch.full((1, heads, length, dim), 0.5, dtype=torch.float32, device=device)
        return prepare(Operator(score=Cosine(), link=SquaredAffine(), anchor=Row()).to(device), x, x, x, causal=True)

    def work(call: Call) -> Callable[[], object] | None:
        return functools.partial(native_sums.chunked, call, None) if native_sums.refusal(call) is None else None

    large = prepared(tokens)
    model = cost_sums_cuda if device.type == "cuda" else cost_sums
    return _kernel(device, budget, work(prepared(1)), work(large), model.operations(problem_of(large))[0])


def _kernel(
    device: torch.device,
    budget: float,
    small: Callable[[], object] | None,
    large: Callable[[], object] | None,
    operations: float,
) -> tuple[float, float]:
    """(a call, an operation) of a compiled kernel, compiled now where it is not there yet; zeros where that cannot be."""
    if small is None or large is None:
        return 0.0, 0.0
    try:
        call = _fastest(device, small, budget)  # too little for a second thread
        seconds = _fastest(device, large, budget)
        if device.type == "cpu":
            seconds = _uncontended(device, large, budget, seconds)
    except BuildError:
        return 0.0, 0.0
    return call, max(seconds - call, seconds / 2) / operations


def _uncontended(device: torch.device, work: Callable[[], object], budget: float, several: float) -> float:
    """``several`` threads' seconds, or what they usually take: as for torch's own work, where several threads lost, others had the processor."""
    many = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        usual = _fastest(device, work, budget) / (1 + 0.7 * (many - 1))
    finally:
        torch.set_num_threads(many)
    return several if several <= 1.3 * usual else usual


def _fresh(device: torch.device) -> float:
    """Seconds a byte for pages that the operating system has to clear first; accelerators pool their memory."""
    if device.type != "cpu":
        return 0.0
    size = 1 << 24  # 64 MB: past what the C library keeps for the next request
    x = torch.full((size,), 0.5, device=device, dtype=torch.float32)
    out = torch.full_like(x, 0.5)
    into_new = _fastest(device, lambda: torch.neg(x), 0.0)
    into_old = _fastest(device, lambda: torch.neg(x, out=out), 0.0)
    return max(into_new - into_old, 0.0) / (4 * size)


# -- the machine -------------------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> str:
    """The name of the processor or accelerator."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).name
    if device.type != "cpu":
        return device.type
    name = platform.processor() or platform.machine()
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
                if line.startswith("model name"):
                    return f"{line.split(':', 1)[1].strip()} x{os.cpu_count()}"
    return f"{name} x{os.cpu_count()}"


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


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be had now, or None where nobody tells."""
    if device.type == "cuda":
        if not torch.cuda.is_available():
            return None
        free = torch.cuda.mem_get_info(device)[0]
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    free = None
    with contextlib.suppress(OSError, ValueError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
        free = int(found.group(1)) * 1024 if found else None
    with contextlib.suppress(OSError, ValueError):
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        free = limit - used if free is None else min(free, limit - used)
    return free


# -- keeping -----------------------------------------------------------------------------------------------------------------


def file_for(device: torch.device, count: int | None = None) -> Path:
    """Where the constants of this machine, number of threads (None = as torch has it now) and torch version are kept."""
    count = threads(device) if count is None else count
    key = f"{machine(device)}|{count}|{torch.__version__}"
    readable = re.sub(r"[^a-z0-9]+", "-", f"{machine(device)}-{count}".lower()).strip("-")
    return cache_folder() / "calibration" / f"{readable}-{hashlib.sha256(key.encode()).hexdigest()[:12]}.json"


def read(path: Path, device: torch.device) -> Constants:
    """The constants in a file. Raises: FileFormatError when it is missing, damaged, or of another machine."""
    found = Constants.from_dict(store.read_json(path), note=f"read from {path}")
    wanted = (machine(device), threads(device), torch.__version__)
    if (found.machine, found.threads, found.torch) != wanted:
        raise FileFormatError(
            f"calibration: {path} is of {found.machine}, {found.threads} threads, torch {found.torch}."
        )
    return found


def _keep(path: Path, constants: Constants, over: bool) -> None:
    """Put the file in place unless another process was first (``over``: what is there is known to be bad)."""
    if over:
        store.write_json(path, constants.to_dict())
        return
    mine = path.with_name(f".{path.stem}-{uuid.uuid4().hex}.json")
    store.write_json(mine, constants.to_dict())
    try:
        os.link(mine, path)
    except FileExistsError:
        pass
    except OSError:
        # a file system without links: the last one wins, whole in any case
        os.replace(mine, path)
    finally:
        mine.unlink(missing_ok=True)


def _obtain(device: torch.device) -> Constants:
    """The constants in the file, or measured now and kept there."""
    path, why = file_for(device), ""
    try:
        if path.exists():
            try:
                return read(path, device)
            except FileFormatError as error:
                why = f" because the file there could not be used ({error})"
        # before the work: numbers that cannot be kept would differ from process to process, and so would the paths taken
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"{path.parent} is not writable")
        _keep(path, measure(device), over=bool(why))
        kept = read(path, device)
    except (OSError, FileFormatError) as error:
        return default(
            device,
            f"typical values: nothing could be kept in {path.parent} ({error}); set ZONAL_CACHE to a folder that can be written",
        )
    return replace(kept, note=f"measured now and kept in {path}{why}")


@functools.lru_cache(maxsize=16)
def _once(device: torch.device, threads: int, folder: str | None) -> Constants:
    return _obtain(device)


_typical: ContextVar[bool] = ContextVar("typical", default=False)


@contextlib.contextmanager
def typical_rates() -> Iterator[None]:
    """Inside the body calls of this thread are planned by typical values, never by measured ones.

    Paths differ in the last bits of their results. Two paths with nearly the same estimate change places with the numbers that happened to be
    measured, so a run that must repeat on another machine of its kind is planned without them.
    """
    token = _typical.set(True)
    try:
        yield
    finally:
        _typical.reset(token)


@functools.lru_cache(maxsize=16)
def _typical_for(device: torch.device) -> Constants:
    return default(device, "typical values: the run must take the same paths on every machine of its kind")


def constants_for(device: torch.device) -> Constants:
    """The constants of a device: those of this process, of the cache folder, or measured now.

    Inside ``typical_rates`` they are typical values. Inside a dispatch mode (fake tensors, counters, tracing) nothing is measured: a stored file
    is used, or typical values.
    """
    if _typical.get():
        return _typical_for(device)
    if device.type == "meta":
        return default(device, "typical values: a meta tensor runs nowhere")
    if device.type == "cuda" and not torch.cuda.is_available():
        return default(device, "typical values: torch sees no such device here")
    if is_in_torch_dispatch_mode():
        try:
            return read(file_for(device), device)
        except FileFormatError:
            return default(device, "typical values: nothing is measured while another tool watches torch calls")
    # the variable rather than the folder: finding that takes longer than a short call of attention
    return _once(device, threads(device), os.environ.get(VARIABLE))
