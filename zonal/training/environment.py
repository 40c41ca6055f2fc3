"""The surroundings of a run: determinism, threads, one process a folder, memory high-water mark, Ctrl-C."""

import contextlib
import ctypes
import errno
import gc
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import torch

from zonal import subnormals
from zonal.errors import ArgumentError
from zonal.execution import machine
from zonal.kernels import choice

MOST_THREADS = 1024
_PATIENCE = 60.0  # seconds that a run which was given up as lost may take to end

Done = TypeVar("Done")


def check_threads(call: str, threads: int | None) -> None:
    """Raise ArgumentError unless ``threads`` is None or a number of threads that a process can have."""
    if threads is not None and not 1 <= threads <= MOST_THREADS:
        raise ArgumentError(f"{call}: threads must be from 1 to {MOST_THREADS}, or None, received {threads}.")


@contextlib.contextmanager
def deterministic(seed: int, threads: int, device: torch.device) -> Iterator[None]:
    """Run the body so that it gives the same bits each time on a CPU; everything is put back afterwards.

    The order of floating-point sums depends on the number of threads, so it is fixed to ``threads``, and on the path
    that attention takes, so paths are planned by typical rates instead of those measured on this machine (a call that
    takes more than a sixteenth of 8 GB still depends on the memory that is free). Random numbers start from ``seed``;
    the caller's generators are not touched. On CUDA only the random numbers are fixed: deterministic kernels exist for
    few of the operations used, and bit-identity is promised for the CPU alone. Subnormal numbers count as 0.
    """
    previous_threads = torch.get_num_threads()
    previous = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    previous_fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        try:
            torch.set_num_threads(threads)
            if device.type == "cpu":
                torch.use_deterministic_algorithms(True)
                # filling fresh memory costs a pass over every buffer and would only hide a read of garbage
                torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            torch.manual_seed(seed)
            with machine.typical_rates() if device.type == "cpu" else contextlib.nullcontext(), subnormals.flushed():
                yield
        finally:
            torch.use_deterministic_algorithms(previous[0], warn_only=previous[1])
            torch.utils.deterministic.fill_uninitialized_memory = previous_fill  # type: ignore[attr-defined]
            torch.set_num_threads(previous_threads)


class FolderInUseError(ArgumentError):
    """Another process works in the folder."""


@contextlib.contextmanager
def folder_lock(folder: Path, *, wait: float = 0.0, call: str = "train") -> Iterator[None]:
    """Hold ``folder`` (made when absent) for this process; the lock goes with the process, however it ends.

    ``wait``: seconds to wait for another holder. ``call``: the name in errors. Windows has no such lock.

    Raises: FolderInUseError when it is still held; ArgumentError when the folder cannot be made, or holds a link in
    place of a file.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"{call}: the folder {folder} cannot be made ({error.strerror}). Choose another folder."
        ) from error
    _refuse_links(folder, call)
    if sys.platform == "win32":
        yield
        return
    import fcntl

    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ArgumentError(
            f"{call}: the folder {folder} cannot be opened ({error.strerror}). "
            "Fix its permissions, or choose another folder."
        ) from error
    try:
        deadline = time.monotonic() + wait
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):
                    raise
                if time.monotonic() >= deadline:
                    raise FolderInUseError(
                        f"{call}: {folder} is in use by another process. "
                        "Wait until it ends, stop it, or choose another folder."
                    ) from error
                time.sleep(0.1)
        yield
    finally:
        os.close(handle)


def when_free(work: Callable[[], Done]) -> Done:
    """The result of ``work``, tried again while another process holds its folder. A task that was given up as lost may
    still be ending.

    Raises: FolderInUseError after a minute.
    """
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            return work()
        except FolderInUseError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.5)


def _refuse_links(folder: Path, call: str) -> None:
    """Raise ArgumentError for a file that is a symbolic link: writing to it would change a file outside the folder.
    Linked folders are allowed.
    """
    for path in folder.iterdir():
        if path.is_symlink() and not path.is_dir():
            raise ArgumentError(
                f"{call}: {path} is a symbolic link, but the files of a run must be in its folder. "
                "Remove the link, or put the file in its place."
            )


@contextlib.contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C (or SIGTERM) into a request to stop: the yielded function then returns True, and the loop
    stops after the current step, with a checkpoint. A second one interrupts at once. Outside the main thread signals
    are not touched.
    """
    requested = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield requested.is_set
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def request(number: int, frame: Any) -> None:
        requested.set()
        for each, handler in previous.items():
            signal.signal(each, handler)

    try:
        for number in previous:
            signal.signal(number, request)
        yield requested.is_set
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class PeakMemory:
    """Highest memory of a stretch of work, in bytes, above what was there when it began.

    CUDA: the allocator's own peak. Linux: the high-water mark of resident memory, which the kernel resets on request,
    so several runs in one process do not hide one another. Where there is no such reset (macOS, some sandboxes) it is
    the mark of the whole process, which only ever rises: a run that needs less than an earlier one then shows no
    growth. ``method`` says which of the three it is.
    """

    def __init__(self, device: torch.device):
        self._device = device
        gc.collect()
        if device.type == "cuda":
            self.method = "cuda allocator"
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
            return
        _give_back_free_memory()
        self.method = "resettable high-water mark" if _reset_high_water() else "process high-water mark"
        self._start = self._mark()

    def _mark(self) -> int:
        if self.method == "cuda allocator":
            return torch.cuda.max_memory_allocated(self._device)
        if self.method == "resettable high-water mark":
            return _high_water() or 0
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024

    def growth(self) -> int:
        """Bytes above the start at the highest point so far."""
        return max(0, self._mark() - self._start)


