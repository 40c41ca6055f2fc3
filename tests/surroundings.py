"""What all tests share: a cache folder of their own, and the same speeds on every machine."""

import gc
import itertools
import os
import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kernels.sets import TEST_SETS

from zonal import store
from zonal.cache import VARIABLE
from zonal.execution import machine as machines
from zonal.execution.machine import TYPICAL_CPU, Machine
from zonal.kernels import choice
from zonal.kernels import native as native_kernels
from zonal.kernels.build import SOURCES


def pytest_configure(config: pytest.Config) -> None:
    """The compiler of CPU kernels: in the fast tier one that takes less time, for processes that tests start, too.

    Without a compiler every call may say so, which no test is about but those that take the compiler away.
    """
    gc.set_threshold(20_000)  # at the 700 of Python, up to a twentieth of the time of tests goes into collections
    found = native_kernels.compiler()
    if found is None:
        config.addinivalue_line("filterwarnings", "ignore::zonal.errors.MissingKernelsWarning")
    elif os.name == "posix" and "not full" in config.getoption("markexpr"):
        os.environ.setdefault("ZONAL_TESTED_CXX", found)
        os.environ["CXX"] = str(Path(__file__).parent / "kernels" / "quick-c++")
        assert config.cache is not None
        os.environ["ZONAL_TESTED_HEADERS"] = str(config.cache.mkdir("headers"))


def fixed(device: torch.device, threads: int | None = None) -> Machine:
    """Typical speeds under this machine's name."""
    count = machines.threads(device) if threads is None else threads
    return replace(TYPICAL_CPU, name=machines.name(device), threads=count, torch=torch.__version__)


def highest_sets() -> dict[str, object]:
    """The record of instruction sets of a machine on which the highest are the fastest."""
    found = {}
    for source, dtype in itertools.product(SOURCES, (torch.float32, torch.bfloat16, torch.float16)):
        names = [isa.name for isa in choice.usable(source, dtype)[0] if isa.needs]
        if len(names) > 1:
            found[" ".join([source, str(dtype).removeprefix("torch."), *names])] = names[0]
    return {"schema": choice.SCHEMA, "processor": choice.processor(), "sets": found}


@pytest.fixture(scope="session", autouse=True)
def fixed_machine(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Path]:
    """No test measures the machine or writes to the user's cache: what is planned is the same everywhere.

    Processes that tests start find the speeds, and which instruction sets to use, in the cache folder they inherit.
    """
    folder = tmp_path_factory.mktemp("cache")
    # a compiled kernel's file name is a digest of all it is made of: one compiled by an earlier session or by another
    # worker is taken as it is
    assert pytestconfig.cache is not None
    (folder / "kernels").symlink_to(pytestconfig.cache.mkdir("kernels"))
    device = torch.device("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder))
        patch.setattr(machines, "measure", fixed)
        patch.setattr(choice, "fastest", lambda source, candidates, *_: candidates[0])
        if "ZONAL_TEST_SET" in os.environ:
            patch.setattr(choice, "SETS", TEST_SETS[os.environ["ZONAL_TEST_SET"]])
        for count in {1, 2, torch.get_num_threads(), os.cpu_count() or 1}:
            store.write_json(machines.file_for(device, count), fixed(device, count).to_dict())
        store.write_checked(folder / "machine" / "instruction-sets.json", highest_sets())
        yield folder


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> Iterator[None]:
    """What a file of tests leaves behind is not looked through at each collection of garbage of the files after it.

    It is compiled graphs, caches and modules; without this, collections take a tenth of the time of all tests.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded(request: pytest.FixtureRequest) -> int:
    """What a test draws without a seed of its own depends on its name alone: on no other test, and not on the clock."""
    seed = zlib.crc32(request.node.nodeid.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also keeps the stack for each kind of device
    return seed
