"""What every benchmark promises of its options, of its record, and of the memory that it counts."""

import importlib
import threading

import pytest

from benchmarks import common
from zonal.errors import ArgumentError


def test_an_error_in_measured_work_ends_the_measurement() -> None:
    """A sampling thread that went on would keep the process from ending."""

    def work() -> object:
        raise MemoryError("no room")

    before = threading.active_count()
    with pytest.raises(MemoryError, match="no room"):
        common.peak_bytes(work)
    assert threading.active_count() == before


ON_THE_CPU = ("convert", "ingest", "long_context", "merging", "recall", "relatives", "soak", "transport", "verdicts")
NEEDED = {"convert": ["--model", "m"], "long_context": ["--model", "m"]}


@pytest.mark.parametrize("name", ON_THE_CPU)
def test_what_runs_on_the_cpu_refuses_another_device(name: str) -> None:
    """Its record would name that device, and be kept with its records."""
    benchmark = importlib.import_module(f"benchmarks.{name}")
    with pytest.raises(ArgumentError, match=r"received --device meta\. Leave"):
        benchmark.main([*NEEDED.get(name, []), "--quick", "--device", "meta", "--out", "-"])
