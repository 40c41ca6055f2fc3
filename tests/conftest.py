"""Which tests are in which tier, and how they are collected. What surrounds each test is in surroundings.py."""

import atexit
import gc
import importlib
from collections import defaultdict
from collections.abc import Iterator

import pytest
from cover import WHOLE, cover, features
from tiers import CHOSEN, SLOW


def pytest_configure(config: pytest.Config) -> None:
    """The process that only hands tests to workers loads neither torch nor the library."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.register(importlib.import_module("surroundings"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collecting makes hardly any garbage, and looking for it takes a fifth of the time.

    What it leaves is held to the end: it is not looked through again at each collection of garbage while tests run.
    """
    atexit.register(gc.unfreeze)  # triton's bindings report what the interpreter leaves when it ends
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Every other worker reads the files of tests backwards.

    Files that have not been read before are compiled, which takes a third of the time. Two workers that read in one
    order would both compile every file.
    """
    report = yield
    worker = getattr(collector.config, "workerinput", {}).get("workerid", "gw0")
    if isinstance(collector, pytest.Directory) and int(worker.removeprefix("gw")) % 2:
        report.result.reverse()
    return report


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``full`` what `make test` leaves out: what tiers.py names, and of large tests all but a cover."""
    items.sort(key=lambda item: item.path.parts)  # the same order in every worker
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        families[item.nodeid.partition("[")[0].removeprefix("tests/")].append(item)
    for name, family in families.items():
        if name in SLOW:
            kept = set()
        elif name in CHOSEN:
            kept = {i for i, item in enumerate(family) if item.nodeid.partition("[")[2].rstrip("]") in CHOSEN[name]}
        elif len(family) > WHOLE:
            kept = cover([features(item) for item in family])
        else:
            continue
        for index, item in enumerate(family):
            if index not in kept:
                item.add_marker(pytest.mark.full)
