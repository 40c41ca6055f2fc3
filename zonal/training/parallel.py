"""Several runs at a time, each in its own process. The parent assigns runs, receives events, and passes on requests to
stop.

A process that dies (killed for memory, crashed) costs nothing but the updates since the last checkpoint of its run: the
run is marked stopped with the reason, and the same comparison goes on with it next time. A parent that dies is noticed
by its children at the end of their input; they stop with a checkpoint.
"""

import contextlib
import dataclasses
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from zonal import errors
from zonal.store import write_bytes
from zonal.training import events
from zonal.training.environment import FolderInUseError
from zonal.training.record import RunResult
from zonal.training.spec import PlannedRun

# how long a worker may take to end the update and evaluation batch it is in, and to write its checkpoint
_PATIENCE_SECONDS = 120.0
_ERRORS = {
    kind.__name__: kind
    for kind in (
        errors.ArgumentError,
        errors.FileFormatError,
        errors.FileWriteError,
        errors.InsufficientSpaceError,
        FolderInUseError,
    )
}


class _Worker:
    """A child process and the run it is busy with."""

    def __init__(self, directory: Path, threads: int, inbox: "queue.Queue[tuple[_Worker, str | None]]"):
        self.run: PlannedRun | None = None
        self.stopping = False
        self.complaints: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115, closed by close()
        package = str(Path(__file__).parents[2])
        path = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH")) if part)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "zonal.training.worker", str(directory), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.complaints,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
            # out of the terminal's process group, so that a second Ctrl-C reaches only the parent
            start_new_session=True,
        )
        threading.Thread(target=self._listen, args=(inbox,), daemon=True).start()

    def _listen(self, inbox: "queue.Queue[tuple[_Worker, str | None]]") -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            inbox.put((self, line.decode()))
        self.process.wait()
        inbox.put((self, None))

    def order(self, order: object) -> None:
        """Send one line; a process that is gone is noticed by the end of its output instead."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(order).encode() + b"\n")
            self.process.stdin.flush()

    def stop(self) -> None:
        if not self.stopping:
            self.stopping = True
            self.order("stop")

    def cause_of_death(self, log: Path) -> str:
        """Why the process ended. Its standard error goes to ``log``."""
        code = self.process.returncode
        if code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        self.complaints.seek(0)
        said = self.complaints.read()
        if not said.strip():
            return f"its process ended with status {code}"
        write_bytes(log, said)
        return (
            f"its process ended with status {code}: {said.decode(errors='replace').strip().splitlines()[-1]} (all of "
            f"it is in {log})"
        )

    def close(self) -> None:
        """End the process, gently first."""
        self.stop()
        try:
            self.process.wait(_PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        finally:
            for stream in (self.process.stdin, self.process.stdout, self.complaints):
                if stream is not None:
                    with contextlib.suppress(BrokenPipeError):
                        stream.close()


def run_in_processes(
    directory: Path,
    runs: Sequence[PlannedRun],
    *,
    jobs: int,
    threads: int,
    emit: events.Listener,
    should_stop: Callable[[], bool],
) -> None:
    """Run ``runs`` of the comparison in ``directory``, ``jobs`` at a time with ``threads`` threads each.

    Raises: the error of a worker that concerns all runs, such as InsufficientSpaceError.
    """
    waiting = deque(runs)
    inbox: queue.Queue[tuple[_Worker, str | None]] = queue.Queue()
    workers: list[_Worker] = []
    fatal: errors.ZonalError | None = None
    try:
        for _ in range(min(jobs, len(waiting))):
            workers.append(_Worker(directory, threads, inbox))
        while workers:
            if fatal is not None or should_stop():
                waiting.clear()
                for worker in workers:
                    worker.stop()
            try:
                worker, line = inbox.get(timeout=0.1)
            except queue.Empty:
                continue
            if line is None:
                workers.remove(worker)
                orphan = worker.run
                if orphan is not None:
                    _note_death(directory, orphan, worker.cause_of_death(directory / orphan.name / "error.log"), emit)
                elif worker.process.returncode not in (0, 2) and fatal is None:
                    fatal = errors.ZonalError(
                        f"compare: a worker could not start: {worker.cause_of_death(directory / 'error.log')}."
                    )
                worker.close()
                if orphan is not None and waiting:
                    workers.append(_Worker(directory, threads, inbox))
                continue
            values = json.loads(line)
            if values["event"] == "Fatal":
                fatal = _ERRORS.get(values["kind"], errors.ZonalError)(values["message"])
            elif values["event"] == "Idle":
                worker.run = waiting.popleft() if waiting else None
                if worker.run is None:
                    worker.stop()
                else:
                    worker.order({"run": dataclasses.asdict(worker.run)})
            else:
                emit(events.from_json(values))
    finally:
        for worker in workers:
            worker.close()
    if fatal is not None:
        raise fatal


def _note_death(directory: Path, run: PlannedRun, cause: str, emit: events.Listener) -> None:
    folder = directory / run.name
    record = RunResult.read(folder)
    if record.status == "failed":  # a defect put down by the run itself
        return
    record.status = "stopped"
    record.message = f"Stopped because {cause}; run the same again to go on from its last checkpoint."
    record.write(folder)
    emit(record.ended(run.name))
