"""Checks that an allocation fits into free memory."""

from pathlib import Path

import torch

from zonal.errors import InsufficientMemoryError

# calls that need less are not held up by the question
_ASKED_FROM = 1 << 28


def free(device: torch.device | str) -> int | None:
    """Bytes that can still be allocated on a device, or None where the system does not report them.

    On CUDA: memory that is free in the driver or unused in PyTorch's allocator. On Linux: the kernel's available
    memory, or what the control group of the process still allows, if that is less.
    """
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():
        return (
            torch.cuda.mem_get_info(device)[0]
            + torch.cuda.memory_reserved(device)
            - torch.cuda.memory_allocated(device)
        )
    if device.type != "cpu":
        return None
    found = [*_available(Path("/proc/meminfo")), *_left(Path("/sys/fs/cgroup"))]
    return min(found, default=None)


def _available(meminfo: Path) -> list[int]:
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
    return [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]


def _left(group: Path) -> list[int]:
    try:
        limit, used = ((group / name).read_text(encoding="ascii").strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return []
    return [] if limit == "max" else [max(0, int(limit) - int(used))]


def require(call: str, what: str, size: int, device: torch.device | str, advice: str) -> None:
    """Raise InsufficientMemoryError when ``what`` needs more bytes (``size``) than are free on the device."""
    if torch.compiler.is_compiling() or size < _ASKED_FROM:  # the system cannot be asked inside a graph
        return
    left = free(device)
    if left is not None and size > left:
        raise InsufficientMemoryError(
            f"{call}: {what} take {size / 2**30:,.1f} GiB, and {left / 2**30:,.1f} GiB of memory are free. {advice}"
        )


def exhausted(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that memory was refused. On the CPU torch raises a bare
    RuntimeError.
    """
    known = ("DefaultCPUAllocator", "bad_alloc", "Cannot allocate memory", "can't start new thread")
    while error is not None:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(words in str(error) for words in known):
            return True
        error = error.__cause__ or error.__context__
    return False


__all__ = ["exhausted", "free", "require"]