def _give_back_free_memory() -> None:
    """Return freed heap pages to the kernel (glibc), so that memory an earlier run left behind is not used unseen."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _high_water() -> int | None:
    """Peak resident bytes since the last reset, where the kernel tells."""
    status = Path("/proc/self/status")
    if sys.platform != "linux" or not status.is_file():
        return None
    lines = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
    return next((int(line.split()[1]) * 1024 for line in lines), None)


def _reset_high_water() -> bool:
    """Reset the high-water mark of resident memory to what is resident now; False where the kernel cannot."""
    if _high_water() is None:
        return False
    try:
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): "5" resets the peak resident set size
    except OSError:
        return False
    return True


def check_device(name: str) -> torch.device:
    """The device called ``name``. Raises ArgumentError when there is no such device here."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ArgumentError(f"device: {name!r} is not a device; use 'cpu', 'cuda' or 'cuda:1'.") from error
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device: {name!r} is not supported; use 'cpu', 'cuda' or 'cuda:1'.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(
            f"device: {name!r} is not available; torch sees {torch.cuda.device_count()} CUDA devices. "
            "Use 'cpu', or a CUDA build of torch on a machine with a GPU."
        )
    return device


def package_version() -> str:
    """Version of this library; "source" where it is run from a folder without being installed."""
    try:
        return version("zonal")
    except PackageNotFoundError:
        return "source"


def commit() -> str:
    """The commit of the checkout that this library runs from, with "-dirty" where its files have changed; the package's
    version where it is no checkout.
    """
    package = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str | None:
        try:
            found = subprocess.run(
                ["git", "-C", str(package), *words], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return found.stdout.strip() if found.returncode == 0 else None

    # a package installed below somebody else's checkout is not in it
    if git("ls-files", "--error-unmatch", "__init__.py") is None or (head := git("rev-parse", "HEAD")) is None:
        return package_version()
    return f"{head}-dirty" if git("status", "--porcelain", "--", ".") else head


def versions() -> dict[str, str]:
    """Versions that the numbers of a run may depend on."""
    return {"zonal": package_version(), "torch": torch.__version__, "python": platform.python_version()}


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_each(jobs: int) -> int:
    """Threads of each of ``jobs`` runs at a time, where nothing else is asked for."""
    return torch.get_num_threads() if jobs == 1 else max(1, cores() // jobs)


def surroundings(device: torch.device, threads: int) -> dict[str, Any]:
    """What is recorded of the time, the library and the machine when a comparison or a search begins."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "versions": versions(),
        "device": describe_device(device, threads),
    }


def describe_device(device: torch.device, threads: int) -> dict[str, Any]:
    """``name``, ``cores``, ``threads`` and ``memory_bytes`` of the device that runs."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "name": properties.name,
            "cores": properties.multi_processor_count,
            "threads": threads,
            "memory_bytes": properties.total_memory,
        }
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
    return {"name": choice.processor(), "cores": cores(), "threads": threads, "memory_bytes": memory}
