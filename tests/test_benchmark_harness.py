"""What every benchmark promises of its options, of its record, and of the memory that it counts."""

import threading

import pytest

from benchmarks import common


def test_an_error_in_measured_work_ends_the_measurement() -> None:
    """A sampling thread that went on would keep the process from ending."""

    def work() -> object:
        raise MemoryError("no room")

    before = threading.active_count()
    with pytest.raises(MemoryError, match="no room"):
        common.peak_bytes(work)
    assert threading.active_count() == before
