"""Several at a time by Ray Tune, which is an extra: one function over a list of texts, each call in a process of its
own.
"""

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from zonal.errors import ArgumentError, ZonalError

EXTRA = "search"


def required(workers: int) -> None:
    """Raise ArgumentError, naming the extra, where Ray Tune is not installed."""
    if any(importlib.util.find_spec(name) is None for name in ("ray", "pyarrow", "pandas")):
        raise ArgumentError(
            f"search: {workers} workers need Ray Tune, which is not installed. "
            f"Install it with pip install 'zonal[{EXTRA}]', or search with one worker."
        )


@contextlib.contextmanager
def session(workers: int, threads: int) -> Iterator[None]:
    """Ray, for as long as the body runs: the caller's where there is one, else one of this machine with ``workers``
    times ``threads`` cores.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")  # which is silent where verbose=0 asks for it
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # a worker without a share of a GPU still sees what this process sees
    import ray  # pyright: ignore[reportMissingImports]

    own = not ray.is_initialized()
    if own:
        ray.init(num_cpus=workers * threads, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    try:
        yield
    finally:
        if own:
            ray.shutdown()


def each(
    function: Callable[[str], dict[str, Any]],
    items: Sequence[str],
    *,
    workers: int,
    threads: int,
    folder: Path,
    finished: Callable[[str], None],
) -> dict[str, dict[str, Any]]:
    """Item → what ``function`` gave for it, ``workers`` at a time; items that were not reached (Ctrl-C) are left out.

    folder: where Ray keeps its own records. finished: called in this process with each item that is done.

    Raises: ZonalError when a process of an item ended with an error.
    """
    from ray import tune  # pyright: ignore[reportMissingImports]

    class Ended(tune.Callback):
        tell: Callable[[str], None] | None = None

        def on_trial_complete(self, iteration: int, trials: Sequence[Any], trial: Any) -> None:
            if self.tell is not None:
                self.tell(trial.config["item"])

        def __getstate__(self) -> dict[str, Any]:
            return {}  # Tune writes its callbacks down; who listens stays in this process

    ended = Ended()
    ended.tell = finished

    def trial(config: dict[str, Any]) -> dict[str, Any]:
        return function(config["item"])

    tuner = tune.Tuner(
        tune.with_resources(trial, {"cpu": threads}),
        param_space={"item": tune.grid_search(list(items))},
        tune_config=tune.TuneConfig(max_concurrent_trials=workers),
        run_config=tune.RunConfig(storage_path=str(folder.resolve()), verbose=0, callbacks=[ended]),
    )
    found: dict[str, dict[str, Any]] = {}
    for result in tuner.fit():
        if result.error is not None:
            raise ZonalError(
                f"search: a worker ended with an error ({result.error}). "
                "Its finished work is kept; run the same command to resume."
            )
        if result.config and result.metrics and "status" in result.metrics:
            found[result.config["item"]] = result.metrics
    return found
