"""One function over many items, in processes of this machine or as tasks of a Ray cluster, which is an extra.

A process that dies (killed for memory, crashed, its machine lost) costs only the item that it was busy with: that item
is tried again, by a function that goes on where the last attempt stopped if it keeps checkpoints.
"""

import contextlib
import importlib.util
import logging
import multiprocessing
import os
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from zonal.errors import ArgumentError, ZonalError

RAY = "ray"
RETRIES = 3
"""How often an item is tried again after its process has died."""

Item = TypeVar("Item")
Result = TypeVar("Result")


def parsed(option: str, workers: str) -> int | str:
    """A number of workers, or ``RAY``. Raises: ArgumentError for other words."""
    if workers == RAY:
        return RAY
    if not (workers.isascii() and workers.isdigit() and 1 <= int(workers) <= 1024):
        raise ArgumentError(f"{option}: a number from 1 to 1024, or ray, was required, received {workers!r}.")
    return int(workers)


def check(call: str, name: str, workers: int | str) -> None:
    """Raise ArgumentError unless ``workers`` is a number of at least 1, or ``RAY`` where Ray is installed."""
    if workers == RAY:
        require_ray(call)
    elif isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ArgumentError(f"{call}: {name} must be at least 1, or 'ray', received {workers!r}.")


def require_ray(call: str) -> None:
    """Raise ArgumentError, naming the extra, where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ArgumentError(f"{call}: Ray is not installed. Install it with pip install 'zonal[ray]', or do without.")


def mapped(function: Callable[[Item], Result], items: Sequence[Item], workers: int | str) -> Iterator[Result]:
    """``function`` of each item, in the order of the items.

    workers: processes, 1 for this one; ``RAY`` for tasks of a Ray cluster.

    Raises: ZonalError when processes die again and again.
    """
    if workers == RAY:
        with session(None, 1):
            for _, found in tasks(function, items, cores=1):
                yield found
        return
    if workers == 1 or len(items) < 2:
        yield from map(function, items)
        return
    assert isinstance(workers, int)
    done = deaths = 0
    # a fork of this process, which has threads, may hang; a server without threads imports once and forks
    context = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
    context.set_forkserver_preload([function.__module__])
    while done < len(items):
        with ProcessPoolExecutor(workers, context, _begin) as pool:
            try:  # a process may die before all are submitted
                running = deque(pool.submit(function, item) for item in items[done : done + 2 * workers])
                while running:
                    found = running[0].result()
                    running.popleft()
                    done, deaths = done + 1, 0
                    yield found  # before the next is submitted, which fails where a process has died
                    if done + len(running) < len(items):
                        running.append(pool.submit(function, items[done + len(running)]))
            except BrokenProcessPool as error:
                deaths += 1
                if deaths > RETRIES:
                    raise ZonalError(
                        f"workers: processes died {deaths} times in a row at the same place. Use fewer workers if "
                        "memory is short; what was finished is kept."
                    ) from error
            finally:
                pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """In a new process: leave Ctrl-C, which a terminal sends to all, to the parent, and end when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextlib.contextmanager
def session(workers: int | None, threads: int) -> Iterator[None]:
    """Ray, for as long as the body runs: the caller's session where there is one, else the cluster that RAY_ADDRESS
    names ("auto": that of this machine), else one of this machine with ``workers`` times ``threads`` cores (None: all).

    Raises: ZonalError where no cluster answers at RAY_ADDRESS.
    """
    # nothing is told to anybody; a worker without a share of a GPU still sees what this process sees
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"):
        os.environ.setdefault(name, "0")
    import ray  # pyright: ignore[reportMissingImports]

    own = not ray.is_initialized()
    if own:
        there = os.environ.get("RAY_ADDRESS")
        # what a cluster has of its own is not asked for again
        wanted = {} if there else {"include_dashboard": False, "num_cpus": workers and workers * threads}
        try:
            _reach(there or "")
            ray.init(address=there or "local", log_to_driver=False, logging_level=logging.ERROR, **wanted)
        except (OSError, RuntimeError, ValueError) as error:  # a ConnectionError is an OSError
            if not there:
                raise
            reason = str(error).partition("\n")[0].rstrip(" .")
            raise ZonalError(
                f"workers: no Ray cluster answers at RAY_ADDRESS={there} ({reason}). Start one "
                "there with `ray start --head`, correct RAY_ADDRESS, or remove it to use this machine alone."
            ) from error
    try:
        yield
    finally:
        if own:
            ray.shutdown()


def _reach(address: str) -> None:
    """Raise OSError where nothing answers at ``host:port``: Ray asks there for minutes. Other addresses are left to
    Ray.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10.0).close()


def slots(cores: int) -> int:
    """How many tasks of so many cores the Ray session runs at a time."""
    import ray  # pyright: ignore[reportMissingImports]

    return max(1, int(ray.cluster_resources().get("CPU", 1)) // cores)


def _last_line(error: Exception) -> str:
    return str(error).strip().rpartition("\n")[2].rstrip(" .")


def _called(function: Callable[[Item], Result], item: Item) -> Result:
    return function(item)


def tasks(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    *,
    cores: int,
    at_once: int | None = None,
    in_order: bool = True,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, Result]]:
    """(Number of the item, ``function`` of it) for each item, by tasks of the Ray session. Tasks whose process or
    machine is lost are started again.

    cores: that a task takes, or all of the largest machine that has fewer. at_once: tasks at most; None: twice as many
    as there are cores for. in_order: in the order of the items rather than as they are done. should_stop: asked often;
    True ends all, and running tasks are stopped.

    Raises: ZonalError for an item whose processes died again and again, or a machine that lacks this library; errors
    of this library that ``function`` raised.
    """
    import ray  # pyright: ignore[reportMissingImports]
    import ray.exceptions  # pyright: ignore[reportMissingImports]

    # a task that no machine has cores for would wait without end
    most = max((int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]), default=0)
    cores = min(cores, most or cores)
    remote: Any = ray.remote(num_cpus=cores, max_retries=RETRIES)(_called)
    limit = at_once or 2 * slots(cores)
    waiting = deque(enumerate(items))
    running: dict[Any, int] = {}
    try:
        while (waiting or running) and not should_stop():
            while waiting and len(running) < limit:
                number, item = waiting.popleft()
                running[remote.remote(function, item)] = number
            asked = [next(iter(running))] if in_order else list(running)
            for done in ray.wait(asked, timeout=0.2)[0]:
                number = running.pop(done)
                try:
                    found = ray.get(done)
                except ray.exceptions.RayTaskError as error:  # what the function raised
                    if isinstance(error, ray.exceptions.RaySystemError):  # it was not even read there
                        raise ZonalError(
                            f"workers: a machine of the Ray cluster cannot run tasks of zonal ({_last_line(error)}). "
                            "Install the same version of zonal on every machine of the cluster."
                        ) from error
                    raise (error.cause if isinstance(error.cause, ZonalError) else error) from None
                except ray.exceptions.RayError as error:
                    raise ZonalError(
                        f"workers: a task of Ray was lost {RETRIES + 1} times ({str(error).splitlines()[0]}). What was "
                        "finished is kept; run the same again to go on."
                    ) from error
                yield number, found
    finally:
        for left in running:
            ray.cancel(left, force=True)


__all__ = ["RAY", "RETRIES", "check", "mapped", "parsed", "require_ray", "session", "slots", "tasks"]
