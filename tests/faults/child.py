"""One command of the library in a child process, to which something happens: a kill, a full disk, little memory.

Children are forks of this process, which has everything imported and has never run a tensor operation, so that a
command costs no start-up. Python's audit events tell of each file that a command opens, makes, renames or removes.
"""

import contextlib
import errno
import mmap
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zonal.cli import main

EVENTS = frozenset(
    {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.link", "os.truncate", "os.chmod", "shutil.rmtree"}
)
TAKES_SPACE = frozenset({"os.rename", "os.mkdir", "os.link"})
SECONDS = 300.0


@dataclass(frozen=True)
class Fault:
    """What happens to a child. kill_at: SIGKILL just before this file operation; kill_after: SIGKILL after so many
    seconds. full_at: the disk is full from this operation on that takes space. memory: bytes of address space that it
    gets beside what is in use.
    """

    kill_at: int | None = None
    kill_after: float | None = None
    full_at: int | None = None
    memory: int | None = None


class Ended(NamedTuple):
    """How a child ended: its exit status, or minus the signal; what it said; its file operations, and of these those
    that take space.
    """

    code: int
    said: str
    seconds: float
    operations: int
    takings: int

    @property
    def killed(self) -> bool:
        return self.code == -signal.SIGKILL


NONE = Fault()


class Child:
    """A command that runs. root: the folder whose files count as operations. prepare: called first in the child. log:
    the ending of the file of its words.
    """

    def __init__(
        self, words: list[str], root: Path, fault: Fault = NONE, prepare: Callable[[], object] = lambda: None,
        log: str = "log",
    ) -> None:  # fmt: skip
        self._fault, self._began = fault, time.perf_counter()
        self._counts = mmap.mmap(-1, 16)
        self._log = root.with_name(f"{root.name}.{log}")
        self.pid = os.fork()
        if self.pid:
            return
        code = 70
        try:
            output = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = (os.fdopen(each, "w", buffering=1, closefd=False) for each in (1, 2))
            os.environ.update(ZONAL_CACHE=str(root / "cache"), TMPDIR=str(root))
            torch.set_num_threads(1)
            sys.modules["__main__"] = sys.modules[main.__module__]  # workers of multiprocessing import it first
            prepare()
            if fault.memory is not None:
                resource.setrlimit(resource.RLIMIT_AS, (_in_use() + fault.memory, resource.RLIM_INFINITY))
            sys.addaudithook(self._hook(os.fspath(root)))
            code = main(words)
        except SystemExit as stop:
            code = int(stop.code or 0)
        except BaseException:
            with contextlib.suppress(BaseException):
                traceback.print_exc()
        finally:
            os._exit(code)

    def _hook(self, root: str) -> Callable[[str, tuple[Any, ...]], None]:
        counts, fault = memoryview(self._counts).cast("q"), self._fault

        def inside(path: object) -> bool:
            return isinstance(path, str | os.PathLike) and os.fspath(path).startswith(root)

        def hook(event: str, given: tuple[Any, ...]) -> None:
            if event not in EVENTS or not any(inside(each) for each in given[:2]):
                return
            if counts[0] == fault.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            counts[0] += 1
            if event in TAKES_SPACE or (event == "open" and given[2] & (os.O_CREAT | os.O_TRUNC)):
                counts[1] += 1
                if fault.full_at is not None and counts[1] > fault.full_at:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), os.fspath(given[0]))

        return hook

    def ended(self) -> Ended:
        """Wait for the end, and for a kill until its time has come."""
        limit = SECONDS if self._fault.kill_after is None else self._fault.kill_after
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            took = time.perf_counter() - self._began
            if pid:
                break
            if took >= limit:
                os.kill(self.pid, signal.SIGKILL)
                _, status = os.waitpid(self.pid, 0)
                break
            time.sleep(min(0.002, limit - took))
        counts = memoryview(self._counts).cast("q")
        said = self._log.read_text(errors="replace") if self._log.exists() else ""
        return Ended(os.waitstatus_to_exitcode(status), said, took, counts[0], counts[1])


def run(words: list[str], root: Path, fault: Fault = NONE, prepare: Callable[[], object] = lambda: None) -> Ended:
    """A command to its end."""
    return Child(words, root, fault, prepare).ended()


def _in_use() -> int:
    """Bytes of address space that the process has."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * resource.getpagesize()
