"""Which tests are in which tier, and how they are collected. What surrounds each test is in surroundings.py."""

import atexit
import gc
import importlib
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


def named(item: pytest.Item) -> str:
    """A test without its case, as tiers.py names it."""
    return item.nodeid.partition("[")[0].removeprefix("tests/")


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Of a test with many cases `make test` makes those that tiers.py names, or a cover.

    More than half of all cases are left out: to make them as well, and deselect them, takes seconds. pytest has no
    public way to leave out cases that its decorators name, so this changes its own list.
    """
    yield
    cases, name = metafunc._calls, named(metafunc.definition)
    if "not full" not in metafunc.config.getoption("markexpr") or name in SLOW:
        return
    if name in CHOSEN:
        metafunc._calls = [case for case in cases if case.id in CHOSEN[name]]
    elif len(cases) > WHOLE:
        kept = cover([features(case.params) for case in cases])
        metafunc._calls = [case for index, case in enumerate(cases) if index in kept]


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as ``full`` the tests that `make test` leaves out entirely."""
    items.sort(key=lambda item: item.path.parts)  # the same order in every worker
    for item in items:
        if named(item) in SLOW:
            item.add_marker(pytest.mark.full)
